"""What a call with certain sizes runs: native segments, with ATen calls between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._fx import Node, Ref, Sym, evaluate_size, map_refs, refs_of
from .._fx._simplify import operator_of
from ._lowering import Lowered
from ._packed import PackedCall
from ._partition import Cut, Unit, cut_graph, schedule, uncovered
from ._segment import Segment, fold_views

__all__ = ["LENIENT", "Plan", "bind_nodes", "is_plain", "make_cut"]

# Neither quantised nor complex: known by one question instead of two.
_REAL = frozenset((torch.float32, torch.bfloat16, torch.int64))
# A view of what has other strides than were foreseen would be an error where eager copies.
LENIENT = {
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
}


def bind_nodes(nodes: Sequence[Node], symbols: Mapping[str, int]) -> list[Node]:
    """The nodes with the values of all symbols put in."""

    def change(value: Ref | Sym) -> Any:
        return evaluate_size(value.expression, symbols) if isinstance(value, Sym) else value

    return [
        replace(
            node,
            args=map_refs(node.args, change),
            kwargs=map_refs(node.kwargs, change),
            meta=None if node.meta is None else node.meta.bind(symbols),
        )
        for node in nodes
    ]


def make_cut(
    lower: Callable[[Mapping[str, str]], Lowered], refused: dict[str, str], fpmath: str, policy: str
) -> Cut:
    """Lower and cut until every operation is in a partition; the rest is added to `refused`."""
    while True:
        cut = cut_graph(lower(refused), fpmath=fpmath, policy=policy)
        missing = dict.fromkeys(uncovered(cut), "this version of oneDNN does not support it here")
        missing.update(dict.fromkeys(_after_pooling(cut), "oneDNN gets it wrong after pooling"))
        if not missing:
            return cut
        refused.update(missing)


def _after_pooling(cut: Cut) -> list[str]:
    """Nodes of two operands in one partition with the pooling that they read.

    oneDNN 3.2 reads the other operand as if it lay as it would like the pooled values to lie, past
    its end if need be.
    """
    found = []
    for partition in cut.partitions:
        ops = [cut.lowered.ops[index] for index in partition.ops]
        if any(op.kind in ("max_pool", "avg_pool") for op in ops):
            found += [op.node for op in ops if op.kind in _BINARY and op.node]
    return found


_BINARY = ("add", "subtract", "multiply", "divide", "maximum", "minimum")


class _Writer:
    """Source of the function that runs a plan."""

    def __init__(self, constants: Mapping[str, Tensor], names: Sequence[str]) -> None:
        self.scope: dict[str, Any] = {}
        self.variable = {name: f"v{index}" for index, name in enumerate(names)}
        self.constants = constants
        self.lines = [f"def run({', '.join(self.variable.values())}):"]

    def keep(self, value: Any) -> str:
        name = f"k{len(self.scope)}"
        self.scope[name] = value
        return name

    def define(self, name: str) -> str:
        return self.variable.setdefault(name, f"v{len(self.variable)}")

    def text(self, value: Any) -> str:
        if isinstance(value, Ref):
            if value.name in self.variable:
                return self.variable[value.name]
            self.variable[value.name] = self.keep(self.constants[value.name])
            return self.variable[value.name]
        if isinstance(value, list):
            return "[" + ", ".join(self.text(item) for item in value) + "]"
        if isinstance(value, tuple):
            return "(" + "".join(self.text(item) + ", " for item in value) + ")"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self.keep(value)

    def call(self, node: Node) -> None:
        target = LENIENT.get(node.target, node.target)
        function = self.keep(operator_of(target))
        parts = [self.text(argument) for argument in node.args]
        parts += [f"{key}={self.text(value)}" for key, value in node.kwargs.items()]
        self.lines.append(f"    {self.define(node.name)} = {function}({', '.join(parts)})")

    def segment(self, segment: Segment) -> None:
        function = self.keep(segment.run)
        reads = "".join(self.text(Ref(name)) + ", " for name in segment.reads)
        writes = "".join(self.define(name) + ", " for name in segment.writes)
        self.lines.append(f"    {writes}= {function}(({reads}))")

    def forget(self, names: Sequence[str]) -> None:
        # Constants live in the scope; what was computed is dropped after its last use.
        dead = [self.variable[n] for n in names if n in self.variable and n not in self.constants]
        if dead:
            self.lines.append(f"    del {', '.join(dead)}")

    def finish(self, outputs: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
        self.lines.append(f"    return {self.text(tuple(outputs))}")
        exec(compile("\n".join(self.lines), "<edgeweave.graphfuse plan>", "exec"), self.scope)
        return self.scope["run"]  # type: ignore[no-any-return]


class Plan:
    """Segments and calls for one set of sizes.

    Attributes:
        run: From input tensors to the tuple of outputs.
        segments: The native parts.
        groups: All units, in order.
        packed: The calls that run outside of partitions with packed weights or on own kernels.
        views: Which outputs lie in memory of the weights' (`Weights.lifted`); None until it ran.
    """

    def __init__(
        self,
        nodes: list[Node],
        lowered: Lowered,
        constants: Mapping[str, Tensor],
        inputs: Sequence[str],
        outputs: Sequence[Any],
        cut: Cut | None,
        cache: dict[str, float] | None,
        packed: Sequence[PackedCall] = (),
    ) -> None:
        self.packed = tuple(packed)
        self.views: tuple[int, ...] | None = None
        returned = set(refs_of(list(outputs)))
        self.cut = cut
        if cut is None:
            self.groups = [[Unit(tuple(refs_of(n)), (n.name,), node=n) for n in nodes]]
            self.groups = self.groups if nodes else []
        else:
            self.groups = fold_views(schedule(nodes, cut, constants), returned)
        self.segments: list[Segment] = []
        bounds: dict[str, float] = {}
        last_use = self._last_uses()
        writer = _Writer(constants, inputs)
        for index, group in enumerate(self.groups):
            if group[0].partition is not None:
                assert cut is not None
                outside = {
                    n for i, g in enumerate(self.groups) if i != index for u in g for n in u.reads
                }
                segment = Segment(group, cut, lowered, constants, outside | returned)
                if cache is not None:
                    segment.place_guards(bounds, cache)
                self.segments.append(segment)
                writer.segment(segment)
                used = [
                    n for n in segment.reads if last_use[n] == (index, -1) and n not in returned
                ]
                writer.forget(used)
                continue
            for position, unit in enumerate(group):
                assert unit.node is not None
                writer.call(unit.node)
                names = dict.fromkeys((*unit.reads, *unit.writes))
                writer.forget(
                    [
                        n
                        for n in names
                        if last_use.get(n, (index, position)) == (index, position)
                        and n not in returned
                    ]
                )
        self.run = writer.finish(outputs)

    def _last_uses(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for index, group in enumerate(self.groups):
            native = group[0].partition is not None
            for position, unit in enumerate(group):
                for name in unit.reads:
                    found[name] = (index, -1 if native else position)
        return found

    def arena_bytes(self) -> int:
        """Bytes kept for what segments write."""
        return sum(segment.arena_bytes() for segment in self.segments)


def is_plain(value: object) -> bool:
    """Whether a tensor is dense, on the CPU, and of a type that a graph can hold."""
    return (
        isinstance(value, Tensor)
        and value.is_cpu
        and value.layout is torch.strided
        and (value.dtype in _REAL or not (value.is_quantized or value.is_complex()))
    )
