"""Edge features in attention layers, without a tensor of `[E, H, C]`.

Where a score is linear in the features of an edge (GATConv, TransformerConv), the layer's matrix is
multiplied by the attention or the query first, and features of D numbers meet vectors of D numbers
per head. GATv2Conv's is not: there the sum of the three goes through its activation tile by tile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.utils.loop import compute_loop_attr

from edgeweave._plan import Plan
from edgeweave._plan._device import make_plan, same_device
from edgeweave._plan._edge_network import Network, run_network
from edgeweave._plan._functions import PlanFunction, is_batched, plan_dot
from edgeweave.pyg._eligibility import features_refusal
from edgeweave.pyg._linear import plain_parameters
from edgeweave.pyg._norm import SelfLoops
from edgeweave.sparse._mm import mm_plan

__all__ = [
    "EDGE_ATTR_REFUSED",
    "additive_scores",
    "edge_features",
    "edge_linear",
    "edge_scores",
    "edge_term",
    "edge_values",
]

EDGE_ATTR_REFUSED = "edge_attr is not [E, D], or its linear layer is changed"

# Edges that are added up in one accumulator.
_BLOCK_EDGES = 1024


def edge_linear(
    layer: Any, edge_attr: Any, x: Tensor, edges: int, vector: Tensor | None
) -> Tensor | None:
    """The weight `[H * C, D]` of `lin_edge`, None if it or what it is applied to is unusual.

    Args:
        layer: The layer.
        edge_attr: What it was given as edge features.
        x: Node features, whose dtype all must have.
        edges: How many edges there are.
        vector: The attention vector that the product is to be multiplied by, if there is one.
    """
    if features_refusal(edge_attr, "edge_attr") is not None or edge_attr.dtype is not x.dtype:
        return None
    if edge_attr.dim() not in (1, 2) or edge_attr.size(0) != edges or not same_device(edge_attr, x):
        return None
    found = plain_parameters(layer.lin_edge, Linear)
    if found is None or found[1] is not None or found[0].dtype is not x.dtype:
        return None
    size = layer.heads * layer.out_channels
    if vector is not None:
        refused = features_refusal(vector, "att_edge") is not None or vector.dtype is not x.dtype
        if refused or vector.numel() != size:
            return None
    width = edge_attr.size(1) if edge_attr.dim() == 2 else 1
    return found[0] if found[0].shape == (size, width) else None


def edge_features(layer: Any, loops: SelfLoops | None, edge_attr: Tensor) -> Tensor:
    """`[E, D]`, with those of the self-loops as `remove_self_loops` and `add_self_loops` do it."""
    if loops is not None:
        if loops.kept is not None:
            edge_attr = edge_attr.index_select(0, loops.kept)
        nodes = loops.edge_index.size(1) - edge_attr.size(0)
        edges = loops.edge_index[:, : edge_attr.size(0)]
        fill = compute_loop_attr(edges, edge_attr, nodes, False, layer.fill_value)
        edge_attr = torch.cat([edge_attr, fill], dim=0)
    return edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr


# ---- GAT ---------------------------------------------------------------------------------------


def edge_term(attr: Tensor, folded: Tensor) -> Tensor:
    """`attr @ folded.T` for `[E, D]` and `[H, D]`: what edges add to GATConv's scores."""
    out: Tensor = _EdgeTerm.apply(attr, folded)
    return out


class _EdgeTerm(PlanFunction):
    """`attr @ folded.T`, whose gradient by `folded` is added up over blocks of edges."""

    @staticmethod
    def forward(ctx: Any, attr: Tensor, folded: Tensor) -> Tensor:
        ctx.save_for_backward(attr, folded)
        return attr @ folded.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        attr, folded = ctx.saved_tensors
        (grad,) = grads
        need_attr, need_folded = ctx.needs_input_grad
        d_folded = None
        if need_folded and (torch.is_grad_enabled() or is_batched(grad)):
            d_folded = grad.t() @ attr
        elif need_folded:
            whole = attr.size(0) // _BLOCK_EDGES * _BLOCK_EDGES
            left = grad[:whole].reshape(-1, _BLOCK_EDGES, grad.size(1)).transpose(1, 2)
            right = attr[:whole].reshape(-1, _BLOCK_EDGES, attr.size(1))
            d_folded = (left @ right).sum(0) + grad[whole:].t() @ attr[whole:]
        return grad @ folded if need_attr else None, d_folded


# ---- GATv2 -------------------------------------------------------------------------------------


def additive_scores(
    layer: Any, plan: Plan, dst: Tensor, src: Tensor, attr: Tensor, weight: Tensor
) -> Tensor:
    """GATv2Conv's scores `[E, H]`: `att . leaky_relu(dst_i + src_j + weight attr)`.

    Args:
        layer: The layer.
        plan: The edges.
        dst: `[num_dst, H * C]`.
        src: `[num_src, H * C]`.
        attr: `[E, D]`.
        weight: `[H * C, D]`.
    """
    heads, slope = layer.heads, layer.negative_slope

    def score(pre: Tensor, att: Tensor) -> Tensor:
        values = functional.leaky_relu(pre, slope).view(pre.size(0), heads, -1)
        sums: Tensor = (values * att).sum(-1)
        return sums

    network = Network(src.contiguous(), score, dst.contiguous(), attr, weight, [layer.att])
    return run_network(plan, network, None)


# ---- Transformer -------------------------------------------------------------------------------


def _entries(plan: Plan) -> Plan:
    """The same destinations, with each edge as a source of its own."""
    return plan.memo(
        "pyg.entries",
        lambda: make_plan(
            plan.array("dst"), torch.arange(plan.num_edges), plan.num_dst, plan.num_edges
        ),
    )


def _per_head(attr: Tensor, heads: int) -> Tensor:
    return attr.repeat(1, heads) if heads > 1 else attr.contiguous()


def edge_scores(layer: Any, plan: Plan, query: Tensor, attr: Tensor, weight: Tensor) -> Tensor:
    """What edges add to TransformerConv's scores, `[E, H]`: `query_i . (weight attr) / sqrt(C)`.

    Args:
        layer: The layer.
        plan: The edges.
        query: `[num_dst, H * C]`.
        attr: `[E, D]`.
        weight: `[H * C, D]`.
    """
    heads, width = layer.heads, layer.out_channels
    split = weight.view(heads, width, -1)
    turned = torch.einsum("nhc,hcd->nhd", query.view(-1, heads, width), split)
    turned = turned.flatten(1) * (1.0 / math.sqrt(width))
    return plan_dot(_entries(plan), turned.contiguous(), _per_head(attr, heads), heads=heads)


def edge_values(layer: Any, plan: Plan, alpha: Tensor, attr: Tensor, weight: Tensor) -> Tensor:
    """What edges add to TransformerConv's sums, `[num_dst, H, C]`.

    Args:
        layer: The layer.
        plan: The edges.
        alpha: `[E, H]`, after dropout.
        attr: `[E, D]`.
        weight: `[H * C, D]`.
    """
    heads, width = layer.heads, layer.out_channels
    spread = _per_head(attr, heads).view(plan.num_edges, heads, -1)
    sums = mm_plan(_entries(plan), spread, "sum", weight=alpha)
    return torch.einsum("nhd,hcd->nhc", sums, weight.view(heads, width, -1))
