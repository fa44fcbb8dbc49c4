"""Layers whose messages go through a network of their own: EdgeConv, CGConv, GINEConv.

What such a message begins with is linear in the features of the two nodes, and so becomes products
over the nodes: `pre[e] = p[dst] + q[src] (+ r[e])`. The rest of the network runs on tiles of
edges that stay in the cache and is reduced at once; backward runs it again, tile by tile. Nothing
is kept per edge, where stock keeps every intermediate result of every message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import MLP, CGConv, EdgeConv, GINEConv
from torch_geometric.nn.dense.linear import Linear

from edgeweave._native import ops
from edgeweave._plan import Plan, plan_for_edges, plan_minmax, plan_sum
from edgeweave._plan._composite import _ends, reduce_messages
from edgeweave._plan._functions import PlanFunction, is_batched
from edgeweave._plan._pair import pair_messages
from edgeweave._plan._tiles import EdgeTile, edge_tiles
from edgeweave.pyg._arguments import read_edges
from edgeweave.pyg._eligibility import features_refusal, has_hooks
from edgeweave.pyg._linear import plain_parameters

__all__ = ["Network", "run_network"]

# Edges of a tile: [16384, 32] float32 is 2 MiB.
_MOST_EDGES = 16384

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


@dataclass(frozen=True)
class Network:
    """A message `rest(p[dst] + q[src] + r[edge])`.

    Attributes:
        q: `[num_src, H]`.
        rest: From `[edges, H]` to `[edges, O]`, row by row.
        p: `[num_dst, H]`, or None.
        r: `[E, H]` in input order, or None.
        parameters: What `rest` uses and may want gradients of.
        in_place: Whether `rest` may write into what it is given, which a leaf forbids.
    """

    q: Tensor
    rest: Callable[[Tensor], Tensor]
    p: Tensor | None = None
    r: Tensor | None = None
    parameters: list[Tensor] = field(default_factory=list)
    in_place: bool = False


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
    return Network(_split_linear(src, other), rest, p, None, parameters, in_place)


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
    r = None if attr is None else _split_linear(attr, weight[:, sizes[0] + sizes[1] :])
    return Network(_split_linear(src, other), _gate, _split_linear(dst, own, bias), r)


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
        attr = layer.lin(attr)
    if attr.dtype is not src.dtype or attr.size(1) != src.size(1):
        return "edge_attr is not in the width and dtype of x"
    return Network(src.contiguous(), torch.relu, r=attr.contiguous())


_SPLITS: dict[Any, Callable[[Any, dict[str, Any]], Network | str]] = {
    EdgeConv: _edge_conv,
    CGConv: _cg_conv,
    GINEConv: _gine,
}


def run_network(
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
    return cast(Tensor, _TiledNetwork.apply(plan, network, reduce, *_inputs(network)))


def _inputs(network: Network) -> list[Tensor | None]:
    return [network.p, network.q, network.r, *network.parameters]


def _begin(tile: EdgeTile, network: Network) -> Tensor:
    """`p[dst] + q[src] + r[edge]` for the edges of a tile."""
    if network.p is None:
        pre: Tensor = ops.gather_rows(network.q, tile.sources)
    else:
        pre = ops.plan_pair(tile.edges.handle, network.p[tile.rows], network.q, 0)
    if network.r is not None:
        pre += network.r.index_select(0, tile.position)
    return pre


def _reduce(groups: Plan, messages: Tensor, reduce: str) -> Tensor:
    if reduce in ("sum", "mean"):
        return plan_sum(groups, messages, mean=reduce == "mean")
    return plan_minmax(groups, messages, None, is_max=reduce == "amax", ties="even")


class _TiledNetwork(PlanFunction):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, network: Network, reduce: str, *inputs: Tensor | None
    ) -> Tensor:
        ctx.plan, ctx.reduce = plan, reduce
        ctx.rest, ctx.in_place = network.rest, network.in_place
        ctx.save_for_backward(*inputs)
        out: Tensor | None = None
        for tile in edge_tiles(plan, _MOST_EDGES).tiles:
            messages = network.rest(_begin(tile, network)).contiguous()
            if out is None:
                out = ops.empty_rows(messages, plan.num_dst, messages.size(1))
            out[tile.rows] = _reduce(tile.groups, messages, reduce)
        if out is None:  # no destination: only the width has to be found
            out = network.rest(network.q.new_empty(0, network.q.size(1)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        p, q, r, *parameters = ctx.saved_tensors
        network = Network(q, ctx.rest, p, r, parameters, ctx.in_place)
        plan, reduce, grad = ctx.plan, ctx.reduce, grads[0]
        need = ctx.needs_input_grad[3:]
        # Somebody wants the derivative of this derivative, or many gradients at once.
        if torch.is_grad_enabled() or is_batched(grad):
            found = _backward_again(plan, network, reduce, grad, need)
            return None, None, None, *found
        tiles = edge_tiles(plan, _MOST_EDGES)
        wanted = [v for v, n in zip(parameters, need[3:], strict=True) if n]
        sums: list[Tensor | None] = [None] * len(wanted)
        dp = torch.empty_like(p) if need[0] else None
        dr = torch.empty_like(r) if need[2] else None
        # The gradients of `pre`, to be added up by source when all are there.
        kept = ops.empty_rows(q, plan.num_edges, q.size(1)) if need[1] else None
        for tile in tiles.tiles:
            leaf = _begin(tile, network).requires_grad_()
            with torch.enable_grad():
                given = leaf.clone() if network.in_place else leaf
                messages = network.rest(given).contiguous()
                reduced = _reduce(tile.groups, messages, reduce)
            d_pre, *more = torch.autograd.grad(
                reduced, [leaf, *wanted], grad[tile.rows], allow_unused=True
            )
            d_pre = torch.zeros_like(leaf) if d_pre is None else d_pre.contiguous()
            for k, part in enumerate(more):
                before = sums[k]
                sums[k] = part if before is None or part is None else before.add_(part)
            if dp is not None:
                dp[tile.rows] = plan_sum(tile.groups, d_pre)
            if dr is not None:
                dr.index_copy_(0, tile.position, d_pre)
            if kept is not None:
                kept[tile.span] = d_pre
        dq = None if kept is None else plan_sum(tiles.sources, kept)
        left = iter(sums)
        return None, None, None, dp, dq, dr, *(next(left) if n else None for n in need[3:])


def _backward_again(
    plan: Plan, network: Network, reduce: str, grad: Tensor, need: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradients as differentiable operations, over messages in memory."""
    dst, src = _ends(plan)
    with torch.enable_grad():
        if network.p is None:
            pre = network.q.index_select(0, src)
        else:
            pre = pair_messages(network.p, network.q, dst, src, "add")
        if network.r is not None:
            pre = pre + network.r
        messages = network.rest(pre.clone())
        out = reduce_messages(messages, dst, plan.num_dst, reduce, "even")
        leaves = [v for v, n in zip(_inputs(network), need, strict=True) if n]
        found = iter(
            torch.autograd.grad(
                out, cast("list[Tensor]", leaves), grad, create_graph=True, allow_unused=True
            )
        )
    return [next(found) if n else None for n in need]
