"""Layers whose messages go through a network of their own: EdgeConv, PointNetConv, NNConv, ...

What such a message begins with is linear in the features of the two nodes, and so becomes products
over the nodes: `pre[e] = p[dst] + q[src] (+ r[e])`. The rest of the network runs on tiles of
edges that stay in the cache and is reduced at once; backward runs it again, tile by tile. Nothing
is kept per edge, where stock keeps every intermediate result of every message, for NNConv a matrix.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import MLP, CGConv, EdgeConv, GINEConv, NNConv, PointNetConv
from torch_geometric.nn.dense.linear import Linear

from edgeweave._plan._edge_network import Network, run_network
from edgeweave.pyg._arguments import find_plan, own_copy, read_edges
from edgeweave.pyg._eligibility import (
    autocast_is_on,
    devices_refusal,
    features_refusal,
    has_hooks,
)
from edgeweave.pyg._linear import plain_parameters

__all__ = ["fused_network"]

# Functions of single numbers without parameters. Exact types: a subclass may do anything.
_ACTIVATIONS = (
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
)

# A function of rows and of the tensors that it was made with.
_Step = Callable[..., Tensor]


class _Rest:
    """Modules behind the first linear layer, frozen: what they are now, not what becomes of them.

    Backward runs them again, when a module may have been edited, exchanged or put in training mode.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[_Step, slice]] = []
        self.tensors: list[Tensor] = []

    def add(self, step: _Step, *tensors: Tensor) -> None:
        begin = len(self.tensors)
        self.tensors += tensors
        self.steps.append((step, slice(begin, len(self.tensors))))

    def __call__(self, x: Tensor, *tensors: Tensor) -> Tensor:
        for step, part in self.steps:
            x = step(x, *tensors[part])
        return x


def _split_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias).contiguous()


# Weight and bias of a plain linear layer, None if it is another one.
_Lead = tuple[Tensor, Tensor | None] | None


def _take_apart(module: Any) -> tuple[_Lead, _Rest] | None:
    """The first linear layer of a network and what is behind it; None if it is not known."""
    found = _modules_of(module)
    if not found or type(found[0]) not in (nn.Linear, Linear):
        return None
    rest = _Rest()
    for part in found[1:]:
        if not _freeze(part, rest):
            return None
    return plain_parameters(found[0], type(found[0])), rest


def _modules_of(module: Any) -> list[Any] | None:
    """The modules that run one after the other; None if that is not all there is to it."""
    if has_hooks(module):
        return None
    if type(module) is nn.Sequential:
        out = []
        for child in module:
            found = _modules_of(child)
            if found is None:
                return None
            out += found
        return out
    if type(module) is not MLP:
        return [module]
    # PyG's: norms must be none, and dropout off.
    if any(type(norm) is not nn.Identity or has_hooks(norm) for norm in module.norms):
        return None
    if (module.training and any(module.dropout)) or not len(module.lins):
        return None
    if module.act is not None and not isinstance(module.act, nn.Module):
        return None
    active = [] if module.act is None else [module.act]
    out = [part for lin in module.lins for part in (lin, *active)]
    if module.plain_last and active:
        out.pop()
    return out


def mlp_norms(module: Any) -> Any:
    """The norms of PyG's `MLP`."""
    return module.norms


def _freeze(module: Any, rest: _Rest) -> bool:
    """Adds what a module does to each row; False if it is not known, or does more than that."""
    if has_hooks(module):
        return False
    kind = type(module)
    if kind in (nn.Linear, Linear):
        found = plain_parameters(module, kind)
        if found is None:
            return False
        weight, bias = found
        rest.add(functional.linear, weight, *(() if bias is None else (bias,)))
    elif kind is nn.LayerNorm:
        shape, eps = tuple(module.normalized_shape), module.eps
        own = [t for t in (module.weight, module.bias) if t is not None]
        if len(shape) != 1 or "parametrizations" in module.__dict__["_modules"]:
            return False
        rest.add(lambda x, w=None, b=None: functional.layer_norm(x, shape, w, b, eps), *own)
    elif kind is nn.Dropout:
        return not module.training or module.p == 0
    elif kind in _ACTIVATIONS:
        twin = copy.copy(module)
        twin.__dict__["inplace"] = False
        rest.add(twin.forward)
    else:
        return False
    return True


