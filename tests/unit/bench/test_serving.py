"""The load generators and the bench of the server, on loads of a few requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from edgeweave.bench import serving, serving_bounds, serving_load
from edgeweave.bench.serving_load import closed_loop, open_loop


class Calls:
    """Counts calls, and how many were inside at a time; every seventh fails."""

    def __init__(self, failing: bool = False) -> None:
        self.numbers: list[int] = []
        self.inside = self.most = 0
        self.failing = failing

    async def __call__(self, number: int) -> bytes:
        self.numbers.append(number)
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(0.001)
        self.inside -= 1
        if self.failing and number % 7 == 0:
            raise OSError("refused")
        return b""


def test_closed_loop_is_bounded_by_count_and_clients() -> None:
    calls = Calls(failing=True)
    load = asyncio.run(closed_loop(calls, clients=4, requests=50, max_s=60.0))
    assert sorted(calls.numbers) == list(range(50))
    assert calls.most == 4
    assert (load.requests, load.failures) == (42, 8)
    assert 1.0 <= load.p50_ms <= load.p95_ms <= load.p99_ms
    assert load.record()["rate"] == pytest.approx(42 / load.seconds)


def test_closed_loop_is_bounded_by_time() -> None:
    calls = Calls()
    asyncio.run(closed_loop(calls, clients=1, requests=10**9, max_s=0.05))
    assert len(calls.numbers) < 1000


def test_open_loop_does_not_wait_for_answers() -> None:
    calls = Calls()
    load = asyncio.run(open_loop(calls, rate=1e6, requests=40))
    assert load.requests == 40
    assert calls.most > 10


def test_nothing_answered_is_an_error() -> None:
    async def refuse(number: int) -> bytes:
        raise OSError("refused")

    with pytest.raises(RuntimeError, match="0 answers and 5 failures"):
        asyncio.run(closed_loop(refuse, clients=1, requests=5, max_s=60.0))


def test_unknown_scenario() -> None:
    with pytest.raises(ValueError, match="filter must be among one-megabyte"):
        serving.run(serving.ServingOptions(only=("nothing",)))


def test_soak_counts_lost_and_swapped_answers(tmp_path: Path) -> None:
    pytest.importorskip("psutil", reason="the extra `bench` brings psutil")
    options = serving.ServingOptions(clients=8, soak=300, only=("soak",))
    result = serving.run(options)["results"]["soak"]
    assert (result["lost"], result["wrong"], result["load"]["failures"]) == (0, 0, 0)
    assert result["rss_after_mb"] > 0
    assert serving_load.Load(2, 1.0, 1.0, 1.0, 1.0, 0).rate == 2.0


def test_bounds_are_measured_on_a_server_that_refuses_and_ends() -> None:
    pytest.importorskip("psutil", reason="the extra `bench` brings psutil")
    result = serving.run(serving.ServingOptions(only=("bounds",)))["results"]["bounds"]
    # The statuses are held against what they should be inside: another one is an error.
    for name in ("full_queue", "after_deadline", "after_cancellation"):
        assert result[name]["times"] >= 1
        assert result[name]["p50_ms"] <= result[name]["most_ms"]
    assert result["sigterm"]["inside"] == 4
    assert (result["sigterm"]["lost"], result["sigterm"]["status"]) == (0, 0)


def test_molecules_and_one_megabyte_run(tmp_path: Path) -> None:
    pytest.importorskip("psutil", reason="the extra `bench` brings psutil")
    pytest.importorskip("torch_geometric", reason="the extra `pyg` has PyG")
    options = serving.ServingOptions(
        clients=8, requests=120, seconds=20.0, only=("molecules", "one-megabyte")
    )
    results = serving.run(options)["results"]
    molecules = results["molecules"]
    assert molecules["mean_batch"] > 1
    for kind in ("batched", "unbatched"):
        assert (molecules[kind]["requests"], molecules[kind]["failures"]) == (120, 0)
    assert results["one-megabyte"]["p50_ms"] > 0


@pytest.mark.parametrize(("busy", "refused"), [(1, True), (4, True), (5, False)])
def test_a_queue_that_was_not_full_is_filled_again(
    monkeypatch: pytest.MonkeyPatch, busy: int, refused: bool
) -> None:
    filled = list[int]()

    class Asker:
        async def fill(self, waiting: int) -> list[Any]:
            filled.append(waiting)
            return []

        def ask(self) -> Any:
            return None

    async def refuse(call: Any, code: Any) -> float:
        if len(filled) <= busy:
            raise serving_bounds._AnsweredError("in this test")
        return 0.001

    monkeypatch.setattr(serving_bounds, "_refused", refuse)
    found = serving_bounds._refusals(cast(Any, Asker()))
    if refused:
        assert set(asyncio.run(found)) == {0.001}
        assert len(filled) == busy + 1
    else:
        with pytest.raises(serving_bounds._AnsweredError):
            asyncio.run(found)
