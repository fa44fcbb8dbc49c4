"""Reductions per relation, each multiplied by the relation's own matrix: what RGCN computes.

`out[i] = sum_r reduce_{j -r-> i}(x[j]) @ W[r]`. Most pairs of a node and a relation have no edge:
the others, the slots, are all that is reduced and multiplied. Slots are dealt with in tiles of
whole nodes, in each of them by relation, so that a relation's slots are one dense product and what
is made per slot stays in the cache. Backward goes over tiles of sources in the same way: the
gradients of a slot's edges first, `T[j, r] = sum_i scale * grad[i]`, then `dx[j] = sum_r T[j, r]
W[r]'` and `dW[r] = sum_j x[j]' T[j, r]`, so that nothing of a slot is kept between the two.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .._native import ops
from ._cache import charge, check_everything
from ._composite import _ends, reduce_messages
from ._functions import PlanFunction, aliases, is_batched, plan_sum
from ._plan import Plan, outside_modes
from ._tiles import sorted_edges, tile_bounds

__all__ = ["Relations", "relational_sum", "relations_of"]

# Slots of a tile: [8192, 128] float32 is 4 MiB, a core's share of a common L3.
_MOST_SLOTS = 8192


@dataclass(frozen=True)
class _Tile:
    """Some nodes and the slots they have.

    Attributes:
        rows: The nodes.
        slots: Plan from the nodes at the other end to the slots.
        position: `[edges]`; the input position of each of the plan's edges.
        relations: (relation, first slot, one past its last slot) of those that occur.
        nodes: `[slots]`; the node of each slot, counted from the first of the tile.
        sums: Plan from the slots to the tile's nodes.
    """

    rows: slice
    slots: Plan
    position: Tensor
    relations: list[tuple[int, int, int]]
    nodes: Tensor
    sums: Plan


class Relations:
    """The types of a plan's edges, and what is built from both.

    Kept in the plan's memo, and therefore without a reference to it: the plan must go when the
    cache drops it.

    Args:
        edge_type: `[E]` int64, in input order, all in `[0, num_relations)`; not copied.
        num_relations: Number of types.
    """

    def __init__(self, edge_type: Tensor, num_relations: int) -> None:
        self.edge_type = edge_type
        self.num_relations = num_relations
        self._kept: dict[object, Any] = {}

    def tiles(self, plan: Plan, transpose: bool) -> list[_Tile]:
        """The tiles of the destinations, or of the sources."""
        return cast(
            "list[_Tile]",
            self._keep(("tiles", transpose), lambda: _build_tiles(plan, self, transpose)),
        )

    def scales(self, plan: Plan, dtype: torch.dtype) -> list[Tensor]:
        """1 / number of edges of the same type into the same node, per edge of each tile.

        `[edges, 1]` for each tile of the sources.
        """

        def build() -> list[Tensor]:
            key = plan.array("dst").long() * self.num_relations + self.edge_type
            counts = torch.zeros(plan.num_dst * self.num_relations, dtype=torch.int32)
            counts.index_add_(0, key, torch.ones(key.numel(), dtype=torch.int32))
            scale = (1 / counts.index_select(0, key).to(dtype)).unsqueeze(-1)
            return [scale.index_select(0, tile.position) for tile in self.tiles(plan, True)]

        return cast("list[Tensor]", self._keep(("scales", dtype), build))

    def _keep(self, key: object, build: Callable[[], object]) -> object:
        # Two threads may both build: the same, and one of the two stays.
        if key not in self._kept:
            with outside_modes(torch.device("cpu")):
                self._kept[key] = build()
        return self._kept[key]


def _build_tiles(plan: Plan, relations: Relations, transpose: bool) -> list[_Tile]:
    count = relations.num_relations
    edges = sorted_edges(plan, transpose)
    types = relations.edge_type.index_select(0, edges.position)
    # How many slots each node has: its different types.
    slots = torch.unique(edges.row * count + types) // max(count, 1)
    rows = edges.ptr.numel() - 1
    per_row = torch.zeros(rows + 1, dtype=torch.int64)
    per_row.index_add_(0, slots + 1, torch.ones_like(slots))
    others = plan.num_dst if transpose else plan.num_src
    out = []
    for begin, end in tile_bounds(per_row.cumsum(0), _MOST_SLOTS, rows):
        span = slice(int(edges.ptr[begin]), int(edges.ptr[end]))
        size = end - begin
        keys, slot = torch.unique(
            types[span] * size + (edges.row[span] - begin), return_inverse=True
        )
        nodes = keys % size
        counts = torch.bincount(keys // size, minlength=count).tolist()
        found, first = [], 0
        for relation, entries in enumerate(counts):
            if entries:
                found.append((relation, first, first + entries))
                first += entries
        out.append(
            _Tile(
                slice(begin, end),
                Plan(slot, edges.other[span], first, others),
                edges.position[span],
                found,
                nodes,
                Plan(nodes, None, size, 0),
            )
        )
    held = sum(p.nbytes_bound for tile in out for p in (tile.slots, tile.sums))
    # Beside the plans, int64: where each edge was, and each slot's node.
    charge(plan, held + 8 * plan.num_edges + 8 * sum(t.nodes.numel() for t in out))
    return out


# ---- finding them again ------------------------------------------------------------------------


@dataclass
class _Known:
    edge_type: weakref.ref[Tensor] | None
    state: tuple[object, ...] | None
    relations: Relations


# Different types for the same edges that are remembered.
_MOST_KNOWN = 4
_SAMPLES = 64


def _state(edge_type: Tensor) -> tuple[object, ...]:
    """What tells of an edit, as far as the plan cache is told of one of the edges."""
    geometry = edge_type.shape, edge_type.stride(), edge_type.storage_offset()
    return edge_type._version, *geometry, ops.fingerprint(edge_type.detach(), -1, _SAMPLES)


def relations_of(plan: Plan, edge_type: Tensor, num_relations: int) -> Relations | None:
    """The types of a plan's edges; None if one is out of range.

    Found again by the tensor and its version, else by its contents; below the plan cache's
    threshold always by contents, as a plan is.

    Args:
        plan: A plan over edges.
        edge_type: `[E]`, int32 or int64, in the order of the edges.
        num_relations: Types must be in `[0, num_relations)`.
    """
    known: list[_Known] = plan.memo(("relations", num_relations), list)
    # An inference tensor has no version to tell of edits.
    full = check_everything(plan.num_edges) or edge_type.is_inference()
    if not full:
        for entry in known:
            same = entry.edge_type is not None and entry.edge_type() is edge_type
            if same and entry.state == _state(edge_type):
                return entry.relations
    state = None if edge_type.is_inference() else _state(edge_type)
    link = None if edge_type.is_inference() else weakref.ref(edge_type)
    with outside_modes(edge_type.device):
        types = edge_type.detach().long()
        for entry in known:
            if torch.equal(entry.relations.edge_type, types):
                entry.edge_type, entry.state = link, state
                return entry.relations
        if types.numel() and (int(types.min()) < 0 or int(types.max()) >= num_relations):
            return None
        copy = types.clone() if types.data_ptr() == edge_type.data_ptr() else types
        relations = Relations(copy, num_relations)
    known.insert(0, _Known(link, state, relations))
    del known[_MOST_KNOWN:]
    return relations


# ---- the sum -----------------------------------------------------------------------------------


def relational_sum(
    plan: Plan, relations: Relations, x: Tensor, weight: Tensor, mean: bool
) -> Tensor:
    """`out[i] = sum_r reduce_{j -r-> i}(x[j]) @ weight[r]`.

    Args:
        plan: The graph.
        relations: The types of its edges.
        x: `[num_src, F]`, contiguous, float32 or float64.
        weight: `[R, F, O]`, in x's dtype.
        mean: Reduce by mean, over the edges of each type; else by sum.

    Returns:
        `[num_dst, O]`.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return cast(Tensor, _RelationalSum.apply(plan, relations, x, weight, mean))
    return _forward(plan, relations, x, weight, mean)


