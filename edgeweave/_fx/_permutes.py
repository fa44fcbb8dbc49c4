"""Moves permutes behind sums, so that a sum stands next to the product that it belongs to."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ._graph import Meta, Node, Ref, refs_of

__all__ = ["sink_permutes"]

_PERMUTE = "aten.permute.default"
_PRODUCTS = ("aten.linear.default", "aten.mul.Tensor")


def sink_permutes(nodes: list[Node], outputs: list[Any], metas: dict[str, Meta]) -> list[Node]:
    """`u + permute(y)` as `permute(unpermute(u) + y)`, where y is a product or a scaled one.

    A residual block that computes with channels last and adds with channels first (ConvNeXt) then
    has its sum right after its product, as a transformer has. Only where both are dense with
    channels last: nothing is computed in another order, and the example's result lies in memory as
    before.
    The metas of what is new are added to `metas`.
    """
    readers = Counter(name for node in nodes for name in refs_of(node))
    readers.update(refs_of(outputs))
    made: dict[str, Node] = {}
    changed: list[Node] = []
    for node in nodes:
        new = _sunk(node, made, readers, metas) or [node]
        for each in new:
            made[each.name] = each
            if each.meta is not None:
                metas[each.name] = each.meta
        changed += new
    return changed


def _sunk(
    node: Node, made: dict[str, Node], readers: Counter[str], metas: dict[str, Meta]
) -> list[Node] | None:
    if node.target != "aten.add.Tensor" or len(node.args) != 2 or node.kwargs or node.meta is None:
        return None
    for place in (1, 0):
        value, other = node.args[place], node.args[1 - place]
        if not isinstance(value, Ref) or not isinstance(other, Ref) or value == other:
            continue
        permute = made.get(value.name)
        if permute is None or permute.target != _PERMUTE or readers[value.name] != 1:
            continue
        source, dims = permute.args[0], _dims_of(permute)
        product = made.get(source.name)
        if product is None or product.target not in _PRODUCTS or readers[source.name] != 1:
            continue
        back = [dims.index(dim) for dim in range(len(dims))]
        beside = metas.get(other.name)
        if beside is None or product.meta is None or permute.meta is None:
            continue
        if not beside.shape == permute.meta.shape == node.meta.shape:  # of one rank, too
            continue
        turned = _permuted(beside, back)
        total = _permuted(node.meta, back)
        if not all(_is_dense(meta) for meta in (turned, total, product.meta)):
            continue
        new = []
        before = made.get(other.name)
        if before is not None and before.target == _PERMUTE and _dims_of(before) == dims:
            left = before.args[0]
        else:
            left = Ref(f"{node.name} turned")
            new.append(Node(left.name, _PERMUTE, (other, back), {}, turned))
        args = (left, source) if place == 1 else (source, left)
        sum_name = f"{node.name} inside"
        new.append(Node(sum_name, node.target, args, {}, total))
        new.append(Node(node.name, _PERMUTE, (Ref(sum_name), dims), {}, node.meta))
        return new
    return None


def _dims_of(permute: Node) -> list[int]:
    return [dim % len(permute.args[1]) for dim in permute.args[1]]


def _permuted(meta: Meta, dims: list[int]) -> Meta:
    return Meta(
        tuple(meta.shape[dim] for dim in dims), tuple(meta.stride[dim] for dim in dims), meta.dtype
    )


def _is_dense(meta: Meta) -> bool:
    # A slice of an open dimension has known sizes and unknown strides.
    return meta.static and all(isinstance(step, int) for step in meta.stride) and meta.in_rows
