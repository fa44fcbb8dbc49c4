"""GATv2's attention scores over the edges of a plan, differentiable, without `[E, H, C]`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from ._composite import _ends
from ._functions import PlanFunction, _in_transform, _tracked
from ._plan import Plan

__all__ = ["plan_scores", "scores_messages"]


def plan_scores(
    plan: Plan, dst: Tensor, src: Tensor, att: Tensor, heads: int, slope: float
) -> Tensor:
    """`out[e, h] = sum_c att[h, c] * leaky_relu(dst[i, h, c] + src[j, h, c])` for each edge j -> i.

    Args:
        plan: A plan over edges.
        dst: `[num_dst, H * C]`, contiguous, floating point.
        src: `[num_src, H * C]`, likewise.
        att: `[H * C]`, likewise.
        heads: H.
        slope: Slope of the activation below 0.

    Returns:
        `[E, H]` in input order, summed in float32 at least. Bitwise the same for any number of
        threads.
    """
    if _in_transform():
        return scores_messages(dst, src, att, *_ends(plan), heads, slope)
    if _tracked(dst, src, att):
        return cast(Tensor, _Scores.apply(plan, dst, src, att, heads, slope))
    return cast(Tensor, plan.ops.plan_scores(plan.handle, dst, src, att, heads, slope))


def scores_messages(
    dst: Tensor,
    src: Tensor,
    att: Tensor,
    dst_index: Tensor,
    src_index: Tensor,
    heads: int,
    slope: float,
) -> Tensor:
    """`plan_scores` as plain torch operations, differentiable to any order."""
    z = dst.index_select(0, dst_index) + src.index_select(0, src_index)
    return (leaky_relu(z, slope) * att).view(z.shape[0], heads, -1).sum(-1)


class _Scores(PlanFunction):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, dst: Tensor, src: Tensor, att: Tensor, heads: int, slope: float
    ) -> Tensor:
        ctx.save_for_backward(dst, src, att)
        ctx.plan, ctx.heads, ctx.slope = plan, heads, slope
        return cast(Tensor, plan.ops.plan_scores(plan.handle, dst, src, att, heads, slope))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dst, src, att = ctx.saved_tensors
        _, need_dst, need_src, need_att, _, _ = ctx.needs_input_grad
        grad = grads[0].contiguous()
        if torch.is_grad_enabled() or _in_transform():
            return None, *_composed(ctx, grad), None, None
        rest = (att, grad, ctx.heads, ctx.slope)
        d_dst = d_src = d_att = None
        if need_dst or need_att:
            d_dst, rows = ctx.plan.ops.plan_scores_grad(
                ctx.plan.handle, False, dst, src, *rest, need_att
            )
            d_att = rows.sum(0).to(att.dtype) if need_att else None
        if need_src:
            d_src, _ = ctx.plan.ops.plan_scores_grad(ctx.plan.handle, True, src, dst, *rest, False)
        return None, d_dst if need_dst else None, d_src, d_att, None, None


def _composed(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """The gradients as operations that can be differentiated again, or batched."""
    dst, src, att = ctx.saved_tensors
    dst_index, src_index = _ends(ctx.plan)
    z = dst.index_select(0, dst_index) + src.index_select(0, src_index)
    per_feature = grad.repeat_interleave(att.numel() // ctx.heads, dim=-1)
    slope = torch.where(z > 0, z.new_ones(()), z.new_full((), ctx.slope))
    d_z = per_feature * att * slope
    out: list[Tensor | None] = [None, None, None]
    if ctx.needs_input_grad[1]:
        out[0] = torch.zeros_like(dst).index_add(0, dst_index, d_z)
    if ctx.needs_input_grad[2]:
        out[1] = torch.zeros_like(src).index_add(0, src_index, d_z)
    if ctx.needs_input_grad[3]:
        out[2] = (per_feature * z * slope).sum(0)
    return out
