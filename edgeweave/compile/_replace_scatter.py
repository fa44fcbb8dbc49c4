"""Passes `replace_scatter` and `replace_gather`: what is not fused gets edgeweave's kernels."""

from __future__ import annotations

import math

import torch
from torch import fx

from .._checks import FLOAT_DTYPES
from ._patterns import find_gather, find_reduction
from ._reading import (
    Positions,
    boundary_between,
    features_of,
    mutated_between,
    name_of,
    tensor_of,
)
from ._record import Rewrite, source_of
from ._writing import Refused, Writer

__all__ = ["replace_gather", "replace_scatter"]


def replace_scatter(module: fx.GraphModule) -> list[Rewrite]:
    """Replace reductions over an index by `edgeweave::scatter`.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    done = []
    graph = module.graph
    for node in reversed(list(graph.nodes)):  # a mean before the sum within it
        if not node.users:
            continue
        found = find_reduction(node)
        if found is None or any(name_of(read) == "edgeweave.scatter" for read in found.reads):
            continue
        trailing = features_of(found.src)
        if trailing is None:
            continue
        positions = Positions(graph)
        first = min(found.reads, key=lambda read: positions.of[read])
        if mutated_between(positions, first, node, [found.src, found.index]):
            continue
        if boundary_between(positions, first, node):
            continue
        writer, source = Writer(graph, node), source_of(node)
        what = f"{name_of(node)} => edgeweave::scatter({found.reduce})"
        try:
            rows = found.src
            if len(trailing) != 1:
                rows = writer.call("reshape", rows, [-1, math.prod(trailing)])
            num = found.num
            if isinstance(num, fx.Node) and tensor_of(num) is not None:
                num = writer.call("size", num, 0)
            op = torch.ops.edgeweave.scatter.default
            result = writer.call(op, rows, found.index, num, found.reduce, "even")
            if len(trailing) != 1:
                result = writer.call("reshape", result, [-1, *trailing])
            writer.put_in_place(result)
        except Refused:
            writer.undo()
            continue
        done.append(Rewrite("replace_scatter", what, *source))
    return done[::-1]


def replace_gather(module: fx.GraphModule) -> list[Rewrite]:
    """Replace gathered rows that record gradients by `edgeweave::gather`.

    Its backward pass is a reduction over the plan instead of additions in the order of the edges.
    Without gradients nothing is replaced: Inductor reads the rows where they are used.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    done = []
    for node in list(module.graph.nodes):
        found = find_gather(node) if node.users else None
        if found is None or name_of(node) == "edgeweave.gather":
            continue
        x, out = tensor_of(found.x), tensor_of(node)
        if x is None or out is None or not out.requires_grad or x.dtype not in FLOAT_DTYPES:
            continue
        trailing = features_of(found.x)
        if x.device.type != "cpu" or trailing is None:
            continue
        writer, source = Writer(module.graph, node), source_of(node)
        what = f"{name_of(node)} => edgeweave::gather"
        try:
            rows = found.x
            if len(trailing) != 1:
                rows = writer.call("reshape", rows, [-1, math.prod(trailing)])
            result = writer.call(torch.ops.edgeweave.gather.default, rows, found.index)
            if len(trailing) != 1:
                result = writer.call("reshape", result, [-1, *trailing])
            writer.put_in_place(result)
        except Refused:
            writer.undo()
            continue
        done.append(Rewrite("replace_gather", what, *source))
    return done
