"""Pass `fuse_pairs`: reductions of `a[i] + b[j]` into the nodes i, without a value per edge.

The largest of `a[i] + b[j]` over the edges into i is `a[i]` plus the largest `b[j]`, and so for
mean and min; a sum has `a[i]` as often as there are edges; variance and deviation do not see it.
So one pass over the rows of `b` makes them all.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._plan._multi import MULTI_REDUCES
from ._fuse_mm import edges_of
from ._indices import index_key
from ._messages import Pair, find_pair, folded_from, on_cpu, only_read_by
from ._patterns import Gather
from ._reading import Positions, changed_between, name_of, same_size, shape_of
from ._record import Rewrite, source_of
from ._writing import Refused, Writer

__all__ = ["fuse_pairs"]

# They do not see what is added to all of a node's messages.
_SPREADS = ("var", "std")


@dataclass(frozen=True)
class _Reduced:
    """A call that reduces sums of two ends.

    Attributes:
        node: `edgeweave::scatter` or `edgeweave::multi_reduce`.
        pair: The two ends.
        own: The end that is reduced into.
        other: The other one.
        reduces: The names of the reductions.
    """

    node: fx.Node
    pair: Pair
    own: Gather
    other: Gather
    reduces: tuple[str, ...]


def fuse_pairs(module: fx.GraphModule) -> list[Rewrite]:
    """Replace reductions of `a[i] + b[j]` by one reduction of the rows of `b`.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    found = [r for node in module.graph.nodes if (r := _read(node)) is not None]
    done = []
    stacks: dict[tuple[object, ...], fx.Node] = {}
    for each in found:
        readers = {r.node for r in found if r.pair.node is each.pair.node}
        # Otherwise the values of the edges are made in any case.
        if not only_read_by(each.pair.node, readers):
            continue
        rewrite = _replace(module.graph, each, stacks)
        if rewrite is not None:
            done.append(rewrite)
    return done


def _read(node: fx.Node) -> _Reduced | None:
    name = name_of(node)
    if name not in ("edgeweave.scatter", "edgeweave.multi_reduce") or not node.users:
        return None
    src, index, _, reduces, last = node.args
    names = tuple(reduces) if isinstance(reduces, (list, tuple)) else (reduces,)
    if last != ("even" if name == "edgeweave.scatter" else 0):
        return None
    if not set(names) <= set(MULTI_REDUCES) or not isinstance(index, fx.Node):
        return None
    if set(names) <= set(_SPREADS):
        return None  # the own row would have no gradient at all, where it has zeros
    pair = find_pair(folded_from(src))
    if pair is None or not on_cpu(pair.node, pair.first.x, pair.second.x):
        return None
    for own, other in ((pair.first, pair.second), (pair.second, pair.first)):
        if index_key(own.index) != index_key(index):
            continue
        # Rows that are gathered for each slot: no more and no less of them than slots.
        if not same_size((shape_of(own.x) or (0,))[0], _slots(node)):
            return None
        return _Reduced(node, pair, own, other, names)
    return None


def _slots(node: fx.Node) -> Any:
    value = node.meta.get("example_value")
    first = value[0] if isinstance(value, (list, tuple)) else value
    return first.shape[0] if isinstance(first, torch.Tensor) else None


def _replace(
    graph: fx.Graph, each: _Reduced, stacks: dict[tuple[object, ...], fx.Node]
) -> Rewrite | None:
    node, own, other = each.node, each.own, each.other
    positions = Positions(graph)
    first = min(own.node, other.node, key=lambda n: positions.of[n])
    read = [n for end in (own, other) for n in (end.x, end.index, end.node)]
    if changed_between(positions, first, node, [*read, each.pair.node]):
        return None
    num: Any = node.args[2]
    writer, source = Writer(graph, node), source_of(node)
    call = writer.call
    try:
        edges, flip = edges_of(writer, other.index, own.index, stacks)
        width = [-1, (shape_of(node.args[0]) or (0, 0))[1]]
        mine, theirs = (
            end.x if len(shape_of(end.x) or ()) == 2 else call("reshape", end.x, width)
            for end in (own, other)
        )
        results = _reductions(writer, edges, theirs, num, flip, each.reduces)
        made = _with_own(writer, mine, theirs, results, each, (edges, num, flip))
        if name_of(node) == "edgeweave.scatter":
            writer.put_in_place(made[0])
        else:
            for user in list(node.users):
                Writer(graph, user).put_in_place(made[user.args[1]])  # type: ignore[index]
    except Refused:
        writer.undo()
        return None
    what = f"{', '.join(each.reduces)} of sums of two ends => of one end, in one pass"
    return Rewrite("fuse_pairs", what, *source)


def _reductions(
    writer: Writer, edges: fx.Node, rows: fx.Node, num: Any, flip: bool, names: tuple[str, ...]
) -> list[fx.Node]:
    """The reductions of the rows at the other end."""
    if len(names) == 1:
        op: Any = torch.ops.edgeweave.mm.default
        return [writer.call(op, edges, rows, None, 1, num, flip, names[0], "even")]
    # The derivatives of spreads need the mean (and the deviation): kept rather than made again.
    more = ("mean",) if "var" in names else ("mean", "std") if "std" in names else ()
    asked = list(dict.fromkeys((*names, *more)))
    op = torch.ops.edgeweave.edge_multi.default
    made = writer.call(op, edges, rows, num, flip, asked, 0)
    return [writer.call(operator.getitem, made, k) for k in range(len(names))]


def _with_own(
    writer: Writer,
    mine: fx.Node,
    theirs: fx.Node,
    results: list[fx.Node],
    each: _Reduced,
    plan: tuple[fx.Node, Any, bool],
) -> list[fx.Node]:
    """The reductions of the other end, and the part of the node's own row in them."""
    call, (edges, num, flip) = writer.call, plan
    rows, dtype = call("size", theirs, 0), mine.meta["example_value"].dtype
    degree = call(torch.ops.edgeweave.in_degree.default, edges, rows, num, flip, dtype)
    degree = call("unsqueeze", degree, 1)
    # A node without edges has no part in them, not even infinity times 0.
    mine = call("masked_fill", mine, call(torch.eq, degree, 0), 0.0)
    made = []
    for name, result in zip(each.reduces, results, strict=True):
        if name not in _SPREADS:
            own = call(torch.mul, mine, degree) if name == "sum" else mine
            result = call(torch.add, own, result)
        made.append(result)
    return made
