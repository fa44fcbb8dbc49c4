"""GCN's self-loops and normalisation, computed once per graph instead of once per layer and step.

The stock `gcn_norm` runs in every layer of every step. What it computes depends on the graph alone
if no edge weight is given; then the result, `(edge_index, weight)`, is kept with the plan of the
input graph. `propagate` recognises the pair and replaces the weight by its two factors,
`weight[e] = scale[row[e]] * scale[col[e]]`, so that the kernel scales rows instead of multiplying
edges. With an edge weight, the self-loops are kept and only the weights are computed,
differentiably.

A layer of PyG that does nothing with the result but pass it on to `propagate` gets the kept
tensors themselves; everybody else, layers with `cached=True` included, gets tensors of their own.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgeweave._plan import Plan, check_everything, outside_modes, plan_for_edges
from edgeweave._plan._device import has_kernels, same_device
from edgeweave.pyg._eligibility import (
    INDEX_DTYPES,
    features_refusal,
    leave_error_to_stock,
    mode_refusal,
)
from edgeweave.pyg._report import record_fallback, record_fused
from edgeweave.sparse._mm import mm_plan

_SITE = "gcn_norm"
_FLOWS = ("source_to_target", "target_to_source")
_PYG_LAYERS = "torch_geometric.nn."
# What may be set on a layer of PyG and is then shown its edges or weights.
_SEEN_BY = (
    "_propagate_forward_pre_hooks",
    "_propagate_forward_hooks",
    "_message_forward_pre_hooks",
    "_message_forward_hooks",
    "propagate",
    "message",
)


@dataclass(eq=False)
class Norm:
    """The factors of a normalised graph's weights.

    Attributes:
        flow: Flow that the degrees were counted for.
        held_plan: Plan of the normalised graph for that flow, if the cache still has it. Not held:
            it may be the very plan that owns this entry, and must go when the cache drops it.
        scale: `[num_nodes]`, fp64 for fp64 weights and fp32 for all others: degree^-1/2, 0 where
            the degree is 0.
    """

    flow: str
    held_plan: weakref.ref[Plan]
    scale: Tensor

    def plan(self, edge_index: Tensor) -> Plan:
        """Return the plan of the normalised graph, built again if the cache has dropped it."""
        plan = self.held_plan()
        if plan is None:
            plan = _plan_of(edge_index, self.scale.size(0), self.flow)
            self.held_plan = weakref.ref(plan)
        return plan


@dataclass(frozen=True, eq=False)
class _Handed:
    """A pair of tensors that was handed out, neither kept alive by this.

    Attributes:
        norm: The factors of the weights.
        edge_index: `[2, E]`, with self-loops if they were asked for.
        weight: `[E]`.
        versions: The versions of both when they were handed out.
        contents: What must be in them, for edits that torch does not count; None: not compared,
            for nobody can edit them, or there are too many edges.
    """

    norm: Norm
    edge_index: weakref.ref[Tensor]
    weight: weakref.ref[Tensor]
    versions: tuple[int, int]
    contents: tuple[Tensor, Tensor] | None

    def is_intact(self, edge_index: Tensor, weight: Tensor) -> bool:
        """Return whether these are the two tensors, and nobody wrote into them since."""
        return (
            self.weight() is weight
            and self.edge_index() is edge_index
            and not weight.requires_grad
            and self.versions == (edge_index._version, weight._version)
            and (self.contents is None or _are_equal(self.contents, (edge_index, weight)))
        )


def _are_equal(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> bool:
    # `torch.equal` raises if the dtypes differ, which `.data = ...` can bring about.
    return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(first, second, strict=True))


# By id of the weight. An entry goes when its weight does, so an id cannot come to mean another.
_handed: dict[int, _Handed] = {}


def _hand_out(
    norm: Norm, edge_index: Tensor, weight: Tensor, contents: tuple[Tensor, Tensor] | None = None
) -> None:
    """Make `find_norm` recognise a pair of tensors."""
    if edge_index.is_inference():
        return  # Has no version to tell of edits: the weights are used as they are.
    key = id(weight)

    def forget(dead: weakref.ref[Tensor]) -> None:
        entry = _handed.get(key)
        if entry is not None and entry.weight is dead:
            _handed.pop(key, None)

    versions = edge_index._version, weight._version
    _handed[key] = _Handed(
        norm, weakref.ref(edge_index), weakref.ref(weight, forget), versions, contents
    )


def _plan_of(edge_index: Tensor, num_nodes: int, flow: str) -> Plan:
    return plan_for_edges(edge_index, num_nodes, num_nodes, flip=flow == "target_to_source")


def find_norm(edge_index: Tensor, weight: Tensor) -> Norm | None:
    """Return the factors of a weight that `cached_gcn_norm` handed out.

    Args:
        edge_index: `[2, E]`, the edges given to `propagate`.
        weight: `[E]`, the weights given to `propagate`.

    Returns:
        The entry, or None if the two are not an unchanged pair from `cached_gcn_norm`.
    """
    entry = _handed.get(id(weight))
    if entry is None or not entry.is_intact(edge_index, weight):
        return None
    return entry.norm


def _passes_it_on(depth: int) -> bool:
    """Return whether the result goes to a layer of PyG that keeps and edits nothing of it.

    Args:
        depth: Frames between the caller of this function and that of `gcn_norm`.
    """
    frame = sys._getframe(depth + 1)
    # The globals, as in `comes_from`: methods and wrappers in users' modules have others.
    if not str(frame.f_globals.get("__name__")).startswith(_PYG_LAYERS):
        return False
    layer = frame.f_locals.get("self")
    if not type(layer).__module__.startswith(_PYG_LAYERS) or getattr(layer, "cached", False):
        return False
    state = vars(layer)
    return not any(state.get(name) for name in _SEEN_BY)


@dataclass(frozen=True)
class SelfLoops:
    """What `add_remaining_self_loops` does to a graph, whatever the weights.

    Attributes:
        edge_index: `[2, E']`, edges without self-loops, then one self-loop per node.
        version: Its version when it was built.
        kept: `[E' - N]`, positions of the edges that are no self-loops; None: all of them.
        loops: Positions of the self-loops of the input.
        loop_nodes: Their nodes.
    """

    edge_index: Tensor
    version: int
    kept: Tensor | None
    loops: Tensor
    loop_nodes: Tensor


def cached_gcn_norm(
    edge_index: Any,
    edge_weight: Any,
    num_nodes: Any,
    improved: Any,
    add_self_loops: Any,
    flow: Any,
    dtype: Any,
) -> Any:
    """Return what PyG's `gcn_norm` returns, from the cache of the graph's plan where possible.

    Args:
        edge_index: As for `gcn_norm`.
        edge_weight: As for `gcn_norm`.
        num_nodes: As for `gcn_norm`.
        improved: As for `gcn_norm`.
        add_self_loops: As for `gcn_norm`.
        flow: As for `gcn_norm`.
        dtype: As for `gcn_norm`.

    Returns:
        `(edge_index, edge_weight)`, or `NotImplemented` if PyG's own code must run.
    """
    if torch.compiler.is_compiling():
        return NotImplemented
    reason = _refusal(edge_index, edge_weight, num_nodes, flow, dtype)
    if reason is None:
        try:
            plan = _plan_of(edge_index, num_nodes, flow)
        except (IndexError, ValueError, TypeError):
            if not leave_error_to_stock(edge_index):
                raise
            # PyG's own code raises its own error about these indices; see the tests.
            reason = "edge_index was rejected"
        else:
            record_fused(_SITE)
            loops = bool(add_self_loops)
            shared = _passes_it_on(2)  # past the wrapper
            if edge_weight is None:
                return _unweighted(plan, edge_index, num_nodes, loops, flow, dtype, shared)
            fill = 2.0 if improved else 1.0
            edges, weight = _weighted(plan, edge_index, edge_weight, num_nodes, loops, fill, flow)
            return (edges if shared or not loops else edges.clone()), weight
    record_fallback(_SITE, reason)
    return NotImplemented


def _refusal(
    edge_index: Any, edge_weight: Any, num_nodes: Any, flow: Any, dtype: Any
) -> str | None:
    """Return why PyG's own `gcn_norm` must run, or None."""
    if type(edge_index) is not Tensor:
        return f"edge_index is a {type(edge_index).__name__}"
    if edge_index.layout is not torch.strided:
        return "edge_index is a sparse matrix"
    if edge_index.dtype not in INDEX_DTYPES or edge_index.dim() != 2 or edge_index.size(0) != 2:
        return f"edge_index of dtype {edge_index.dtype} is not [2, E] of int32 or int64"
    if not has_kernels(edge_index):
        return f"edge_index is on {edge_index.device.type}"
    if type(num_nodes) is not int:
        return "num_nodes is not given"
    if flow not in _FLOWS:
        return "flow is neither source_to_target nor target_to_source"
    if edge_weight is None:
        if dtype is not None and not dtype.is_floating_point:
            return f"dtype is {dtype}"
    else:
        reason = features_refusal(edge_weight, "edge_weight")
        if reason is not None:
            return reason
        if edge_weight.dim() != 1 or edge_weight.size(0) != edge_index.size(1):
            return "edge_weight is not [E]"
        if not same_device(edge_index, edge_weight):
            return "edge_weight is not where edge_index is"
    return mode_refusal()


