"""Pass `factor_scales`: a linear layer of rows beside multiples of themselves scales its results.

PNA hands its aggregations to a linear layer three times beside each other, each time scaled by a
function of the node's degree: `W [y || s y || t y] = W1 y + s W2 y + t W3 y`. The results are
narrower than the aggregations, and the rows beside each other need not be made.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from ._messages import find_product, on_cpu, tower_of
from ._reading import Positions, arguments, changed_between, name_of, same_size, shape_of
from ._record import Rewrite, rewrite_each, source_of
from ._writing import Refused, Writer

__all__ = ["factor_scales"]

NAME = "factor_scales"
# How much wider than the results the rows must be: below, nothing is saved.
_LEAST_WIDER = 2
# Rows beside the scaled ones; more would be products of their own.
_MOST_OTHERS = 2


@dataclass(frozen=True)
class _Part:
    """Some columns: `rows`, times `scale` if there is one.

    Attributes:
        node: What was there.
        rows: `[N, K]`, or `[N, T, K]` of towers.
        scale: `[N, 1]`, or `[N, 1, 1]` or `[N, T, 1]` of towers; or None.
        begin: The first of the columns.
        end: The one behind the last.
    """

    node: fx.Node
    rows: fx.Node
    scale: fx.Node | None
    begin: int
    end: int


def factor_scales(module: fx.GraphModule) -> list[Rewrite]:
    """Scale the results of linear layers instead of copies of their rows.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    return rewrite_each(module, _replace)


def _replace(graph: fx.Graph, node: fx.Node) -> Rewrite | None:
    found = find_product(node)
    if found is None or found[0].turned:
        return None
    product, rows = found
    base, column = tower_of(rows)
    parts = _parts(base)
    if parts is None:
        return None
    groups: dict[fx.Node, list[_Part]] = {}
    for part in parts:
        groups.setdefault(part.rows, []).append(part)
    scaled = {
        rows: many
        for rows, many in groups.items()
        if len(many) > 1 and any(part.scale is not None for part in many)
    }
    others = [part for part in parts if part.rows not in scaled]
    if not scaled or len(others) > _MOST_OTHERS or any(part.scale for part in others):
        return None
    for many in scaled.values():
        if many[0].end - many[0].begin < _LEAST_WIDER * product.width:
            return None
    tensors = list(dict.fromkeys(t for p in parts for t in (p.rows, p.scale) if t is not None))
    if not on_cpu(node, *tensors):
        return None
    positions = Positions(graph)
    reads = [*_concatenations(base), *(part.node for part in parts if part.scale is not None)]
    first = min(reads, key=lambda n: positions.of[n])
    if changed_between(positions, first, node, [*tensors, *reads]):
        return None
    writer, source = Writer(graph, node), source_of(node)
    weight, bias, total = product.weight, product.bias, None
    try:
        for part in others:
            span = slice(part.begin, part.end)
            own = writer.call(operator.getitem, weight, (slice(None), span))
            one = writer.call(functional.linear, _tower(writer, part.rows, column), own, bias)
            total = one if total is None else writer.call(torch.add, total, one)
            bias = None
        for each, many in scaled.items():
            one = _scaled(writer, product.weight, product.width, each, many, column)
            total = one if total is None else writer.call(torch.add, total, one)
        assert total is not None, "there is a group"
        writer.put_in_place(total if bias is None else writer.call(torch.add, total, bias))
    except Refused:
        writer.undo()
        return None
    count = sum(len(many) for many in scaled.values())
    what = f"linear of {count} multiples of the same rows => multiples of its results"
    return Rewrite(NAME, what, *source)


def _scaled(
    writer: Writer,
    weight: fx.Node,
    width: int,
    rows: fx.Node,
    many: list[_Part],
    column: int | None,
) -> fx.Node:
    """The sum of the scaled products of some rows, all by one product."""
    spans = [slice(part.begin, part.end) for part in many]
    weights = [writer.call(operator.getitem, weight, (slice(None), span)) for span in spans]
    stacked = writer.call(torch.cat, weights, 0)
    made = writer.call(functional.linear, _tower(writer, rows, column), stacked, None)
    total: fx.Node | None = None
    for k, part in enumerate(many):
        key = (slice(None), slice(k * width, (k + 1) * width))
        one = writer.call(operator.getitem, made, key)
        if part.scale is not None:
            one = writer.call(torch.mul, one, _tower(writer, part.scale, column))
        total = one if total is None else writer.call(torch.add, total, one)
    assert total is not None, "a group is not empty"
    return total


def _tower(writer: Writer, node: fx.Node, column: int | None) -> fx.Node:
    """The rows of one tower; a scale that all towers share has one column."""
    if column is None:
        return node
    alone = (shape_of(node) or (0, 0))[1] == 1
    return writer.call(operator.getitem, node, (slice(None), 0 if alone else column))


def _parts(base: fx.Node) -> list[_Part] | None:
    """The columns of concatenations, one in the other; None if one of them is not known."""
    found: list[_Part] = []
    begin = 0
    # Rows that are scaled somewhere stay whole, also where they are put together themselves.
    whole = {rows for piece in _pieces(base) if (rows := _read_scaled(piece)[0]) is not piece}
    for piece in _pieces(base, whole):
        shape = shape_of(piece)
        if shape is None or type(shape[-1]) is not int:
            return None
        rows, scale = _read_scaled(piece)
        found.append(_Part(piece, rows, scale, begin, begin + shape[-1]))
        begin += shape[-1]
    return found if len(found) > 1 else None


def _pieces(node: Any, whole: Collection[fx.Node] = ()) -> list[Any]:
    if name_of(node) != "cat" or node in whole:
        return [node]
    bound, rank = arguments(node, "cat"), len(shape_of(node) or ())
    tensors = bound.get("tensors")
    if bound.get("dim", 0) not in (-1, rank - 1) or not isinstance(tensors, (list, tuple)):
        return [node]
    return [piece for tensor in tensors for piece in _pieces(tensor, whole)]


def _concatenations(node: Any) -> list[fx.Node]:
    """The calls that put the columns together."""
    pieces = _pieces(node)
    if pieces == [node]:
        return []
    tensors = arguments(node, "cat")["tensors"]
    return [node, *(inner for tensor in tensors for inner in _concatenations(tensor))]


def _read_scaled(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """`(rows, scale)` of rows times one number for each of them."""
    if name_of(node) != "mul":
        return node, None
    bound, shape = arguments(node, "mul"), shape_of(node) or ()
    for rows, scale in (
        (bound.get("input"), bound.get("other")),
        (bound.get("other"), bound.get("input")),
    ):
        inner, sizes = shape_of(rows), shape_of(scale)
        if inner is None or sizes is None or len(inner) != len(shape) or len(sizes) != len(shape):
            continue
        alike = all(map(same_size, inner, shape)) and same_size(sizes[0], shape[0])
        one = all(type(size) is int and size == 1 for size in sizes[1:])
        per_tower = len(sizes) == 3 and sizes[2] == 1 and same_size(sizes[1], shape[1])
        if (
            alike
            and (one or per_tower)
            and isinstance(rows, fx.Node)
            and isinstance(scale, fx.Node)
        ):
            return rows, scale
    return node, None
