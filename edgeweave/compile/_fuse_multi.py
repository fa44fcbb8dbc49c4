"""Pass `fuse_multi`: several reductions of the same entries in one pass over them (PNA)."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._plan._multi import MULTI_REDUCES
from ._indices import index_key
from ._reading import Positions, changed_between, mutated_between, name_of, shape_of
from ._record import Rewrite, source_of
from ._writing import Refused, Writer, erase_dead

__all__ = ["fuse_multi"]


@dataclass(frozen=True)
class _One:
    """One reduction of entries into slots.

    Attributes:
        node: The call whose result it is.
        reduce: Of `MULTI_REDUCES`.
        src: `[E, F]`.
        index: `[E]`.
        num: Number of slots.
    """

    node: fx.Node
    reduce: str
    src: fx.Node
    index: fx.Node
    num: Any


def _read(node: fx.Node) -> _One | None:
    name = name_of(node)
    if name == "edgeweave.scatter":
        src, index, num, reduce, ties = node.args
        fits = reduce in MULTI_REDUCES and ties == "even"
        return _One(node, str(reduce), src, index, num) if fits else None  # type: ignore[arg-type]
    call = node.args[0] if name == "getitem" else None
    if name_of(call) != "edgeweave.multi_reduce":
        return None
    assert isinstance(call, fx.Node), "it has a name"
    src, index, num, reduces, correction = call.args
    alone = len(reduces) == 1 and correction == 0  # type: ignore[arg-type]
    return _One(node, str(reduces[0]), src, index, num) if alone else None  # type: ignore[index,arg-type]


def fuse_multi(module: fx.GraphModule) -> list[Rewrite]:
    """Replace reductions of one tensor over one index by one `edgeweave::multi_reduce`.

    The same reduction asked for twice is computed once, unless somebody may write into one of the
    results, here or after it was returned.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    groups: dict[tuple[Any, ...], list[_One]] = {}
    for node in module.graph.nodes:
        one = _read(node) if node.users else None
        if one is not None:
            key = (_unfolded(one.src), index_key(one.index), one.num)
            groups.setdefault(key, []).append(one)
    done = []
    for found in groups.values():
        by_name: dict[str, _One] = {}
        for one in found:
            kept = by_name.setdefault(one.reduce, one)
            if kept is not one and _may_share(module.graph, kept, one):
                what = f"edgeweave::scatter({one.reduce}) twice => once"
                done.append(Rewrite("fuse_multi", what, *source_of(one.node)))
                one.node.replace_all_uses_with(kept.node)
                erase_dead(module.graph, [one.node])
        ones = list(by_name.values())
        rewrite = _replace(module.graph, ones) if len(ones) > 1 else None
        if rewrite is not None:
            done.append(rewrite)
    return done


def _may_share(graph: fx.Graph, kept: _One, one: _One) -> bool:
    """Whether one tensor may stand for two equal results."""
    positions = Positions(graph)
    end = positions.nodes[-1]
    return not (
        _changed(positions, [kept, one])
        or mutated_between(positions, kept.node, end, [kept.node, one.node])
        or end in kept.node.users
        or end in one.node.users
    )


def _changed(positions: Positions, ones: list[_One]) -> bool:
    """Whether what some reductions read may have been written to from the first to the last.

    A folding may be a copy, and so is of the time when it was made.
    """
    tensors: list[fx.Node] = []
    begin = ones[0].node
    for one in ones:
        src = one.src
        while name_of(src) == "reshape":
            begin = min(begin, src, key=lambda n: positions.of[n])
            tensors.append(src)
            src = src.args[0]  # type: ignore[assignment]
        tensors += [src, one.index]
    return changed_between(positions, begin, ones[-1].node, tensors)


def _unfolded(src: Any) -> tuple[Any, ...]:
    """What tells two foldings of one tensor to `[E, F]` apart: nothing."""
    sizes = tuple(str(size) for size in shape_of(src) or ())
    while name_of(src) == "reshape":
        src = src.args[0]
    return src, sizes


def _replace(graph: fx.Graph, ones: list[_One]) -> Rewrite | None:
    first = ones[0]
    if _changed(Positions(graph), ones):
        return None
    names = [one.reduce for one in ones]
    writer, source = Writer(graph, first.node), source_of(first.node)
    try:
        op = torch.ops.edgeweave.multi_reduce.default
        results = writer.call(op, first.src, first.index, first.num, names, 0)
        made = [writer.call(operator.getitem, results, k) for k in range(len(names))]
        for one, result in zip(ones, made, strict=True):
            Writer(graph, one.node).put_in_place(result)
    except Refused:
        writer.undo()
        return None
    what = f"{len(ones)} reductions of one tensor => edgeweave::multi_reduce({', '.join(names)})"
    return Rewrite("fuse_multi", what, *source)
