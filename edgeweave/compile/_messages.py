"""Messages as passes read them: rows gathered at the ends of edges, and sums and differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ._indices import index_key
from ._patterns import Gather, find_gather
from ._reading import arguments, name_of, same_size, shape_of, tensor_of, value_users

__all__ = [
    "Pair",
    "Part",
    "Product",
    "Term",
    "find_pair",
    "find_product",
    "folded_from",
    "is_at_least",
    "on_cpu",
    "only_read_by",
    "read_parts",
    "tower_of",
]


@dataclass(frozen=True)
class Term:
    """Rows of a tensor of nodes, with a sign.

    Attributes:
        sign: 1 or -1.
        gather: The rows.
        column: Which of the tensor's columns `[N, T, F]` is meant; None if it is `[N, F]`.
    """

    sign: int
    gather: Gather
    column: int | None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal rows, whatever the sign."""
        return index_key(self.gather.index), self.gather.x, self.column


@dataclass(frozen=True)
class Part:
    """Some columns of a message `[E, K]`.

    Attributes:
        node: The columns before a column of towers was taken.
        column: Of towers, as in `Term`.
        width: How many they are.
        terms: What they are the sum of; empty: values of edges, of which no more is known.
    """

    node: fx.Node
    column: int | None
    width: int
    terms: tuple[Term, ...]


def tower_of(node: fx.Node) -> tuple[fx.Node, int | None]:
    """`(rows, t)` of `rows[:, t]` of `[E, T, F]`; the node itself and None of anything else."""
    if name_of(node) != "getitem":
        return node, None
    base, key = node.args
    inner = shape_of(base)
    whole = isinstance(key, tuple) and len(key) == 2 and key[0] == slice(None)
    if not whole or inner is None or len(inner) != 3 or not isinstance(base, fx.Node):
        return node, None
    column: Any = key[1]  # type: ignore[index]
    if type(column) is not int or type(inner[1]) is not int or not 0 <= column < inner[1]:
        return node, None
    return base, column


def read_parts(node: Any) -> list[Part] | None:
    """Read a message `[E, K]` as parts beside each other; None if none of them is of nodes."""
    shape = shape_of(node)
    if shape is None or len(shape) != 2:
        return None
    node, column = tower_of(node)
    pieces: Any = [node]
    if name_of(node) == "cat":
        bound = arguments(node, "cat")
        pieces = bound.get("tensors")
        if bound.get("dim", 0) not in (-1, len(shape_of(node) or ()) - 1):
            return None
        if not isinstance(pieces, (tuple, list)):
            return None
    parts = []
    for piece in pieces:
        sizes = shape_of(piece)
        if sizes is None or type(sizes[-1]) is not int or sizes[-1] == 0:
            return None
        if len(sizes) != len(shape_of(node) or ()) or not same_size(sizes[0], shape[0]):
            return None
        parts.append(Part(piece, column, sizes[-1], _terms(piece, column)))
    return parts if any(part.terms for part in parts) else None


def _terms(node: Any, column: int | None) -> tuple[Term, ...]:
    gather = find_gather(node)
    if gather is not None:
        return (Term(1, gather, column),)
    name = name_of(node)
    if name not in ("add", "sub"):
        return ()
    bound = arguments(node, name)
    ends = [find_gather(bound.get(end)) for end in ("input", "other")]
    one, two = ends
    if one is None or two is None or bound.get("alpha", 1) != 1:
        return ()
    shapes = shape_of(node), shape_of(one.node), shape_of(two.node)
    if any(s is None or not _alike(s, shapes[0]) for s in shapes):
        return ()
    return Term(1, one, column), Term(1 if name == "add" else -1, two, column)


def _alike(first: tuple[Any, ...], second: tuple[Any, ...] | None) -> bool:
    if second is None or len(first) != len(second):
        return False
    return all(map(same_size, first, second))