def _unweighted(
    plan: Plan,
    edge_index: Tensor,
    num_nodes: int,
    add_self_loops: bool,
    flow: str,
    dtype: torch.dtype | None,
    shared: bool,
) -> tuple[Tensor, Tensor]:
    """Return the norm of a graph without weights, built once per plan."""
    dtype = dtype or torch.get_default_dtype()

    def build() -> list[tuple[Tensor, Tensor, Norm]]:
        return [_build_norm(edge_index, num_nodes, add_self_loops, flow, dtype)]

    # `improved` is no part of the key: stock ignores it where no weight is given. The dtype of the
    # edges is one: an int32 and an int64 edge list share a plan, but get back their own dtype.
    key = ("pyg.gcn_norm", num_nodes, add_self_loops, flow, dtype, edge_index.dtype)
    kept = plan.memo(key, build)
    if find_norm(*kept[0][:2]) is None:
        # Somebody got hold of the kept tensors and wrote into them: start again with fresh ones.
        with outside_modes(edge_index.device):
            kept[0] = build()[0]
    edges, weight, norm = kept[0]
    if not shared:
        with outside_modes(edge_index.device):
            # Where nothing is added, stock gives the caller's own edges back.
            own = (edges.clone() if add_self_loops else edge_index), weight.clone()
        compared = check_everything(weight.numel(), on_cpu=weight.is_cpu)
        _hand_out(norm, *own, (edges, weight) if compared else None)
        return own
    return edges, weight


