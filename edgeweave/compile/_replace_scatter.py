"""Passes `replace_scatter` and `replace_gather`: what is not fused gets edgeweave's kernels."""

from __future__ import annotations

import torch
from torch import fx

from .._checks import FLOAT_DTYPES
from .._plan._device import has_kernels
from ._patterns import find_gather, find_reduction
from ._reading import (
    Positions,
    changed_between,
    features_of,
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
        if changed_between(positions, first, node, [found.src, found.index]):
            continue
        writer, source = Writer(graph, node), source_of(node)
        what = f"{name_of(node)} => edgeweave::scatter({found.reduce})"
        try:
            rows = writer.fold(found.src, trailing)
            num = writer.count(found.num)
            op = torch.ops.edgeweave.scatter.default
            result = writer.call(op, rows, found.index, num, found.reduce, "even")
            writer.put_in_place(writer.unfold(result, trailing))
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
        if not has_kernels(x) or trailing is None:
            continue
        writer, source = Writer(module.graph, node), source_of(node)
        what = f"{name_of(node)} => edgeweave::gather"
        try:
            rows = writer.fold(found.x, trailing)
            result = writer.call(torch.ops.edgeweave.gather.default, rows, found.index)
            writer.put_in_place(writer.unfold(result, trailing))
        except Refused:
            writer.undo()
            continue
        done.append(Rewrite("replace_gather", what, *source))
    return done
