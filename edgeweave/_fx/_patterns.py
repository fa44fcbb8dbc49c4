"""Recognises what models write out by hand.

GELU by the tanh, products of flattened values, rows of many embedding tables side by side, dot
interactions of an example's features, elements picked by two constant indices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._native import ops
from ._graph import Meta, Node, Ref, refs_of
from ._simplify import OWN_OPERATORS, Derived, drop_unused

__all__ = [
    "fuse_embeddings",
    "fuse_gelu",
    "fuse_interactions",
    "pick_elements",
    "unflatten_products",
]

_INTERACTION = "edgeweave.dot_interaction.default"
_PRODUCTS = ("aten.addmm.default", "aten.mm.default", "aten.matmul.default")
_INTERACTION_DTYPES = (torch.float32, torch.bfloat16)
# Beyond, a batched product by a library is the faster one.
_MOST_SLOTS = 64
_MOST_WIDTH = 256
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


def fuse_embeddings(
    nodes: list[Node], outputs: list[Any], metas: Mapping[str, Meta], constants: set[str]
) -> list[Node]:
    """A stack of rows of embedding tables, looked up by the columns of one matrix, as one call.

    Recommendation models have dozens of tables; a call for each costs more than its rows.
    """
    graph = _Graph(nodes, outputs)
    changed = []
    for node in nodes:
        made = _embedding_stack(node, graph, metas, constants)
        changed.append(node if made is None else made)
    return drop_unused(changed, outputs)


def _embedding_stack(
    node: Node, graph: _Graph, metas: Mapping[str, Meta], constants: set[str]
) -> Node | None:
    if node.target != "aten.stack.default" or node.meta is None or node.kwargs:
        return None
    dim = node.args[1] if len(node.args) > 1 else 0
    if len(node.meta.shape) != 3 or dim not in (1, -2):
        return None
    tables: list[Ref] = []
    columns: list[int] = []
    others: list[Ref] = []
    slots: list[tuple[bool, int]] = []
    indices: set[Ref] = set()
    for part in node.args[0]:
        look_up = graph.only(part, "aten.embedding.default")
        select = None if look_up is None else graph.made.get(look_up.args[1].name)
        if look_up is None or select is None or select.target != "aten.select.int":
            slots.append((False, len(others)))
            others.append(part)
            continue
        source = metas.get(select.args[0].name)
        table = metas.get(look_up.args[0].name)
        if source is None or table is None or look_up.args[0].name not in constants:
            return None
        if len(source.shape) != 2 or select.args[1] not in (1, -1) or source.dtype != torch.int64:
            return None
        if not isinstance(select.args[2], int) or table.dtype != node.meta.dtype:
            return None
        if len(table.shape) != 2 or table.stride[1] != 1 or not isinstance(source.shape[1], int):
            return None
        indices.add(select.args[0])
        slots.append((True, len(tables)))
        tables.append(look_up.args[0])
        columns.append(int(select.args[2]) % source.shape[1])
    rows = [metas.get(other.name) for other in others]
    if len(tables) < 2 or len(indices) != 1:
        return None
    if any(meta is None or meta.dtype != node.meta.dtype or meta.stride[-1] != 1 for meta in rows):
        return None
    order = [at if table else len(tables) + at for table, at in slots]
    args = (tables, indices.pop(), columns, others, order)
    return Node(node.name, "edgeweave.embedding_stack.default", args, {}, node.meta)


def embedding_stack(
    tables: list[Tensor],
    indices: Tensor,
    columns: list[int],
    others: list[Tensor],
    order: list[int],
) -> Tensor:
    """Rows of tables, and of matrices as they are, side by side.

    Args:
        tables: `[rows, width]` each.
        indices: int64 `[count, columns]`.
        columns: For each table, the column of `indices` that names its rows.
        others: `[count, width]` each.
        order: For each slot a table, or, beyond their number, one of `others`.

    Returns:
        `[count, slots, width]`.

    Raises:
        IndexError: If an index is not a row of its table.
    """
    tables, others = _with_contiguous_rows(tables), _with_contiguous_rows(others)
    with _index_errors():
        result: Tensor = ops.dense_embedding_stack(tables, indices, columns, others, order)
    return result


OWN_OPERATORS["edgeweave.embedding_stack.default"] = embedding_stack


def fuse_interactions(
    nodes: list[Node], outputs: list[Any], metas: Mapping[str, Meta], constants: set[str]
) -> tuple[list[Node], dict[str, Derived]]:
    """Dot interactions as one call: `bmm(x, x')` of a stack of features, of which some are picked.

    Embedding rows go into the products from their tables, and what is picked goes behind what the
    model puts in front of it: neither the stack nor the products are written to memory.
    """
    graph = _Graph(nodes, outputs)
    derived: dict[str, Derived] = {}
    made: dict[str, Node] = {}
    for node in nodes:
        flat = _flat_picks(node, metas, constants)
        sources = None if flat is None else _interaction(node, graph, metas)
        if flat is None or sources is None:
            continue
        name, derived[name] = flat
        args = (*sources, Ref(name), None)
        made[node.name] = replace(node, target=_INTERACTION, args=args, kwargs={})
    for node in nodes:
        if node.target != "aten.cat.default" or node.meta is None or len(node.meta.shape) != 2:
            continue
        parts, *dim = node.args
        if dim not in ([1], [-1]) or node.kwargs or len(parts) != 2:
            continue
        picked = made.get(parts[1].name)
        front = metas.get(parts[0].name)
        if picked is None or picked.meta is None or graph.readers[picked.name] != 1:
            continue
        if picked.args[-1] is not None:  # there is something in front of it already
            continue
        if front is None or front.dtype != picked.meta.dtype or len(front.shape) != 2:
            continue
        args = (*picked.args[:-1], parts[0])
        made[node.name] = replace(node, target=_INTERACTION, args=args)
    changed = [made.get(node.name, node) for node in nodes]
    return drop_unused(changed, outputs), derived


def _interaction(node: Node, graph: _Graph, metas: Mapping[str, Meta]) -> tuple[Any, ...] | None:
    """Where the features come from whose products are picked: arguments of `dot_interaction`."""
    product = graph.only(node.args[0], "aten.bmm.default", "aten.matmul.default")
    if product is None or product.kwargs or product.meta is None or node.meta is None:
        return None
    read = [product]
    left, right = (_side(value, graph, read) for value in product.args)
    if left is None or right is None:
        return None
    stack, turned, dtypes = left
    meta = metas.get(stack.name)
    if turned or right != (stack, True, dtypes) or meta is None or len(meta.shape) != 3:
        return None
    _, slots, width = meta.shape
    if not isinstance(slots, int) or not isinstance(width, int):
        return None
    if slots > _MOST_SLOTS or width > _MOST_WIDTH or node.meta.dtype not in _INTERACTION_DTYPES:
        return None
    # Autocast rounds float32 to bfloat16 on both sides; nothing else may happen on the way.
    narrow = (meta.dtype, node.meta.dtype) == _INTERACTION_DTYPES
    if set(dtypes) - {node.meta.dtype} or (meta.dtype != node.meta.dtype and not narrow):
        return None
    source = graph.made.get(stack.name)
    reads = sum(name == stack.name for reader in read for name in refs_of(reader))
    if source is not None and graph.readers[stack.name] == reads:
        if source.target == "edgeweave.embedding_stack.default":
            return (*source.args, narrow)
        dim = source.args[1] if len(source.args) > 1 else 0
        if source.target == "aten.stack.default" and not source.kwargs and dim in (1, -2):
            stacked = {metas[part.name].dtype for part in source.args[0] if part.name in metas}
            if stacked == {meta.dtype}:
                return [], None, [], list(source.args[0]), list(range(slots)), narrow
    return [], None, [], [stack], list(range(slots)), narrow


def _side(
    value: Any, graph: _Graph, read: list[Node]
) -> tuple[Ref, bool, tuple[torch.dtype, ...]] | None:
    """An operand of a product, before conversions and with or without a turn of its matrices."""
    turned = False
    dtypes: list[torch.dtype] = []
    while isinstance(value, Ref):
        node = graph.made.get(value.name)
        if node is not None and node.target == "aten._to_copy.default":
            if set(node.kwargs) != {"dtype"}:
                return None
            dtypes.append(node.kwargs["dtype"])
        elif node is not None and node.target == "aten.transpose.int":
            if sorted(d % 3 for d in node.args[1:]) != [1, 2]:
                return None
            turned = not turned
        elif node is not None and node.target == "aten.permute.default":
            if [d % 3 for d in node.args[1]] != [0, 2, 1]:
                return None
            turned = not turned
        else:
            return value, turned, tuple(dtypes)
        if node not in read:
            read.append(node)
        value = node.args[0]
    return None


def dot_interaction(
    tables: list[Tensor],
    indices: Tensor | None,
    columns: list[int],
    others: list[Tensor],
    order: list[int],
    narrow: bool,
    picks: Tensor,
    front: Tensor | None,
) -> Tensor:
    """Products of each of an example's features with each, of which some are picked.

    Args:
        tables: `[rows, width]` each, float32 or bfloat16.
        indices: int64 `[count, columns]`; None without tables.
        columns: For each table, the column of `indices` that names its rows.
        others: `[count, width]` each, or one `[count, slots, width]`.
        order: For each slot a table, or, beyond their number, one of `others`.
        narrow: Whether float32 features are rounded to bfloat16 first.
        picks: int64, products as `slot * slots + slot`.
        front: `[count, size]`, of the result's dtype, put before what is picked.

    Returns:
        `[count, size + picks]`, of the features' dtype, rounded or not. Sums are of float32.

    Raises:
        IndexError: If an index is not a row of its table.
    """
    others = [row for part in others for row in (part.unbind(1) if part.dim() == 3 else (part,))]
    tables, others = _with_contiguous_rows(tables), _with_contiguous_rows(others)
    if front is not None and front.stride(1) != 1:
        front = front.contiguous()
    with _index_errors():
        result: Tensor = ops.dense_dot_interaction(
            tables, indices, columns, others, order, narrow, picks, front
        )
    return result


def _with_contiguous_rows(parts: list[Tensor]) -> list[Tensor]:
    return [part if part.stride(1) == 1 else part.contiguous() for part in parts]


@contextmanager
def _index_errors() -> Iterator[None]:
    """An index that is no row of its table, as torch's lookup raises it."""
    try:
        yield
    except RuntimeError as error:
        if "index out of range in self" in str(error):
            raise IndexError("index out of range in self") from None
        raise


