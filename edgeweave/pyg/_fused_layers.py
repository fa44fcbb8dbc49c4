"""`forward` of SAGEConv and GINConv with what stands around their reduction fused into it.

GIN: `(1 + eps) * x_i + sum_j x_j` is one pass over the edges, where PyG's code makes two more
passes over the nodes. GraphSAGE: `lin_l(aggr) + lin_r(x)` adds within the second product and
reduces in the narrower of the two widths; its backward multiplies the transposed reduction of the
gradient, so that the aggregated features need not be kept. Rows of zeros at the end of a sampled
batch are left out of the products (see `_rows`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import GINConv, SAGEConv
from torch_geometric.nn.dense.linear import Linear

from edgeweave._plan import Plan, plan_sum
from edgeweave._plan._device import same_device
from edgeweave._plan._functions import PlanFunction, is_batched
from edgeweave.pyg._arguments import find_plan, read_edges
from edgeweave.pyg._eligibility import autocast_is_on, has_hooks, mode_refusal
from edgeweave.pyg._layers import LayerRule
from edgeweave.pyg._linear import (
    add_product,
    affine_parameters,
    can_multiply,
    has_faster_linear,
    linear,
    multiply,
    multiply_backward,
    plain_parameters,
)
from edgeweave.pyg._propagate import aggregation_of, layer_refusal, runs_our_propagate
from edgeweave.pyg._report import record_fused
from edgeweave.pyg._rows import are_finite, rows_in_use, rows_reached

__all__ = ["fused_gin", "fused_linear", "fused_sage"]

_MEAN = 1
_SUM = 0


def fused_linear(layer: Any, x: Any) -> Any:
    """`forward` of PyG's `Linear`, or `NotImplemented`."""
    if torch.compiler.is_compiling():
        return NotImplemented
    found = affine_parameters(layer)
    if found is None or not isinstance(x, Tensor) or not can_multiply(x, *found):
        return NotImplemented
    return linear(x, *found) if has_faster_linear(x, found[0]) else NotImplemented


def _plan_of(rule: LayerRule, layer: Any, x: Any, edge_index: Any, size: Any) -> Plan | None:
    """The plan of a call to `forward` that may be fused as a whole, or None."""
    if (
        torch.compiler.is_compiling()
        or size is not None
        or type(x) is not Tensor
        or layer.explain
        or layer.decomposed_layers > 1
        or layer_refusal(rule, layer) is not None
        or not runs_our_propagate(layer)
        or mode_refusal() is not None
        or layer.node_dim not in (0, -2)
    ):
        return None
    read = read_edges(layer, edge_index, None)
    if isinstance(read, str):
        return None
    edges, rows, cols = read
    nodes = x.size(0)
    if rows not in (None, nodes) or cols not in (None, nodes) or not same_device(x, edges):
        return None
    return find_plan(edges, nodes, nodes, layer.flow != "source_to_target")


# ---- GraphSAGE ---------------------------------------------------------------------------------


def fused_sage(rule: LayerRule, layer: Any, x: Any, edge_index: Any, size: Any) -> Any:
    """`SAGEConv.forward`, or `NotImplemented` where PyG's own must run."""
    if (
        torch.compiler.is_compiling()
        or layer.project
        or not layer.root_weight
        or type(x) is not Tensor
    ):
        return NotImplemented
    left = plain_parameters(layer.lin_l, Linear)
    right = plain_parameters(getattr(layer, "lin_r", None), Linear)
    if left is None or right is None or not can_multiply(x, *left) or not can_multiply(x, *right):
        return NotImplemented
    (wl, bias), (wr, other_bias) = left, right
    if wl.shape[0] != wr.shape[0] or other_bias is not None:
        return NotImplemented
    reduce = aggregation_of(layer)
    if reduce not in ("sum", "mean"):
        return NotImplemented
    plan = _plan_of(rule, layer, x, edge_index, size)
    if plan is None:
        return NotImplemented
    record_fused(rule.site)
    out = _Sage.apply(plan, x, wl, bias, wr, reduce == "mean")
    return nn.functional.normalize(out, p=2.0, dim=-1) if layer.normalize else out


