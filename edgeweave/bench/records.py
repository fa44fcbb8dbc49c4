"""What the harness takes and returns: sides, cases, settings, timings and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Side:
    """One implementation of a case.

    Attributes:
        name: Name in the tables.
        run: The timed call; gets what `prepare` returned; returns a tensor or several.
        prepare: Called before every call of `run`, not timed.
        trusted: Whether a large distance of this side (as a peer) is an error of the case. False
            for peers known to lose precision, such as reductions that accumulate in bf16.
        settle_s: Seconds to wait after its calls: threads of its own may go on turning round and
            would take the processor from the next side.
    """

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] | None = None
    trusted: bool = True
    settle_s: float = 0.0


@dataclass(frozen=True)
class Reference:
    """The right result of a case, in float64.

    Attributes:
        values: One tensor per tensor that a side returns.
        columns: Columns (last dimension) that `values` hold, or None for all of them.
        eps: Machine epsilon of the case's dtype.
        peer_limit: Distance beyond which a peer computes something else; None for the harness's
            own. A deep network in bf16 is further from float64 than one operation is.
    """

    values: tuple[Tensor, ...]
    columns: Tensor | None = None
    eps: float = torch.finfo(torch.float32).eps
    peer_limit: float | None = None


@dataclass(frozen=True)
class Traffic:
    """Bytes that a case must move.

    Attributes:
        no_reuse: If nothing read once were ever found in a cache.
        compulsory: If everything were read once and written once.
    """

    no_reuse: int
    compulsory: int


@dataclass(frozen=True)
class Case:
    """One computation and everything needed to check and time it.

    Attributes:
        group: Row of the numbers table that it belongs to.
        case_id: Unique name, `group/graph/...`.
        params: What distinguishes it inside its group.
        ours: The edgeweave side.
        peers: Sides to compare with.
        reference: Computes the right result.
        traffic: Bytes moved, or None where that says nothing.
        warm_turns: Whether each side's turn begins with three calls that are not timed, so that it
            finds its own data in the cache: what another side left there,
            which some share, is no part of a program that calls one model again and again.
    """

    group: str
    case_id: str
    params: Mapping[str, str | int]
    ours: Side
    peers: Sequence[Side]
    reference: Callable[[], Reference]
    traffic: Traffic | None = None
    warm_turns: bool = False


@dataclass(frozen=True)
class Settings:
    """How long to measure.

    Attributes:
        repeats: Rounds per case (each side once per round).
        min_repeats: Rounds that are run even beyond `budget_s`.
        warmup: Untimed calls of each side after the check.
        budget_s: Time for the rounds of one case.
        min_sample_s: Short calls are repeated within a sample until it lasts this long.
    """

    repeats: int = 9
    min_repeats: int = 3
    warmup: int = 1
    budget_s: float = 10.0
    min_sample_s: float = 2e-3

    def rounds(self, round_s: float) -> int:
        """Number of rounds to run, when one takes `round_s` seconds."""
        affordable = int(self.budget_s / round_s) if round_s > 0 else self.repeats
        return min(self.repeats, max(self.min_repeats, affordable))


@dataclass(frozen=True)
class Timing:
    """Times of one side, in seconds per call.

    Attributes:
        name: The side.
        median_s: Median of the samples.
        q25_s: Lower quartile.
        q75_s: Upper quartile.
        min_s: Fastest.
        max_s: Slowest.
        samples: Number of samples.
        calls_per_sample: Calls in each.
    """

    name: str
    median_s: float
    q25_s: float
    q75_s: float
    min_s: float
    max_s: float
    samples: int
    calls_per_sample: int = 1


@dataclass(frozen=True)
class Speedup:
    """How much faster ours is than one peer.

    Attributes:
        peer: The peer.
        ratio: Median time of the peer over median time of ours.
        q25: Lower quartile of the ratios of the single rounds.
        q75: Upper quartile of the same.
    """

    peer: str
    ratio: float
    q25: float
    q75: float


@dataclass(frozen=True)
class CaseResult:
    """Outcome of a case.

    Attributes:
        group: As in the case.
        case_id: As in the case.
        params: As in the case.
        status: `"ok"`, `"wrong"` (failed its check, not timed) or `"error"` (raised).
        message: Reason if not ok.
        distances: Each side's distance to the float64 reference.
        timings: One per side, ours first.
        speedups: One per peer.
        traffic: As in the case.
    """

    group: str
    case_id: str
    params: Mapping[str, str | int]
    status: str = "ok"
    message: str = ""
    distances: Mapping[str, float] = field(default_factory=dict)
    timings: Sequence[Timing] = ()
    speedups: Sequence[Speedup] = ()
    traffic: Traffic | None = None

    @property
    def bandwidth_gb_s(self) -> float | None:
        """Bytes without any reuse over our time: more than the memory's means caches helped."""
        if self.traffic is None or not self.timings:
            return None
        return self.traffic.no_reuse / self.timings[0].median_s / 1e9

    def compulsory_fraction(self, stream_gb_s: float) -> float | None:
        """Share of the time that a perfect cache would need at STREAM's bandwidth."""
        if self.traffic is None or not self.timings:
            return None
        return self.traffic.compulsory / self.timings[0].median_s / 1e9 / stream_gb_s
