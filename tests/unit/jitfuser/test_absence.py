"""Where TorchScript or its oneDNN bridge is missing: the same interface on another engine."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from edgeweave import EdgeweaveError, EdgeweaveWarning, _engines
from edgeweave.jitfuser import _availability, optimize


def old_processor(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(_availability.platform, "machine", lambda: "aarch64")
    return "built for x86-64 only, this is aarch64"


def no_onednn(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    return "this build of torch has no oneDNN"


def new_python(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(sys, "version_info", (3, 14, 0))
    return "TorchScript does not support Python"


def without(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], str]:
    def remove(patch: pytest.MonkeyPatch) -> str:
        patch.delattr(owner, name)
        return f"has no torch.*{name}"

    return remove


ABSENCES = {
    "machine": old_processor,
    "oneDNN": no_onednn,
    "Python": new_python,
    "trace": without(torch.jit, "trace"),
    "bridge": without(torch._C, "_jit_set_llga_enabled"),
    "executor": without(torch._C, "_create_function_from_graph"),
}


class Fused:
    """Another engine's model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.refreshed = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def refresh(self) -> None:
        self.refreshed += 1

    def report(self) -> str:
        return "3 partitions"


@pytest.mark.parametrize("absence", list(ABSENCES))
def test_graphfuse_does_the_work(monkeypatch: pytest.MonkeyPatch, absence: str) -> None:
    asked: list[Any] = []

    def fuse(model: nn.Module, example_inputs: Any, **options: Any) -> Fused:
        asked.append((example_inputs, options))
        return Fused(model)

    reason = ABSENCES[absence](monkeypatch)
    monkeypatch.setattr("edgeweave.jitfuser._optimize.find_engine", {"graphfuse": fuse}.get)
    model, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    fast = optimize(model, x, nan="fast")
    assert asked == [((x,), {"dtype": None, "nan": "fast"})]
    assert torch.equal(fast(x), model(x))
    assert not fast(x).requires_grad
    fast.refresh()
    assert fast._run.refreshed == 1
    report = fast.report()
    assert (report.engine, report.engine_report) == ("graphfuse", "3 partitions")
    assert re.search(reason, report.notes[0])
    assert "3 partitions" in str(report)


@pytest.mark.parametrize("absence", ["bridge", "Python"])
def test_without_any_engine_it_warns_and_runs_in_eager(
    monkeypatch: pytest.MonkeyPatch, absence: str
) -> None:
    ABSENCES[absence](monkeypatch)
    monkeypatch.setattr("edgeweave.jitfuser._optimize.find_engine", lambda name: None)
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.warns(EdgeweaveWarning, match="edgeweave.graphfuse is not there: runs in eager"):
        fast = optimize(model, x)
    assert torch.equal(fast(x), model(x))
    assert fast.report().engine == "eager"
    fast.refresh()


def test_keywords_beside_positional_inputs_get_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fuse(model: nn.Module, example_inputs: Any, **options: Any) -> Fused:
        asked.append(example_inputs)
        return Fused(model)

    old_processor(monkeypatch)
    monkeypatch.setattr("edgeweave.jitfuser._optimize.find_engine", {"graphfuse": fuse}.get)
    x = torch.randn(2, 4)
    optimize(nn.Bilinear(4, 4, 2).eval(), ((x,), {"input2": x}))
    assert asked == [{"input1": x, "input2": x}]


def test_an_engine_that_refuses_leaves_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def fuse(model: nn.Module, example_inputs: Any, **options: Any) -> Fused:
        raise EdgeweaveError("no libdnnl; pip install it")

    old_processor(monkeypatch)
    monkeypatch.setattr("edgeweave.jitfuser._optimize.find_engine", {"graphfuse": fuse}.get)
    model, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    with pytest.warns(EdgeweaveWarning, match="graphfuse says: no libdnnl; pip install it"):
        fast = optimize(model, x)
    assert torch.equal(fast(x), model(x))


def test_engines_are_found_by_name() -> None:
    assert _engines.find_engine("jitfuser") is optimize


def test_an_absent_room_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_engines.ENGINES, "gone", "edgeweave.gone:fuse")
    assert _engines.find_engine("gone") is None


def test_a_broken_room_is_not_taken_for_an_absent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_engines.ENGINES, "broken", "edgeweave.jitfuser:no_such_function")
    with pytest.raises(AttributeError, match="no_such_function"):
        _engines.find_engine("broken")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="find_engine: name must be one of"):
        _engines.find_engine("warpdrive")
