"""What was fused, what was not and why, what it costs and gains."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["FuseReport", "PartitionReport", "Refusal", "Verification"]

# Where calls run outside of partitions, in the order of the report.
_WHERE = {
    "torch": "with packed weights in torch's own oneDNN",
    "mkl": "with packed weights in torch's MKL",
    "vectors": "on edgeweave's vectors",
    "tiles": "on AMX tiles",
}


@dataclass(frozen=True)
class PartitionReport:
    """One partition.

    Attributes:
        nodes: The captured calls that it covers.
        ops: The ATen operators of those calls.
        fused_us: Its time inside the fused graph; None if it was not measured.
        eager_us: The time of the same calls in ATen; None if it was not measured.
        where: `partition`, `torch` for torch's own oneDNN, `mkl` for torch's MKL, `tiles` and
            `vectors` for edgeweave's kernels on AMX tiles and on vectors of fp32.
    """

    nodes: tuple[str, ...]
    ops: tuple[str, ...]
    fused_us: float | None = None
    eager_us: float | None = None
    where: str = "partition"


@dataclass(frozen=True)
class Refusal:
    """A call that runs in ATen.

    Attributes:
        node: Its name in the captured graph.
        op: The ATen operator.
        reason: Why it is in no partition.
    """

    node: str
    op: str
    reason: str


@dataclass(frozen=True)
class Verification:
    """Distance of one partition, or of the whole model, from float64, beside eager's.

    Attributes:
        nodes: The captured calls that it covers.
        inputs: What it was tried on: `random`, `large`, `tiny`, `zero`; `whole` for all partitions
            together, in the layouts in which they hand values on, on random inputs.
        error: Largest distance from the float64 result, relative to its largest magnitude.
        eager_error: The same of ATen in the partition's own dtype.
        good: Whether `error` is within the tolerance.
    """

    nodes: tuple[str, ...]
    inputs: str
    error: float
    eager_error: float
    good: bool


@dataclass(frozen=True)
class FuseReport:
    """What `graphfuse.fuse` made of a model.

    Attributes:
        mode: `fused`, or `eager` where the whole model runs as it was.
        reason: Why the mode is `eager`; empty otherwise.
        dtype: `float32`, `bfloat16` or `bf16-math`.
        nan: `propagate` or `fast`.
        library: Version of oneDNN.
        partitions: What oneDNN runs.
        packed: Calls, each with what follows it, that run outside of partitions since that was
            faster: products in torch's own oneDNN or MKL, products of fp32 on edgeweave's vectors,
            and products, attention and layer norms on AMX tiles.
        refused: What ATen runs.
        segments: Native programs between which Python acts.
        guards: Places where a value is looked at so that no NaN is lost.
        capture_s: Seconds to capture the model.
        compile_s: Seconds to partition and compile, all sizes so far.
        arena_bytes: Memory kept for intermediates, all sizes so far.
        constant_bytes: Memory of weights made by folding, beside the model's own.
        fused_ms: A call on the example; None if it was not measured.
        eager_ms: The same call where nothing is fused (of the model itself, in bfloat16 of the
            captured calls); the least of one call and the sum of its calls where that was
            clear; None if it was not measured.
        calls: Calls since.
        eager_calls: Those that ran in eager, by reason.
        symbols: Sizes that may change, with their limits.
    """

    mode: str
    reason: str
    dtype: str
    nan: str
    library: str
    partitions: tuple[PartitionReport, ...]
    packed: tuple[PartitionReport, ...]
    refused: tuple[Refusal, ...]
    segments: int
    guards: int
    capture_s: float
    compile_s: float
    arena_bytes: int
    constant_bytes: int
    fused_ms: float | None
    eager_ms: float | None
    calls: int
    eager_calls: dict[str, int] = field(default_factory=dict)
    symbols: dict[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        return asdict(self)

    def __str__(self) -> str:
        fused = sum(len(partition.nodes) for partition in self.partitions)
        moved = {
            where: sum(len(part.nodes) for part in self.packed if part.where == where)
            for where in _WHERE
        }
        packed = sum(moved.values())
        lines = [
            f"graphfuse: {self.mode}, oneDNN {self.library}, {self.dtype}, nan={self.nan!r}"
            + (f" ({self.reason})" if self.reason else ""),
            f"  {fused} of {fused + packed + len(self.refused)} calls in {len(self.partitions)} "
            f"partitions, {self.segments} native segments, {self.guards} guards",
            f"  capture {self.capture_s:.2f} s, compile {self.compile_s:.3f} s, "
            f"arena {self.arena_bytes / 2**20:.1f} MiB, folded weights "
            f"{self.constant_bytes / 2**20:.1f} MiB",
        ]
        if self.fused_ms is not None and self.eager_ms is not None:
            lines.append(
                f"  example: {self.fused_ms:.3f} ms, eager {self.eager_ms:.3f} ms "
                f"({self.eager_ms / self.fused_ms:.2f}x)"
            )
        moves = [
            f"  {count} more {_WHERE[where]}, which was faster"
            for where, count in moved.items()
            if count
        ]
        lines[2:2] = moves
        lines += [f"  {p.fused_us or 0:9.1f} us  " + " + ".join(p.ops) for p in self.partitions]
        lines += [
            f"  {p.fused_us or 0:9.1f} us  "
            + " + ".join(p.ops)
            + {"tiles": ", on tiles", "vectors": ", on vectors", "mkl": ", MKL"}.get(
                p.where, ", packed"
            )
            for p in self.packed
        ]
        lines += [f"  ATen: {r.op} ({r.node}): {r.reason}" for r in self.refused]
        lines += [f"  {count} calls in eager: {why}" for why, count in self.eager_calls.items()]
        return "\n".join(lines)
