"""Matrix products with weights in the layout of the libraries that torch brings.

These are oneDNN and MKL. The libdnnl that is loaded may be years older than the oneDNN inside of
torch, and its matrix products slower: on AVX2, version 3.2 multiplies with a kernel that reaches 75
GFLOP/s where that of 3.12 reaches 122. torch offers its own with packed weights, and with an
activation or a sum at the end; Inductor compiles to the same calls, and in float32 to MKL's. Which
one runs is measured, and whether the activation is better off apart: inside of a product, torch
2.13's erf takes six times what it takes in ATen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .._fx import Meta, Node, Ref, readers_of, refs_of
from .._fx._simplify import OWN_OPERATORS
from ._tile_ops import OWN, TiledWeight, activate
from ._tile_ops import is_available as is_tiled

__all__ = [
    "PackedCall",
    "PackedWeights",
    "find_packed",
    "find_product",
    "is_available",
    "packed_name",
    "with_packed",
]

TARGET = "edgeweave.packed_linear.default"
# How torch's operator calls an activation.
_ACTIVATIONS = {
    "aten.gelu.default": "gelu",
    "aten.silu.default": "swish",
    "aten.sigmoid.default": "sigmoid",
    "aten.tanh.default": "tanh",
    "aten.hardswish.default": "hardswish",
    "aten.relu.default": "relu",
}
# They would turn NaN into a number inside of the product.
_LOSSY = ("relu",)
_IN_PLACE: dict[str, Callable[..., Tensor]] = {
    "gelu": torch.ops.aten.gelu_.default,
    "swish": torch.ops.aten.silu_.default,
    "sigmoid": torch.ops.aten.sigmoid_.default,
    "tanh": torch.ops.aten.tanh_.default,
    "hardswish": torch.ops.aten.hardswish_.default,
    "relu": torch.ops.aten.relu_.default,
}
_PRODUCTS = ("aten.linear.default", "aten.addmm.default", "aten.mm.default")


@dataclass(frozen=True, eq=False)
class PackedCall:
    """A product, attention or norm that other kernels could run, with what may follow it.

    Attributes:
        product: The node of the product.
        nodes: Names of the nodes that one call covers.
        node: That call.
        weight: Name of the weight that is packed; empty for attention and norms.
        turned: Whether the weight lies as `[in, out]`.
        variants: How it may run: `"inside"` with an activation in the product, `"apart"` with it as
            a call of its own, `"mkl"` in MKL with what follows apart, `"tiles"` and `"vectors"` in
            edgeweave's own kernels (`_tiles.py`).
        bias: Name of the bias where it is packed with the weight.
        scale: Name of what multiplies each column of the product, packed with the weight too.
        spares: Names of nodes that nothing reads where this call runs: it converts by itself.
        parts: The products that it computes as one, side by side; their results are views of its.
    """

    product: str
    nodes: tuple[str, ...]
    node: Node
    weight: str
    turned: bool
    variants: tuple[str, ...] = ("inside",)
    bias: str | None = None
    scale: str | None = None
    spares: tuple[str, ...] = ()
    parts: tuple[PackedCall, ...] = ()

    def resolve(self, how: str) -> str:
        """A variant; the first, if it has not that one, as where a saved choice is not there."""
        return how if how in self.variants else self.variants[0]

    def variant(self, how: str) -> Node:
        """The node in one of the variants."""
        if how in OWN:
            return self.node
        return replace(self.node, args=(*self.node.args[:-1], how))


def packed_linear(
    value: Tensor,
    packed: Any,
    bias: Tensor | None,
    other: Tensor | None,
    kind: str,
    algorithm: str,
    how: str,
) -> Tensor:
    """Call torch's operator.

    Args:
        value: fp32 or bf16 `[..., in]`.
        packed: Weight of `PackedWeights`.
        bias: `[out]`.
        other: `[..., out]`, what is added or multiplied at the end.
        kind: Name of what follows, or `"none"`.
        algorithm: `"none"` or `"tanh"`, for `gelu`.
        how: As in `PackedCall.variants`; what follows a product is apart from it in all but
            `"inside"`, in place.

    Returns:
        `[..., out]`.
    """
    if how == "mkl":
        result: Tensor = torch.ops.mkl._mkl_linear(value, *packed[:2], bias, packed[2])
        if other is not None:
            return result.add_(other) if kind == "add" else result.mul_(other)
        return result if kind == "none" else _in_place(result, kind, algorithm)
    ops = torch.ops.mkldnn._linear_pointwise
    if other is not None:
        return ops.binary(value, other, packed, bias, kind)  # type: ignore[no-any-return]
    if how == "inside":
        return ops.default(value, packed, bias, kind, [], algorithm)  # type: ignore[no-any-return]
    return _in_place(ops.default(value, packed, bias, "none", [], "none"), kind, algorithm)


def _in_place(result: Tensor, kind: str, algorithm: str) -> Tensor:
    if kind == "gelu" and is_tiled():  # ATen's erf takes ten times as long
        return activate(result, "gelu_tanh" if algorithm == "tanh" else "gelu")
    options = {"approximate": algorithm} if kind == "gelu" else {}
    return _IN_PLACE[kind](result, **options)


OWN_OPERATORS[TARGET] = packed_linear


@lru_cache(maxsize=8)
def is_available(dtype: torch.dtype) -> bool:
    """Whether torch's operators are there for a dtype and answer as expected; they are not public.

    Args:
        dtype: fp32 or bf16; the latter needs a processor that multiplies it.
    """
    # Numbers that bf16 holds.
    value = torch.eye(16, dtype=dtype, device="cpu")
    bias = torch.ones(32, dtype=dtype, device="cpu")
    weight = torch.arange(512, device="cpu").remainder(64).view(32, 16).to(dtype)
    try:
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return False
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        got = packed_linear(value, packed, bias, None, "none", "none", "inside")
        other = weight.t().contiguous()
        summed = packed_linear(value, packed, bias, other, "add", "none", "inside")
    except (RuntimeError, AttributeError, TypeError):
        return False
    expected = weight.t() + 1
    return torch.equal(got, expected) and torch.equal(summed, expected + weight.t())


@lru_cache(maxsize=1)
def has_mkl() -> bool:
    """Whether torch has MKL's products with packed weights, and they answer as expected."""
    # Whatever the default dtype and device are: the answer is kept.
    plain: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    value, weight = torch.eye(16, **plain), torch.arange(512, **plain).view(32, 16)
    try:
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, 16)
        got = torch.ops.mkl._mkl_linear(value, packed, weight, torch.ones(32, **plain), 16)
    except (RuntimeError, AttributeError, TypeError):  # torch without MKL, as on aarch64
        return False
    return torch.equal(got, weight.t() + 1)


