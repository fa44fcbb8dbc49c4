"""The harness refuses wrong results, times in turn, and reports medians and spread."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch

from edgeweave.bench import harness
from edgeweave.bench.harness import CheckFailedError
from edgeweave.bench.records import Case, CaseResult, Reference, Settings, Side, Traffic

RIGHT = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
SETTINGS = Settings(repeats=4, min_repeats=2, warmup=1, budget_s=1e9, min_sample_s=0.0)


def make_case(ours: Side, *peers: Side, traffic: Traffic | None = None) -> Case:
    return Case("group", "group/case", {}, ours, peers, reference, traffic)


def reference() -> Reference:
    return Reference((RIGHT.double(),))


def right(name: str, log: list[str] | None = None) -> Side:
    def run(_: object) -> torch.Tensor:
        if log is not None:
            log.append(name)
        return RIGHT.clone()

    return Side(name, run)


def ticking_clock(step_s: float = 0.5) -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: step_s * next(ticks)


def test_sides_take_turns_after_check_and_warm_up() -> None:
    log: list[str] = []
    case = make_case(right("A", log), right("B", log))
    result = harness.measure(case, SETTINGS, ticking_clock())
    assert "".join(log[:2]) == "AB"  # the check
    assert "".join(log[2:6]) == "AABB"  # one warm-up and one estimate of each
    assert "".join(log[6:]) == "ABABABAB"
    assert [timing.samples for timing in result.timings] == [4, 4]


@pytest.mark.parametrize(
    "wrong",
    [
        RIGHT + torch.tensor([[0.0, 0.0], [0.0, 1e-3]]),
        RIGHT * math.nan,
        torch.tensor([[1.0, 2.0], [3.0, math.inf]]),
        RIGHT[:1],
        RIGHT.t(),
    ],
    ids=["one-value", "nan", "inf", "shape", "transposed"],
)
def test_wrong_result_is_not_timed(wrong: torch.Tensor) -> None:
    calls: list[int] = []

    def run(_: object) -> torch.Tensor:
        calls.append(1)
        return wrong

    result = harness.measure(make_case(Side("ours", run), right("peer")), SETTINGS)
    assert result.status == "wrong"
    assert result.timings == ()
    assert result.speedups == ()
    assert len(calls) == 1
    assert result.message


def test_wrong_peer_is_not_timed_unless_known_to_be_imprecise() -> None:
    def run(_: object) -> torch.Tensor:
        return RIGHT * 1.5

    refused = harness.measure(make_case(right("ours"), Side("peer", run)), SETTINGS)
    assert refused.status == "wrong"
    assert "computes something else" in refused.message
    known = Side("peer", run, trusted=False)
    assert harness.measure(make_case(right("ours"), known), SETTINGS).status == "ok"


def test_ours_may_be_as_far_from_the_truth_as_the_peer() -> None:
    noisy = Side("ours", lambda _: RIGHT * (1 + 3e-5))
    peer = Side("peer", lambda _: RIGHT * (1 - 1e-5))
    assert harness.measure(make_case(noisy, peer), SETTINGS).status == "ok"
    assert harness.measure(make_case(noisy, right("peer")), SETTINGS).status == "wrong"
    rounded = Side("ours", lambda _: RIGHT * (1 + 1e-6))
    assert harness.measure(make_case(rounded, right("peer")), SETTINGS).status == "ok"


def test_number_of_tensors_is_checked() -> None:
    with pytest.raises(CheckFailedError, match="must hold 1 tensors, got 2"):
        harness.distance_to_reference((RIGHT, RIGHT), reference())


def test_a_wrong_row_cannot_hide_behind_a_hub() -> None:
    truth = torch.ones(1000, 2, dtype=torch.float64)
    truth[0] = 100.0
    output = truth.clone()
    output[5] = 2.0
    assert harness.distance_to_reference(output, Reference((truth,))) > 0.4


def test_only_the_chosen_columns_are_compared() -> None:
    chosen = Reference((RIGHT[:, :1].double(),), torch.tensor([0]))
    assert harness.distance_to_reference(RIGHT * torch.tensor([1.0, 9.0]), chosen) == 0.0
    assert harness.distance_to_reference(RIGHT * torch.tensor([9.0, 1.0]), chosen) > 1.0


def test_prepare_runs_before_every_call_and_is_not_timed() -> None:
    now = [0.0]
    received: list[object] = []

    def prepare() -> int:
        now[0] += 100.0
        return len(received)

    def run(prepared: object) -> torch.Tensor:
        received.append(prepared)
        now[0] += 1.0
        return RIGHT

    case = make_case(Side("ours", run, prepare), Side("peer", lambda _: RIGHT))
    result = harness.measure(case, SETTINGS, lambda: now[0])
    assert received == list(range(len(received)))
    assert result.timings[0].median_s == 1.0


def test_medians_spread_and_ratios() -> None:
    timing = harness.summarise("side", [5.0, 1.0, 2.0, 3.0, 4.0])
    assert (timing.median_s, timing.q25_s, timing.q75_s) == (3.0, 2.0, 4.0)
    assert (timing.min_s, timing.max_s, timing.samples) == (1.0, 5.0, 5)
    speedup = harness.compare("peer", [1.0, 2.0, 4.0], [4.0, 4.0, 4.0])
    assert speedup.ratio == 2.0
    assert (speedup.q25, speedup.q75) == (1.5, 3.0)


def test_short_calls_are_repeated_within_a_sample() -> None:
    settings = Settings(repeats=2, warmup=0, min_sample_s=10.0)
    case = make_case(right("ours"), right("peer"))
    result = harness.measure(case, settings, ticking_clock(step_s=2.0))
    assert result.timings[0].calls_per_sample == 5
    # Two clock readings, 2 s apart, around 5 calls.
    assert result.timings[0].median_s == pytest.approx(0.4)


def test_budget_limits_the_rounds() -> None:
    settings = Settings(repeats=9, min_repeats=3, warmup=0, budget_s=5.0, min_sample_s=0.0)
    case = make_case(right("ours"), right("peer"))
    by_budget = harness.measure(case, settings, ticking_clock(step_s=0.5))
    assert by_budget.timings[0].samples == 5
    at_least = harness.measure(case, settings, ticking_clock(step_s=60.0))
    assert at_least.timings[0].samples == 3


def test_bandwidths() -> None:
    traffic = Traffic(no_reuse=8_000_000_000, compulsory=2_000_000_000)
    case = make_case(right("ours"), right("peer"), traffic=traffic)
    result = harness.measure(case, SETTINGS, ticking_clock(step_s=0.5))
    assert result.bandwidth_gb_s == pytest.approx(16.0)
    # 4 GB/s of what must be moved, on a memory of 40 GB/s.
    assert result.compulsory_fraction(40.0) == pytest.approx(0.1)
    assert CaseResult("group", "case", {}).bandwidth_gb_s is None


def test_a_side_that_settles_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads may still turn; and whoever comes next is woken before it is timed."""
    log: list[str] = []
    monkeypatch.setattr(harness.time, "sleep", lambda seconds: log.append(f"wait {seconds}"))
    spinning = dataclasses.replace(right("spinning", log), settle_s=0.1)
    settings = dataclasses.replace(SETTINGS, repeats=2)
    harness.measure(make_case(right("ours", log), right("peer", log), spinning), settings)
    timed = log[log.index("wait 0.1") - 3 :]
    turn = ["ours", "peer", "spinning", "wait 0.1"]
    assert timed == [*turn, "ours", *turn]


