"""`forward` of GATConv, GATv2Conv and TransformerConv without a tensor of `[E, H, C]`.

The scores of the edges, `[E, H]`, come from the features of the two ends in one kernel; softmax,
dropout (torch's own, so that a seed gives the numbers it gives without us) and the weighted sum
follow. The edges with the self-loops that these layers add are kept with the plan of the input
graph, where PyG's code copies and filters them in every call.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv
from torch_geometric.nn.conv import gat_conv, gatv2_conv, transformer_conv
from torch_geometric.nn.dense.linear import Linear

from edgeweave._native import ops
from edgeweave._plan import Plan, outside_modes, plan_for_edges
from edgeweave._plan._attention import plan_scores
from edgeweave._plan._device import same_device
from edgeweave._plan._functions import PlanFunction, accumulator_dtype, is_batched, plan_dot
from edgeweave._plan._pair import plan_pair
from edgeweave._plan._softmax import plan_softmax
from edgeweave.pyg._attention_edges import (
    EDGE_ATTR_REFUSED,
    additive_scores,
    edge_features,
    edge_linear,
    edge_scores,
    edge_term,
    edge_values,
)
from edgeweave.pyg._eligibility import features_refusal, leave_error_to_stock
from edgeweave.pyg._linear import plain_parameters, row_blocks
from edgeweave.pyg._norm import SelfLoops, self_loops
from edgeweave.pyg._propagate import aggregation_of
from edgeweave.pyg._report import record_fused
from edgeweave.pyg._whole_layer import fell_back, read_pair, whole_layer_refusal
from edgeweave.sparse._mm import mm_plan

__all__ = ["fused_gat", "fused_gatv2", "fused_transformer"]

# Values in a block of rows that stays in the cache while several passes go over it.
_BLOCK_VALUES = 1 << 17
_HOMES: dict[type, str] = {
    GATConv: gat_conv.__name__,
    GATv2Conv: gatv2_conv.__name__,
    TransformerConv: transformer_conv.__name__,
}


def _read(layer: Any, x: Any, edge_index: Any, size: Any) -> tuple[Tensor, Tensor, Tensor] | str:
    """(features of the sources, features of the destinations, edges `[2, E]`), or why not."""
    reason = whole_layer_refusal(layer, _HOMES)
    if reason is None and (layer.node_dim != 0 or aggregation_of(layer) != "sum"):
        reason = "the aggregation is not a plain sum over nodes"
    return read_pair(layer, x, edge_index, size) if reason is None else reason


def _weights_refusal(
    layer: Any, x: Tensor, linears: tuple[str, ...], attention: tuple[str, ...]
) -> str | None:
    """Why the layer's parameters are not those that the kernels take, or None.

    Stock promotes dtypes, broadcasts attention vectors and calls whatever stands for a linear
    layer; here all of one kind must be what the layer made itself.
    """
    if "parametrizations" in layer.__dict__["_modules"]:
        return "a parameter is parametrized"  # to look at it would compute it once more
    size = layer.heads * layer.out_channels
    for name in linears:
        found = plain_parameters(getattr(layer, name), Linear)
        if (
            found is None
            or found[0].dtype is not x.dtype
            or found[0].size(0) != size
            or not same_device(found[0], x)
        ):
            return f"{name} is not a plain linear layer in the dtype of x"
    for name in attention:
        vector = getattr(layer, name)
        if features_refusal(vector, name) is not None or vector.dtype is not x.dtype:
            return f"{name} is not in the dtype of x"
        if not same_device(vector, x):
            return f"{name} is not where x is"
        if vector.shape != (1, layer.heads, layer.out_channels):
            return f"{name} is not [1, H, C]"
    return None


def _planned(
    layer: Any, edges: Tensor, sources: int, destinations: int, add_self_loops: bool
) -> tuple[Plan, SelfLoops | None] | None:
    """The plan of the graph, and how its self-loops came about, if it is to have one per node."""
    flip = layer.flow != "source_to_target"
    try:
        plan = plan_for_edges(edges, sources, destinations, flip=flip)
        if not add_self_loops:
            return plan, None
        loops = self_loops(plan, edges, min(sources, destinations))
        return plan_for_edges(loops.edge_index, sources, destinations, flip=flip), loops
    except (IndexError, ValueError, TypeError):
        if leave_error_to_stock(edges):
            return None  # PyG's own code raises its own error about these indices
        raise


def _join_heads(layer: Any, out: Tensor) -> Tensor:
    """`[N, H, C]` side by side or averaged, as the layer is told."""
    return out.view(-1, layer.heads * layer.out_channels) if layer.concat else out.mean(dim=1)


def _finish(layer: Any, out: Tensor, root: Tensor | None) -> Tensor:
    """What GATConv and GATv2Conv do with the sums `[N, H, C]`."""
    out = _join_heads(layer, out)
    if root is not None:
        out = out + root
    if layer.bias is not None:
        out = out + layer.bias
    return out


def _attend(
    layer: Any, plan: Plan, scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums `[num_dst, H, C]`, and the attention `[E, H]` before and after dropout."""
    alpha = plan_softmax(plan, scores)
    dropped = functional.dropout(alpha, p=layer.dropout, training=layer.training)
    return mm_plan(plan, values, "sum", weight=dropped), alpha, dropped