def _products(tile: _Tile, rows: Tensor, weight: Tensor) -> Tensor:
    """`rows[s] @ weight[relation of s]` for each slot s."""
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for relation, begin, end in tile.relations:
        torch.mm(rows[begin:end], weight[relation], out=out[begin:end])
    return out


def _forward(plan: Plan, relations: Relations, x: Tensor, weight: Tensor, mean: bool) -> Tensor:
    out = cast(Tensor, ops.empty_rows(x, plan.num_dst, weight.shape[2]))
    for tile in relations.tiles(plan, False):
        reduced = plan_sum(tile.slots, x, mean=mean)
        out[tile.rows] = plan_sum(tile.sums, _products(tile, reduced, weight))
    return out


class _RelationalSum(PlanFunction):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, relations: Relations, x: Tensor, weight: Tensor, mean: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plan, ctx.relations, ctx.mean = plan, relations, mean
        return _forward(plan, relations, x, weight, mean)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        plan, relations, mean = ctx.plan, ctx.relations, ctx.mean
        grad = grads[0]
        _, _, need_x, need_weight, _ = ctx.needs_input_grad
        # Somebody wants the derivative of this derivative, or many gradients at once.
        if torch.is_grad_enabled() or is_batched(grad):
            found = _backward_again(plan, relations, x, weight, mean, grad)
            return None, None, *found, None
        grad = grad.contiguous()
        tiles = relations.tiles(plan, True)
        scales = relations.scales(plan, grad.dtype) if mean else [None] * len(tiles)
        turned = weight.transpose(1, 2).contiguous()
        dx = cast(Tensor, ops.empty_rows(x, *x.shape)) if need_x else None
        dw = torch.zeros_like(weight) if need_weight else None
        for tile, scale in zip(tiles, scales, strict=True):
            sums = plan_sum(tile.slots, grad, scale)
            if dx is not None:
                dx[tile.rows] = plan_sum(tile.sums, _products(tile, sums, turned))
            if dw is not None:
                own = x[tile.rows].index_select(0, tile.nodes)
                for relation, begin, end in tile.relations:
                    dw[relation].addmm_(own[begin:end].t(), sums[begin:end])
        return None, None, dx, dw, None


def _backward_again(
    plan: Plan, relations: Relations, x: Tensor, weight: Tensor, mean: bool, grad: Tensor
) -> list[Tensor | None]:
    """The gradients as differentiable operations over whole tensors of slots."""
    dst, src = _ends(plan)
    key = dst * relations.num_relations + relations.edge_type
    with torch.enable_grad():
        own = aliases((x, weight))
        leaves = [t for t in own if t.requires_grad]
        sizes = plan.num_dst, relations.num_relations
        messages = own[0].index_select(0, src)
        reduce = "mean" if mean else "sum"
        reduced = reduce_messages(messages, key, sizes[0] * sizes[1], reduce, "even")
        out = torch.einsum("nrf,rfo->no", reduced.view(*sizes, x.shape[1]), own[1])
        found = list(torch.autograd.grad(out, leaves, grad, create_graph=True))
    return [found.pop(0) if t.requires_grad else None for t in own]