class PackedWeights:
    """The packed form of weights, made at first use."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def get(self, call: PackedCall, how: str, weights: Mapping[str, Tensor], rows: int) -> Any:
        """Weight of a call that runs in one of its variants, packed for about `rows` rows."""
        name = packed_name(call, how)
        if name not in self._made:
            if call.variants[0] in OWN:
                dtype = torch.bfloat16 if "tiles" in call.variants else torch.float32
                self._made[name] = TiledWeight(*_joined(call, weights), dtype)
            elif how == "mkl":
                matrix = _matrix(call, weights).contiguous()
                rows = max(1, rows)
                packed = torch.ops.mkl._mkl_reorder_linear_weight(matrix, rows)
                # For other numbers of rows MKL reads the plain matrix.
                self._made[name] = (packed, matrix, rows)
            else:
                matrix = _matrix(call, weights).contiguous()
                self._made[name] = torch.ops.mkldnn._reorder_linear_weight(matrix, max(1, rows))
        return self._made[name]

    def clear(self) -> None:
        """Forget all, as after a change of weights."""
        self._made.clear()


def _matrix(call: PackedCall, weights: Mapping[str, Tensor]) -> Tensor:
    weight = weights[call.weight].detach()
    return weight.t() if call.turned else weight


def _joined(call: PackedCall, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a call, those of its parts below each other."""
    parts = call.parts or (call,)
    matrices = [_matrix(part, weights) for part in parts]
    biases = [
        matrix.new_zeros(matrix.shape[0], dtype=torch.float32)
        if part.bias is None
        else weights[part.bias].float()
        for part, matrix in zip(parts, matrices, strict=True)
    ]
    for at, part in enumerate(parts):
        if part.scale is not None:
            scale = weights[part.scale].detach().float().flatten()
            matrices[at] = matrices[at].float() * scale[:, None]
            biases[at] = biases[at] * scale
    bias = None if all(part.bias is None for part in parts) else torch.cat(biases)
    return torch.cat(matrices) if call.parts else matrices[0], bias


def packed_name(call: PackedCall, how: str) -> str:
    """Name of a call's weight, packed, among the constants; none that a parameter could have."""
    turned = " turned" if call.turned else ""
    if call.parts:
        return " beside ".join(packed_name(part, how) for part in call.parts)
    if call.variants[0] in OWN:
        kind = "tiled" if "tiles" in call.variants else "in panels"
        return f"{call.weight} {kind}{turned} {call.bias} {call.scale}"
    return f"{call.weight} {'for MKL' if how == 'mkl' else 'packed'}{turned}"