def _own_edges(edge_index: Tensor, loops: SelfLoops | None) -> Tensor:
    """The edges that a caller gets, who may edit them: not those kept for the graph."""
    if loops is None:
        return edge_index
    # Stock appends int64 loops, so that int32 edges become int64.
    with outside_modes(edge_index.device):
        return loops.edge_index.to(torch.int64, copy=True)


# ---- GAT ---------------------------------------------------------------------------------------


def fused_gat(
    layer: Any, x: Any, edge_index: Any, edge_attr: Any, size: Any, return_weights: Any
) -> Any:
    """`GATConv.forward`, or `NotImplemented` where PyG's own must run."""
    if torch.compiler.is_compiling():
        return NotImplemented
    read = _read(layer, x, edge_index, size)
    if isinstance(read, str):
        return fell_back(layer, read)
    x_src, x_dst, edges = read
    linears = ("lin",) if layer.lin is not None else ("lin_src", "lin_dst")
    reason = _weights_refusal(layer, x_src, linears, ("att_src", "att_dst"))
    if reason is not None:
        return fell_back(layer, reason)
    edge_weight: Tensor | None = None
    if edge_attr is None or layer.lin_edge is None:
        if edge_attr is not None and len(edge_attr) != edges.size(1):
            return fell_back(layer, "edge_attr is not [E, D]")
        edge_attr = None
    else:
        edge_weight = edge_linear(layer, edge_attr, x_src, edges.size(1), layer.att_edge)
        if edge_weight is None:
            return fell_back(layer, EDGE_ATTR_REFUSED)
    sources, destinations = x_src.size(0), x_dst.size(0)
    if layer.add_self_loops and size is not None and min(size) != min(sources, destinations):
        return fell_back(layer, "size does not match x")
    planned = _planned(layer, edges, sources, destinations, layer.add_self_loops)
    if planned is None:
        return fell_back(layer, "edge_index was rejected")
    plan, loops = planned
    if edge_weight is not None and plan.num_edges == 0:
        return fell_back(layer, "edge_attr without edges")  # has no gradient then, not zeros
    record_fused(type(layer).__name__)

    heads, width = layer.heads, layer.out_channels
    root = layer.res(x_dst) if layer.res is not None else None
    one = type(x) not in (tuple, list)
    if layer.lin is not None:
        src = layer.lin(x_src)
        dst = src if one else layer.lin(x_dst)
    else:
        src, dst = layer.lin_src(x_src), layer.lin_dst(x_dst)
    if src is dst:
        a_src, a_dst = _per_head(src, heads, layer.att_src, layer.att_dst)
    else:
        (a_src,) = _per_head(src, heads, layer.att_src)
        (a_dst,) = _per_head(dst, heads, layer.att_dst)
    scores = plan_pair(plan, a_dst, a_src, "add")
    if edge_weight is not None:
        edge_attr = edge_features(layer, loops, edge_attr)
        # The sums over C first: no [E, H, C].
        folded = (edge_weight.view(heads, width, -1) * layer.att_edge.view(heads, width, 1)).sum(1)
        scores = scores + edge_term(edge_attr, folded)
    scores = functional.leaky_relu(scores, layer.negative_slope)
    out, _, alpha = _attend(layer, plan, scores, src.view(-1, heads, width))
    out = _finish(layer, out, root)
    return (out, (_own_edges(edge_index, loops), alpha)) if return_weights else out


