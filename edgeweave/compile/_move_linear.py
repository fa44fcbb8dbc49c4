"""Pass `move_linear`: a linear layer of gathered rows becomes products over nodes, then gathers.

`W [x_i || x_j]` is `(W1 x)_i + (W2 x)_j`: a product per node instead of one per edge, and passes
behind this one find the two ends of an edge added up.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from ._indices import index_key
from ._messages import (
    Part,
    Product,
    Term,
    find_pair,
    find_product,
    is_at_least,
    on_cpu,
    read_parts,
)
from ._reading import Positions, changed_between, name_of, same_size, shape_of
from ._record import Rewrite, source_of
from ._writing import Refused, Writer

__all__ = ["move_linear"]

NAME = "move_linear"
# Products over nodes may be this much wider than the messages: gathering their results costs memory
# traffic per column where the product over edges cost arithmetic per message column.
_MOST_WIDER = 2
# Rows that the middle of all is taken from.
_MOST_SAMPLES = 64


def move_linear(module: fx.GraphModule) -> list[Rewrite]:
    """Move linear layers of gathered rows in front of the gathers, where edges outnumber nodes.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    done: list[Rewrite] = []
    todo = deque(module.graph.nodes)
    while todo:
        node = todo.popleft()
        if node.graph is not module.graph or getattr(node, "_erased", False) or not node.users:
            continue
        if name_of(node) == "stack":
            rewrite = _move_stack(module.graph, node)
        else:
            made: list[fx.Node] = []
            rewrite = _move(module.graph, node, made)
            todo.extendleft(reversed(made))  # they may be of gathered rows themselves
        if rewrite is not None:
            done.append(rewrite)
    return done


def _move(graph: fx.Graph, node: fx.Node, made: list[fx.Node]) -> Rewrite | None:
    found = find_product(node)
    parts = None if found is None else read_parts(found[1])
    if found is None or parts is None:
        return None
    product, rows = found
    parts = _decided(parts)
    terms = [term for part in parts for term in part.terms]
    width = sum(part.width for part in parts)
    if not terms or product.width > _MOST_WIDER * width:
        return None
    if len({index_key(term.gather.index) for term in terms}) > 2:
        return None
    if not on_cpu(node, *(term.gather.x for term in terms), *(part.node for part in parts)):
        return None
    ends = len({index_key(term.gather.index) for term in terms})
    edges = (shape_of(rows) or (0,))[0]
    # As many products over nodes as there are ends.
    if not all(is_at_least(edges, ends * (shape_of(t.gather.x) or (0,))[0]) for t in terms):
        return None
    positions = Positions(graph)
    first = min((term.gather.node for term in terms), key=lambda n: positions.of[n])
    read = [n for term in terms for n in (term.gather.x, term.gather.index, term.gather.node)]
    # What is made on the way, too: it would be made no more, and so not be written to either.
    read += [rows, *(part.node for part in parts)]
    if changed_between(positions, first, node, read):
        return None
    writer, source = Writer(graph, node), source_of(node)
    before = "linear" if len(parts) == 1 else f"linear of {len(parts)} parts"
    try:
        writer.put_in_place(_Moved(writer, product, parts).write())
    except Refused:
        writer.undo()
        return None
    made += [n for n in writer.made if name_of(n) == "linear"]
    what = f"{before} of gathered rows => products over nodes, gathered at {ends} end(s)"
    return Rewrite(NAME, what, *source)


def _decided(parts: list[Part]) -> list[Part]:
    """Differences of two ends stay as they are, unless one of the ends is a part of its own.

    A product of neighbours' difference is small where the products of both are large, as with
    positions: taken apart it would cancel. With one of the ends beside it, the sum is as large as
    that end's product anyway.
    """
    plain = {part.terms[0].key for part in parts if len(part.terms) == 1}
    out, differences = [], 0
    for part in parts:
        if any(term.sign < 0 for term in part.terms):
            differences += 1
            if differences > 1 or not plain & {term.key for term in part.terms}:
                part = Part(part.node, part.column, part.width, ())
        out.append(part)
    return out


