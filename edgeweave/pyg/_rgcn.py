"""`forward` of RGCNConv and FastRGCNConv: one pass over the edges instead of one per relation.

Stock selects each relation's edges anew in every call and multiplies all nodes by each relation's
matrix, whether they have such edges or not; FastRGCNConv gathers a matrix per edge.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import FastRGCNConv, RGCNConv
from torch_geometric.nn.conv import rgcn_conv

from edgeweave._plan._relations import relational_sum, relations_of
from edgeweave.pyg._arguments import find_plan
from edgeweave.pyg._eligibility import INDEX_DTYPES
from edgeweave.pyg._linear import can_multiply, has_faster_linear, linear
from edgeweave.pyg._propagate import aggregation_of
from edgeweave.pyg._report import record_fused
from edgeweave.pyg._whole_layer import fell_back, read_pair, whole_layer_refusal

__all__ = ["fused_rgcn"]

_HOMES = {RGCNConv: rgcn_conv.__name__, FastRGCNConv: rgcn_conv.__name__}


def fused_rgcn(layer: Any, x: Any, edge_index: Any, edge_type: Any) -> Any:
    """`RGCNConv.forward` or `FastRGCNConv.forward`, or `NotImplemented`."""
    if torch.compiler.is_compiling():
        return NotImplemented
    reason = _refusal(layer, x, edge_type)
    if reason is not None:
        return fell_back(layer, reason)
    read = read_pair(layer, x, edge_index, None)
    if isinstance(read, str):
        return fell_back(layer, read)
    x_src, x_dst, edges = read
    if not x_src.is_cpu:
        return fell_back(layer, f"x is on {x_src.device.type}")
    weight = layer.weight
    if (
        x_src.dtype is not weight.dtype
        or x_src.size(1) != weight.size(1)
        or (layer.root is not None and x_dst.size(1) != layer.root.size(0))
    ):
        return fell_back(layer, "x is not [N, in_channels] in the dtype of the weights")
    if edge_type.size(0) != edges.size(1):
        return fell_back(layer, "edge_type is not [E]")
    flip = layer.flow != "source_to_target"
    plan = find_plan(edges, x_src.size(0), x_dst.size(0), flip)
    if plan is None:
        return fell_back(layer, "edge_index was rejected")
    relations = relations_of(plan, edge_type, layer.num_relations)
    if relations is None:
        return fell_back(layer, "edge_type has values that are no relation's")
    record_fused(type(layer).__name__)
    if layer.comp is not None:
        weight = (layer.comp @ weight.flatten(1)).view(-1, *weight.shape[1:])
    mean = aggregation_of(layer) == "mean"
    out = relational_sum(plan, relations, x_src.contiguous(), weight.contiguous(), mean)
    return _finish(layer, out, x_dst)


def _refusal(layer: Any, x: Any, edge_type: Any) -> str | None:
    """Why PyG's own code must run whatever the edges, or None."""
    reason = whole_layer_refusal(layer, _HOMES)
    if reason is not None:
        return reason
    if aggregation_of(layer) not in ("sum", "mean"):
        return "the aggregation is not a plain sum or mean"
    if layer.num_blocks is not None:
        return "num_blocks is given"
    if x is None or (type(x) is tuple and x[0] is None):
        return "x is None: the nodes are numbers"
    if type(x) is list:
        return "x is a list"
    for name in ("weight", "comp", "root", "bias"):
        value = layer.__dict__["_parameters"].get(name, NotImplemented)
        if value is not None and type(value) is not nn.Parameter:
            return f"{name} is not a parameter"
        if value is not None and value.dtype not in (torch.float32, torch.float64):
            return f"{name} has dtype {value.dtype}"
    if type(edge_type) is not Tensor or edge_type.dtype not in INDEX_DTYPES:
        return "edge_type is not a tensor of int32 or int64"
    if edge_type.dim() != 1 or not edge_type.is_cpu:
        return "edge_type is not [E] on the CPU"
    return None


def _finish(layer: Any, out: Tensor, x: Tensor) -> Tensor:
    """Adds what the nodes themselves contribute, and the bias."""
    root = layer.root
    if root is not None:
        turned = root.t().contiguous()
        bias = layer.bias
        if can_multiply(x, turned, bias) and has_faster_linear(x, turned):
            return out + linear(x, turned, bias)
        out = out + x @ root
    return out if layer.bias is None else out + layer.bias