OWN_OPERATORS[_INTERACTION] = dot_interaction


def pick_elements(
    nodes: list[Node], metas: Mapping[str, Meta], constants: set[str]
) -> tuple[list[Node], dict[str, Derived]]:
    """`x[:, rows, columns]` with constant indices as one selection from flattened rows of `x`.

    ATen looks at both indices for each element of the result.
    """
    made: dict[str, Derived] = {}
    changed: list[Node] = []
    for node in nodes:
        flat = _flat_picks(node, metas, constants)
        if flat is None:
            changed.append(node)
            continue
        name, made[name] = flat
        rows = f"{node.name} rows"
        changed.append(Node(rows, "edgeweave.flat_rows.default", (node.args[0],), {}, None))
        args = (Ref(rows), 1, Ref(name))
        changed.append(Node(node.name, "aten.index_select.default", args, {}, node.meta))
    return changed, made


def _flat_picks(
    node: Node, metas: Mapping[str, Meta], constants: set[str]
) -> tuple[str, Derived] | None:
    """Name and value of what picks the same elements from flattened matrices; None if none can."""
    picks = _constant_picks(node, metas, constants)
    if picks is None:
        return None
    height, width = metas[node.args[0].name].shape[1:]
    return f"{node.name} flat", Derived(picks, _flat_index(int(height), int(width)))