def is_at_least(first: Any, second: Any) -> bool:
    """Whether a size is not less than another.

    Sizes that are open are compared as they are now, and Dynamo is told: it checks the answer at
    each call, and compiles anew where it is the other one. Sizes that depend on values are not
    known.
    """
    for size in (first, second):
        if type(size) is not int and (free_unbacked_symbols(size) or not size.node.has_hint()):
            return False
    return bool(first >= second)


@dataclass(frozen=True)
class Product:
    """`rows @ weight.T + bias`.

    Attributes:
        node: The call.
        weight: `[H, K]`, or `[K, H]` if `turned`.
        bias: `[H]` or None.
        turned: Whether the weight is a right operand of `@`.
        width: H.
    """

    node: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    turned: bool
    width: int


def find_product(node: fx.Node) -> tuple[Product, fx.Node] | None:
    """A product, and the rows that it is of."""
    name = name_of(node)
    if name == "linear":
        bound = arguments(node, name)
        rows, weight, bias = (bound.get(key) for key in ("input", "weight", "bias"))
    elif name in ("matmul", "mm"):
        bound = arguments(node, name)
        rows, weight, bias = bound.get("input"), bound.get("other", bound.get("mat2")), None
    else:
        return None
    if not isinstance(rows, fx.Node) or not isinstance(weight, fx.Node):
        return None
    if bias is not None and not isinstance(bias, fx.Node):
        return None
    sizes, shape = shape_of(weight), shape_of(node)
    if sizes is None or shape is None or len(sizes) != 2 or len(shape) != 2:
        return None
    turned = name != "linear"
    width = sizes[1] if turned else sizes[0]
    if type(width) is not int or width == 0 or not on_cpu(node, rows, weight, bias):
        return None
    return Product(node, weight, bias, turned, width), rows


# ---- two ends ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """`a[i] + b[j]` for each edge.

    Attributes:
        node: The sum.
        first: One summand.
        second: The other.
    """

    node: fx.Node
    first: Gather
    second: Gather


def find_pair(node: Any) -> Pair | None:
    """Read a node as the sum of rows at the two ends of each edge, of one shape and dtype."""
    if name_of(node) != "add":
        return None
    bound = arguments(node, "add")
    one, two = find_gather(bound.get("input")), find_gather(bound.get("other"))
    if one is None or two is None or bound.get("alpha", 1) != 1:
        return None
    shape = shape_of(node)
    for end in (one, two):
        sizes = shape_of(end.node)
        if sizes is None or not _alike(sizes, shape):
            return None
    dtypes = {getattr(tensor_of(n), "dtype", None) for n in (node, one.x, two.x)}
    return Pair(node, one, two) if len(dtypes) == 1 else None


def folded_from(node: Any) -> fx.Node | None:
    """What was made `[E, F]`, from `[E, ...]`."""
    while name_of(node) in ("reshape", "view", "contiguous"):
        inner = node.args[0]
        before, after = shape_of(inner), shape_of(node)
        if before is None or after is None or not before or not same_size(before[0], after[0]):
            break
        node = inner
    return node if isinstance(node, fx.Node) else None


def only_read_by(node: fx.Node, readers: set[fx.Node]) -> bool:
    """Whether nobody but some calls, and foldings that they alone read, needs a node's values."""
    for user in value_users(node):
        if user in readers:
            continue
        if name_of(user) not in ("reshape", "view", "contiguous"):
            return False
        if not only_read_by(user, readers):
            return False
    return True


def on_cpu(*nodes: fx.Node | None) -> bool:
    """Whether all of some tensors are of float32 or float64, the same, on the CPU."""
    values: list[Tensor | None] = [tensor_of(node) for node in nodes if node is not None]
    if any(v is None or v.device.type != "cpu" for v in values):
        return False
    kinds = {v.dtype for v in values if v is not None}
    return len(kinds) == 1 and kinds <= {torch.float32, torch.float64}
