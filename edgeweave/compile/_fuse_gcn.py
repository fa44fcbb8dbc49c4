"""Passes `fuse_self_loops` and `fuse_gcn`: what a GCN does to its graph, once per graph.

Stock layers filter and append self-loops, count degrees and multiply two of them for each edge, in
every layer of every step. What comes out depends on the edges alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from .._plan._device import has_kernels
from ._indices import row_of
from ._patterns import fill_of, find_gather, find_reduction, number
from ._reading import (
    Positions,
    arguments,
    changed_between,
    mutated_between,
    name_of,
    same_size,
    shape_of,
    tensor_of,
)
from ._record import Rewrite, source_of
from ._writing import Refused, Writer, erase_dead

__all__ = ["fuse_gcn", "fuse_self_loops", "share_self_loops"]


def fuse_self_loops(module: fx.GraphModule) -> list[Rewrite]:
    """Replace filtered edges with one self-loop per node behind them by one op.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    done = []
    for node in list(module.graph.nodes):
        found = _find_self_loops(node) if node.users else None
        if found is None:
            continue
        edges, kept, num = found
        positions = Positions(module.graph)
        if changed_between(positions, kept, node, [edges]):
            continue
        sizes = _sizes_to_replace(kept, node, positions)
        if sizes is None:
            continue
        writer, source = Writer(module.graph, node), source_of(node)
        op = torch.ops.edgeweave.add_self_loops.default
        # The shapes of what follows name the size that `cat` has: it stays the same size.
        result = writer.call(op, edges, num, example=node.meta["example_value"])
        for old in sizes:
            _replace_size(writer, old, result, num, positions.of[node], positions)
        try:
            writer.put_in_place(result)
        except Refused:
            writer.undo()
            continue
        done.append(
            Rewrite("fuse_self_loops", "ne -> [] -> cat => edgeweave::add_self_loops", *source)
        )
    return done


def _find_self_loops(node: fx.Node) -> tuple[fx.Node, fx.Node, Any] | None:
    """`(edges, the edges that are no loops, number of nodes)`."""
    if name_of(node) != "cat":
        return None
    bound = arguments(node)
    parts = bound.get("tensors")
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or bound.get("dim") not in (1, -1):
        return None
    kept, loops = parts
    if name_of(kept) != "getitem" or not isinstance(kept, fx.Node):
        return None
    edges, key = kept.args
    if not isinstance(edges, fx.Node) or not isinstance(key, tuple) or len(key) != 2:
        return None
    if key[0] != slice(None) or name_of(key[1]) != "ne":
        return None
    mask = arguments(key[1])  # type: ignore[arg-type]
    rows = [row_of(mask.get(side)) for side in ("input", "other")]  # type: ignore[arg-type]
    if set(rows) != {(edges, 0), (edges, 1)}:
        return None
    num = _loops_of(loops)
    tensor, result = tensor_of(edges), tensor_of(node)
    if num is None or tensor is None or result is None or tensor.dtype is not result.dtype:
        return None
    return (edges, kept, num) if has_kernels(tensor) else None


def _loops_of(node: Any) -> Any:
    """Number of nodes n if a node is `[[0, .., n - 1], [0, .., n - 1]]`."""
    name = name_of(node)
    shape = shape_of(node)
    if shape is None or len(shape) != 2 or shape[0] != 2:
        return None
    if name == "stack" and isinstance(node.args[0], (list, tuple)):
        first, *others = node.args[0]
        if len(others) != 1 or others[0] is not first or node.kwargs or len(node.args) > 1:
            return None
        return _counted(first)
    if name not in ("repeat", "expand"):
        return None
    inner = node.args[0]
    before = shape_of(inner)
    if before is None or not same_size(before[-1], shape[1]):
        return None
    while name_of(inner) in ("view", "unsqueeze", "reshape"):
        inner = inner.args[0]
    return _counted(inner)


def _counted(node: Any) -> Any:
    if name_of(node) != "arange" or not node.args:
        return None
    start, end = (0, node.args[0]) if len(node.args) == 1 else node.args[:2]
    return end if start == 0 and type(start) is int and len(node.args) <= 2 else None


def _sizes_to_replace(kept: fx.Node, cat: fx.Node, positions: Positions) -> list[fx.Node] | None:
    """Calls that ask how many edges are no loops, None if something else reads those edges."""
    sizes = []
    for user in kept.users:
        if user is cat:
            continue
        if name_of(user) != "sym_size" or user.args[1:] != (1,):
            return None
        for reader in user.users:
            if positions.of[reader] < positions.of[cat] and not _is_checked(reader):
                return None
        sizes.append(user)
    return sizes


def _is_checked(node: fx.Node) -> bool:
    """Whether a node compares a size with a number, for an assertion and nothing else."""
    return name_of(node) in ("ge", "le") and all(
        name_of(user) == "_assert_scalar" for user in node.users
    )


def _replace_size(
    writer: Writer, old: fx.Node, result: fx.Node, num: Any, place: int, positions: Positions
) -> None:
    """Take the number of edges without loops from the result's size instead."""
    later = [user for user in old.users if positions.of.get(user, place + 1) > place]
    for user in list(old.users):
        if user not in later:
            # Bounds of a size that is no longer asked for.
            for check in list(user.users):
                writer.graph.erase_node(check)
            writer.graph.erase_node(user)
    if later:
        total = writer.call(torch.ops.aten.sym_size.int, result, 1)
        rest = writer.call(_subtract, total, num)
        rest.meta["example_value"] = old.meta["example_value"]
        for user in later:
            user.replace_input_with(old, rest)
    erase_dead(writer.graph, [old])


