"""Matrix products by kernels of edgeweave's own: bfloat16 on AMX tiles, float32 on vectors.

What surrounds a product costs as much as the product where single requests are served: values are
converted before it, and activated, converted and added to a residual after it, each in a pass of
its own. Here rows are converted while they are laid out for the tiles, and the rest happens to the
sums while they are in the first cache. Where the kernels are faster than oneDNN's is measured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._fx import Meta, Node, Ref, readers_of, refs_of, row_strides
from .._fx._simplify import _behind
from ._packed import PackedCall, find_product
from ._tile_ops import (
    ACTIVATIONS,
    ATTENTION,
    LINEAR,
    NORM,
    OWN,
    TiledWeight,
    has_vectors,
    is_available,
    tiled_attention,
    tiled_linear,
    tiled_norm,
)

__all__ = [
    "TiledWeight",
    "converted",
    "find_attention",
    "find_norms",
    "find_tiled",
    "is_available",
    "tiled_attention",
    "tiled_linear",
    "tiled_norm",
]

# Beyond that the scores of a block of queries leave the second cache.
_MOST_KEYS = 4096
_ACTIVATIONS = {
    f"aten.{name}.default": number for name, number in ACTIVATIONS.items() if name != "gelu_tanh"
}
_COMBINE = {"aten.add.Tensor": 1, "aten.mul.Tensor": 2}
_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
# Of what a kernel takes.
_MOST_DIMS = 8
_FLOATS = (torch.float32, torch.bfloat16)


def find_tiled(
    nodes: Sequence[Node],
    metas: Mapping[str, Meta],
    outputs: Sequence[Any],
    constants: Mapping[str, Any],
    *,
    math: bool = False,
    apart: Collection[str] = (),
) -> dict[str, PackedCall]:
    """Products that edgeweave's kernels can multiply, by the product's name.

    Args:
        nodes: Bound nodes.
        metas: Of every value, bound.
        outputs: What the graph returns.
        constants: Known tensors.
        math: Whether products of fp32 may be computed in bf16.
        apart: Nodes that no call may cover, since something else does.
    """
    readers = readers_of(nodes)
    writers = {node.name: node for node in nodes}
    returned = set(refs_of(list(outputs)))
    taken = set(apart)
    found = {}
    casts: dict[str, str] = {}
    for node in nodes:
        if node.name in taken:
            continue
        parts = find_product(node, constants)
        if parts is None:
            continue
        value, matrix, weight, bias, turned = parts
        if node.meta is None or len(node.meta.shape) > _MOST_DIMS:
            continue
        on_tiles = is_available() and (matrix.dtype == torch.bfloat16 or math)
        if not on_tiles and (matrix.dtype != torch.float32 or not has_vectors()):
            continue
        after, covered = _follow(node, readers, returned, taken, metas, constants)
        source = writers.get(value.name)
        if source is not None and _converts(source, metas):
            value = source.args[0]
            casts[node.name] = source.name
        activation, combine, other, scale = after
        last = writers[covered[-1]]
        assert last.meta is not None
        wide = last.meta.dtype == torch.float32
        args = (value, weight, other, activation, combine, wide)
        made = Node(last.name, LINEAR, args, {}, last.meta)
        taken.update(covered)
        bias_name = None if bias is None else bias.name
        variants = ("tiles",) if on_tiles else ("vectors",)
        found[node.name] = PackedCall(
            node.name, covered, made, weight.name, turned, variants, bias_name, scale
        )
    calls = _side_by_side(found, readers, _behind(list(nodes), list(outputs)))
    for name, packed in calls.items():
        cast = casts.get(name)
        if cast is None or cast in returned or cast in apart:
            continue
        if all(reader.name in packed.nodes for reader in readers[cast]):
            calls[name] = replace(packed, spares=(cast,))
    return calls


def _side_by_side(
    found: Mapping[str, PackedCall],
    readers: Mapping[str, list[Node]],
    owned: Collection[str],
) -> dict[str, PackedCall]:
    """The calls, with those of one value whose results are only viewed made into one.

    Then the rows are laid out once, and the threads meet once.
    """
    groups: dict[Any, list[PackedCall]] = {}
    for call in found.values():
        value, _, other, activation, combine, wide = call.node.args
        plain = (other, activation, combine, len(call.nodes)) == (None, 0, 0, 1)
        viewed = all(reader.target in _VIEWS for reader in readers.get(call.product, []))
        alone = not (plain and viewed and call.product not in owned)
        key = call.product if alone else (value, wide, call.variants)
        groups.setdefault(key, []).append(call)
    made = {}
    for calls in groups.values():
        first = calls[0]
        if len(calls) == 1:
            made[first.product] = first
            continue
        of_each = [call.node.meta for call in calls if call.node.meta is not None]
        sizes = (*of_each[0].sizes[:-1], sum(meta.sizes[-1] for meta in of_each))
        meta = Meta(sizes, row_strides(sizes), of_each[0].dtype)
        node = replace(first.node, name=f"{first.product} and more", meta=meta)
        names = tuple(call.product for call in calls)
        made[first.product] = replace(first, nodes=names, node=node, parts=tuple(calls))
    return made


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
        defaults = (None, None, None, None, 1e-5)
        value, shape, weight, bias, epsilon = (*node.args, *defaults[len(node.args) :])[:5]
        source = metas.get(value.name)
        if source is None or len(shape) != 1 or source.dtype not in _FLOATS:
            continue
        if len(source.shape) > _MOST_DIMS:
            continue
        if node.meta.dtype not in _FLOATS or not _dense(source) or not _dense(node.meta):
            continue
        affine = [constants.get(p.name) for p in (weight, bias) if p is not None]
        if not all(
            isinstance(p, Tensor) and p.dtype == torch.float32 and p.is_contiguous() for p in affine
        ):
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
        given = dict(
            zip(("q", "k", "v", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False)
        )
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
        # torch's result lies as its query does; what comes after knows it by its strides.
        batch, token, head, one = row_strides((q[0], q[2], q[1], q[3]))
        side_by_side = node.meta.strides == (batch, head, token, one)
        if not side_by_side and not _dense(node.meta):
            continue
        causal = given.get("is_causal", False)
        args = (given["q"], given["k"], given["v"], mask, causal, scale, side_by_side)
        made = Node(node.name, ATTENTION, args, {}, node.meta)
        found[node.name] = PackedCall(node.name, (node.name,), made, "", False, ("tiles",))
    return found


def converted(nodes: Sequence[Node], calls: Collection[PackedCall]) -> dict[str, str]:
    """Conversions that nothing but tiled products reads: they convert by themselves."""
    products = {
        part.product: part
        for call in calls
        if call.variants[0] in OWN
        for part in call.parts or (call,)
    }
    readers = readers_of(nodes)
    spared: dict[str, str] = {}
    for node in nodes:
        read_by = {reader.name for reader in readers.get(node.name, [])}
        if not read_by or not read_by <= products.keys():
            continue
        if node.target != "aten._to_copy.default":
            continue
        if all(products[name].node.args[0] == node.args[0] for name in read_by):
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
    """Whether a value has elements and lies row by row."""
    return meta is not None and 0 not in meta.sizes and meta.in_rows


def _follow(
    product: Node,
    readers: Mapping[str, list[Node]],
    returned: Collection[str],
    taken: Collection[str],
    metas: Mapping[str, Meta],
    constants: Mapping[str, Any],
) -> tuple[tuple[int, int, Ref | None, str | None], tuple[str, ...]]:
    """What of the calls after a product can be done to its sums, and the nodes that covers.

    That is an activation, a conversion back to fp32, and a sum or a product with a value of the
    same shape. A constant for each column that multiplies the product itself goes into the weight.
    """
    activation, combine = 0, 0
    other: Ref | None = None
    scale: str | None = None
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
            activation = ACTIVATIONS["gelu_tanh"] if tanh else kind
        elif after.target == "aten._to_copy.default" and after.kwargs == {"dtype": torch.float32}:
            pass  # the sums are that already
        elif after.target in _COMBINE and len(after.args) == 2:
            others = [arg for arg in after.args if arg != Ref(current.name)]
            if len(others) != 1 or not isinstance(others[0], Ref):
                break
            meta = metas.get(others[0].name)
            constant = constants.get(others[0].name)
            columns = after.meta.sizes[-1]
            if (
                after.target == "aten.mul.Tensor"
                and covered == [product.name]
                and isinstance(constant, Tensor)
                and constant.dim() > 0
                and constant.numel() == columns == constant.shape[-1]
                and after.meta.shape == product.meta.shape  # type: ignore[union-attr]
            ):
                scale = others[0].name
                covered.append(after.name)
                current = after
                continue
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
    return (activation, combine, other, scale), tuple(covered)
