"""Pass `fuse_multi`: several reductions of the same entries in one pass over them (PNA)."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .._plan._multi import MULTI_REDUCES
from ._indices import index_key
from ._reading import Positions, changed_between, mutated_between, name_of, shape_of
from ._record import Rewrite, source_of
from ._writing import Refused, Writer, erase_dead

__all__ = ["fuse_multi"]


def fuse_multi(module: fx.GraphModule) -> list[Rewrite]:
    """Replace `edgeweave::scatter`s of one tensor over one index by `edgeweave::multi_reduce`.

    The same reduction asked for twice is computed once, unless somebody may write into one of the
    results, here or after it was returned.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in module.graph.nodes:
        if name_of(node) != "edgeweave.scatter" or not node.users:
            continue
        src, index, num, reduce, ties = node.args
        if reduce in MULTI_REDUCES and ties == "even":
            groups.setdefault((_unfolded(src), index_key(index), num), []).append(node)
    done = []
    for found in groups.values():
        by_name: dict[str, fx.Node] = {}
        for node in found:
            kept = by_name.setdefault(str(node.args[3]), node)
            if kept is not node and _may_share(module.graph, kept, node):
                what = f"edgeweave::scatter({node.args[3]}) twice => once"
                done.append(Rewrite("fuse_multi", what, *source_of(node)))
                node.replace_all_uses_with(kept)
                erase_dead(module.graph, [node])
        nodes = list(by_name.values())
        rewrite = _replace(module.graph, nodes) if len(nodes) > 1 else None
        if rewrite is not None:
            done.append(rewrite)
    return done


def _may_share(graph: fx.Graph, kept: fx.Node, node: fx.Node) -> bool:
    """Whether one tensor may stand for two equal results."""
    positions = Positions(graph)
    end = positions.nodes[-1]
    return not (
        changed_between(positions, kept, node, [kept.args[0], kept.args[1]])  # type: ignore[list-item]
        or mutated_between(positions, kept, end, [kept, node])
        or end in kept.users
        or end in node.users
    )


def _unfolded(src: Any) -> tuple[Any, ...]:
    """What tells two foldings of one tensor to `[E, F]` apart: nothing."""
    sizes = tuple(str(size) for size in shape_of(src) or ())
    while name_of(src) == "reshape":
        src = src.args[0]
    return src, sizes


def _replace(graph: fx.Graph, nodes: list[fx.Node]) -> Rewrite | None:
    first, last = nodes[0], nodes[-1]
    positions = Positions(graph)
    if changed_between(positions, first, last, [first.args[0], first.args[1]]):  # type: ignore[list-item]
        return None
    names = [str(node.args[3]) for node in nodes]
    writer, source = Writer(graph, first), source_of(first)
    src, index, num = first.args[:3]
    try:
        op = torch.ops.edgeweave.multi_reduce.default
        results = writer.call(op, src, index, num, names, 0)
        made = [writer.call(operator.getitem, results, k) for k in range(len(names))]
        for node, result in zip(nodes, made, strict=True):
            Writer(graph, node).put_in_place(result)
    except Refused:
        writer.undo()
        return None
    what = f"{len(nodes)} reductions of one tensor => edgeweave::multi_reduce({', '.join(names)})"
    return Rewrite("fuse_multi", what, *source)
