"""What the passes look for: gathers of rows, reductions over an index, and means by counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._checks import FLOAT_DTYPES
from .._plan._device import has_kernels
from ._indices import (
    BROADCASTS,
    VIEWS,
    adds_dimensions_only,
    alike,
    index_key,
    is_index,
    plain_index,
    unwrapped,
)
from ._reading import (
    Positions,
    arguments,
    mutated_between,
    name_of,
    same_size,
    shape_of,
    tensor_of,
    value_users,
)

__all__ = [
    "Gather",
    "Reduction",
    "fill_of",
    "find_gather",
    "find_reduction",
    "number",
    "one_value_per_row",
]

_REDUCES = {"sum": "sum", "mean": "mean", "amax": "amax", "amin": "amin", "prod": "prod"}


@dataclass(frozen=True)
class Gather:
    """Rows of a tensor, one for each entry of an index.

    Attributes:
        node: The call.
        x: `[N, ...]`.
        index: `[E]` int32 or int64.
    """

    node: fx.Node
    x: fx.Node
    index: fx.Node


@dataclass(frozen=True)
class Reduction:
    """Entries reduced into slots: `out[i] = reduce(src[e] for e with index[e] == i)`.

    An empty slot is 0 (of a product: 1), as for edgeweave's own ops.

    Attributes:
        node: The call whose result it is.
        src: `[E, ...]`, floating point.
        index: `[E]` int32 or int64.
        num: Number of slots, a number or a node.
        reduce: sum, mean, amax, amin or prod.
        reads: The calls that read `src` or `index`, `node` among them.
    """

    node: fx.Node
    src: fx.Node
    index: fx.Node
    num: Any
    reduce: str
    reads: tuple[fx.Node, ...]


def number(value: Any) -> float | None:
    """A Python number of the graph, also where Dynamo has wrapped it; None if it is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


# ---- gathers -------------------------------------------------------------------------------------


def find_gather(node: Any) -> Gather | None:
    """Read a node as rows of a tensor, along dimension 0."""
    name = name_of(node)
    if name not in ("index_select", "gather", "getitem", "edgeweave.gather"):
        return None
    bound = arguments(node)
    if name == "getitem":
        x, index = bound["input"], bound["key"]
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
    elif name == "edgeweave.gather":
        x, index = bound["x"], bound["index"]
    else:
        x, index = bound.get("input"), bound.get("index")
    tensor = tensor_of(x)
    if tensor is None or tensor.dim() == 0 or not isinstance(index, fx.Node):
        return None
    if name == "edgeweave.gather" and tensor.dim() != 2:
        return None
    if name in ("index_select", "gather") and bound.get("dim") not in (0, -tensor.dim()):
        return None
    if name == "gather":
        full = shape_of(index)
        if full is None or not alike(full[1:], (shape_of(x) or ())[1:]):
            return None
        index = plain_index(index, 0)
    if not isinstance(index, fx.Node) or not is_index(index):
        return None
    return Gather(node, x, unwrapped(index))


# ---- reductions ----------------------------------------------------------------------------------


def find_reduction(node: Any) -> Reduction | None:
    """Read a node as a reduction over an index, along dimension 0."""
    name = name_of(node)
    if name == "div":
        return _find_mean(node)
    if name == "edgeweave.scatter":
        return _find_ours(node, node)
    if name in ("reshape", "view") and name_of(node.args[0]) == "edgeweave.scatter":
        return _find_ours(node, node.args[0])
    kind = name.rstrip("_")
    if kind not in ("scatter_add", "scatter_reduce", "index_add", "index_reduce"):
        return None
    bound = arguments(node, kind)
    base, index = bound.get("input"), bound.get("index")
    src = bound.get("source" if kind.startswith("index") else "src")
    out, values, base_value = tensor_of(node), tensor_of(src), tensor_of(base)
    if out is None or values is None or base_value is None:
        return None
    if not isinstance(base, fx.Node) or not isinstance(src, fx.Node):
        return None
    if bound.get("dim") not in (0, -out.dim()) or bound.get("alpha", 1) != 1:
        return None
    if values.dtype not in FLOAT_DTYPES or out.dtype is not values.dtype:
        return None
    if values.dim() == 0 or values.dim() != out.dim() or not has_kernels(values):
        return None
    if kind.startswith("scatter"):
        full = shape_of(index)
        if full is None or not alike(full, tuple(values.shape)):
            return None
        index = plain_index(index, 0)
    if not isinstance(index, fx.Node) or not is_index(index):
        return None
    if not same_size((shape_of(index) or (0,))[0], values.shape[0]):
        return None
    if not alike(tuple(out.shape[1:]), tuple(values.shape[1:])):
        return None
    reduce = "sum" if kind.endswith("add") else _REDUCES.get(str(bound.get("reduce")))
    if reduce is None or not _starts_right(base, reduce, bound.get("include_self", True), name):
        return None
    return Reduction(node, src, unwrapped(index), _slots(base), reduce, (node,))


def _starts_right(base: fx.Node, reduce: str, include_self: Any, name: str) -> bool:
    """Whether what is reduced into is fresh, and empty slots end as edgeweave's do."""
    fill = fill_of(base)
    if fill is None:
        return False
    if name.endswith("_") and len(value_users(base)) != 1:
        return False  # Somebody else sees the tensor that is written to.
    if reduce == "sum":
        return fill == 0
    if reduce == "prod":
        return fill == 1 and include_self is True
    return fill == 0 and include_self is False