def _build_norm(
    edge_index: Tensor, num_nodes: int, add_self_loops: bool, flow: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Norm]:
    """Compute what stock computes from degrees counted in the features' dtype, but count exactly.

    Stock's bfloat16 degree of a node with 300 neighbours is 256. In fp32 and fp64 the two agree.
    """
    # A copy where nothing is added: the entry must not change with the caller's tensor.
    edges = _split(edge_index, num_nodes).edge_index if add_self_loops else edge_index.clone()
    plan = _plan_of(edges, num_nodes, flow)
    degree = plan.in_degree().to(torch.float64 if dtype == torch.float64 else torch.float32)
    scale = degree.pow(-0.5).masked_fill(degree == 0, 0.0)
    rounded = scale.to(dtype)
    weight = rounded.index_select(0, edges[0]) * rounded.index_select(0, edges[1])
    norm = Norm(flow, weakref.ref(plan), scale)
    _hand_out(norm, edges, weight)
    return edges, weight, norm


def _weighted(
    plan: Plan,
    edge_index: Tensor,
    edge_weight: Tensor,
    num_nodes: int,
    add_self_loops: bool,
    fill: float,
    flow: str,
) -> tuple[Tensor, Tensor]:
    """Return the stock result for a weighted graph; differentiable in `edge_weight`."""
    if add_self_loops:
        split = self_loops(plan, edge_index, num_nodes)
        loop_weight = edge_weight.new_full((num_nodes,), fill)
        if split.kept is not None:
            loop_weight[split.loop_nodes] = edge_weight[split.loops]
            edge_weight = edge_weight.index_select(0, split.kept)
        edge_weight = torch.cat([edge_weight, loop_weight])
        edge_index = split.edge_index
        plan = _plan_of(edge_index, num_nodes, flow)
    # The weighted degree, as a product with ones: the plan is there, an index of its own is not.
    ones = edge_weight.new_ones(num_nodes, 1)
    degree = mm_plan(plan, ones, "sum", weight=edge_weight).view(-1)
    scale = degree.pow(-0.5)
    scale = scale.masked_fill(scale == float("inf"), 0.0)
    row, col = edge_index[0], edge_index[1]
    return edge_index, scale.index_select(0, row) * edge_weight * scale.index_select(0, col)


def self_loops(plan: Plan, edge_index: Tensor, num_nodes: int) -> SelfLoops:
    """Return a graph's edges with exactly one self-loop per node, kept with its plan.

    Args:
        plan: The plan of the edges.
        edge_index: `[2, E]`.
        num_nodes: Number of nodes that get a self-loop, the first ones.

    Returns:
        The split, shared: do not edit its tensors.
    """
    key = ("pyg.self_loops", num_nodes, edge_index.dtype)
    kept = plan.memo(key, lambda: [_split(edge_index, num_nodes)])
    if kept[0].edge_index._version != kept[0].version:
        with outside_modes(edge_index.device):
            kept[0] = _split(edge_index, num_nodes)
    return kept[0]


def _split(edge_index: Tensor, num_nodes: int) -> SelfLoops:
    """Replace the self-loops of a graph by one per node, as `add_remaining_self_loops` does."""
    is_loop = edge_index[0] == edge_index[1]
    loops = is_loop.nonzero().view(-1)
    kept = (~is_loop).nonzero().view(-1) if loops.numel() else None
    nodes = torch.arange(num_nodes, dtype=edge_index.dtype, device=edge_index.device)
    edges = edge_index if kept is None else edge_index[:, kept]
    edges = torch.cat([edges, nodes.expand(2, -1)], dim=1)
    return SelfLoops(edges, edges._version, kept, loops, edge_index[0][loops])