def find_packed(
    nodes: Sequence[Node],
    metas: Mapping[str, Meta],
    outputs: Sequence[Any],
    constants: Mapping[str, Any],
    lossy: bool,
    apart: Collection[str] = (),
) -> dict[str, PackedCall]:
    """Products that torch's oneDNN can run, by the product's name.

    Args:
        nodes: Bound nodes.
        metas: Of every value, bound.
        outputs: What the graph returns.
        constants: Known tensors.
        lossy: Whether what follows may turn NaN into a number.
        apart: Nodes that no call may cover, since something else does.
    """
    readers = readers_of(nodes)
    returned = set(refs_of(list(outputs)))
    found = {}
    taken = set(apart)
    for node in nodes:
        parts = find_product(node, constants)
        if parts is None or node.meta is None or node.name in apart:
            continue
        value, matrix, weight, bias, turned = parts
        if not is_available(matrix.dtype):
            continue
        args = (value, weight, bias, None, "none", "none", "inside")
        call = Node(node.name, TARGET, args, {}, node.meta)
        covered: tuple[str, ...] = (node.name,)
        variants: tuple[str, ...] = ("inside",)
        reader = readers.get(node.name, [])
        # A sum of two products goes to the first of them.
        if len(reader) == 1 and node.name not in returned and reader[0].name not in taken:
            after = _follow(call, node, reader[0], metas)
            if after is not None:
                call, covered = after, (node.name, reader[0].name)
                taken.add(reader[0].name)
                if call.args[3] is None:
                    lost = call.args[4] in _LOSSY and not lossy
                    variants = ("apart",) if lost else ("inside", "apart")
        if matrix.dtype == torch.float32 and has_mkl():
            variants = (*variants, "mkl")
        found[node.name] = PackedCall(node.name, covered, call, weight.name, turned, variants)
    return found


def find_product(
    node: Node, constants: Mapping[str, Any]
) -> tuple[Ref, Tensor, Ref, Ref | None, bool] | None:
    """What a product with a constant matrix multiplies, or None for anything else.

    Returns:
        The value, the matrix and its name, the bias, and whether the matrix lies as `[in, out]`.
    """
    if node.target not in _PRODUCTS or node.meta is None or 0 in node.meta.shape:
        return None
    if node.target == "aten.addmm.default":
        if any(node.kwargs.get(key, 1) != 1 for key in ("beta", "alpha")):
            return None
        bias, value, weight = node.args[:3]
        turned = True
    else:
        value, weight = node.args[:2]
        bias = node.args[2] if len(node.args) > 2 else None
        turned = node.target == "aten.mm.default"
        if node.kwargs:
            return None
    if not isinstance(weight, Ref) or not isinstance(value, Ref) or value.name in constants:
        return None
    matrix = constants.get(weight.name)
    if not isinstance(matrix, Tensor) or matrix.dim() != 2 or matrix.dtype != node.meta.dtype:
        return None
    if matrix.dtype not in (torch.float32, torch.bfloat16) or 0 in matrix.shape:
        return None
    if bias is not None:
        offset = constants.get(bias.name) if isinstance(bias, Ref) else None
        out = matrix.shape[1 if turned else 0]
        if not isinstance(offset, Tensor) or offset.shape != (out,) or offset.dtype != matrix.dtype:
            return None
        if not offset.is_contiguous():  # torch's operators read it as if it were
            return None
    return value, matrix, weight, bias, turned


def _follow(call: Node, product: Node, reader: Node, metas: Mapping[str, Any]) -> Node | None:
    """The call with the operation that alone reads it; None if it cannot take that in."""
    if reader.meta is None or reader.meta.dtype != call.meta.dtype:  # type: ignore[union-attr]
        return None
    value, weight, bias = call.args[:3]
    kind = _ACTIVATIONS.get(reader.target)
    args: tuple[Any, ...]
    if kind is not None:
        algorithm = reader.kwargs.get("approximate", "none") if kind == "gelu" else "none"
        args = (value, weight, bias, None, kind, algorithm, "inside")
        return replace(call, name=reader.name, args=args, meta=reader.meta)
    if reader.target in ("aten.add.Tensor", "aten.mul.Tensor"):
        if reader.kwargs.get("alpha", 1) != 1 or len(reader.args) != 2:
            return None
        others = [arg for arg in reader.args if arg != Ref(product.name)]
        if len(others) != 1 or not isinstance(others[0], Ref):
            return None
        meta = metas.get(others[0].name)
        # The same layout: torch's operator reads the other operand as the result lies.
        if meta != reader.meta or meta != product.meta:
            return None
        kind = "add" if reader.target == "aten.add.Tensor" else "mul"
        args = (value, weight, bias, others[0], kind, "none", "inside")
        return replace(call, name=reader.name, args=args, meta=reader.meta)
    return None


def with_packed(nodes: Sequence[Node], calls: Mapping[PackedCall, str]) -> list[Node]:
    """The nodes with these calls, in these variants, in place of what they cover."""
    # Products side by side come before what reads the first of them; others where all that they
    # read is there.
    place = {(c.nodes[0] if c.parts else c.nodes[-1]): (c, how) for c, how in calls.items()}
    covered = {name for call in calls for name in call.nodes}

    def changed() -> Iterator[Node]:
        for node in nodes:
            if node.name in place:
                call, how = place[node.name]
                made = call.variant(how)
                args = list(made.args)
                if call.weight:
                    args[1] = Ref(packed_name(call, how))
                yield replace(made, args=tuple(args))
                yield from _slices(call, made.name)
            elif node.name not in covered:
                yield node

    return list(changed())


def _slices(call: PackedCall, name: str) -> Iterator[Node]:
    """The results of products that were computed side by side."""
    begin = 0
    for part in call.parts:
        assert part.node.meta is not None
        end = begin + part.node.meta.sizes[-1]
        yield Node(
            part.product, "aten.slice.Tensor", (Ref(name), -1, begin, end), {}, part.node.meta
        )
        begin = end