def _subtract(total: Any, part: Any) -> Any:
    return total - part


def fuse_gcn(module: fx.GraphModule) -> list[Rewrite]:
    """Replace a product with GCN's symmetric normalisation of an unweighted graph by one op.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    done = []
    for node in list(module.graph.nodes):
        found = _find_gcn(node) if node.users else None
        if found is None:
            continue
        edges, self_loops, num, first = found
        positions = Positions(module.graph)
        if changed_between(positions, first, node, [edges]):
            continue
        writer, source = Writer(module.graph, node), source_of(node)
        x, flip = node.args[1], node.args[5]
        op = torch.ops.edgeweave.gcn.default
        try:
            writer.put_in_place(writer.call(op, edges, x, num, self_loops, flip, False))
        except Refused:
            writer.undo()
            continue
        done.append(
            Rewrite("fuse_gcn", "normalisation and edgeweave::mm => edgeweave::gcn", *source)
        )
    return done


def _find_gcn(node: fx.Node) -> tuple[fx.Node, bool, Any, fx.Node] | None:
    """`(edges, whether self-loops are added, number of nodes, the first call that reads edges)`."""
    if name_of(node) != "edgeweave.mm":
        return None
    edges, x, weight, heads, num, flip, reduce, _ = node.args
    if weight is None or heads != 1 or reduce != "sum" or not isinstance(edges, fx.Node):
        return None
    factors = _factors(_flat(weight))
    tables = []
    for factor in factors:
        gather = find_gather(factor)
        if gather is not None:
            tables.append((gather.x, row_of(gather.index)))
        elif fill_of(factor) != 1.0:
            return None
    if len(tables) != 2 or tables[0][0] is not tables[1][0]:
        return None
    if {tables[0][1], tables[1][1]} != {(edges, 0), (edges, 1)}:
        return None
    degrees = _inverse_root(tables[0][0])
    counts = None if degrees is None else find_reduction(degrees)
    if counts is None or counts.reduce != "sum" or fill_of(counts.src) != 1.0:
        return None
    if row_of(counts.index) != (edges, 0 if flip else 1):
        return None
    slots, rows = shape_of(counts.node), shape_of(x)
    if slots is None or rows is None or not same_size(slots[0], rows[0]):
        return None
    if not same_size((shape_of(node) or (0,))[0], rows[0]):
        return None
    if name_of(edges) == "edgeweave.add_self_loops":
        base, loops = edges.args
        if not isinstance(base, fx.Node) or not _same_number(loops, num):
            return None
        return base, True, num, edges
    return edges, False, num, counts.node


def share_self_loops(module: fx.GraphModule) -> list[Rewrite]:
    """Let all layers use the edges with self-loops that the first of them made.

    The last pass: afterwards, the shapes that the graph notes for what follows name two sizes
    where there is one.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    done = []
    first: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(module.graph.nodes):
        if name_of(node) != "edgeweave.add_self_loops" or not node.users:
            continue
        kept = first.setdefault(node.args, node)
        if kept is node:
            continue
        positions = Positions(module.graph)
        end = positions.nodes[-1]
        # Shared, both must stay as they are to the end, and after it: nobody gets them.
        if (
            mutated_between(positions, kept, node, [node.args[0]])
            or mutated_between(positions, kept, end, [kept, node])
            or end in kept.users
            or end in node.users
        ):
            first[node.args] = node
            continue
        source = source_of(node)
        node.replace_all_uses_with(kept)
        erase_dead(module.graph, [node])
        done.append(Rewrite("share_self_loops", "edgeweave::add_self_loops => shared", *source))
    return done


def _same_number(first: Any, second: Any) -> bool:
    values = [v.meta.get("example_value") if isinstance(v, fx.Node) else v for v in (first, second)]
    if any(not isinstance(v, (int, torch.SymInt)) for v in values):
        return False
    return same_size(*values)


def _flat(node: Any) -> Any:
    """The `[E]` behind views of it as `[E, 1]`, and casts."""
    while name_of(node) in ("view", "reshape", "unsqueeze", "to"):
        node = node.args[0]
    return node


def _factors(node: Any) -> list[Any]:
    if name_of(node) != "mul":
        return [node]
    bound = arguments(node)
    return [*_factors(bound.get("input")), *_factors(bound.get("other"))]


def _inverse_root(node: Any) -> fx.Node | None:
    """The degrees d of which a node is d^-1/2, with 0 for an infinity."""
    if name_of(node).rstrip("_") != "masked_fill":
        return None
    bound = arguments(node, "masked_fill")
    root, mask = bound.get("input"), bound.get("mask")
    if number(bound.get("value")) != 0.0 or name_of(mask) != "eq":
        return None
    compared = arguments(mask)  # type: ignore[arg-type]
    if compared.get("input") is not root or number(compared.get("other")) != math.inf:
        return None
    if name_of(root).rstrip("_") != "pow" or not isinstance(root, fx.Node):
        return None
    power = arguments(root, "pow")
    degrees = power.get("input")
    exact = number(power.get("exponent")) == -0.5 and isinstance(degrees, fx.Node)
    return degrees if exact else None
