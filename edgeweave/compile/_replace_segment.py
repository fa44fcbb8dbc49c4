"""Pass `replace_segment`: `torch.segment_reduce` over rows becomes `edgeweave::scatter`.

It runs first, so that what reduces rows that were gathered is then fused as any other reduction.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from .._checks import FLOAT_DTYPES
from ._indices import is_index
from ._reading import arguments, features_of, name_of, shape_of, tensor_of
from ._record import Rewrite, source_of
from ._writing import Refused, Writer

__all__ = ["replace_segment"]

_REDUCES = {
    "sum": "sum", "mean": "mean", "max": "amax", "amax": "amax", "min": "amin", "amin": "amin",
    "prod": "prod",
}  # fmt: skip
# What torch gives for an empty segment, where that is not what `edgeweave::scatter` gives.
_EMPTY = {"mean": math.nan, "amax": -math.inf, "amin": math.inf}


def replace_segment(module: fx.GraphModule) -> list[Rewrite]:
    """Replace reductions of segments of rows by `edgeweave::scatter`.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    done = []
    for node in list(module.graph.nodes):
        if name_of(node) != "segment_reduce" or not node.users:
            continue
        source = source_of(node)
        try:
            reduce = _replace(module.graph, node)
        except Refused:
            continue
        what = f"segment_reduce => edgeweave::scatter({reduce})"
        done.append(Rewrite("replace_segment", what, *source))
    return done


def _replace(graph: fx.Graph, node: fx.Node) -> str:
    bound = arguments(node)
    data, reduce = bound.get("data"), _REDUCES.get(str(bound.get("reduce")))
    rows, trailing = tensor_of(data), features_of(data)
    if not isinstance(data, fx.Node) or rows is None or trailing is None or reduce is None:
        raise Refused("shapes or the reduction are not known")
    if rows.device.type != "cpu" or rows.dtype not in FLOAT_DTYPES or bound.get("axis", 0) != 0:
        raise Refused("not rows of floating-point numbers on the CPU")
    fills = _fills(reduce, bound.get("initial"))
    writer = Writer(graph, node)
    try:
        ptr = _pointers(writer, bound)
        ends, entries = _rows(writer, ptr), _rows(writer, data)
        groups = ends - 1 if type(ends) is int else writer.call(operator.sub, ends, 1)
        index = writer.call(torch.ops.edgeweave.segment_index.default, ptr, entries)
        flat = writer.fold(data, trailing)
        scatter = torch.ops.edgeweave.scatter.default
        result = writer.call(scatter, flat, index, groups, reduce, "even")
        if fills:
            empty = writer.call("unsqueeze", writer.call("eq", writer.call("diff", ptr), 0), 1)
            result = writer.call("masked_fill", result, empty, _EMPTY[reduce])
        writer.put_in_place(writer.unfold(result, trailing))
    except Refused:
        writer.undo()
        raise
    return reduce


def _rows(writer: Writer, node: fx.Node) -> Any:
    """Size 0, as a number or as the node that asks for it."""
    size = (shape_of(node) or (0,))[0]
    return size if type(size) is int else writer.call("size", node, 0)


def _fills(reduce: str, initial: Any) -> bool:
    """Whether empty segments must be filled in afterwards."""
    if initial is None:
        return reduce in _EMPTY
    # Where reductions begin: without effect for sums and means that begin at 0, products at 1.
    if type(initial) not in (int, float) or initial != {"sum": 0, "mean": 0, "prod": 1}.get(reduce):
        raise Refused("segments begin at a number")
    return False


def _pointers(writer: Writer, bound: dict[str, Any]) -> fx.Node:
    """`[G + 1]`: where each segment begins, and where the last one ends."""
    offsets, lengths = bound.get("offsets"), bound.get("lengths")
    given = lengths if offsets is None else offsets
    if bound.get("indices") is not None or (offsets is not None and lengths is not None):
        raise Refused("segments are given in two ways")
    if not isinstance(given, fx.Node) or not is_index(given):
        raise Refused("segments are not given by one list of numbers")
    if lengths is None:
        return given
    ends = writer.call("cumsum", given, 0)
    zero = writer.call("new_zeros", ends, [1])
    return writer.call(torch.cat, [zero, ends])
