"""Ops that rewritten graphs call beside those of `_plan`: self-loops, GCN's propagation, segments.

As there, each takes the edge list itself, looks the plan up inside, and returns fresh tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._plan import Plan, plan_for_edges, plan_sum
from .._plan._cache import share_links
from .._plan._compiled import _TAGS, UNRECORDED, _fake, _impl, _library
from .._plan._device import has_kernels, is_native
from .._plan._segments import check_ptr_values, segment_groups

__all__ = ["registered"]

registered = ("edgeweave::add_self_loops", "edgeweave::gcn", "edgeweave::segment_index")
"""Names of the ops that importing this module registers."""

_library.define(
    "add_self_loops(Tensor edge_index, SymInt num_nodes) -> Tensor",
    tags=(
        torch.Tag.pt2_compliant_tag,
        torch.Tag.dynamic_output_shape,
        *UNRECORDED,
    ),
)
_library.define(
    "gcn(Tensor edge_index, Tensor x, SymInt num_nodes, bool self_loops, bool flip,"
    " bool transpose) -> Tensor",
    tags=_TAGS,
)
_library.define("segment_index(Tensor ptr, SymInt num_entries) -> Tensor", tags=_TAGS)
_ops: Any = torch.ops.edgeweave


@_impl("add_self_loops")
def _add_self_loops(edge_index: Tensor, num_nodes: int) -> Tensor:
    """The edges that are no self-loops, in order, then one self-loop per node: `[2, E']`."""
    if is_native(edge_index) or not has_kernels(edge_index):
        return _with_self_loops(edge_index, num_nodes)
    # How many edges stay is a question to the device: asked once per graph.
    plan = plan_for_edges(edge_index, num_nodes, num_nodes, compiled=True)
    edges, links = _kept_self_loops(plan, edge_index, num_nodes)
    fresh = edges.clone()
    share_links(fresh, links)
    return fresh


def _kept_self_loops(plan: Plan, edge_index: Tensor, num_nodes: int) -> tuple[Tensor, list[object]]:
    """The edges with self-loops, once per graph, and what leads from their copies to plans."""
    key = ("compile.self_loops", int(num_nodes), edge_index.dtype)
    return plan.memo(key, lambda: (_with_self_loops(edge_index, num_nodes), []))


def _with_self_loops(edge_index: Tensor, num_nodes: int) -> Tensor:
    loops = torch.arange(num_nodes, dtype=edge_index.dtype, device=edge_index.device)
    kept = edge_index[:, edge_index[0] != edge_index[1]]
    return torch.cat([kept, loops.expand(2, -1)], dim=1)


@_fake("add_self_loops")
def _add_self_loops_fake(edge_index: Tensor, num_nodes: int) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size()
    return edge_index.new_empty(2, size)


@_impl("segment_index")
def _segment_index(ptr: Tensor, num_entries: int) -> Tensor:
    """The segment of each entry, `[E]` int64, checked as `scatter.segment_reduce` checks `ptr`."""
    check_ptr_values("segment_reduce", ptr, num_entries)
    return segment_groups(ptr, num_entries)


@_fake("segment_index")
def _segment_index_fake(ptr: Tensor, num_entries: int) -> Tensor:
    return ptr.new_empty(num_entries, dtype=torch.int64)


@_impl("gcn")
def _gcn(
    edge_index: Tensor, x: Tensor, num_nodes: int, self_loops: bool, flip: bool, transpose: bool
) -> Tensor:
    """`D^-1/2 A D^-1/2 x` with the in-degrees of A, or of its transpose with the same degrees."""
    x = x.contiguous()
    if not has_kernels(x):
        edges = _with_self_loops(edge_index, num_nodes) if self_loops else edge_index
        return _gcn_elsewhere(edges, x, num_nodes, flip, transpose)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    plan, scale = _normalised(edge_index, num_nodes, self_loops, flip, wide)
    return plan_sum(plan, x, transpose=transpose, row_scale=scale, col_scale=scale)


def _normalised(
    edge_index: Tensor, num_nodes: int, self_loops: bool, flip: bool, dtype: torch.dtype
) -> tuple[Plan, Tensor]:
    """The plan with self-loops, and degree^-1/2 rounded once to the accumulator's dtype.

    What depends on the graph alone is kept with the plan of the edges that came in: the edges with
    self-loops are one tensor for all layers and steps, and so lead to their plan by identity.
    """
    plan = plan_for_edges(edge_index, num_nodes, num_nodes, flip=flip, compiled=True)
    if self_loops:
        edges, _ = _kept_self_loops(plan, edge_index, num_nodes)
        plan = plan_for_edges(edges, num_nodes, num_nodes, flip=flip)

    def build() -> Tensor:
        degree = plan.in_degree().double()
        return degree.pow(-0.5).masked_fill(degree == 0, 0.0).to(dtype)

    return plan, plan.memo(("compile.gcn_scale", dtype), build)


def _gcn_elsewhere(edges: Tensor, x: Tensor, num_nodes: int, flip: bool, transpose: bool) -> Tensor:
    dst, src = (edges[0], edges[1]) if flip else (edges[1], edges[0])
    degree = torch.bincount(dst, minlength=num_nodes).to(torch.float32)
    scale = degree.pow(-0.5).masked_fill(degree == 0, 0.0).to(x.dtype)
    if transpose:
        src, dst = dst, src
    messages = x.index_select(-2, src) * (scale[src] * scale[dst]).unsqueeze(-1)
    out = x.new_zeros(*x.shape[:-2], num_nodes, x.shape[-1])
    return out.index_add(-2, dst, messages)


@_fake("gcn")
def _gcn_fake(
    edge_index: Tensor, x: Tensor, num_nodes: int, self_loops: bool, flip: bool, transpose: bool
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _gcn_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    edge_index, _, *ctx.options = inputs
    ctx.save_for_backward(edge_index)


def _gcn_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (edge_index,) = ctx.saved_tensors
    num_nodes, self_loops, flip, transpose = ctx.options
    # The transpose has the same degrees: it is the matrix of this call that is turned round.
    dx = _ops.gcn(edge_index, grad, num_nodes, self_loops, flip, not transpose)
    return None, dx, None, None, None, None


torch.library.register_autograd("edgeweave::gcn", _gcn_grad, setup_context=_gcn_setup, lib=_library)
