"""Layers whose messages go through a network of their own: EdgeConv, CGConv, GINEConv.

What such a message begins with is linear in the features of the two nodes, and so becomes products
over the nodes: `pre[e] = p[dst] + q[src] (+ r[e])`. The rest of the network runs on tiles of
edges that stay in the cache and is reduced at once; backward runs it again, tile by tile. Nothing
is kept per edge, where stock keeps every intermediate result of every message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import MLP, CGConv, EdgeConv, GINEConv
from torch_geometric.nn.dense.linear import Linear

from edgeweave._plan import plan_for_edges
from edgeweave._plan._edge_network import Network, run_network
from edgeweave.pyg._arguments import read_edges
from edgeweave.pyg._eligibility import features_refusal, has_hooks
from edgeweave.pyg._linear import plain_parameters

__all__ = ["fused_network"]

# What treats every row alike and draws no random numbers. Exact types: a subclass may do anything.
_ROW_WISE = (
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
    nn.Hardswish,
    nn.LayerNorm,
)


def _split_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias).contiguous()


def _first_and_rest(module: Any) -> tuple[Any, Callable[[Tensor], Tensor], list[Any]] | None:
    """The first linear layer, the function behind it and the modules in that; None if unknown."""
    if has_hooks(module):
        return None
    if type(module) in (nn.Linear, Linear):
        return module, lambda x: x, []
    if type(module) is nn.Sequential and len(module) > 0:
        first, *others = module
        found = _first_and_rest(first)
        if found is None or not all(_is_row_wise(m) for m in others):
            return None
        lead, begin, used = found

        def rest(x: Tensor) -> Tensor:
            x = begin(x)
            for other in others:
                x = other(x)
            return x

        return lead, rest, [*used, *others]
    if type(module) is MLP:
        return _split_mlp(module)
    return None


def _is_row_wise(module: Any) -> bool:
    if has_hooks(module):
        return False
    if type(module) in (nn.Linear, Linear):
        return plain_parameters(module, type(module)) is not None
    if type(module) is nn.Sequential:
        return all(_is_row_wise(m) for m in module)
    if type(module) is nn.Dropout:
        return not module.training or module.p == 0
    if type(module) is nn.LayerNorm:
        return len(module.normalized_shape) == 1
    return type(module) in _ROW_WISE


def _split_mlp(mlp: Any) -> tuple[Any, Callable[[Tensor], Tensor], list[Any]] | None:
    """The same for PyG's `MLP`, whose norms must be none and whose dropout must be off."""
    if any(type(norm) is not nn.Identity or has_hooks(norm) for norm in mlp.norms):
        return None
    if (mlp.training and any(mlp.dropout)) or not len(mlp.lins):
        return None
    if mlp.act is not None and not (isinstance(mlp.act, nn.Module) and _is_row_wise(mlp.act)):
        return None
    if not all(_is_row_wise(lin) for lin in mlp.lins):
        return None
    activate: Callable[[Tensor], Tensor] = nn.Identity() if mlp.act is None else mlp.act
    first, *others = mlp.lins
    last = bool(mlp.plain_last)

    def rest(x: Tensor) -> Tensor:
        for other in others:
            x = other(activate(x))
        return x if last else activate(x)

    return first, rest, [*others, *([mlp.act] if mlp.act is not None else [])]


def _row(x: Any, name: str) -> str | None:
    reason = features_refusal(x, name)
    return reason if reason is not None or x.dim() == 2 else f"{name} is not [N, F]"


def _edge_conv(layer: Any, kwargs: dict[str, Any]) -> Network | str:
    if set(kwargs) - {"size"} != {"x"}:
        return "propagate was given other arguments than the layer's own"
    src, dst = kwargs["x"]
    found = _first_and_rest(layer.nn)
    if found is None:
        return "its nn is not linear layers and activations of torch"
    lead, rest, used = found
    parts = plain_parameters(lead, type(lead))
    width = dst.size(1)
    if parts is None or parts[0].dtype is not src.dtype or parts[0].size(1) != 2 * width:
        return "its nn does not begin with a plain linear layer, in the dtype of x"
    if src.size(1) != width:
        return "the two parts of x differ in width"
    weight, bias = parts
    # W [x_i || x_j - x_i] = (W1 - W2) x_i + W2 x_j
    own, other = weight[:, :width], weight[:, width:]
    p = _split_linear(dst, own - other, bias)
    parameters = [v for m in used for v in m.parameters()]
    in_place = any(getattr(m, "inplace", False) for top in used for m in top.modules())
    return Network(_split_linear(src, other), rest, p, parameters=parameters, in_place=in_place)


def _gate(pre: Tensor) -> Tensor:
    left, right = pre.chunk(2, dim=1)
    return left.sigmoid() * functional.softplus(right)