class _Moved:
    """Writes products over nodes, and the sum of what is gathered of them."""

    def __init__(self, writer: Writer, product: Product, parts: Sequence[Part]) -> None:
        self.writer, self.product, self.parts = writer, product, parts
        self.columns: dict[tuple[Any, ...], fx.Node] = {}
        begin, self.spans = 0, []
        for part in parts:
            self.spans.append((begin, begin + part.width))
            begin += part.width

    def write(self) -> fx.Node:
        """The call whose result is that of the product."""
        call, bias = self.writer.call, self.product.bias
        away = self._centers()
        if away:
            bias = self._constant(away, bias)
        ends: dict[Any, tuple[fx.Node, dict[tuple[Any, ...], list[tuple[int, int]]]]] = {}
        of: dict[tuple[Any, ...], Term] = {}
        for k, part in enumerate(self.parts):
            for term in part.terms:
                of.setdefault(term.key, term)
                end = ends.setdefault(index_key(term.gather.index), (term.gather.index, {}))
                end[1].setdefault(term.key, []).append((term.sign, k))
        summands = []
        for index, uses in ends.values():
            total: fx.Node | None = None
            for key, places in uses.items():
                rows = self._rows(of[key])
                if rows in away:
                    rows = away[rows]
                one = call(functional.linear, rows, self._weight(places), bias)
                bias = None
                total = one if total is None else call(torch.add, total, one)
            summands.append(call("index_select", total, 0, index))
        for k, part in enumerate(self.parts):
            if not part.terms:
                rows = self._column(part.node, part.column)
                summands.append(call(functional.linear, rows, self._weight([(1, k)]), None))
        out = summands[0]
        for more in summands[1:]:
            out = call(torch.add, out, more)
        return out

    def _weight(self, places: list[tuple[int, int]]) -> fx.Node:
        """The sum of some columns of the weight, `[H, part]`."""
        call, total = self.writer.call, None
        weight, turned = self.product.weight, self.product.turned
        for sign, k in sorted(places, reverse=True):
            span = slice(*self.spans[k])
            one = weight
            if len(self.parts) > 1:
                key: Any = (span, slice(None)) if turned else (slice(None), span)
                one = call(operator.getitem, weight, key)
            if turned:
                one = call("t", one)
            if total is None:
                total = one if sign > 0 else call(torch.neg, one)
            else:
                total = call(torch.add if sign > 0 else torch.sub, total, one)
        assert total is not None, "every term has a place"
        return total

    def _column(self, node: fx.Node, column: int | None) -> fx.Node:
        if column is None:
            return node
        key = (node, column)
        if key not in self.columns:
            self.columns[key] = self.writer.call(operator.getitem, node, (slice(None), column))
        return self.columns[key]

    def _rows(self, term: Term) -> fx.Node:
        """The rows of nodes that a term gathers, `[N, part]`."""
        return self._column(term.gather.x, term.column)

    def _centers(self) -> dict[fx.Node, fx.Node]:
        """Rows whose difference is taken apart, each minus one constant in their middle.

        The difference is the same without it, and of features with a large common offset, as
        coordinates have, it would cancel. The middle is the median of some rows: a few that are
        far away, and that no edge need read, would draw the mean away from all the others.
        """
        call = self.writer.call
        for part in self.parts:
            if not any(term.sign < 0 for term in part.terms):
                continue
            both = [self._rows(term) for term in part.terms]
            middle = self._median(call("detach", both[-1]))
            self.center = call("nan_to_num", middle, 0.0, 0.0, 0.0)
            return {rows: call(torch.sub, rows, self.center) for rows in dict.fromkeys(both)}
        return {}

    def _median(self, rows: fx.Node) -> fx.Node:
        """Of each column, over rows here and there."""
        call = self.writer.call
        count, width = shape_of(rows) or (0, 0)
        if same_size(count, 0):
            return call("new_zeros", rows, [width])
        # A size that is open, as it is now: any other step is as right.
        now = count if type(count) is int else count.node.hint
        some = call(operator.getitem, rows, slice(None, None, now // _MOST_SAMPLES + 1))
        return call(operator.getitem, call("nanmedian", some, 0), 0)

    def _constant(self, away: dict[fx.Node, fx.Node], bias: fx.Node | None) -> fx.Node:
        """The bias, and what the centre has taken away from rows that stand for themselves."""
        places = []
        for k, part in enumerate(self.parts):
            signs = [term.sign for term in part.terms if self._rows(term) in away]
            places += [(1, k)] * sum(signs)
        return self.writer.call(functional.linear, self.center, self._weight(places), bias)


# ---- towers --------------------------------------------------------------------------------------


def _move_stack(graph: fx.Graph, node: fx.Node) -> Rewrite | None:
    """Stack the nodes' rows of several towers instead of the messages'."""
    bound = dict(zip(("tensors", "dim"), node.args, strict=False)) | node.kwargs
    tensors, dim = bound.get("tensors"), bound.get("dim", 0)
    shape = shape_of(node)
    if not isinstance(tensors, (tuple, list)) or shape is None or type(dim) is not int:
        return None
    dim = dim + len(shape) if dim < 0 else dim
    pairs = [find_pair(each) for each in tensors]
    if dim == 0 or not pairs or any(pair is None for pair in pairs):
        return None
    known = [pair for pair in pairs if pair is not None]
    keys = {(index_key(p.first.index), index_key(p.second.index)) for p in known}
    if len(keys) != 1 or not on_cpu(node, *(end.x for p in known for end in (p.first, p.second))):
        return None
    positions = Positions(graph)
    ends = [end for p in known for end in (p.first, p.second)]
    first = min((end.node for end in ends), key=lambda n: positions.of[n])
    read = [n for end in ends for n in (end.x, end.index, end.node)]
    if changed_between(positions, first, node, [*read, *(pair.node for pair in known)]):
        return None
    rows = {(str((shape_of(end.x) or (0,))[0])) for end in (p.first for p in known)}
    others = {(str((shape_of(end.x) or (0,))[0])) for end in (p.second for p in known)}
    if len(rows) != 1 or len(others) != 1:
        return None
    writer, source = Writer(graph, node), source_of(node)
    try:
        summands = []
        for side in ([p.first for p in known], [p.second for p in known]):
            stacked = writer.call(torch.stack, [end.x for end in side], dim)
            summands.append(writer.call("index_select", stacked, 0, side[0].index))
        writer.put_in_place(writer.call(torch.add, *summands))
    except Refused:
        writer.undo()
        return None
    return Rewrite(NAME, f"stack of {len(known)} sums of two ends => of their nodes", *source)
