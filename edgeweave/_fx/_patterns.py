"""Recognises what models write out by hand: GELU by the tanh, products of flattened values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ._graph import Meta, Node, Ref, refs_of
from ._simplify import Derived, drop_unused

__all__ = ["fuse_gelu", "unflatten_products"]

_PRODUCTS = ("aten.addmm.default", "aten.mm.default", "aten.matmul.default")
_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")


class _Graph:
    """Who makes a value, and how many read it."""

    def __init__(self, nodes: list[Node], outputs: list[Any]) -> None:
        self.made = {node.name: node for node in nodes}
        self.readers = Counter(name for node in nodes for name in refs_of(node))
        self.readers.update(refs_of(outputs))

    def only(self, value: Any, *targets: str) -> Node | None:
        """The call that makes a value which one other call reads, if it is one of these."""
        if not isinstance(value, Ref) or self.readers[value.name] != 1:
            return None
        node = self.made.get(value.name)
        return node if node is not None and node.target in targets else None

    def scaled(self, value: Any, factor: float) -> Any:
        """What is multiplied by this number to give the value; None if nothing is."""
        node = self.only(value, "aten.mul.Tensor", "aten.mul.Scalar")
        return None if node is None else _other(node, factor)


def _other(node: Node, number: float) -> Any:
    """The operand beside a number."""
    if len(node.args) != 2 or node.kwargs:
        return None
    for value, given in (node.args, node.args[::-1]):
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        if is_number and math.isclose(given, number, rel_tol=1e-6) and isinstance(value, Ref):
            return value
    return None


def fuse_gelu(nodes: list[Node], outputs: list[Any], metas: Mapping[str, Meta]) -> list[Node]:
    """`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))` as `aten.gelu`."""
    graph = _Graph(nodes, outputs)
    found = {}
    for node in nodes:
        value = _gelu_of(node, graph)
        source = None if value is None else metas.get(value.name)
        if value is None or source is None or node.meta is None:
            continue
        if source.dtype == node.meta.dtype and source.dtype.is_floating_point:
            found[node.name] = value
    changed = [
        replace(
            node,
            target="aten.gelu.default",
            args=(found[node.name],),
            kwargs={"approximate": "tanh"},
        )
        if node.name in found
        else node
        for node in nodes
    ]
    return drop_unused(changed, outputs) if found else nodes


def _gelu_of(node: Node, graph: _Graph) -> Ref | None:
    if node.target != "aten.mul.Tensor" or len(node.args) != 2 or node.meta is None:
        return None
    for left, right in (node.args, node.args[::-1]):
        half = graph.scaled(left, 0.5)
        one_more = graph.only(right, "aten.add.Tensor", "aten.add.Scalar")
        if half is None or one_more is None:
            continue
        tanh = graph.only(_other(one_more, 1.0), "aten.tanh.default")
        inner = None if tanh is None else graph.scaled(tanh.args[0], math.sqrt(2 / math.pi))
        total = graph.only(inner, "aten.add.Tensor")
        if total is None or len(total.args) != 2 or total.kwargs:
            continue
        for value, cubic in (total.args, total.args[::-1]):
            cube = graph.only(graph.scaled(cubic, 0.044715), "aten.pow.Tensor_Scalar")
            if value == half and cube is not None and cube.args == (half, 3):
                return half if isinstance(half, Ref) else None
    return None


def unflatten_products(
    nodes: list[Node], outputs: list[Any], metas: dict[str, Meta], constants: set[str]
) -> tuple[list[Node], dict[str, Derived]]:
    """`view`, `addmm` with a constant matrix, and `view` back, as one `linear`.

    So that what follows the product is next to it, as after a linear layer. Autocast converts
    between the first two; that then happens to the value in its own shape, added to `metas`.
    """
    graph = _Graph(nodes, outputs)
    derived: dict[str, Derived] = {}
    replaced: dict[str, list[Node]] = {}
    for back in nodes:
        if back.target not in _VIEWS or back.meta is None:
            continue
        product = graph.only(back.args[0], *_PRODUCTS)
        if product is None or product.kwargs:
            continue
        bias = product.args[0] if product.target == "aten.addmm.default" else None
        rows, weight = product.args[-2:]
        flat = graph.made.get(rows.name) if isinstance(rows, Ref) else None
        cast = None
        if flat is not None and flat.target == "aten._to_copy.default":
            cast = flat
            flat = graph.made.get(cast.args[0].name)
        if flat is None or flat.target not in _VIEWS or not isinstance(weight, Ref):
            continue
        source = metas.get(flat.args[0].name)
        matrix = metas.get(weight.name)
        if source is None or matrix is None or weight.name not in constants:
            continue
        if flat.meta is None or len(flat.meta.shape) != 2 or len(matrix.shape) != 2:
            continue
        if bias is not None:
            offset = metas.get(bias.name) if isinstance(bias, Ref) else None
            if offset is None or offset.shape != matrix.shape[1:] or bias.name not in constants:
                continue
        if (*source.shape[:-1], matrix.shape[1]) != back.meta.shape or len(source.shape) < 3:
            continue
        if source.shape[-1] != matrix.shape[0]:
            continue
        name = f"{weight.name} turned"  # no name that a parameter could have
        derived[name] = Derived((weight.name,), lambda tensor: tensor.t())
        made = []
        value = flat.args[0]
        if cast is not None:
            if set(cast.kwargs) != {"dtype"}:
                continue
            meta = replace(source, dtype=cast.kwargs["dtype"])
            copied = f"{cast.name} unflattened"
            if copied not in metas:
                metas[copied] = meta
                made.append(Node(copied, cast.target, (value,), dict(cast.kwargs), meta))
            value = Ref(copied)
        args = (value, Ref(name), bias)
        made.append(Node(back.name, "aten.linear.default", args, {}, back.meta))
        replaced[back.name] = made
    changed = [made for node in nodes for made in replaced.get(node.name, [node])]
    return (drop_unused(changed, outputs) if replaced else nodes), derived