class _HeadSums(PlanFunction):
    """`(x.view(N, H, C) * a).sum(-1)` for each `a` of `[1, H, C]`, in blocks that fit the cache.

    Sums as stock has them: in a product of matrices, the gradient of `a` would be added up over all
    nodes in one accumulator, and an infinity of one head would meet the zeros of the others.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int, *attention: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *attention)
        ctx.heads = heads
        out = tuple(x.new_empty(x.size(0), heads) for _ in attention)
        for part in row_blocks(x.size(0), x.size(1), _BLOCK_VALUES):
            values = x[part].view(-1, heads, x.size(1) // heads)
            for a, sums in zip(attention, out, strict=True):
                torch.sum(values * a, -1, out=sums[part])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *attention = ctx.saved_tensors
        need_x, _, *need = ctx.needs_input_grad
        values = x.view(-1, ctx.heads, x.size(1) // ctx.heads)
        columns = [grad.unsqueeze(-1) for grad in grads]
        if torch.is_grad_enabled() or any(is_batched(grad) for grad in grads):
            pairs = list(zip(columns, attention, strict=True))
            whole = sum((g * a for g, a in pairs[1:]), pairs[0][0] * pairs[0][1])
            sums = [(values * g).sum(0, keepdim=True) if n else None
                    for g, n in zip(columns, need, strict=True)]  # fmt: skip
            return whole.reshape(x.shape) if need_x else None, None, *sums
        dx = ops.empty_rows(x, *x.shape) if need_x else None
        parts: list[list[Tensor]] = [[] for _ in attention]
        for part in row_blocks(x.size(0), x.size(1), _BLOCK_VALUES):
            for k, (g, a) in enumerate(zip(columns, attention, strict=True)):
                if dx is not None and k == 0:
                    torch.mul(g[part], a, out=dx[part].view(values[part].shape))
                elif dx is not None:
                    dx[part].view(values[part].shape).addcmul_(g[part], a)
                if need[k]:
                    parts[k].append((values[part] * g[part]).sum(0, keepdim=True))
        d_attention = (torch.stack(found).sum(0) if found else None for found in parts)
        return dx, None, *d_attention


def _per_head(x: Tensor, heads: int, *attention: Tensor) -> tuple[Tensor, ...]:
    """The sums of `_HeadSums`, `[N, H]` each; x is `[N, H * C]`."""
    # Blocks are for a CPU's cache.
    if x.size(0) == 0 or not x.is_contiguous() or not x.is_cpu:
        values = x.view(x.size(0), heads, x.size(1) // heads)
        return tuple((values * a).sum(-1) for a in attention)
    out: tuple[Tensor, ...] = _HeadSums.apply(x, heads, *attention)
    return out


# ---- GATv2 -------------------------------------------------------------------------------------


def fused_gatv2(layer: Any, x: Any, edge_index: Any, edge_attr: Any, return_weights: Any) -> Any:
    """`GATv2Conv.forward`, or `NotImplemented` where PyG's own must run."""
    if torch.compiler.is_compiling():
        return NotImplemented
    read = _read(layer, x, edge_index, None)
    if isinstance(read, str):
        return fell_back(layer, read)
    x_src, x_dst, edges = read
    reason = _weights_refusal(layer, x_src, ("lin_l", "lin_r"), ("att",))
    if reason is not None:
        return fell_back(layer, reason)
    edge_weight: Tensor | None = None
    if edge_attr is not None:
        edge_weight = edge_linear(layer, edge_attr, x_src, edges.size(1), None)
        if edge_weight is None:
            return fell_back(layer, EDGE_ATTR_REFUSED)
    planned = _planned(layer, edges, x_src.size(0), x_dst.size(0), layer.add_self_loops)
    if planned is None:
        return fell_back(layer, "edge_index was rejected")
    plan, loops = planned
    record_fused(type(layer).__name__)

    heads, width = layer.heads, layer.out_channels
    root = layer.res(x_dst) if layer.res is not None else None
    src = layer.lin_l(x_src)
    if type(x) not in (tuple, list):
        dst = src if layer.share_weights else layer.lin_r(x_dst)
    else:
        dst = layer.lin_r(x_dst)
    if edge_weight is None:
        att, slope = layer.att.reshape(-1), layer.negative_slope
        scores = plan_scores(plan, dst.contiguous(), src.contiguous(), att, heads, slope)
    else:
        edge_attr = edge_features(layer, loops, edge_attr)
        scores = additive_scores(layer, plan, dst, src, edge_attr, edge_weight)
    out, _, alpha = _attend(layer, plan, scores, src.view(-1, heads, width))
    out = _finish(layer, out, root)
    return (out, (_own_edges(edge_index, loops), alpha)) if return_weights else out


