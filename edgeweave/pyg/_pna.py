"""`forward` of PNAConv without a tensor of `[E, ...]` or one of all scaled aggregations.

The first linear layer of a message, `W [x_i || x_j] + b`, is two products over the nodes:
`a_i + b_j`. Then sum, mean, max and min of messages are those of `b_j` plus `a_i`, variance and
deviation do not see `a_i` at all, and all of them come from one pass over the edges. Scalers
multiply rows, so the first linear layer behind them is applied to the unscaled aggregations, once
per scaler, and only its results, which are narrower, are scaled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import PNAConv
from torch_geometric.nn.aggr.scaler import DegreeScalerAggregation
from torch_geometric.nn.conv import pna_conv
from torch_geometric.nn.dense.linear import Linear

from edgeweave._plan import Plan
from edgeweave._plan._edge_multi import plan_edge_multi
from edgeweave.pyg._aggregations import aggregate, multi_names, reductions_of
from edgeweave.pyg._arguments import find_plan, own_copy
from edgeweave.pyg._eligibility import has_hooks
from edgeweave.pyg._linear import plain_parameters
from edgeweave.pyg._report import record_fused
from edgeweave.pyg._whole_layer import fell_back, read_pair, whole_layer_refusal

__all__ = ["fused_pna"]

_HOMES = {PNAConv: pna_conv.__name__}
_SCALERS = ("identity", "amplification", "attenuation", "linear", "inverse_linear")


def fused_pna(layer: Any, x: Any, edge_index: Any, edge_attr: Any) -> Any:
    """`PNAConv.forward`, or `NotImplemented` where PyG's own must run."""
    if torch.compiler.is_compiling():
        return NotImplemented
    reason = whole_layer_refusal(layer, _HOMES)
    if reason is None and edge_attr is not None:
        reason = "edge_attr is given"
    if reason is None and type(x) in (tuple, list):
        reason = "x is a pair"
    if reason is not None:
        return fell_back(layer, reason)
    read = read_pair(layer, x, edge_index, None)
    if isinstance(read, str):
        return fell_back(layer, read)
    x, _, edges = read
    if x.dtype not in (torch.float32, torch.float64):
        # The two parts of a message would be rounded each by itself.
        return fell_back(layer, f"x has dtype {x.dtype}")
    towers = layer.towers
    if x.size(1) != (layer.F_in * towers if layer.divide_input else layer.F_in):
        return fell_back(layer, "x is not [N, in_channels]")
    reason = _layers_refusal(layer, x)
    if reason is not None:
        return fell_back(layer, reason)
    scaler: Any = layer.aggr_module
    names = reductions_of(scaler.aggr)
    if type(scaler) is not DegreeScalerAggregation or has_hooks(scaler) or names is None:
        return fell_back(layer, "its aggregations are not those that run in one pass")
    if scaler.aggr.mode != "cat" or not set(scaler.scaler) <= set(_SCALERS):
        return fell_back(layer, "its aggregations are not concatenated, or not scaled by degree")
    nodes = x.size(0)
    plan = find_plan(edges, nodes, nodes, layer.flow != "source_to_target")
    if plan is None:
        return fell_back(layer, "edge_index was rejected")
    record_fused(type(layer).__name__)
    x = own_copy(x)
    own, other = _messages(layer, x)
    found = _aggregate(plan, own, other, names)
    return layer.lin(_combine(layer, scaler, plan, x, found))


def _layers_refusal(layer: Any, x: Tensor) -> str | None:
    """Why the layer's parts cannot be applied to nodes and aggregations, or None."""
    width = layer.F_in
    scaler: Any = layer.aggr_module
    for pre in layer.pre_nns:
        found = _first(pre, x)
        if found is None or len(pre) != 1 or found.shape[1] != 2 * width:
            return "its pre_nns are not one plain linear layer each, in the dtype of x"
    for post in layer.post_nns:
        found = _first(post, x)
        if (
            found is None
            or found.shape[1] != (len(scaler.aggr.aggrs) * len(scaler.scaler) + 1) * width
        ):
            return "its post_nns do not begin with a plain linear layer, in the dtype of x"
    return None