def _row(x: Any, name: str) -> str | None:
    reason = features_refusal(x, name)
    return reason if reason is not None or x.dim() == 2 else f"{name} is not [N, F]"


def _edge_conv(layer: Any, kwargs: dict[str, Any]) -> Network | str:
    src, dst = kwargs["x"]
    found = _take_apart(layer.nn)
    if found is None:
        return "its nn is not linear layers and activations of torch"
    parts, rest = found
    width = dst.size(1)
    if parts is None or parts[0].dtype is not src.dtype or parts[0].size(1) != 2 * width:
        return "its nn does not begin with a plain linear layer, in the dtype of x"
    if src.size(1) != width:
        return "the two parts of x differ in width"
    weight, bias = parts
    # W [x_i || x_j - x_i] = (W1 - W2) x_i + W2 x_j, the same for x - c but for W1 c. Differences of
    # features with a common offset, as coordinates have, would cancel without c.
    own, other = weight[:, :width], weight[:, width:]
    center = _center(dst)
    near = dst - center
    far = near if src is dst else src - center
    constant = functional.linear(center, own, bias)
    p = functional.linear(near, own - other, constant)
    return Network(_split_linear(far, other), rest, p.contiguous(), tensors=rest.tensors)


def _center(x: Tensor) -> Tensor:
    """A constant in the middle of each column, 0 where it holds infinities or NaN."""
    if x.size(0) == 0:
        return x.new_zeros(x.size(1))
    with torch.no_grad():
        return torch.nan_to_num(x.mean(0), nan=0.0, posinf=0.0, neginf=0.0)


def _gate(pre: Tensor) -> Tensor:
    left, right = pre.chunk(2, dim=1)
    return left.sigmoid() * functional.softplus(right)


def _cg_conv(layer: Any, kwargs: dict[str, Any]) -> Network | str:
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
    dst = own_copy(dst)
    src = dst if kwargs["x"][0] is kwargs["x"][1] else own_copy(src)
    w = None if attr is None else weight[:, sizes[0] + sizes[1] :]
    return Network(_split_linear(src, other), _gate, _split_linear(dst, own, bias), attr, w)


def _gine(layer: Any, kwargs: dict[str, Any]) -> Network | str:
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
        q = own_copy(src) if bias is None else src + bias
        return Network(q.contiguous(), torch.relu, r=attr, w=w)
    if attr.dtype is not src.dtype or attr.size(1) != src.size(1):
        return "edge_attr is not in the width and dtype of x"
    return Network(own_copy(src).contiguous(), torch.relu, r=attr)


def _nn_conv(layer: Any, kwargs: dict[str, Any]) -> Network | str:
    src, attr = kwargs["x"][0], kwargs["edge_attr"]
    reason = _row(attr, "edge_attr")
    if reason is not None:
        return reason
    found = _take_apart(layer.nn)
    if found is None:
        return "its nn is not linear layers and activations of torch"
    parts, rest = found
    if parts is None or parts[0].size(1) != attr.size(1) or attr.dtype is not src.dtype:
        return "its nn does not begin with a plain linear layer of edge_attr's width and dtype"
    weight, bias = parts
    inputs, outputs = layer.in_channels_l, layer.out_channels
    if weight.dtype is not src.dtype or src.size(1) != inputs:
        return "x is not in the width and dtype of the layer"
    # Beside each other in one row: the features of the source, and the first layer of nn.
    first = src.new_zeros(weight.size(0)) if bias is None else bias
    q = torch.cat([src, first.expand(src.size(0), -1)], 1)
    w = torch.cat([weight.new_zeros(inputs, attr.size(1)), weight])

    def product(pre: Tensor, *tensors: Tensor) -> Tensor:
        matrices = rest(pre[:, inputs:], *tensors).view(pre.size(0), inputs, outputs)
        return torch.bmm(pre[:, :inputs].unsqueeze(1), matrices).squeeze(1)

    return Network(q, product, r=attr, w=w, tensors=rest.tensors, width=inputs * outputs)


