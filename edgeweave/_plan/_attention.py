"""GATv2's attention scores over the edges of a plan, differentiable, without `[E, H, C]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from ._composite import _ends
from ._functions import PlanFunction, _in_transform, _tracked
from ._plan import Plan

__all__ = [
    "plan_scores",
    "scores_backward",
    "scores_messages",
    "scores_messages_backward",
]


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
        _, *needs, _, _ = ctx.needs_input_grad
        grad = grads[0].contiguous()
        if torch.is_grad_enabled() or _in_transform():
            ends = _ends(ctx.plan)
            made = scores_messages_backward(grad, dst, src, att, *ends, ctx.heads, ctx.slope, needs)
        else:
            made = scores_backward(ctx.plan, grad, dst, src, att, ctx.heads, ctx.slope, needs)
        return None, *made, None, None


def scores_backward(
    plan: Plan,
    grad: Tensor,
    dst: Tensor,
    src: Tensor,
    att: Tensor,
    heads: int,
    slope: float,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of `plan_scores` by dst, src and att, as far as needed, by the fused kernels."""
    need_dst, need_src, need_att = needs
    rest = (att, grad, heads, slope)
    grad_of = plan.ops.plan_scores_grad
    d_dst = d_src = d_att = None
    if need_dst or need_att:
        d_dst, rows = grad_of(plan.handle, False, dst, src, *rest, need_att)
        d_att = rows.sum(0).to(att.dtype) if need_att else None
    if need_src:
        d_src, _ = grad_of(plan.handle, True, src, dst, *rest, False)
    return d_dst if need_dst else None, d_src, d_att


def scores_messages_backward(
    grad: Tensor,
    dst: Tensor,
    src: Tensor,
    att: Tensor,
    dst_index: Tensor,
    src_index: Tensor,
    heads: int,
    slope: float,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The same as operations that can be differentiated again, or batched."""
    z = dst.index_select(0, dst_index) + src.index_select(0, src_index)
    per_feature = grad.repeat_interleave(att.numel() // heads, dim=-1)
    steep = torch.where(z > 0, z.new_ones(()), z.new_full((), slope))
    d_z = per_feature * att * steep
    need_dst, need_src, need_att = needs
    return (
        torch.zeros_like(dst).index_add(0, dst_index, d_z) if need_dst else None,
        torch.zeros_like(src).index_add(0, src_index, d_z) if need_src else None,
        (per_feature * z * steep).sum(0) if need_att else None,
    )