def test_a_turn_may_begin_with_calls_that_are_not_timed() -> None:
    log: list[str] = []
    case = make_case(right("ours", log), right("peer", log))
    settings = dataclasses.replace(SETTINGS, repeats=3)
    harness.measure(case, settings, ticking_clock(step_s=0.5))
    cold = len(log)
    log.clear()
    warm = dataclasses.replace(case, warm_turns=True)
    result = harness.measure(warm, settings, ticking_clock(step_s=0.5))
    assert len(log) == cold + 3 * 2 * 3
    assert log[-8:] == ["ours"] * 4 + ["peer"] * 4
    assert {timing.samples for timing in result.timings} == {3}
    assert all(timing.median_s == 0.5 for timing in result.timings)


def test_a_share_of_the_rows_leaves_the_worst_out_but_not_what_is_not_finite():
    truth = torch.ones(100, 4, dtype=torch.float64)
    output = truth.clone()
    output[7] = 3.0
    assert harness.distance_to_reference(output, Reference((truth,))) == 1.0
    assert harness.distance_to_reference(output, Reference((truth,)), 0.99) == 0.0
    output[8] = 3.0
    assert harness.distance_to_reference(output, Reference((truth,)), 0.99) == 1.0
    output[8] = float("nan")
    assert harness.distance_to_reference(output, Reference((truth,)), 0.9) == float("inf")
