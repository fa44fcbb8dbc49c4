"""Matrix products in bfloat16 on the processor's AMX tiles, by kernels of edgeweave's own.

What surrounds a product costs as much as the product where single requests are served: values are
converted before it, and activated, converted and added to a residual after it, each in a pass of
its own. Here rows are converted while they are laid out for the tiles, and the rest happens to the
sums while they are in the first cache. Where the kernels are faster than oneDNN's is measured.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._fx import Meta, Node, Ref, refs_of
from .._fx._simplify import OWN_OPERATORS
from .._native import ops
from ._packed import PackedCall, find_product

__all__ = ["TiledWeight", "converted", "find_attention", "find_norms", "find_tiled", "is_available"]

TARGET = "edgeweave.tiled_linear.default"
NORM = "edgeweave.tiled_norm.default"
ATTENTION = "edgeweave.tiled_attention.default"
# Beyond that the scores of a block of queries leave the second cache.
_MOST_KEYS = 4096
# As csrc/dense/amx.h numbers them.
_ACTIVATIONS = {
    "aten.relu.default": 1,
    "aten.gelu.default": 2,
    "aten.silu.default": 4,
    "aten.sigmoid.default": 5,
    "aten.tanh.default": 6,
}
_TANH_GELU = 3
_COMBINE = {"aten.add.Tensor": 1, "aten.mul.Tensor": 2}
_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_FLOATS = (torch.float32, torch.bfloat16)


class TiledWeight:
    """A weight in the order of the tiles, with its bias.

    Args:
        weight: `[out, in]`, any strides; it is kept in bfloat16.
        bias: `[out]`, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        if bias is not None:
            bias = bias.detach()
        self.handle: int = ops.dense_pack(weight.detach().to(torch.bfloat16), bias)
        weakref.finalize(self, ops.dense_release, self.handle)


def is_available() -> bool:
    """Whether the processor has AMX and the system lets this process use it."""
    return bool(ops.dense_available())


def tiled_linear(
    value: Tensor,
    weight: TiledWeight,
    other: Tensor | None,
    activation: int,
    combine: int,
    wide: bool,
) -> Tensor:
    """Multiply on tiles.

    Args:
        value: fp32 or bf16 `[..., in]`.
        weight: Packed, with its bias.
        other: fp32 or bf16 `[..., out]`, what is added or multiplied at the end; or None.
        activation: Its number in `csrc/dense/amx.h`, applied before that.
        combine: 0, or 1 to add `other`, or 2 to multiply by it.
        wide: Whether the result is fp32 rather than bf16.

    Returns:
        `[..., out]`.
    """
    value = value if value.is_contiguous() else value.contiguous()
    if other is not None and not other.is_contiguous():
        other = other.contiguous()
    result: Tensor = ops.dense_linear(value, weight.handle, other, activation, combine, wide)
    return result


