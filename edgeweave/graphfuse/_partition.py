"""Cuts a lowered graph into partitions of oneDNN and calls of ATen, in an order that can run."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .._fx import Node, refs_of
from .._native import ops, release
from ._code import graph_code
from ._lowering import Lowered

__all__ = ["Cut", "Partition", "Unit", "cut_graph", "schedule", "torn_apart"]


@dataclass(frozen=True)
class Partition:
    """A subgraph that oneDNN runs as one.

    Attributes:
        index: In the native graph.
        ops: Indices of its operations in the lowered graph.
        inputs: Values it reads, in the order that the native side wants.
        outputs: Values it writes, likewise.
        nodes: Captured nodes that it covers, in order.
    """

    index: int
    ops: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[str, ...]


@dataclass
class Cut:
    """A native graph with its partitions.

    Attributes:
        handle: Of the native graph, released with this object.
        lowered: What it was made from.
        partitions: Those that run in oneDNN.
        seconds: What the library took.
    """

    handle: int
    lowered: Lowered
    partitions: list[Partition] = field(default_factory=list)

    def __post_init__(self) -> None:
        weakref.finalize(self, release, ops.onednn_graph_release, self.handle)


@dataclass
class Unit:
    """A step of the schedule: a partition or a call of ATen."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    partition: Partition | None = None
    node: Node | None = None


def _read_partitions(cut: Cut) -> Iterator[tuple[bool, list[int], list[int], list[int]]]:
    words = iter(ops.onednn_graph_partitions(cut.handle).tolist())
    for supported in words:
        lists = []
        for _ in range(3):
            count = next(words)
            lists.append([next(words) for _ in range(count)])
        yield bool(supported), lists[0], lists[1], lists[2]


def cut_graph(lowered: Lowered, *, fpmath: str = "strict", policy: str = "fusion") -> Cut:
    """Have oneDNN choose the partitions.

    Args:
        lowered: The graph.
        fpmath: `strict`, or `bf16` for float32 products in bfloat16 arithmetic.
        policy: `fusion`, or `debug` for one operation in each partition.
    """
    names = list(lowered.tensors)
    code = graph_code(lowered.tensors, lowered.ops, fpmath=fpmath, policy=policy)
    cut = Cut(ops.onednn_graph_create(code), lowered)
    for index, (supported, members, inputs, outputs) in enumerate(_read_partitions(cut)):
        kinds = {lowered.ops[op].kind for op in members}
        if not supported or kinds & {"wildcard", "end"}:
            continue
        nodes = tuple(dict.fromkeys(lowered.ops[op].node for op in sorted(members)))
        cut.partitions.append(
            Partition(
                index,
                tuple(sorted(members)),
                tuple(names[i] for i in inputs),
                tuple(names[i] for i in outputs),
                nodes,
            )
        )
    return cut


def uncovered(cut: Cut) -> set[str]:
    """Captured nodes with an operation that is in no partition, or in one with such a node."""
    covered = {op for partition in cut.partitions for op in partition.ops}
    return {
        op.node
        for index, op in enumerate(cut.lowered.ops)
        if op.kind not in ("wildcard", "end") and index not in covered
    }


def schedule(nodes: list[Node], cut: Cut, constants: Mapping[str, object]) -> list[list[Unit]]:
    """Order the units so that as many partitions as can stand together; a group is of one kind."""
    fused = {name for partition in cut.partitions for name in partition.nodes}
    units = [
        Unit(
            tuple(n for n in dict.fromkeys(p.inputs) if n not in constants), p.outputs, partition=p
        )
        for p in cut.partitions
    ]
    units += [
        Unit(
            tuple(n for n in dict.fromkeys(refs_of(node)) if n not in constants),
            (node.name,),
            node=node,
        )
        for node in nodes
        if node.name not in fused
    ]
    writer = {name: unit for unit in units for name in unit.writes}
    waiting = {
        id(unit): {id(writer[name]) for name in unit.reads if name in writer} for unit in units
    }
    remaining = {id(unit): unit for unit in units}
    groups: list[list[Unit]] = []
    native = True
    idle = 0
    while remaining:
        group: list[Unit] = []
        progress = True
        while progress:
            progress = False
            for key, unit in list(remaining.items()):
                if (unit.partition is not None) == native and not waiting[key]:
                    group.append(unit)
                    del remaining[key]
                    progress = True
                    for blocked in waiting.values():
                        blocked.discard(key)
        if group:
            groups.append(group)
            idle = 0
        else:
            idle += 1
            if idle > 1:
                raise RuntimeError("graphfuse: the partitions depend on each other in a circle")
        native = not native
    return groups


def torn_apart(nodes: Sequence[Node], cut: Cut) -> list[str]:
    """Nodes whose partition keeps a value to itself that a call outside of it reads too.

    The captured graph's readers are known when it is cut. Calls that convert for themselves read
    what the conversion read: with such a conversion in a partition of its own, none can.
    """
    fused = {name for partition in cut.partitions for name in partition.nodes}
    hidden = fused.difference(*(partition.outputs for partition in cut.partitions))
    wanted = {
        name for node in nodes if node.name not in fused for name in refs_of(node) if name in hidden
    }
    return [n.name for n in nodes if n.name in fused and not wanted.isdisjoint(refs_of(n))]
