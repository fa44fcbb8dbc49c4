"""`fuser`: flags are set, and are put back whatever happens."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import edgeweave
from edgeweave import EdgeweaveWarning
from edgeweave.jitfuser import _flags, flags, fuser

NAMES = ("fuser0", "fuser1", "fuser2", "fuser3", "none")


@pytest.fixture(autouse=True)
def _flags_do_not_leak() -> Iterator[None]:
    before = flags()
    yield
    assert flags() == before


def test_lazy_name_at_the_top() -> None:
    assert edgeweave.fuser is fuser


@pytest.mark.parametrize("name", NAMES)
def test_same_flags_as_torch(name: str) -> None:
    with fuser(name):
        ours = flags()
    with torch.jit.fuser(name):
        theirs = flags()
    assert ours == theirs


@pytest.mark.parametrize("outer", NAMES)
@pytest.mark.parametrize("inner", NAMES)
def test_nesting_restores_level_by_level(outer: str, inner: str) -> None:
    with fuser(outer):
        between = flags()
        with fuser(inner):
            pass
        assert flags() == between


def test_exception_restores() -> None:
    before = flags()
    with pytest.raises(KeyError, match="inside"), fuser("fuser3"):
        raise KeyError("inside")
    assert flags() == before


def test_flags_changed_by_hand_inside_come_back_to_what_they_were_before_the_inner() -> None:
    with fuser("fuser3"):
        torch._C._jit_set_texpr_fuser_enabled(False)
        with fuser("fuser1"):
            assert flags()["nnc"]
        assert not flags()["nnc"]
        assert flags()["onednn"]


def test_around_and_inside_torchs_own() -> None:
    with torch.jit.fuser("fuser3"):
        with fuser("none"):
            assert not flags()["onednn"]
        assert flags()["onednn"]
    with fuser("fuser3"):
        with torch.jit.fuser("none"):
            assert not flags()["onednn"]
        assert flags()["onednn"]


def test_profiling_and_optimize_that_were_off_stay_off() -> None:
    profiling = torch._C._jit_set_profiling_executor(False)
    optimize = torch._C._get_graph_executor_optimize(False)
    try:
        with fuser("fuser3"):
            assert flags()["profiling"]
            assert flags()["optimize"]
        assert not flags()["profiling"]
        assert not flags()["optimize"]
    finally:
        torch._C._jit_set_profiling_executor(profiling)
        torch._C._get_graph_executor_optimize(optimize)


def test_contexts_of_two_threads_that_overlap() -> None:
    """First in, first out: torch's own leaves oneDNN on for good here."""
    before = flags()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with fuser("fuser3"):
            entered.set()
            assert leave.wait(60)

    first = fuser("fuser3")
    first.__enter__()
    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(60)
    first.__exit__(None, None, None)
    assert flags()["onednn"], "the other thread's context is still open"
    leave.set()
    thread.join()
    assert flags() == before


def test_many_threads_leave_nothing_behind() -> None:
    before = flags()

    def work(name: str) -> None:
        for _ in range(50):
            with fuser(name), fuser("fuser3"):
                pass

    threads = [threading.Thread(target=work, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert flags() == before
    assert not _flags._open


def test_failure_while_setting_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = flags()
    real = torch._C._jit_set_llga_enabled
    state = {"calls": 0}

    def broken(value: bool) -> None:
        state["calls"] += 1
        if state["calls"] == 1:
            raise RuntimeError("no bridge today")
        real(value)

    monkeypatch.setattr(torch._C, "_jit_set_llga_enabled", broken)
    with pytest.raises(RuntimeError, match="no bridge today"), fuser("fuser3"):
        pytest.fail("must not be entered")
    assert flags() == before


def test_unknown_name() -> None:
    with (
        pytest.raises(ValueError, match=r"fuser: name must be one of fuser0, .*, got 'fuser4'"),
        fuser("fuser4"),
    ):
        pass


def test_as_decorator() -> None:
    @fuser("fuser3")
    def inside() -> bool:
        return flags()["onednn"]

    assert inside()


@pytest.mark.parametrize("gone", ["_jit_set_llga_enabled", "_get_graph_executor_optimize"])
def test_without_the_flags_it_warns_once_and_does_nothing(
    monkeypatch: pytest.MonkeyPatch, gone: str, script: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    monkeypatch.setattr(_flags, "_warned", False)
    with monkeypatch.context() as patch:
        patch.delattr(torch._C, gone)
        context = fuser("fuser3")
        with pytest.warns(EdgeweaveWarning, match=f"no torch._C.{gone}; models run unfused"):
            context.__enter__()
        assert flags() == {}
        assert torch.equal(script(torch.ones(2)), torch.full((2,), 2.0))
        context.__exit__(None, None, None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with fuser("fuser3"):
                pass


@pytest.fixture
def script() -> Callable[[torch.Tensor], torch.Tensor]:
    graph = torch._C.parse_ir(
        "graph(%x : Tensor):\n  %y : int = prim::Constant[value=1]()\n"
        "  %z : Tensor = aten::add(%x, %y, %y)\n  return (%z)\n"
    )
    return torch._C._create_function_from_graph("plus_one", graph)  # type: ignore[no-any-return]
