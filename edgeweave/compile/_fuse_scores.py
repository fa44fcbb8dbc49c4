"""Pass `fuse_scores`: attention's scores of edges, of the features at their two ends.

Of `(a[dst] * b[src]).sum(-1)` one `edgeweave::edge_dots` is made (TransformerConv), and of
`(att * leaky_relu(a[dst] + b[src])).sum(-1)` one `edgeweave::edge_scores` (GATv2Conv). Nothing of
size `[E, H, C]` is left, forward or backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ._fuse_mm import edges_of
from ._indices import row_of
from ._patterns import Gather, find_gather, number
from ._reading import (
    Positions,
    arguments,
    changed_between,
    name_of,
    shape_of,
    tensor_of,
    value_users,
)
from ._record import Rewrite, rewrite_each, source_of
from ._writing import Refused, Writer

__all__ = ["fuse_scores"]

NAME = "fuse_scores"


@dataclass(frozen=True)
class _Score:
    """A sum over the features of each head.

    Attributes:
        node: The sum.
        dst: The rows at one end, `[E, H, C]` of `[N, H, C]`.
        src: The rows at the other.
        att: `[1, H, C]` that the activation is multiplied by; None: a product of the two ends.
        slope: Of the activation below 0.
    """

    node: fx.Node
    dst: Gather
    src: Gather
    att: fx.Node | None = None
    slope: float = 0.0


def fuse_scores(module: fx.GraphModule) -> list[Rewrite]:
    """Replace sums over the features of two gathered ends by one op.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    stacks: dict[tuple[object, ...], fx.Node] = {}

    def replace(graph: fx.Graph, node: fx.Node) -> Rewrite | None:
        score = _find_score(node)
        return None if score is None else _replace(graph, score, stacks)

    return rewrite_each(module, replace)


def _find_score(node: fx.Node) -> _Score | None:
    if name_of(node) != "sum" or not _sums_last(node):
        return None
    product = node.args[0] if node.args else node.kwargs.get("input")
    if name_of(product) != "mul" or not _only_for(product, node):
        return None
    assert isinstance(product, fx.Node), "it has a name"
    bound = arguments(product, "mul")
    first, second = bound.get("input"), bound.get("other")
    ends = _ends(product, first, second)
    if ends is not None:
        return _Score(node, *ends)
    for values, att in ((first, second), (second, first)):
        found = _activated(product, values)
        if found is None or not isinstance(att, fx.Node) or not isinstance(values, fx.Node):
            continue
        if _fits(att, values):
            return _Score(node, found[0], found[1], att, found[2])
    return None


def _sums_last(node: fx.Node) -> bool:
    """Whether a sum is over the last of three dimensions and nothing else."""
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = dims[0] if isinstance(dims, (list, tuple)) and len(dims) == 1 else dims
    others = {k: v for k, v in node.kwargs.items() if k not in ("dim", "input")}
    if len(node.args) > 2 or any(v not in (None, False) for v in others.values()):
        return False
    shape = shape_of(node.args[0]) if node.args else None
    return dims in (-1, 2) and shape is not None and len(shape) == 3


def _only_for(node: Any, user: fx.Node) -> bool:
    return isinstance(node, fx.Node) and set(value_users(node)) == {user}


def _ends(user: fx.Node, first: Any, second: Any) -> tuple[Gather, Gather] | None:
    """The gathers of the two ends, if both rows are read by `user` alone and have one shape."""
    one, two = find_gather(first), find_gather(second)
    if one is None or two is None or one.node is two.node:
        return None
    if not _only_for(one.node, user) or not _only_for(two.node, user):
        return None
    shapes = shape_of(one.x), shape_of(two.x)
    if None in shapes or any(len(shape or ()) != 3 for shape in shapes):
        return None
    sizes = [(shape or ())[1:] for shape in shapes]
    if sizes[0] != sizes[1] or not all(type(size) is int and size > 0 for size in sizes[0]):
        return None
    # Destinations are what the edges' second row names, where that can be told.
    rows = row_of(one.index), row_of(two.index)
    if rows[0] is not None and rows[0][1] == 0:
        return two, one
    return one, two


def _activated(product: fx.Node, values: Any) -> tuple[Gather, Gather, float] | None:
    """`(one end, the other, slope)` of `leaky_relu(a[dst] + b[src])`."""
    if name_of(values) != "leaky_relu" or not _only_for(values, product):
        return None
    names = ("input", "negative_slope", "inplace")
    bound = {**dict(zip(names, values.args, strict=False)), **values.kwargs}
    slope = number(bound.get("negative_slope", 0.01))
    total = bound.get("input")
    if slope is None or bound.get("inplace", False) is not False:
        return None
    if name_of(total) != "add" or not _only_for(total, values):
        return None
    summands = arguments(total, "add")  # type: ignore[arg-type]
    if summands.get("alpha", 1) != 1:
        return None
    ends = _ends(total, summands.get("input"), summands.get("other"))  # type: ignore[arg-type]
    return None if ends is None else (*ends, slope)


def _fits(att: fx.Node, values: fx.Node) -> bool:
    """Whether a factor is one number per head and feature, the same for all edges."""
    shape, rows = shape_of(att), shape_of(values)
    return shape is not None and rows is not None and shape == (1, *rows[1:])


def _replace(
    graph: fx.Graph, score: _Score, stacks: dict[tuple[object, ...], fx.Node]
) -> Rewrite | None:
    ends = (score.dst, score.src)
    tensors = [t for end in ends for t in (end.x, end.index)]
    tensors += [] if score.att is None else [score.att]
    positions = Positions(graph)
    first = min((end.node for end in ends), key=lambda node: positions.of[node])
    if changed_between(positions, first, score.node, tensors):
        return None
    values = [tensor_of(t) for t in (score.dst.x, score.src.x, score.att or score.dst.x)]
    result = tensor_of(score.node)
    if result is None or any(v is None or v.dtype is not result.dtype for v in values):
        return None
    heads, width = (shape_of(score.dst.x) or ())[1:]
    writer, source = Writer(graph, score.node), source_of(score.node)
    try:
        edges, flip = edges_of(writer, score.src.index, score.dst.index, stacks)
        rows = [writer.call("reshape", end.x, [-1, heads * width]) for end in ends]
        if score.att is None:
            op: Any = torch.ops.edgeweave.edge_dots.default
            out = writer.call(op, edges, *rows, heads, flip)
        else:
            op = torch.ops.edgeweave.edge_scores.default
            att = writer.call("reshape", score.att, [heads * width])
            out = writer.call(op, edges, *rows, att, heads, score.slope, flip)
        writer.put_in_place(out)
    except Refused:
        writer.undo()
        return None
    before = "mul" if score.att is None else "add -> leaky_relu -> mul"
    return Rewrite(NAME, f"gathers -> {before} -> sum => {op.name().split('.')[0]}", *source)
