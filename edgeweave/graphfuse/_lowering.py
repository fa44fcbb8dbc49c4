"""From captured ATen calls, with sizes known, to operations of oneDNN Graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._fx import Meta, Node, Ref, refs_of
from ._code import Attribute, Op
from ._code import Tensor as GraphTensor

__all__ = ["Lowered", "Lowering", "Refused", "Rule", "lower"]

DTYPES = (torch.float32, torch.bfloat16)
_MOST_DIMS = 6  # most that the library's kernels take


class Refused(Exception):
    """An ATen call has no counterpart in oneDNN; the message is the reason."""


@dataclass
class Lowered:
    """A graph of oneDNN operations with the calls that have none in between.

    Attributes:
        tensors: Every value, by name.
        ops: Operations in order; what has no rule is a wildcard.
        refused: Reason for each captured node that has no operation.
        literals: Constants that rules made, such as scalars.
        metas: Of every value, those that rules made included.
    """

    tensors: dict[str, GraphTensor] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    literals: dict[str, Tensor] = field(default_factory=dict)
    metas: dict[str, Meta] = field(default_factory=dict)


class Lowering:
    """What a rule works with: it reads metas and appends operations for one node."""

    def __init__(
        self,
        metas: Mapping[str, Meta],
        constants: Mapping[str, Tensor],
        lowered: Lowered,
        open_dims: Mapping[str, tuple[bool, ...]],
    ) -> None:
        self.constants = constants
        self._open = dict(open_dims)
        self.lowered = lowered
        lowered.metas = dict(metas)
        self._node: Node | None = None
        self._pending: list[Op] = []
        self._made: dict[str, Meta] = {}
        self._literals: dict[str, Tensor] = {}

    def start(self, node: Node) -> None:
        """Begin a node; what a rule appends counts only when it does not refuse."""
        self._node, self._pending, self._made, self._literals = node, [], {}, {}

    def finish(self) -> None:
        """Keep what the rule appended."""
        self.lowered.metas.update(self._made)
        self.lowered.literals.update(self._literals)
        for op in self._pending:
            for name in (*op.inputs, *op.outputs):
                self.declare(name)
        self.lowered.ops += self._pending

    def declare(self, name: str) -> None:
        """Make a value a tensor of the graph."""
        if name in self.lowered.tensors:
            return
        meta = self.lowered.metas.get(name)
        shape = meta.sizes if meta is not None else (1,)
        dtype = meta.dtype if meta is not None else torch.float32
        constant = name in self.constants or name in self.lowered.literals
        free = self._open.get(name, ())
        self.lowered.tensors[name] = GraphTensor(shape, dtype, constant, free)

    def meta(self, value: Any) -> Meta:
        """Of a tensor argument that oneDNN can read."""
        if not isinstance(value, Ref):
            raise Refused(f"argument must be a tensor, is {value!r}")
        meta = self._made.get(value.name) or self.lowered.metas.get(value.name)
        if meta is None:
            raise Refused("argument is no dense tensor")
        if meta.dtype not in DTYPES:
            raise Refused(f"dtype {str(meta.dtype).removeprefix('torch.')}")
        if not 1 <= len(meta.shape) <= _MOST_DIMS:
            raise Refused(f"{len(meta.shape)} dimensions, oneDNN takes 1 to {_MOST_DIMS}")
        if 0 in meta.sizes:
            raise Refused("empty tensor")
        return meta

    def result(self, node: Node) -> Meta:
        """Of the node's result, which oneDNN must be able to write."""
        return self.meta(Ref(node.name))

    def is_constant(self, value: Any) -> bool:
        """Whether a tensor is known before the first call."""
        return isinstance(value, Ref) and (
            value.name in self.constants or value.name in self._literals
        )

    def constant(self, value: Any) -> Tensor | None:
        """The tensor of a constant."""
        if not isinstance(value, Ref):
            return None
        return self._literals.get(value.name, self.constants.get(value.name))

    def literal(self, value: float, rank: int, dtype: torch.dtype) -> Ref:
        """A number as a constant tensor."""
        assert self._node is not None
        name = f"{self._node.name}_literal{len(self._literals)}"
        self._literals[name] = torch.full((1,) * rank, value, dtype=dtype)
        self._made[name] = Meta((1,) * rank, (1,) * rank, dtype)
        return Ref(name)

    def between(self, meta: Meta) -> str:
        """A value that only this node's operations see."""
        assert self._node is not None
        name = f"{self._node.name}_part{len(self._made)}"
        self._made[name] = meta
        if self._node.name in self._open:
            self._open[name] = self._open[self._node.name]
        return name

    def op(
        self,
        kind: str,
        inputs: list[Any],
        output: str | None = None,
        attributes: dict[str, Attribute] | None = None,
    ) -> None:
        """Append an operation; the node's own value is the default output."""
        assert self._node is not None
        names = [value.name if isinstance(value, Ref) else str(value) for value in inputs]
        self._pending.append(
            Op(kind, names, [output or self._node.name], self._node.name, attributes or {})
        )


Rule = Callable[[Lowering, Node], None]


def lower(
    nodes: list[Node],
    metas: Mapping[str, Meta],
    constants: Mapping[str, Tensor],
    outputs: list[Any],
    rules: Mapping[str, Rule],
    refused: Mapping[str, str],
    open_dims: Mapping[str, tuple[bool, ...]],
) -> Lowered:
    """Lower every node that has a rule which accepts it.

    Args:
        nodes: The calls.
        metas: Of every value, bound.
        constants: Values known before the first call.
        outputs: What the graph returns.
        rules: For each target.
        refused: Nodes that must stay in ATen, with reasons.
        open_dims: Dimensions of values that differ from call to call.
    """
    lowered = Lowered()
    lowering = Lowering(metas, constants, lowered, open_dims)
    for node in nodes:
        reason = refused.get(node.name)
        rule = rules.get(node.target)
        if reason is None and rule is None:
            reason = "no counterpart in oneDNN Graph"
        if reason is None and rule is not None:
            lowering.start(node)
            try:
                lowering.result(node)
                rule(lowering, node)
                lowering.finish()
                continue
            except Refused as refusal:
                reason = str(refusal)
        assert reason is not None
        lowered.refused[node.name] = reason
        # It stands in the graph all the same: what it reads must be written, and no partition
        # may both feed it and depend on it.
        inputs = [n for n in dict.fromkeys(refs_of(node)) if n not in constants]
        for name in (*inputs, node.name):
            lowering.declare(name)
        lowered.ops.append(Op("wildcard", inputs, [node.name], node.name))
    for name in dict.fromkeys(refs_of(outputs)):
        if name not in constants:
            lowering.declare(name)
            lowered.ops.append(Op("end", [name], [], ""))
    return lowered