def _constant_picks(
    node: Node, metas: Mapping[str, Meta], constants: set[str]
) -> tuple[str, str] | None:
    """The two constants that pick elements of each matrix of a batch; None for any other call."""
    if node.target != "aten.index.Tensor" or node.meta is None or len(node.args[1]) != 3:
        return None
    source = metas.get(node.args[0].name)
    first, *picks = node.args[1]
    if source is None or len(source.shape) != 3 or first is not None:
        return None
    if not all(isinstance(size, int) for size in source.shape[1:]):
        return None
    if not all(isinstance(p, Ref) and p.name in constants and p.name in metas for p in picks):
        return None
    rows, columns = (metas[pick.name].shape for pick in picks)
    return (picks[0].name, picks[1].name) if rows == columns and len(rows) == 1 else None


def _flat_index(height: int, width: int) -> Callable[[Tensor, Tensor], Tensor]:
    def compute(rows: Tensor, columns: Tensor) -> Tensor:
        for pick, size in ((rows, height), (columns, width)):
            if pick.numel() and (int(pick.min()) < -size or int(pick.max()) >= size):
                raise IndexError(f"index is out of bounds for dimension with size {size}")
        return rows.remainder(height) * width + columns.remainder(width)

    return compute


def flat_rows(value: Tensor) -> Tensor:
    """`[count, height, width]` as `[count, height * width]`."""
    return value.flatten(1)


OWN_OPERATORS["edgeweave.flat_rows.default"] = flat_rows
