"""Makes the report from what an engine knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ._engine import Engine
from ._measure import Measured
from ._report import FuseReport, PartitionReport, Refusal
from ._tile_ops import OWN

__all__ = ["summarise"]


def summarise(
    engines: Sequence[Engine],
    settings: Mapping[str, Any],
    measured: Measured | None,
    calls: int,
    eager_calls: dict[str, int],
) -> FuseReport:
    """The report of the first captured graph, with totals of all."""
    engine = engines[0]
    plan = engine.plan(settings["example_symbols"])
    target = {node.name: node.target for node in engine.nodes}
    partitions = []
    fused: set[str] = set()
    for segment in plan.segments:
        for unit in segment.units:
            if unit.partition is None:
                continue
            nodes = unit.partition.nodes
            fused.update(nodes)
            eager_us = None
            if measured is not None and all(name in measured.eager_us for name in nodes):
                eager_us = sum(measured.eager_us[name] for name in nodes)
            partitions.append(
                PartitionReport(
                    nodes,
                    tuple(target[name] for name in nodes),
                    None if measured is None else measured.fused_us.get(nodes),
                    eager_us,
                )
            )
    packed = []
    for product in plan.packed:
        fused.update(product.nodes)
        times = None if measured is None else measured.packed_us.get(product.product)
        slow = [] if measured is None else [measured.eager_us.get(n, 0.0) for n in product.nodes]
        ops = tuple(target[name] for name in product.nodes)
        how = engine.packed.get(product.product)
        where = how if how in (*OWN, "mkl") and how in product.variants else "torch"
        slow_us = sum(slow) if slow else None
        packed.append(PartitionReport(product.nodes, ops, times, slow_us, where))
    reason = ""
    if not engine.fused:
        reason = "no faster than eager on the example"
    elif not partitions and not packed:
        reason = "nothing in it has a counterpart in oneDNN Graph"
    inside = {name for s in plan.segments for u in s.units for name in u.writes}
    refused = tuple(
        Refusal(node.name, node.target, engine.refused.get(node.name, reason))
        for node in engine.nodes
        if node.name not in fused and node.name not in inside
    )
    own = {tensor.data_ptr() for tensor in engine.captured.constants.values()}
    made = [
        tensor
        for tensor in engine.weights.tensors.values()
        if isinstance(tensor, Tensor) and tensor.data_ptr() not in own
    ]
    return FuseReport(
        mode="fused" if not reason else "eager",
        reason=reason,
        dtype=settings["dtype"],
        nan=settings["nan"],
        library=settings["library"],
        partitions=tuple(partitions),
        packed=tuple(packed),
        refused=refused,
        segments=len(plan.segments),
        guards=sum(len(guards) for segment in plan.segments for guards in segment.guards),
        capture_s=settings["capture_s"],
        compile_s=sum(each.compile_s for each in engines),
        arena_bytes=sum(each.arena_bytes() for each in engines),
        constant_bytes=sum(tensor.numel() * tensor.element_size() for tensor in made),
        fused_ms=None if measured is None else measured.fused_ms,
        eager_ms=None if measured is None else measured.eager_ms,
        calls=calls,
        eager_calls=eager_calls,
        symbols={
            name: f"dimension {s.dim} of input {s.position}, {s.least} to "
            f"{'any' if s.most is None else s.most}"
            for name, s in engine.captured.symbols.items()
        },
    )