def fill_of(node: Any) -> float | None:
    """The number that a new tensor is filled with; None if a node is no new tensor."""
    name = name_of(node)
    if isinstance(node, fx.Node) and node.kwargs.get("requires_grad"):
        return None
    if name in ("new_zeros", "zeros", "zeros_like"):
        return 0.0
    if name in ("new_ones", "ones", "ones_like"):
        return 1.0
    if name in ("full", "new_full", "full_like"):
        return number(arguments(node).get("fill_value"))
    return None


def _slots(base: fx.Node) -> Any:
    """Size 0 of a new tensor, as a number or as the node that computes it."""
    size = (shape_of(base) or (0,))[0]
    if type(size) is int:
        return size
    name = name_of(base)
    if name.endswith("_like") and isinstance(base.args[0], fx.Node):
        return base.args[0]
    first: Any = None
    if name in ("new_zeros", "new_full", "new_ones") and len(base.args) > 1:
        first = base.args[1]
    elif name in ("zeros", "full", "ones") and base.args:
        first = base.args[0]
    if isinstance(first, fx.Node) and name_of(first) == "Size":
        first = first.args[0]
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    if isinstance(first, fx.Node) and "example_value" in first.meta:
        value = first.meta["example_value"]
        if isinstance(value, torch.SymInt) and same_size(value, size):
            return first
    return base  # Its size is asked for where it is needed: `Writer` cannot be had here.


def _find_ours(node: fx.Node, call: fx.Node) -> Reduction | None:
    """Our own op, with the folding of dimensions around it that `scatter_reduce` does."""
    src, index, num, reduce, ties = call.args
    if ties != "even" or not isinstance(index, fx.Node) or len(shape_of(src) or ()) != 2:
        return None
    if node is not call and value_users(call) != [node]:
        return None
    shape = shape_of(node) or ()
    folding: list[fx.Node] = []
    while name_of(src) in ("contiguous", "reshape", "view") and isinstance(src, fx.Node):
        if alike((shape_of(src) or (0,))[1:], shape[1:]) and name_of(src) != "contiguous":
            break
        folding.append(src)
        src = src.args[0]
    before, after = shape_of(src), shape_of(call.args[0])
    if before is None or after is None or not isinstance(src, fx.Node):
        return None
    if not alike(before[1:], shape[1:]) or not same_size(before[0], after[0]):
        return None
    return Reduction(node, src, unwrapped(index), num, str(reduce), (*folding, call, node))


def _find_mean(node: fx.Node) -> Reduction | None:
    """A sum over an index, divided by how many entries each slot has, at least 1."""
    bound = arguments(node, "div")
    if bound.get("rounding_mode") is not None:
        return None
    total, count = bound.get("input"), bound.get("other")
    found = None if name_of(total) == "div" else find_reduction(total)
    if found is None or found.reduce != "sum" or value_users(found.node) != [node]:
        return None
    counted = one_value_per_row(count)
    # A count of lower rank would line up with the last dimension of the sum, not the first.
    if counted is None or not isinstance(count, fx.Node):
        return None
    if len(shape_of(count) or ()) != len(shape_of(total) or ()):
        return None
    counts = _find_counts(counted)
    if counts is None or index_key(counts.index) != index_key(found.index):
        return None
    # Numbers that somebody writes over are no counts.
    made = [counts.node, counted, count]
    if mutated_between(Positions(node.graph), counts.node, node, made, known=[counted]):
        return None
    sizes = shape_of(found.node), shape_of(counts.node)
    if sizes[0] is None or sizes[1] is None or not same_size(sizes[0][0], sizes[1][0]):
        return None
    result, summed = tensor_of(node), tensor_of(found.node)
    if result is None or summed is None or result.dtype is not summed.dtype:
        return None
    reads = (*found.reads, *counts.reads, node)
    return Reduction(node, found.src, found.index, found.num, "mean", reads)


def one_value_per_row(node: Any) -> fx.Node | None:
    """The `[N]` that a node repeats along all dimensions but the first."""
    current = node
    while isinstance(current, fx.Node):
        shape = shape_of(current)
        if shape is None:
            return None
        if len(shape) == 1:
            return current
        before = current.args[0] if current.args else None
        inner = shape_of(before)
        name = name_of(current)
        if inner is None or name not in BROADCASTS | VIEWS:
            return None
        if name == "getitem" and not adds_dimensions_only(current):
            return None
        if not same_size(inner[0], shape[0]):
            return None
        if name in BROADCASTS and len(inner) != len(shape):
            return None
        if name in VIEWS and any(type(s) is not int or s != 1 for s in shape[1:]):
            return None
        current = before
    return None


def _find_counts(node: fx.Node) -> Reduction | None:
    """How many entries each slot has, at least 1."""
    name = name_of(node).rstrip("_")
    if name not in ("clamp", "clamp_min"):
        return None
    bound = arguments(node, name)
    if number(bound.get("min")) != 1.0 or bound.get("max") is not None:
        return None
    counts = find_reduction(bound["input"])
    if counts is None or counts.reduce != "sum" or fill_of(counts.src) != 1.0:
        return None
    return counts
