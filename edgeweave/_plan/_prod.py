"""Products over the groups of a plan, differentiable: zeros included once, without zeros twice."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ._functions import PlanFunction, _fold_batch, _tracked, _unfold_batch, plan_sum
from ._plan import Plan
from ._softmax import entry_groups

__all__ = ["plan_prod", "plan_prod_grad"]


def plan_prod(plan: Plan, src: Tensor) -> Tensor:
    """`out[i] = product of src[e] for e in group i`, 1 for an empty group.

    Args:
        plan: A plan over an index.
        src: `[E, F]` or `[B, E, F]`, contiguous.
    """
    if _tracked(src):
        return cast(Tensor, _Prod.apply(plan, src))
    return _Prod.forward(plan, src)


def plan_prod_grad(plan: Plan, src: Tensor, grad: Tensor) -> Tensor:
    """`grad[i]` times the product of the other entries of the group, for each entry."""
    if _tracked(src, grad):
        return cast(Tensor, _ProdGrad.apply(plan, src, grad))
    return _ProdGrad.forward(plan, src, grad)


class _Prod(PlanFunction):
    @staticmethod
    def forward(plan: Plan, src: Tensor) -> Tensor:
        return cast(Tensor, plan.ops.plan_prod(plan.handle, src))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.plan = inputs[0]
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (src,) = ctx.saved_tensors
        return None, plan_prod_grad(ctx.plan, src, grads[0].contiguous())

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        (src,) = ctx.saved_tensors
        shape = (*src.shape[:-2], ctx.plan.num_dst, src.shape[-1])
        others = plan_prod_grad(ctx.plan, src, src.new_ones(shape))
        return plan_sum(ctx.plan, (others * cast(Tensor, tangents[1])).contiguous())

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], plan: Plan, src: Tensor
    ) -> tuple[Tensor, int]:
        rank = src.dim() - 1
        folded, _ = _fold_batch(info.batch_size, src, in_dims[1], None, None, 1)
        return _unfold_batch(plan_prod(plan, folded), info.batch_size), rank - 1


class _ProdGrad(PlanFunction):
    @staticmethod
    def forward(plan: Plan, src: Tensor, grad: Tensor) -> Tensor:
        return cast(Tensor, plan.ops.plan_prod_grad(plan.handle, src, grad))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.plan, src, grad = inputs
        ctx.save_for_backward(src, grad)
        ctx.save_for_forward(src, grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # out[e] = g P / x[e] with P the product of e's group. With upstream u, s = sum(u / x):
        # d/dg = P s, and d/dx[e] = g P / x[e] * (s - u[e] / x[e]).
        src, grad = ctx.saved_tensors
        _refuse_zeros(src)
        groups = entry_groups(ctx.plan)
        ratio = grads[0] / src
        total = plan_sum(ctx.plan, ratio.contiguous())
        product = plan_prod(ctx.plan, src)
        dx = None
        if ctx.needs_input_grad[1]:
            scaled = (grad * product).index_select(-2, groups) / src
            dx = scaled * (total.index_select(-2, groups) - ratio)
        return None, dx, product * total if ctx.needs_input_grad[2] else None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        src, grad = ctx.saved_tensors
        _refuse_zeros(src)
        groups = entry_groups(ctx.plan)
        product = plan_prod(ctx.plan, src)
        out = torch.zeros_like(src)
        if tangents[2] is not None:
            out = out + (tangents[2] * product).index_select(-2, groups) / src
        if tangents[1] is not None:
            ratio = tangents[1] / src
            total = plan_sum(ctx.plan, ratio.contiguous())
            scaled = (grad * product).index_select(-2, groups) / src
            out = out + scaled * (total.index_select(-2, groups) - ratio)
        return out

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], plan: Plan, src: Tensor, grad: Tensor
    ) -> tuple[Tensor, int]:
        size, rank = info.batch_size, src.dim() - (in_dims[1] is not None)
        x, _ = _fold_batch(size, src, in_dims[1], None, None, 1)
        g, _ = _fold_batch(size, grad, in_dims[2], None, None, 1)
        return _unfold_batch(plan_prod_grad(plan, x, g), size), rank - 1


def _refuse_zeros(src: Tensor) -> None:
    # Under vmap there is no one answer to ask for; a zero then shows as NaN.
    if not torch._C._functorch.is_batchedtensor(src) and bool((src == 0).any()):
        raise RuntimeError(
            "edgeweave: second derivatives of prod must be taken where no entry is 0, got a 0; "
            "the first derivative is right there"
        )
