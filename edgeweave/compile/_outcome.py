"""What became of a graph once its engine has run it: known after the first call, not before.

oneDNN partitions are cut and measured when the first inputs come, and a graph that cannot be
captured again runs in eager from then on. `outcome_of` asks what was handed over.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ._regions import Region

__all__ = ["Outcome", "outcome_of"]

_PARTITIONS, _PACKED, _ATEN = "oneDNN partitions", "packed products", "ATen"


@dataclass(frozen=True)
class Outcome:
    """Who ran the calls of a graph.

    Attributes:
        got: Calls by who ran them.
        share: Share of the calls that were not left to eager, 0 to 1.
        left: Why something was left to eager; empty if nothing was.
        refused: Reasons of single calls that oneDNN did not get, and how many gave each.
        seconds: That oneDNN needed at the first call, to capture and compile.
    """

    got: dict[str, int] = field(default_factory=dict)
    share: float = 1.0
    left: str = ""
    refused: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def outcome_of(engine: str, compiled: Any, calls: int, ops: int, reason: str) -> Outcome:
    """Ask what an engine made of a graph.

    Args:
        engine: `inductor`, `onednn` or `eager`.
        compiled: What it gave for the graph.
        calls: Calls in the graph.
        ops: Those of them that are edgeweave's ops.
        reason: Why the engine was chosen.

    Returns:
        Who ran the calls. Inductor is taken to have generated code for all that are no ops of
        edgeweave, though it calls libraries for products and convolutions.
    """
    ours = {"edgeweave's ops": ops} if ops else {}
    if engine == "onednn" and isinstance(compiled, nn.Module):
        return _of_regions(compiled, calls, ours)
    if engine == "onednn":
        return _of_onednn(compiled, calls)
    if engine == "inductor":
        return Outcome({**ours, "Inductor": calls - ops})
    share = ops / calls if calls else 1.0
    left = f"engine eager: {reason}" if calls > ops else ""
    return Outcome({**ours, _ATEN: calls - ops}, share, left)


def _of_regions(cut: nn.Module, calls: int, ours: dict[str, int]) -> Outcome:
    """Regions between ops of edgeweave's: some are oneDNN's, the others ATen's."""
    inside = [region for region in cut.children() if isinstance(region, Region)]
    each = [_of_onednn(region.compiled, region.calls) for region in inside]
    counts = Counter(ours)
    counts[_ATEN] = calls - sum(ours.values()) - sum(region.calls for region in inside)
    refused = Counter[str]()
    for outcome in each:
        counts.update(outcome.got)
        refused.update(outcome.refused)
    share = 1.0 - counts[_ATEN] / max(counts.total(), 1)
    left = "; ".join(dict.fromkeys(outcome.left for outcome in each if outcome.left))
    got = {who: count for who, count in counts.items() if count}
    return Outcome(got, share, left, dict(refused), sum(outcome.seconds for outcome in each))


def _of_onednn(compiled: Any, calls: int) -> Outcome:
    fused = getattr(compiled, "_fused", None)
    if fused is None:
        # No call yet, or the graph could not be captured again: which is said, but only once.
        return Outcome({_ATEN: calls}, 0.0, "oneDNN could not take the graph")
    report = fused.report()
    counts = Counter[str]()
    counts[_PARTITIONS] = sum(len(part.nodes) for part in report.partitions)
    counts[_PACKED] = sum(len(part.nodes) for part in report.packed)
    counts[_ATEN] = len(report.refused)
    total = sum(counts.values())
    refused = Counter(f"{each.op}: {each.reason}" for each in report.refused)
    share = 1.0 - counts[_ATEN] / total if total else 1.0
    left = f"oneDNN: {report.reason}" if report.mode == "eager" else ""
    got = {who: count for who, count in counts.items() if count}
    return Outcome(got, share, left, dict(refused), report.capture_s + report.compile_s)
