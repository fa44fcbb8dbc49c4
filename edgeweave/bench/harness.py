"""The one benchmark harness: check first, then time the sides in turn.

A case (`records.Case`) is one computation done by several sides, ours first. `measure`

1. runs every side once and compares it with a float64 reference; a wrong result is never timed;
2. warms every side up;
3. times them interleaved, A B A B, so that a change of the machine's clock or load hits all sides;
4. reports medians, quartiles and extremes.

What a side's `prepare` does before a call (fresh tensors, emptied caches) is not timed; freeing
what `run` returns is.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from edgeweave._fx._capture import no_collections
from edgeweave.bench.records import (
    Case,
    CaseResult,
    Reference,
    Settings,
    Side,
    Speedup,
    Timing,
)

# Ours may be this much further from the reference than the best peer: two correct summation
# orders differ by about that.
_PEER_FACTOR = 4.0
# What is always allowed: a few roundings of the result's dtype, and what fp32 sums of some hundred
# terms lose when their order is unlucky. A wrong edge, tie or weight is off by 1e-3 and more.
_FLOOR_EPS = 4.0
_FLOOR = 4e-6
# A trusted peer beyond this distance computes something else: the comparison would mean nothing.
_PEER_LIMIT = 1e-2
# Calls that are not timed, at the beginning of a turn. The third cache takes in what is read again,
# not what is read: weights come from it from the third call on.
_UNTIMED_CALLS = 3


class CheckFailedError(AssertionError):
    """A side's result is wrong, so that timing it would be meaningless."""


def distance_to_reference(output: Any, reference: Reference, share: float = 1.0) -> float:
    """Largest error of a result, relative to the size of its row.

    `max |out - ref| / (max |ref| of the row + mean |ref|)`: a single wrong row cannot hide
    behind the large values of a hub, and a row that cancels to nearly zero is no false alarm.

    Args:
        output: A tensor or a sequence of tensors, in the order of `reference.values`.
        reference: The right values.
        share: Of the rows of each tensor, how many count: the best. One that is not finite where
            the reference is always counts.

    Returns:
        The distance; infinity if a value is NaN or infinite where the reference is not.

    Raises:
        CheckFailedError: If number or shape of the tensors differ from the reference's.

    Example:
        >>> import torch
        >>> from edgeweave.bench.harness import distance_to_reference
        >>> from edgeweave.bench.records import Reference
        >>> reference = Reference((torch.ones(2, 3, dtype=torch.float64),))
        >>> distance_to_reference(torch.ones(2, 3) + 0.5, reference)
        0.25
    """
    tensors = (output,) if isinstance(output, Tensor) else tuple(output)
    if len(tensors) != len(reference.values):
        raise CheckFailedError(
            f"check: result must hold {len(reference.values)} tensors, got {len(tensors)}"
        )
    worst = 0.0
    for tensor, expected in zip(tensors, reference.values, strict=True):
        actual = tensor.detach()
        if reference.columns is not None:
            actual = actual.index_select(-1, reference.columns)
        if actual.shape != expected.shape:
            raise CheckFailedError(
                f"check: result must have shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
            )
        if expected.numel() == 0:
            continue
        size = expected.abs()
        row = size.amax(dim=-1, keepdim=True) if size.dim() else size
        scale = (row + size.mean()).clamp(min=torch.finfo(torch.float64).tiny)
        error = (actual.double() - expected).abs() / scale
        error = error.nan_to_num(nan=math.inf, posinf=math.inf)
        largest = float(error.max())
        if share < 1 and math.isfinite(largest):
            rows = error.amax(dim=-1).flatten() if error.dim() else error.view(1)
            largest = float(rows.kthvalue(max(1, math.ceil(share * rows.numel()))).values)
        worst = max(worst, largest)
    return worst


def check(case: Case) -> dict[str, float]:
    """Compares every side of a case with its float64 reference.

    Ours passes if it is not much further away than the best peer, or within a few roundings.

    Args:
        case: The case.

    Returns:
        Distance of each side by name.

    Raises:
        CheckFailedError: If a side computes something else.
    """
    reference = case.reference()
    distances: dict[str, float] = {}
    for side in (case.ours, *case.peers):
        distances[side.name] = distance_to_reference(_call(side), reference)
    trusted = [peer.name for peer in case.peers if peer.trusted]
    check_distances(
        case.case_id, distances, case.ours.name, trusted, reference.eps, reference.peer_limit
    )
    return distances


def check_distances(
    case_id: str,
    distances: Mapping[str, float],
    ours: str,
    trusted: Sequence[str],
    eps: float,
    peer_limit: float | None = None,
) -> None:
    """Judges distances to a float64 reference.

    Args:
        case_id: Name for the message.
        distances: Distance of each side.
        ours: The side which must be as close as the best of the others, or within a few roundings.
        trusted: Peers which must be close at all.
        eps: Machine epsilon of the dtype.
        peer_limit: How close a trusted peer must be; None for what one operation may lose.

    Raises:
        CheckFailedError: If a side is too far away.

    Example:
        >>> from edgeweave.bench.harness import check_distances
        >>> check_distances("case", {"ours": 2e-7, "peer": 1e-7}, "ours", ["peer"], eps=1.2e-7)
    """
    if peer_limit is None:
        peer_limit = max(_PEER_LIMIT, _FLOOR_EPS * eps)
    for peer in trusted:
        # Written so that a NaN fails.
        if not distances[peer] <= peer_limit:
            raise CheckFailedError(
                f"{case_id}: {peer} must be within {peer_limit:.1e} of the reference, "
                f"got {distances[peer]:.3e}; it computes something else"
            )
    best_peer = min((distances[peer] for peer in trusted), default=0.0)
    limit = max(_PEER_FACTOR * best_peer, _FLOOR_EPS * eps, _FLOOR)
    if not distances[ours] <= limit:
        raise CheckFailedError(
            f"{case_id}: {ours} must be within {limit:.1e} of the reference, "
            f"got {distances[ours]:.3e}; not timed"
        )


