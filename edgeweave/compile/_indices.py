"""Indices of a graph: rows of an edge list, and what repeats one along other dimensions."""

from __future__ import annotations

from typing import Any

from torch import fx

from .._checks import INDEX_DTYPES
from ._reading import arguments, name_of, same_size, shape_of, tensor_of

__all__ = [
    "BROADCASTS",
    "VIEWS",
    "adds_dimensions_only",
    "alike",
    "index_key",
    "is_index",
    "plain_index",
    "row_of",
    "unwrapped",
]

BROADCASTS = {"expand", "expand_as", "broadcast_to"}
VIEWS = {"view", "reshape", "unsqueeze", "getitem"}


def index_key(node: fx.Node) -> tuple[Any, ...]:
    """Two nodes with equal keys hold the same index, if nobody writes to it in between."""
    row = row_of(node)
    return ("node", node) if row is None else ("row", *row)


def row_of(node: fx.Node) -> tuple[fx.Node, int] | None:
    """`(edge_index, k)` if a node is row k of an edge list `[2, E]`."""
    name = name_of(node)
    if name == "getitem":
        base, key = node.args
        if isinstance(key, tuple) and key and all(k == slice(None) for k in key[1:]):
            key = key[0]
        if name_of(base) == "unbind" and arguments(base).get("dim", 0) == 0:  # type: ignore[arg-type]
            base = base.args[0]  # type: ignore[union-attr]
    elif name == "select":
        bound = arguments(node)
        base, key = bound["input"], bound.get("index")
        if bound.get("dim") != 0:
            return None
    else:
        return None
    if type(key) is not int or not isinstance(base, fx.Node):
        return None
    tensor = tensor_of(base)
    if tensor is None or tensor.dim() != 2 or not _is_two(tensor.shape[0]):
        return None
    if tensor.dtype not in INDEX_DTYPES or not -2 <= key < 2:
        return None
    return base, key % 2


def _is_two(size: Any) -> bool:
    """Whether a size is 2; if a symbol is just now, it is from here on.

    With `dynamic=True` Dynamo leaves even the two rows of an edge list open. Asking makes it check
    at each call, and compile again for a tensor with another number of rows.
    """
    if type(size) is int or not size.node.has_hint():
        return same_size(size, 2)
    return bool(size.node.hint == 2) and bool(size == 2)


def is_index(node: Any) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.dim() == 1 and tensor.dtype in INDEX_DTYPES


def plain_index(node: Any, dim: int) -> fx.Node | None:
    """The `[E]` that an index of full rank repeats along all other dimensions than `dim`."""
    current = node
    while isinstance(current, fx.Node):
        if is_index(current):
            return unwrapped(current)
        before = current.args[0] if current.args else None
        inner, outer = shape_of(before), shape_of(current)
        if inner is None or outer is None:
            return None
        name = name_of(current)
        if name == "getitem" and not adds_dimensions_only(current):
            return None
        if name in BROADCASTS:
            # Entry e stays entry e if no dimension is put in front and E is not itself repeated.
            aligned = len(inner) == len(outer) and same_size(inner[dim], outer[dim])
            if len(inner) == 1:
                aligned = dim == len(outer) - 1 and same_size(inner[0], outer[dim])
            if not aligned:
                return None
        elif name in VIEWS:
            # A view of [E] whose other sizes are all 1 is [1, .., E, .., 1] in the same order.
            others = [size for d, size in enumerate(outer) if d != dim]
            if not all(size == 1 for size in others if type(size) is int) or not all(
                type(size) is int for size in others
            ):
                return None
            if dim >= len(outer) or not same_size(inner[0 if len(inner) == 1 else dim], outer[dim]):
                return None
        else:
            return None
        current = before
    return None


def unwrapped(index: fx.Node) -> fx.Node:
    """The index behind views, copies and expansions of `[E]` to `[E]`."""
    while name_of(index) in (*BROADCASTS, "view", "reshape", "long", "contiguous"):
        inner = index.args[0]
        if not isinstance(inner, fx.Node) or not is_index(inner):
            return index
        before, after = tensor_of(inner), tensor_of(index)
        if before is None or after is None or before.dtype is not after.dtype:
            return index
        if not alike(shape_of(inner) or (), shape_of(index) or (0, 0)):
            return index
        index = inner
    return index


def adds_dimensions_only(node: fx.Node) -> bool:
    """Whether an indexing is like `x[:, None]`: no entry moves."""
    key = node.args[1]
    parts = key if isinstance(key, tuple) else (key,)
    return all(part is None or part is Ellipsis or part == slice(None) for part in parts)


def alike(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    return len(first) == len(second) and all(map(same_size, first, second))