def tiled_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Attend on tiles.

    Args:
        query: bf16 `[batch, heads, queries, width]`.
        key: bf16 `[batch, heads, keys, width]`.
        value: As `key`.
        mask: bool, fp32 or bf16, broadcast to `[batch, heads, queries, keys]`; or None.
        causal: Whether a query sees only the keys up to its own position.
        scale: What scores are multiplied by.

    Returns:
        bf16 `[batch, heads, queries, width]`, the heads of a query side by side in memory.
    """
    parts = [t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)]
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    result: Tensor = ops.dense_attention(*parts, mask, causal, scale)
    return result


OWN_OPERATORS[TARGET] = tiled_linear
OWN_OPERATORS[ATTENTION] = tiled_attention


def find_tiled(
    nodes: Sequence[Node],
    metas: Mapping[str, Meta],
    outputs: Sequence[Any],
    constants: Mapping[str, Any],
    *,
    math: bool = False,
    apart: Collection[str] = (),
) -> dict[str, PackedCall]:
    """Products that tiles can multiply, by the product's name.

    Args:
        nodes: Bound nodes.
        metas: Of every value, bound.
        outputs: What the graph returns.
        constants: Known tensors.
        math: Whether products of fp32 may be computed in bf16.
        apart: Nodes that no call may cover, since something else does.
    """
    if not is_available():
        return {}
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for name in refs_of(node):
            readers.setdefault(name, []).append(node)
    writers = {node.name: node for node in nodes}
    returned = set(refs_of(list(outputs)))
    taken = set(apart)
    found = {}
    casts: dict[str, str] = {}
    for node in nodes:
        if node.name in taken:
            continue
        parts = find_product(node, constants)
        if parts is None or (parts[1].dtype != torch.bfloat16 and not math):
            continue
        value, _, weight, bias, turned = parts
        call, covered = _follow(node, readers, returned, taken, metas)
        source = writers.get(value.name)
        if source is not None and _converts(source, metas):
            value = source.args[0]
            casts[node.name] = source.name
        activation, combine, other = call
        last = writers[covered[-1]]
        assert last.meta is not None
        wide = last.meta.dtype == torch.float32
        args = (value, weight, other, activation, combine, wide)
        made = Node(last.name, TARGET, args, {}, last.meta)
        taken.update(covered)
        found[node.name] = PackedCall(
            node.name,
            covered,
            made,
            weight.name,
            turned,
            ("tiles",),
            bias=None if bias is None else bias.name,
        )
    made = _side_by_side(found, readers, returned)
    for name, call in made.items():
        cast = casts.get(name)
        if cast is None or cast in returned or cast in apart:
            continue
        if all(reader.name in call.nodes for reader in readers[cast]):
            made[name] = replace(call, spares=(cast,))
    return made


def _side_by_side(
    found: Mapping[str, PackedCall],
    readers: Mapping[str, list[Node]],
    returned: Collection[str],
) -> dict[str, PackedCall]:
    """The calls, with those of one value whose results are only viewed made into one: the rows
    are laid out once, and the threads meet once."""
    groups: dict[Any, list[PackedCall]] = {}
    for call in found.values():
        value, _, *after = call.node.args
        plain = after[:3] == [None, 0, 0] and len(call.nodes) == 1
        viewed = all(reader.target in _VIEWS for reader in readers.get(call.product, []))
        alone = not (plain and viewed and call.product not in returned)
        key = call.product if alone else (value, after[3])
        groups.setdefault(key, []).append(call)
    made = {}
    for calls in groups.values():
        first = calls[0]
        if len(calls) == 1:
            made[first.product] = first
            continue
        shape = first.node.meta.sizes  # type: ignore[union-attr]
        width = sum(call.node.meta.sizes[-1] for call in calls)  # type: ignore[union-attr]
        sizes = (*shape[:-1], width)
        strides = tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))
        meta = Meta(sizes, strides, first.node.meta.dtype)  # type: ignore[union-attr]
        node = replace(first.node, name=f"{first.product} and more", meta=meta)
        names = tuple(call.product for call in calls)
        made[first.product] = replace(first, nodes=names, node=node, parts=tuple(calls))
    return made


def tiled_norm(
    value: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, wide: bool
) -> Tensor:
    """Normalise rows.

    Args:
        value: fp32 or bf16 `[..., width]`.
        weight: fp32 `[width]`, or None.
        bias: fp32 `[width]`, or None.
        epsilon: Added to the variance.
        wide: Whether the result is fp32 rather than bf16.

    Returns:
        `[..., width]`.
    """
    value = value if value.is_contiguous() else value.contiguous()
    result: Tensor = ops.dense_norm(value, weight, bias, epsilon, wide)
    return result


OWN_OPERATORS[NORM] = tiled_norm


def find_norms(
    nodes: Sequence[Node], metas: Mapping[str, Meta], constants: Mapping[str, Any]
) -> dict[str, PackedCall]:
    """Layer norms over the last dimension, by the node's name.

    Args:
        nodes: Bound nodes.
        metas: Of every value, bound.
        constants: Known tensors.
    """
    if not is_available():
        return {}
    found = {}
    for node in nodes:
        if node.target != "aten.layer_norm.default" or node.meta is None or node.kwargs:
            continue
        value, shape, weight, bias, epsilon, *_ = (*node.args, *(None, None, 1e-5)[len(node.args) - 2 :])
        source = metas.get(value.name)
        if source is None or len(shape) != 1 or source.dtype not in _FLOATS:
            continue
        if node.meta.dtype not in _FLOATS or not _dense(source) or not _dense(node.meta):
            continue
        affine = [constants.get(p.name) for p in (weight, bias) if p is not None]
        if any(not isinstance(p, Tensor) or p.dtype != torch.float32 for p in affine):
            continue
        if any(not p.is_contiguous() for p in affine):
            continue
        args = (value, weight, bias, epsilon, node.meta.dtype == torch.float32)
        made = Node(node.name, NORM, args, {}, node.meta)
        found[node.name] = PackedCall(node.name, (node.name,), made, "", False, ("tiles",))
    return found


def find_attention(nodes: Sequence[Node], metas: Mapping[str, Meta]) -> dict[str, PackedCall]:
    """Attention that tiles can compute, by the node's name.

    Args:
        nodes: Bound nodes.
        metas: Of every value, bound.
    """
    if not is_available():
        return {}
    found = {}
    for node in nodes:
        if node.target != "aten.scaled_dot_product_attention.default" or node.meta is None:
            continue
        given = dict(zip(("q", "k", "v", "attn_mask", "dropout_p", "is_causal"), node.args))
        given |= node.kwargs
        mask, scale = given.get("attn_mask"), given.get("scale")
        if given.get("dropout_p", 0.0) or given.get("enable_gqa", False):
            continue
        parts = [metas.get(given[name].name) for name in ("q", "k", "v")]
        if any(part is None or part.dtype != torch.bfloat16 for part in parts):
            continue
        q, k, v = (part.sizes for part in parts)  # type: ignore[union-attr]
        if len(q) != 4 or k != v or q[:2] != k[:2] or q[3] != k[3] or 0 in q or k[2] == 0:
            continue
        if k[2] > _MOST_KEYS:
            continue
        if mask is not None:
            meta = metas.get(mask.name)
            if meta is None or meta.dtype not in (torch.bool, *_FLOATS) or len(meta.shape) > 4:
                continue
            wanted = (*q[:3], k[2])[4 - len(meta.shape) :]
            if any(have not in (1, want) for have, want in zip(meta.sizes, wanted, strict=True)):
                continue
        scale = q[3] ** -0.5 if scale is None else scale
        args = (given["q"], given["k"], given["v"], mask, given.get("is_causal", False), scale)
        made = Node(node.name, ATTENTION, args, {}, node.meta)
        found[node.name] = PackedCall(node.name, (node.name,), made, "", False, ("tiles",))
    return found


def converted(nodes: Sequence[Node], calls: Collection[PackedCall]) -> dict[str, str]:
    """Conversions that nothing but tiled products reads: they convert by themselves."""
    products = {
        part.product: part
        for call in calls
        if "tiles" in call.variants
        for part in call.parts or (call,)
    }
    readers: dict[str, set[str]] = {}
    for node in nodes:
        for name in refs_of(node):
            readers.setdefault(name, set()).add(node.name)
    spared: dict[str, str] = {}
    for node in nodes:
        read_by = readers.get(node.name, set())
        if not read_by or not read_by <= products.keys():
            continue
        source = node.args[0] if node.args else None
        if node.target == "aten._to_copy.default" and isinstance(source, Ref):
            if all(products[name].node.args[0] == source for name in read_by):
                spared[node.name] = "the products that read it convert for themselves"
    return spared


def _converts(node: Node, metas: Mapping[str, Meta]) -> bool:
    """Whether a node only makes bf16 numbers of fp32 ones."""
    if node.target != "aten._to_copy.default" or set(node.kwargs) - {"dtype"}:
        return False
    source = node.args[0]
    if not isinstance(source, Ref) or source.name not in metas or node.meta is None:
        return False
    return (
        node.meta.dtype == torch.bfloat16
        and metas[source.name].dtype == torch.float32
        and _dense(metas[source.name])
    )


def _dense(meta: Meta | None) -> bool:
    """Whether a value lies row by row."""
    if meta is None or 0 in meta.sizes:
        return False
    step = 1
    for size, stride in zip(reversed(meta.sizes), reversed(meta.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _follow(
    product: Node,
    readers: Mapping[str, list[Node]],
    returned: Collection[str],
    taken: Collection[str],
    metas: Mapping[str, Meta],
) -> tuple[tuple[int, int, Ref | None], tuple[str, ...]]:
    """What of the calls after a product can be done to its sums: activation, then a conversion,
    then a sum or a product with a value of the same shape."""
    activation, combine = 0, 0
    other: Ref | None = None
    covered = [product.name]
    current = product
    while combine == 0:
        reader = readers.get(current.name, [])
        if len(reader) != 1 or current.name in returned or reader[0].name in taken:
            break
        after = reader[0]
        if after.meta is None or after.meta.dtype not in _FLOATS or not _dense(after.meta):
            break
        kind = _ACTIVATIONS.get(after.target)
        if kind is not None and activation == 0 and after.meta.dtype == current.meta.dtype:  # type: ignore[union-attr]
            tanh = after.kwargs.get("approximate", "none") == "tanh"
            activation = _TANH_GELU if tanh else kind
        elif after.target == "aten._to_copy.default" and set(after.kwargs) <= {"dtype"}:
            # Back to fp32: the sums are that already.
            if after.meta.dtype != torch.float32:
                break
        elif after.target in _COMBINE and len(after.args) == 2:
            others = [arg for arg in after.args if arg != Ref(current.name)]
            if len(others) != 1 or not isinstance(others[0], Ref):
                break
            meta = metas.get(others[0].name)
            same = meta is not None and meta.shape == after.meta.shape == current.meta.shape  # type: ignore[union-attr]
            if not same or not _dense(meta) or meta.dtype not in _FLOATS:  # type: ignore[union-attr]
                break
            if after.kwargs.get("alpha", 1) != 1:
                break
            combine, other = _COMBINE[after.target], others[0]
        else:
            break
        covered.append(after.name)
        current = after
    return (activation, combine, other), tuple(covered)