def measure(
    case: Case, settings: Settings, clock: Callable[[], float] = time.perf_counter
) -> CaseResult:
    """Checks a case, then times its sides in turn.

    Args:
        case: The case.
        settings: How long to measure.
        clock: Returns the time in seconds.

    Returns:
        The result, with status `"wrong"` and no timings if the check failed.
    """
    result = CaseResult(case.group, case.case_id, case.params, traffic=case.traffic)
    try:
        distances = check(case)
    except CheckFailedError as error:
        return _replace(result, status="wrong", message=str(error))
    sides = (case.ours, *case.peers)
    estimates = [_warm_up(side, settings.warmup, clock) for side in sides]
    calls = [_calls_per_sample(s, t, settings) for s, t in zip(sides, estimates, strict=True)]
    untimed = _UNTIMED_CALLS if case.warm_turns else 0
    round_s = sum(t * (n + untimed) for t, n in zip(estimates, calls, strict=True))
    samples: list[list[float]] = [[] for _ in sides]
    gc.collect()
    with no_collections():
        rested = False
        for _ in range(settings.rounds(round_s)):
            for side, count, times in zip(sides, calls, samples, strict=True):
                for _ in range(max(rested, untimed)):
                    _call(side)  # all come upon a processor that is awake
                times.append(_time(side, count, clock))
                rested = side.settle_s > 0
                if rested:
                    time.sleep(side.settle_s)
    timings = tuple(
        summarise(side.name, times, count)
        for side, times, count in zip(sides, samples, calls, strict=True)
    )
    speedups = tuple(
        compare(side.name, samples[0], times)
        for side, times in zip(sides[1:], samples[1:], strict=True)
    )
    return _replace(result, distances=distances, timings=timings, speedups=speedups)


def summarise(name: str, times: Sequence[float], calls_per_sample: int = 1) -> Timing:
    """Condenses the samples of one side.

    Args:
        name: The side.
        times: Seconds per call, one per sample, at least one.
        calls_per_sample: Calls in each sample.

    Returns:
        Median and spread.

    Example:
        >>> from edgeweave.bench.harness import summarise
        >>> summarise("side", [3.0, 1.0, 2.0]).median_s
        2.0
    """
    q25, q75 = _quartiles(times)
    return Timing(
        name,
        statistics.median(times),
        q25,
        q75,
        min(times),
        max(times),
        len(times),
        calls_per_sample,
    )


def compare(peer: str, ours: Sequence[float], theirs: Sequence[float]) -> Speedup:
    """Compares two sides timed in the same rounds.

    Args:
        peer: Name of the peer.
        ours: Our times, one per round.
        theirs: The peer's.

    Returns:
        Ratio of the medians, and quartiles of the rounds' ratios.

    Example:
        >>> from edgeweave.bench.harness import compare
        >>> compare("peer", [1.0, 1.0, 2.0], [3.0, 3.0, 6.0]).ratio
        3.0
    """
    q25, q75 = _quartiles([b / a for a, b in zip(ours, theirs, strict=True)])
    return Speedup(peer, statistics.median(theirs) / statistics.median(ours), q25, q75)


def fastest(choices: Mapping[str, Callable[[], object]], calls: int = 3) -> str:
    """Picks the peer's best layout by trying all.

    Args:
        choices: From the layout's name to a call with it.
        calls: Timed calls of each, after one to warm up.

    Returns:
        Name of the layout with the shortest call.

    Example:
        >>> import time
        >>> from edgeweave.bench.harness import fastest
        >>> fastest({"slow": lambda: time.sleep(0.01), "quick": lambda: None})
        'quick'
    """
    best: dict[str, float] = {}
    for name, call in choices.items():
        call()
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        best[name] = min(times)
    return min(best, key=lambda name: best[name])


def _call(side: Side) -> Any:
    return side.run(side.prepare() if side.prepare else None)


def _time(side: Side, count: int, clock: Callable[[], float]) -> float:
    """Seconds per call over `count` calls; results are dropped inside the timed region."""
    prepared = side.prepare() if side.prepare else None
    run = side.run
    start = clock()
    for _ in range(count):
        run(prepared)
    return (clock() - start) / count


def _warm_up(side: Side, calls: int, clock: Callable[[], float]) -> float:
    """Calls a side `calls` times, then once more and returns how long that took."""
    for _ in range(calls):
        _call(side)
    return _time(side, 1, clock)


def _calls_per_sample(side: Side, estimate_s: float, settings: Settings) -> int:
    # A side that prepares every call must be timed call by call.
    if side.prepare is not None or estimate_s >= settings.min_sample_s:
        return 1
    return min(1000, math.ceil(settings.min_sample_s / max(estimate_s, 1e-9)))


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    q25, _, q75 = statistics.quantiles(values, n=4, method="inclusive")
    return q25, q75


def _replace(result: CaseResult, **changes: Any) -> CaseResult:
    return CaseResult(**{**vars(result), **changes})