def _cg_conv(layer: Any, kwargs: dict[str, Any]) -> Network | str:
    if set(kwargs) - {"size", "edge_attr"} != {"x"}:
        return "propagate was given other arguments than the layer's own"
    src, dst = kwargs["x"]
    attr = kwargs.get("edge_attr")
    found = [plain_parameters(lin, nn.Linear) for lin in (layer.lin_f, layer.lin_s)]
    if None in found:
        return "lin_f or lin_s is not a plain linear layer"
    (wf, bf), (ws, bs) = cast(Any, found)
    sizes = dst.size(1), src.size(1), 0 if attr is None else attr.size(-1)
    if wf.shape != ws.shape or wf.dtype is not src.dtype or wf.size(1) != sum(sizes):
        return "lin_f or lin_s is not of x's width and dtype"
    if attr is not None:
        reason = _row(attr, "edge_attr")
        if reason is not None or attr.dtype is not src.dtype:
            return reason or "edge_attr is not in the dtype of x"
    weight = torch.cat([wf, ws])
    bias = None if bf is None or bs is None else torch.cat([bf, bs])
    if bias is None and not (bf is None and bs is None):
        return "one of lin_f and lin_s has no bias"
    own, other = weight[:, : sizes[0]], weight[:, sizes[0] : sizes[0] + sizes[1]]
    w = None if attr is None else weight[:, sizes[0] + sizes[1] :]
    return Network(_split_linear(src, other), _gate, _split_linear(dst, own, bias), attr, w)


def _gine(layer: Any, kwargs: dict[str, Any]) -> Network | str:
    if set(kwargs) - {"size"} != {"x", "edge_attr"}:
        return "propagate was given other arguments than the layer's own"
    src, attr = kwargs["x"][0], kwargs["edge_attr"]
    reason = _row(attr, "edge_attr")
    if reason is not None:
        return reason
    if layer.lin is not None:
        found = plain_parameters(layer.lin, Linear)
        if found is None or found[0].size(1) != attr.size(1):
            return "lin is not a plain linear layer of edge_attr's width"
        w, bias = found
        if attr.dtype is not src.dtype or w.dtype is not src.dtype or w.size(0) != src.size(1):
            return "lin is not in the width and dtype of x"
        q = src if bias is None else src + bias
        return Network(q.contiguous(), torch.relu, r=attr, w=w)
    if attr.dtype is not src.dtype or attr.size(1) != src.size(1):
        return "edge_attr is not in the width and dtype of x"
    return Network(src.contiguous(), torch.relu, r=attr)


_SPLITS: dict[Any, Callable[[Any, dict[str, Any]], Network | str]] = {
    EdgeConv: _edge_conv,
    CGConv: _cg_conv,
    GINEConv: _gine,
}


def fused_network(
    kind: Any,
    layer: Any,
    edge_index: Any,
    kwargs: dict[str, Any],
    reduce: str | None,
) -> Tensor | str:
    """The output of `propagate`, or why it cannot be computed here.

    Args:
        kind: The class of PyG that defines the layer's `message`.
        layer: The layer.
        edge_index: First argument of `propagate`.
        kwargs: Its keyword arguments.
        reduce: The layer's reduction, None if it is none of ours.
    """
    split = _SPLITS[kind]
    if reduce is None:
        return "the aggregation is not a plain sum, mean, max or min"
    read = read_edges(layer, edge_index, kwargs.get("size"))
    if isinstance(read, str):
        return read
    edges, rows, cols = read
    x = kwargs.get("x")
    if type(x) not in (tuple, list) or len(cast(Any, x)) != 2:
        return "x is not a pair"
    src, dst = cast(Any, x)
    if dst is None and split is _gine:
        dst = src  # only its rows count, and it has none of its own
        if cols is None:
            return "x has no destinations, and size is not given"
    reason = _row(src, "x") or _row(dst, "x")
    if reason is not None:
        return reason
    if src.dtype not in (torch.float32, torch.float64):
        # Each part would be rounded by itself, and the difference of two weights too.
        return f"x has dtype {src.dtype}"
    if src.dtype is not dst.dtype or torch.is_autocast_enabled("cpu"):
        return "the two parts of x differ in dtype, or autocast is on"
    counts = src.size(0), dst.size(0) if cast(Any, x)[1] is not None else cols
    if rows not in (None, counts[0]) or cols not in (None, counts[1]):
        return "size does not match x"
    forward = layer.flow == "source_to_target"
    if (not forward and counts[0] != counts[1]) or layer.node_dim not in (0, -2):
        return "x is a pair of different lengths and flow='target_to_source'"
    try:
        plan = plan_for_edges(edges, *counts, flip=not forward)
    except (IndexError, ValueError, TypeError):
        return "edge_index was rejected"
    network = split(layer, kwargs)
    if isinstance(network, str):
        return network
    if network.r is not None and network.r.size(0) != plan.num_edges:
        return "edge_attr is not [E, D]"
    return run_network(plan, network, reduce)
