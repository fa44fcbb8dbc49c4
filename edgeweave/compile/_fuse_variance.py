"""Pass `fuse_variance`: the mean of squares minus the squared mean becomes one variance.

It is what PyG's `VarAggregation` and `StdAggregation` compute, and cancels where the mean is large;
edgeweave's kernel adds up squared distances from the mean.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ._indices import index_key
from ._messages import folded_from, on_cpu
from ._reading import (
    Positions,
    arguments,
    changed_between,
    features_of,
    name_of,
    same_size,
    shape_of,
    tensor_of,
    value_users,
)
from ._record import Rewrite, rewrite_each, source_of
from ._writing import Refused, Writer

__all__ = ["fuse_variance"]


def fuse_variance(module: fx.GraphModule) -> list[Rewrite]:
    """Replace `mean(x * x) - mean(x) ** 2` over an index by `edgeweave::multi_reduce` of `var`.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    return rewrite_each(module, _replace)


def _replace(graph: fx.Graph, node: fx.Node) -> Rewrite | None:
    if name_of(node) != "sub":
        return None
    bound = arguments(node, "sub")
    squares, mean = _find_mean(bound.get("input")), _squared(bound.get("other"))
    found = None if mean is None else _find_mean(mean)
    if squares is None or found is None or bound.get("alpha", 1) != 1:
        return None
    src = _squared(folded_from(squares.args[0]))
    if src is None or src is not folded_from(found.args[0]):
        return None
    same = index_key(squares.args[1]) == index_key(found.args[1])  # type: ignore[arg-type]
    if not same or not same_size(_slots(squares), _slots(found)):
        return None
    trailing, out = features_of(src), tensor_of(node)
    if not on_cpu(src, node):
        return None
    product = folded_from(squares.args[0])
    assert product is not None, "it has been read as a square"
    if trailing is None or out is None or not set(value_users(product)) <= _readers(product):
        return None
    positions = Positions(graph)
    index: Any = found.args[1]
    # What is made on the way: the foldings of rows too, which may be copies of them.
    made: list[Any] = [product, found, squares, found.args[0], squares.args[0]]
    made = [n for n in made if n is not src]
    begin = min(made, key=lambda n: positions.of[n])
    read = [src, index, squares.args[1], *made, *bound.values()]
    if changed_between(positions, begin, node, [n for n in read if isinstance(n, fx.Node)]):
        return None
    # Where the mean of the messages is made: what comes behind can be one pass with it.
    writer, source = Writer(graph, node), source_of(node)
    try:
        op = torch.ops.edgeweave.multi_reduce.default
        rows = writer.fold(src, trailing)
        both = writer.call(op, rows, index, found.args[2], ["var"], 0)
        result = writer.call(operator.getitem, both, 0)
        writer.put_in_place(writer.unfold(result, trailing))
    except Refused:
        writer.undo()
        return None
    what = "mean of squares - squared mean => edgeweave::multi_reduce(var)"
    return Rewrite("fuse_variance", what, *source)


def _readers(product: fx.Node) -> set[fx.Node]:
    """Foldings and means: a square that somebody else reads has to be made anyway."""
    names = ("edgeweave.scatter", "reshape", "view", "contiguous")
    return {user for user in value_users(product) if name_of(user) in names}


def _slots(scatter: fx.Node) -> Any:
    return (shape_of(scatter) or (0,))[0]


def _find_mean(node: Any) -> fx.Node | None:
    """The `edgeweave::scatter` of a mean, behind what unfolds its result."""
    inner = folded_from(node)
    if inner is None or name_of(inner) != "edgeweave.scatter":
        return None
    return inner if inner.args[3] == "mean" and inner.args[4] == "even" else None


def _squared(node: Any) -> fx.Node | None:
    """What a node is the square of."""
    name = name_of(node)
    if name == "mul":
        bound = arguments(node, "mul")
        one, two = bound.get("input"), bound.get("other")
        return one if isinstance(one, fx.Node) and one is two else None
    if name == "pow":
        bound = arguments(node, "pow")
        base = bound.get("input")
        power = bound.get("exponent")
        squares = type(power) in (int, float) and power == 2
        return base if isinstance(base, fx.Node) and squares else None
    if name == "square" and node.args and isinstance(node.args[0], fx.Node):
        return node.args[0]
    return None