class _Sage(PlanFunction):
    """`reduce(x_j) @ wl.T + bias + x @ wr.T`, written R x Wl' + b + x Wr' below."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, x: Tensor, wl: Tensor, bias: Tensor | None, wr: Tensor, mean: bool
    ) -> Tensor:
        code = _MEAN if mean else _SUM
        aggregated = None
        if wl.shape[0] < wl.shape[1]:  # R (x Wl') is the narrower reduction
            root = multiply(x, wr, bias)
            projected = multiply(x, wl)
            out = plan.ops.spmm(plan.handle, False, projected, 1, None, None, None, code, root, 1.0)
        else:
            aggregated = plan.ops.spmm(plan.handle, False, x, 1, None, None, None, code)
            out = _with_root(aggregated, wl, bias, x, wr, rows_reached(plan))
        # With a gradient for x, backward needs R' g, which gives Wl's too; without, R x is enough.
        kept = None if ctx.needs_input_grad[1] else aggregated
        ctx.save_for_backward(x, wl, wr, kept)
        ctx.plan, ctx.mean = plan, mean
        return cast(Tensor, out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, wl, wr, aggregated = ctx.saved_tensors
        plan: Plan = ctx.plan
        grad = grads[0].contiguous()
        _, need_x, need_wl, need_b, need_wr, _ = ctx.needs_input_grad
        # Somebody wants the derivative of this derivative, or many gradients at once.
        again = torch.is_grad_enabled() or is_batched(grad)
        scale = plan.mean_scale(torch.float32) if ctx.mean else None
        turned = None
        if need_x or (need_wl and (aggregated is None or again)):
            turned = plan_sum(plan, grad, transpose=True, col_scale=scale)
        if again:
            dx = turned @ wl + grad @ wr if turned is not None and need_x else None
            dwl = turned.t() @ x if turned is not None and need_wl else None
            db = grad.sum(0) if need_b else None
            return None, dx, dwl, db, grad.t() @ x if need_wr else None, None
        used = rows_in_use(grad)
        used_turned = used if turned is None else rows_in_use(turned)
        dx = None
        if need_x:
            assert turned is not None, "computed above"
            dx = _root_backward(turned, wl, grad, wr, max(used, used_turned))
        _, dwr, db = multiply_backward(
            grad, x, wr, need_weight=need_wr, need_bias=need_b, used=used
        )
        if aggregated is not None:
            _, dwl, _ = multiply_backward(grad, aggregated, wl, need_weight=need_wl, used=used)
        else:
            assert turned is not None or not need_wl, "computed above"
            _, dwl, _ = multiply_backward(
                grad if turned is None else turned, x, wl, need_weight=need_wl, used=used_turned
            )
        return None, dx, dwl, db, dwr, None


def _with_root(
    aggregated: Tensor, wl: Tensor, bias: Tensor | None, x: Tensor, wr: Tensor, reached: int
) -> Tensor:
    """`aggregated @ wl.T + bias + x @ wr.T`, where rows from `reached` on aggregate nothing."""
    # From a quarter of the rows on it is worth another pass over what is left.
    if 4 * reached > 3 * x.shape[0] or not are_finite(wl):
        return multiply(aggregated, wl, bias, second=(x, wr))
    out = multiply(x, wr, bias)
    add_product(out[:reached], aggregated[:reached], wl)
    return out


def _root_backward(turned: Tensor, wl: Tensor, grad: Tensor, wr: Tensor, used: int) -> Tensor:
    """`turned @ wl + grad @ wr`, where rows from `used` on are zero in both."""
    left, right = wl.t().contiguous(), wr.t().contiguous()
    if used == grad.shape[0] or not are_finite(wl, wr):
        return multiply(turned, left, second=(grad, right))
    dx = turned.new_zeros(grad.shape[0], left.shape[0])
    dx[:used] = multiply(turned[:used], left, second=(grad[:used], right))
    return dx


# ---- GIN ---------------------------------------------------------------------------------------


def fused_gin(rule: LayerRule, layer: Any, x: Any, edge_index: Any, size: Any) -> Any:
    """`GINConv.forward`, or `NotImplemented` where PyG's own must run."""
    eps = layer.eps
    if (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or x.dim() != 2
        # Stock multiplies halves by eps, a float32 tensor, and goes on in float32.
        or x.dtype not in (torch.float32, torch.float64)
        # To read eps is to wait for a GPU.
        or not x.is_cpu
        or x.layout is not torch.strided
        or not isinstance(eps, Tensor)
        or eps.requires_grad
        or eps.numel() != 1
        or eps.dtype != torch.float32
        or autocast_is_on()
        or aggregation_of(layer) != "sum"
    ):
        return NotImplemented
    plan = _plan_of(rule, layer, x, edge_index, size)
    if plan is None:
        return NotImplemented
    record_fused(rule.site)
    # Added in float32, as stock does.
    return _call(layer.nn, _self_sum(plan, x.contiguous(), (1.0 + eps).item(), False))


def _self_sum(plan: Plan, x: Tensor, scale: float, transpose: bool) -> Tensor:
    """`scale * x_i + sum_j x_j`."""
    if torch.is_grad_enabled() and x.requires_grad:
        return cast(Tensor, _SelfSum.apply(plan, x, scale, transpose))
    return cast(
        Tensor, plan.ops.spmm(plan.handle, transpose, x, 1, None, None, None, _SUM, x, scale)
    )


class _SelfSum(PlanFunction):
    @staticmethod
    def forward(ctx: Any, plan: Plan, x: Tensor, scale: float, transpose: bool) -> Tensor:
        ctx.plan, ctx.scale, ctx.transpose = plan, scale, transpose
        return cast(
            Tensor, plan.ops.spmm(plan.handle, transpose, x, 1, None, None, None, _SUM, x, scale)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].contiguous()
        if is_batched(grad):
            dx = plan_sum(ctx.plan, grad, transpose=not ctx.transpose) + ctx.scale * grad
        else:
            dx = _self_sum(ctx.plan, grad, ctx.scale, not ctx.transpose)
        return None, dx, None, None


def _call(module: Any, x: Tensor) -> Any:
    """`module(x)`, with the plain linear layers of a plain `Sequential` on the faster library."""
    if type(module) is nn.Sequential and not has_hooks(module):
        children: list[Any] = list(module)
        out: Any = x
        while children:
            child = children.pop(0)
            # A relu that follows a product is done while its rows are in the cache.
            relu = bool(children) and type(children[0]) is nn.ReLU and not has_hooks(children[0])
            product = _product(child, out, relu)
            if product is None:
                out = child(out)
            else:
                out = product
                if relu:
                    children.pop(0)
        return out
    product = _product(module, x, False)
    return module(x) if product is None else product


def _product(module: Any, x: Any, relu: bool) -> Tensor | None:
    """`module(x)`, optionally its relu, if the module is a plain linear layer; None if not."""
    found = plain_parameters(module, nn.Linear)
    if found is None or not isinstance(x, Tensor) or not can_multiply(x, *found):
        return None
    return linear(x, *found, relu) if has_faster_linear(x, found[0]) else None


FORWARDS = ((SAGEConv, fused_sage), (GINConv, fused_gin))
"""Layers whose whole `forward` has a fused form."""
