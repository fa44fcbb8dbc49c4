"""Pass `fuse_mm`: rows gathered, weighed and reduced become one `edgeweave::mm`.

Nothing of size `[E, F]` is left, forward or backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ._indices import index_key, row_of
from ._patterns import Gather, Reduction, find_gather, find_reduction
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
from ._record import Rewrite, source_of
from ._writing import Refused, Writer

__all__ = ["edges_of", "fuse_mm"]

NAME = "fuse_mm"


@dataclass(frozen=True)
class _Message:
    """What is reduced: rows of `x`, times `weight` if there is one."""

    reduction: Reduction
    gather: Gather
    product: fx.Node | None
    weight: fx.Node | None


def fuse_mm(module: fx.GraphModule) -> list[Rewrite]:
    """Replace gather -> (times a weight per edge) -> reduce by `edgeweave::mm`.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    messages = _find_messages(module.graph)
    done: list[Rewrite] = []
    changed = True
    while changed:  # a gather that several reductions share goes when the last of them can
        changed = False
        for message in list(messages):
            if not _may_read(message, messages):
                messages.remove(message)
                changed = True
    stacks: dict[tuple[object, ...], fx.Node] = {}
    for message in messages:
        # Read again: what was replaced before may be an input of this one.
        reduction = find_reduction(message.reduction.node)
        current = None if reduction is None else _read_message(reduction)
        rewrite = None if current is None else _replace(module.graph, current, stacks)
        if rewrite is not None:
            done.append(rewrite)
    return done


def _find_messages(graph: fx.Graph) -> list[_Message]:
    """All reductions of gathered rows, in the graph's order; a mean hides the sum within it."""
    found: list[_Message] = []
    inner: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in inner or not node.users:
            continue
        reduction = find_reduction(node)
        if reduction is None or reduction.reduce == "prod":
            continue
        message = _read_message(reduction)
        if message is not None:
            found.append(message)
            inner.update(reduction.reads)
    return found[::-1]


def _read_message(reduction: Reduction) -> _Message | None:
    gather = find_gather(reduction.src)
    if gather is not None:
        return _Message(reduction, gather, None, None)
    if name_of(reduction.src) != "mul":
        return None
    bound = arguments(reduction.src, "mul")
    for rows, weight in (
        (bound.get("input"), bound.get("other")),
        (bound.get("other"), bound.get("input")),
    ):
        gather = find_gather(rows)
        if gather is None or not isinstance(weight, fx.Node):
            continue
        message = _Message(reduction, gather, reduction.src, weight)
        if _heads(message) is not None:
            return message
    return None


def _heads(message: _Message) -> int | None:
    """How many weights an edge has; None if they do not fit, or not with certainty."""
    if message.weight is None:
        return 1
    rows, weights, product = (
        shape_of(n) for n in (message.gather.node, message.weight, message.product)
    )
    if rows is None or weights is None or product is None:
        return None
    if len(rows) != len(weights) or len(product) != len(rows):
        return None
    if not same_size(rows[0], weights[0]) or not all(map(same_size, rows, product)):
        return None
    if all(type(size) is int and size == 1 for size in weights[1:]):
        return 1
    per_head = len(rows) == 3 and type(weights[1]) is int and same_size(weights[1], rows[1])
    return weights[1] if per_head and weights[2] == 1 else None


def _may_read(message: _Message, messages: list[_Message]) -> bool:
    """Whether nothing of size `[E, F]` is needed for anything but reductions that go as well."""
    reads = {read for m in messages for read in m.reduction.reads}
    products = {m.product for m in messages if m.product is not None}
    if message.product is not None and not set(value_users(message.product)) <= reads:
        return False
    mine = [m for m in messages if m.gather.node is message.gather.node]
    gone = {m.product for m in mine if m.product is not None} & products
    return set(value_users(message.gather.node)) <= reads | gone


def _replace(
    graph: fx.Graph, message: _Message, stacks: dict[tuple[object, ...], fx.Node]
) -> Rewrite | None:
    reduction, gather = message.reduction, message.gather
    tensors = [t for t in (gather.x, gather.index, reduction.index, message.weight) if t]
    positions = Positions(graph)
    if changed_between(positions, gather.node, reduction.node, tensors):
        return None
    x, out = tensor_of(gather.x), tensor_of(reduction.node)
    weight = tensor_of(message.weight)
    if x is None or out is None or (weight is None and x.dtype is not out.dtype):
        return None
    trailing = features_of(gather.x)
    if trailing is None:
        return None
    heads = _heads(message)
    assert heads is not None, "messages that do not fit were left out"
    writer = Writer(graph, reduction.node)
    before = (name_of(gather.node), name_of(message.product), name_of(reduction.node))
    source = source_of(reduction.node)
    try:
        edges, flip = edges_of(writer, gather.index, reduction.index, stacks)
        # A product is in the wider dtype of the two, so N rows are widened instead of E.
        rows = writer.fold(_as_dtype(writer, gather.x, out.dtype), trailing)
        factor = message.weight and _as_dtype(writer, message.weight, out.dtype)
        if factor is not None and (shape_of(factor) or ())[1:] != (heads,):
            factor = writer.call("reshape", factor, [-1, heads])
        num = writer.count(reduction.num)
        op = torch.ops.edgeweave.mm.default
        result = writer.call(op, edges, rows, factor, heads, num, flip, reduction.reduce, "even")
        writer.put_in_place(writer.unfold(result, trailing))
    except Refused:
        writer.undo()
        return None
    what = " -> ".join(filter(None, before)) + f" => edgeweave::mm({reduction.reduce})"
    return Rewrite(NAME, what, *source)


def _as_dtype(writer: Writer, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    tensor = tensor_of(node)
    assert tensor is not None, "messages whose shapes are not known were left out"
    return node if tensor.dtype is dtype else writer.call("to", node, dtype)


def edges_of(
    writer: Writer, src: fx.Node, dst: fx.Node, stacks: dict[tuple[object, ...], fx.Node]
) -> tuple[fx.Node, bool]:
    """`(edge_index, flip)` whose rows the two indices are, put together if they are not."""
    src_row, dst_row = row_of(src), row_of(dst)
    if src_row is not None and dst_row is not None:
        (base, k), (other, m) = src_row, dst_row
        if base is other and k != m:
            return base, k == 1
    first, second = tensor_of(src), tensor_of(dst)
    if first is None or second is None or first.dtype is not second.dtype:
        raise Refused("the two indices differ in dtype")
    key = (index_key(src), index_key(dst))
    if key not in stacks:
        # Behind the later of the two, so that every reduction of this pair can use it.
        positions = Positions(writer.graph)
        later = max(src, dst, key=lambda node: positions.of[node])
        stacks[key] = writer.call(torch.stack, [src, dst], after=later)
    return stacks[key], False