def _first(module: Any, x: Tensor) -> nn.Parameter | None:
    """The weight of the first linear layer of a `Sequential` of PyG's, None if it is changed."""
    if type(module) is not nn.Sequential or has_hooks(module) or len(module) == 0:
        return None
    found = plain_parameters(module[0], Linear)
    if found is None or found[0].dtype is not x.dtype or found[1] is None:
        return None
    return found[0]


def _messages(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts of a message, `[N, T * F]` each: of its own node and of the other."""
    width = layer.F_in
    weights = [pre[0].weight for pre in layer.pre_nns]
    bias = torch.cat([pre[0].bias for pre in layer.pre_nns])
    if layer.divide_input and layer.towers > 1:
        parts = x.chunk(layer.towers, dim=1)
        pairs = list(zip(parts, weights, strict=True))
        own = torch.cat([p @ w[:, :width].t() for p, w in pairs], dim=1) + bias
        return own, torch.cat([p @ w[:, width:].t() for p, w in pairs], dim=1)
    whole = torch.cat(weights)
    own = nn.functional.linear(x, whole[:, :width], bias)
    return own, nn.functional.linear(x, whole[:, width:])


def _aggregate(plan: Plan, own: Tensor, other: Tensor, names: list[str]) -> list[Tensor]:
    """The reductions of `own[i] + other[j]`, `[N, T * F]` each, as PyG defines them."""
    asked, correction = multi_names(names)
    results = dict(zip(asked, plan_edge_multi(plan, other, asked, correction), strict=True))
    degree = _degree(plan, own.dtype)
    if plan.memo("pyg.has_empty", lambda: bool((degree == 0).any())):
        own = own.masked_fill(degree == 0, 0)  # no messages, no part in them: not even inf * 0
    out = aggregate(results, names)
    for k, name in enumerate(names):
        if name == "sum":
            out[k] = torch.addcmul(out[k], own, degree)
        elif name not in ("var", "std"):
            out[k] = out[k] + own
    return out


def _degree(plan: Plan, dtype: torch.dtype) -> Tensor:
    """Number of edges into each node, `[N, 1]`."""
    return plan.memo(("pyg.degree", dtype), lambda: plan.in_degree().to(dtype).unsqueeze(-1))


def _scale(scaler: Any, name: str, degree: Tensor) -> Tensor | None:
    """The factor of each row `[N, 1]` for a scaler's name, None for 1."""
    linear: Tensor = scaler.avg_deg_lin
    log: Tensor = scaler.avg_deg_log
    if name == "identity":
        return None
    if name == "amplification":
        return torch.log(degree + 1) / log
    if name == "attenuation":
        return log / torch.log(degree.clamp(min=1) + 1)
    return degree / linear if name == "linear" else linear / degree.clamp(min=1)


def _combine(layer: Any, scaler: Any, plan: Plan, x: Tensor, found: list[Tensor]) -> Tensor:
    """What PyG's code computes of `cat([x, scaled aggregations])`, `[N, out_channels]`."""
    width, towers = layer.F_in, layer.towers
    degree = plan.memo(("pyg.degree", x.dtype), lambda: plan.in_degree().to(x.dtype).unsqueeze(-1))
    scales = [_scale(scaler, name, degree) for name in scaler.scaler]
    outs = []
    for t, post in enumerate(layer.post_nns):
        columns = slice(t * width, (t + 1) * width)
        own = x[:, columns] if layer.divide_input else x
        rows = torch.cat([part[:, columns] for part in found], dim=1)
        weight, bias = post[0].weight, post[0].bias
        size = rows.size(1)
        # One product for all scalers: [S * F_out, A * F].
        per_scaler = weight[:, width:].unflatten(1, (len(scales), size)).transpose(0, 1)
        parts = nn.functional.linear(rows, per_scaler.reshape(-1, size))
        out = nn.functional.linear(own, weight[:, :width], bias)
        for part, scale in zip(parts.chunk(len(scales), dim=1), scales, strict=True):
            out = out + part if scale is None else torch.addcmul(out, part, scale)
        for module in post[1:]:
            out = module(out)
        outs.append(out)
    return torch.cat(outs, dim=1) if towers > 1 else outs[0]