def _point_net(layer: Any, kwargs: dict[str, Any]) -> Network | str:
    (near, far), features = kwargs["pos"], kwargs["x"][0]
    found = _take_apart(layer.local_nn) if layer.local_nn is not None else None
    if found is None:
        return "its local_nn is not linear layers and activations of torch"
    parts, rest = found
    width = 0
    if features is not None:
        reason = _row(features, "x")
        if reason is not None or features.dtype is not near.dtype:
            return reason or "x is not in the dtype of pos"
        width = features.size(1)
        if features.size(0) != near.size(0):
            return "x and pos differ in length"
    if parts is None or parts[0].dtype is not near.dtype:
        return "its local_nn does not begin with a plain linear layer in the dtype of pos"
    weight, bias = parts
    if near.size(1) != far.size(1) or weight.size(1) != width + near.size(1):
        return "its local_nn does not begin with a linear layer of x's and pos's width"
    hidden = weight.size(0)
    own, turned = weight[:, :width], weight[:, width:]
    if features is None:
        lead_rows = near.new_zeros(hidden) if bias is None else bias
        projected = lead_rows.expand(near.size(0), -1)
    else:
        projected = functional.linear(features, own, bias)
    # Differences of positions are made before they are multiplied: neighbours are close to each
    # other, and products of the positions themselves would cancel.
    q = torch.cat([projected, near], 1)
    p = torch.cat([far.new_zeros(far.size(0), hidden), -far], 1)

    def network(pre: Tensor, turned: Tensor, *tensors: Tensor) -> Tensor:
        return rest(pre[:, :hidden] + functional.linear(pre[:, hidden:], turned), *tensors)

    return Network(q, network, p, tensors=[turned, *rest.tensors])


@dataclass(frozen=True)
class _Kind:
    """A layer whose messages are taken apart.

    Attributes:
        split: Makes the network, or says why it cannot be made.
        needs: What `propagate` must be given.
        takes: What it may be given besides; `size` always.
        pair: Which of these is the pair of the two sides.
        source_only: Messages are of the source alone: destinations need no features.
    """

    split: Callable[[Any, dict[str, Any]], Network | str]
    needs: frozenset[str]
    takes: frozenset[str] = frozenset()
    pair: str = "x"
    source_only: bool = False


_KINDS: dict[Any, _Kind] = {
    EdgeConv: _Kind(_edge_conv, frozenset({"x"})),
    CGConv: _Kind(_cg_conv, frozenset({"x"}), frozenset({"edge_attr"})),
    GINEConv: _Kind(_gine, frozenset({"x", "edge_attr"}), source_only=True),
    NNConv: _Kind(_nn_conv, frozenset({"x", "edge_attr"}), source_only=True),
    PointNetConv: _Kind(_point_net, frozenset({"x", "pos"}), pair="pos"),
}


def _is_pair(value: Any) -> bool:
    return type(value) in (tuple, list) and len(value) == 2


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
    known = _KINDS[kind]
    if reduce is None:
        return "the aggregation is not a plain sum, mean, max or min"
    read = read_edges(layer, edge_index, kwargs.get("size"))
    if isinstance(read, str):
        return read
    edges, rows, cols = read
    pair = kwargs.get(known.pair)
    if not _is_pair(pair) or not _is_pair(kwargs.get("x")):
        return "x is not a pair"
    src, dst = cast(Any, pair)
    if dst is None and known.source_only:
        dst = src  # only its rows count, and it has none of its own
        if cols is None:
            return "x has no destinations, and size is not given"
    reason = _row(src, "x") or _row(dst, "x")
    if reason is not None:
        return reason
    if src.dtype not in (torch.float32, torch.float64):
        # Each part would be rounded by itself, and the difference of two weights too.
        return f"x has dtype {src.dtype}"
    if src.dtype is not dst.dtype or autocast_is_on():
        return "the two parts of x differ in dtype, or autocast is on"
    counts = src.size(0), dst.size(0) if cast(Any, pair)[1] is not None else cols
    if rows not in (None, counts[0]) or cols not in (None, counts[1]):
        return "size does not match x"
    forward = layer.flow == "source_to_target"
    if (not forward and counts[0] != counts[1]) or layer.node_dim not in (0, -2):
        return "x is a pair of different lengths and flow='target_to_source'"
    reason = devices_refusal(src, dst, edges)
    if reason is not None:
        return reason
    plan = find_plan(edges, *counts, not forward)
    if plan is None:
        return "edge_index was rejected"
    given = set(kwargs) - {"size"}
    if not known.needs <= given <= known.needs | known.takes:
        return "propagate was given other arguments than the layer's own"
    network = known.split(layer, kwargs)
    if isinstance(network, str):
        return network
    if network.r is not None and network.r.size(0) != plan.num_edges:
        return "edge_attr is not [E, D]"
    return run_network(plan, network, reduce)
