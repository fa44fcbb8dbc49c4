"""What `report()` returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["GroupReport", "JitReport", "ShapeReport"]


@dataclass(frozen=True)
class GroupReport:
    """A group of operations that runs as one oneDNN partition.

    Attributes:
        name: `group 0` and so on, in the order of the graph.
        ops: Names of its operations.
        time_s: Seconds per call, or None if no profile was asked for.
    """

    name: str
    ops: tuple[str, ...]
    time_s: float | None = None


@dataclass(frozen=True)
class ShapeReport:
    """What runs for one shape of the inputs.

    Attributes:
        shapes: Of the input tensors.
        state: `"fused"` (oneDNN groups), `"frozen"` (TorchScript without groups) or `"eager"`.
        layout: `"contiguous"` or `"channels_last"`, of 4-d inputs.
        groups: The fused groups.
        left_out: Operations that run one by one, with their number.
        findings: What the lint pass changed: `operation: fault (action)`, with their number.
        reasons: Why it is not more.
        notes: What the tracer fixed, and other remarks.
        calls: Calls so far.
        fused_calls: Calls that ran fused.
        warm_ups: Calls until it was fused.
        build_s: Seconds that tracing, checking and measuring took.
        eager_s: Seconds of a call in eager when it was built, or None if not measured.
        chosen_s: Seconds of a call of what runs now, or None if not measured.
    """

    shapes: tuple[tuple[int, ...], ...]
    state: str
    layout: str = "contiguous"
    groups: tuple[GroupReport, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    findings: Mapping[str, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    calls: int = 0
    fused_calls: int = 0
    warm_ups: int = 0
    build_s: float = 0.0
    eager_s: float | None = None
    chosen_s: float | None = None


@dataclass(frozen=True)
class JitReport:
    """What an optimized model did so far.

    Attributes:
        engine: `"torchscript"`, `"graphfuse"`, or `"eager"` where neither is there.
        dtype: What it computes in: `"as the model"`, or the dtype of autocast.
        nan: `"propagate"` or `"fast"`.
        flags: torch's fuser flags in force now (they matter while a new shape warms up only, and
            are set there).
        shapes: One entry per shape in the cache, most recently used last.
        evicted: Shapes that were dropped from the cache.
        overflowed: Calls in eager because too many different shapes had been there.
        refreshed: How often changed weights or `refresh()` dropped all of them.
        notes: What applies to all shapes.
        engine_report: The report of the other engine, as text.
    """

    engine: str
    dtype: str
    nan: str
    flags: Mapping[str, bool]
    shapes: tuple[ShapeReport, ...] = ()
    evicted: int = 0
    overflowed: int = 0
    refreshed: int = 0
    notes: tuple[str, ...] = ()
    engine_report: str = ""

    def __str__(self) -> str:
        on = [name for name, value in self.flags.items() if value]
        lines = [
            f"edgeweave.jitfuser: engine {self.engine}, dtype {self.dtype}, nan={self.nan}, "
            f"{len(self.shapes)} shapes ({self.evicted} evicted, "
            f"{self.overflowed} calls without room), refreshed {self.refreshed}x",
            f"torch's flags now: {', '.join(on) or 'none'}",
            *(f"note: {note}" for note in self.notes),
        ]
        for shape in self.shapes:
            lines += _shape_lines(shape)
        if self.engine_report:
            lines.append(self.engine_report)
        return "\n".join(lines)


def _shape_lines(shape: ShapeReport) -> list[str]:
    text = ", ".join("x".join(map(str, sizes)) or "scalar" for sizes in shape.shapes)
    lines = [
        f"{text}: {shape.state}, {shape.layout}, {shape.calls} calls ({shape.fused_calls} fused), "
        f"built in {shape.build_s:.2f} s with {shape.warm_ups} warm-ups"
    ]
    if shape.eager_s is not None and shape.chosen_s is not None:
        lines[-1] += f", {1e3 * shape.chosen_s:.3g} ms against {1e3 * shape.eager_s:.3g} in eager"
    lines += [f"  why: {reason}" for reason in shape.reasons]
    lines += [f"  note: {note}" for note in shape.notes]
    if any(group.time_s is not None for group in shape.groups):
        for group in shape.groups:
            ms = f"{1e3 * group.time_s:8.3f} ms  " if group.time_s is not None else ""
            lines.append(f"  {ms}{group.name}: {' + '.join(group.ops)}")
    else:
        counts = Counter(" + ".join(group.ops) for group in shape.groups)
        lines += [f"  fused {n}x {ops}" for ops, n in counts.most_common()]
    lines += [f"  linted {n}x {finding}" for finding, n in shape.findings.items()]
    if shape.left_out:
        rest = ", ".join(f"{n}x {op}" for op, n in shape.left_out.items())
        lines.append(f"  one by one: {rest}")
    return lines