# ---- Transformer -------------------------------------------------------------------------------


def fused_transformer(
    layer: Any, x: Any, edge_index: Any, edge_attr: Any, return_weights: Any
) -> Any:
    """`TransformerConv.forward`, or `NotImplemented` where PyG's own must run."""
    if torch.compiler.is_compiling():
        return NotImplemented
    read = _read(layer, x, edge_index, None)
    if isinstance(read, str):
        return fell_back(layer, read)
    x_src, x_dst, edges = read
    reason = _weights_refusal(layer, x_src, ("lin_query", "lin_key", "lin_value"), ())
    if reason is not None:
        return fell_back(layer, reason)
    edge_weight: Tensor | None = None
    if edge_attr is not None or layer.lin_edge is not None:
        edge_weight = edge_linear(layer, edge_attr, x_src, edges.size(1), None)
        if edge_weight is None or edge_attr.dim() != 2:
            return fell_back(layer, EDGE_ATTR_REFUSED)
        if edge_weight.size(1) > layer.out_channels:
            return fell_back(layer, "edge_attr is wider than a head")
    planned = _planned(layer, edges, x_src.size(0), x_dst.size(0), False)
    if planned is None:
        return fell_back(layer, "edge_index was rejected")
    plan, _ = planned
    record_fused(type(layer).__name__)

    heads, width = layer.heads, layer.out_channels
    query = layer.lin_query(x_dst).contiguous()
    key = layer.lin_key(x_src).contiguous()
    value = layer.lin_value(x_src).view(-1, heads, width)
    dtype = accumulator_dtype(query.dtype)
    factor = 1.0 / math.sqrt(width)
    scale = plan.memo(
        ("pyg.row_constant", factor, dtype),
        lambda: torch.full((plan.num_dst,), factor, dtype=dtype),
    )
    scores = plan_dot(plan, query, key, heads=heads, row_scale=scale)
    if edge_weight is not None:
        scores = scores + edge_scores(layer, plan, query, edge_attr, edge_weight)
    out, alpha, dropped = _attend(layer, plan, scores, value)
    if edge_weight is not None:
        out = out + edge_values(layer, plan, dropped, edge_attr, edge_weight)
    out = _join_heads(layer, out)
    if layer.root_weight:
        root = layer.lin_skip(x_dst)
        if layer.lin_beta is not None:
            beta = layer.lin_beta(torch.cat([out, root, out - root], dim=-1)).sigmoid()
            out = beta * root + (1 - beta) * out
        else:
            out = out + root
    return (out, (edge_index, alpha)) if isinstance(return_weights, bool) else out
