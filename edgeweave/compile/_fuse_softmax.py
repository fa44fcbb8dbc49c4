"""Pass `fuse_softmax`: the softmax over the edges of each node becomes `edgeweave::softmax`."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ._indices import index_key
from ._patterns import Reduction, find_gather, find_reduction, number
from ._reading import (
    Positions,
    arguments,
    changed_between,
    features_of,
    name_of,
    same_size,
    shape_of,
    value_users,
)
from ._record import Rewrite, rewrite_each, source_of
from ._writing import Refused, Writer

__all__ = ["fuse_softmax"]

NAME = "fuse_softmax"
# A group's sum is at least 1, since its largest entry is exp(0): below half an ulp of 1 in fp64,
# what is added to it to avoid a division by zero changes nothing.
_MOST_EPS = 1.2e-16


def fuse_softmax(module: fx.GraphModule) -> list[Rewrite]:
    """Replace `exp(s - max) / sum(exp(s - max))` over an index by `edgeweave::softmax`.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    return rewrite_each(module, _replace)


def _find(node: fx.Node) -> tuple[fx.Node, Reduction, Reduction] | None:
    """`(scores, their maxima, the sum of the exponentials)` if a node is a softmax."""
    if name_of(node) != "div":
        return None
    bound = arguments(node, "div")
    top, bottom = bound.get("input"), find_gather(bound.get("other"))
    if bound.get("rounding_mode") is not None or bottom is None or name_of(top) != "exp":
        return None
    sums = find_reduction(_without_eps(bottom.x))
    if sums is None or sums.reduce != "sum" or sums.src is not top:
        return None
    shifted = arguments(top)["input"]
    if name_of(shifted) != "sub":
        return None
    bound = arguments(shifted, "sub")
    scores, taken = bound.get("input"), find_gather(bound.get("other"))
    if taken is None or bound.get("alpha", 1) != 1 or not isinstance(scores, fx.Node):
        return None
    maxima = find_reduction(taken.x)
    if maxima is None or maxima.reduce != "amax" or _attached(maxima.src) is not scores:
        return None
    keys = {index_key(i) for i in (bottom.index, sums.index, taken.index, maxima.index)}
    sizes = [(shape_of(r.node) or (None,))[0] for r in (sums, maxima)]
    if len(keys) != 1 or None in sizes or not same_size(*sizes):
        return None
    # Whoever else looks at these values needs them to be there.
    own = (
        (top, {node, sums.node}),
        (shifted, {top}),
        (sums.node, set(sums.node.users)),
        (maxima.node, {taken.node}),
        (taken.node, {shifted}),
        (bottom.node, {node}),
    )
    if any(not set(value_users(each)) <= users for each, users in own):
        return None
    return scores, maxima, sums


def _without_eps(node: Any) -> Any:
    if name_of(node) != "add":
        return node
    bound = arguments(node, "add")
    eps = number(bound.get("other"))
    if eps is None or not 0 <= eps <= _MOST_EPS or bound.get("alpha", 1) != 1:
        return None
    inner = bound.get("input")
    return inner if isinstance(inner, fx.Node) and value_users(inner) == [node] else None


def _attached(node: fx.Node) -> Any:
    return arguments(node)["input"] if name_of(node) == "detach" else node


def _replace(graph: fx.Graph, node: fx.Node) -> Rewrite | None:
    found = _find(node)
    if found is None:
        return None
    scores, maxima, sums = found
    positions = Positions(graph)
    if changed_between(positions, maxima.node, node, [scores, maxima.index]):
        return None
    trailing = features_of(scores)
    if trailing is None:
        return None
    writer = Writer(graph, node)
    source = source_of(node)
    try:
        rows = writer.fold(scores, trailing)
        num = writer.count(sums.num)
        result = writer.call(torch.ops.edgeweave.softmax.default, rows, maxima.index, num)
        writer.put_in_place(writer.unfold(result, trailing))
    except Refused:
        writer.undo()
        return None
    return Rewrite(NAME, "max, exp, sum and division over an index => edgeweave::softmax", *source)
