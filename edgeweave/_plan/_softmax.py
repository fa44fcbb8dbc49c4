"""Softmax and log-sum-exp over the groups of a plan, differentiable.

`src` is `[E, F]` or `[B, E, F]`, contiguous, one row per entry of a plan over an index, or per edge
of a plan over edges, whose groups are the destinations. The
derivative of a softmax is `y * (g - sum(y * g))`, a fused kernel which also serves forward mode,
since the Jacobian is symmetric; derivatives of derivatives are the same formula in torch
operations and `plan_sum`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ._composite import _wide
from ._functions import PlanFunction, _fold_batch, _tracked, _unfold_batch, plan_sum
from ._pair import sum_at
from ._plan import Plan

__all__ = [
    "entry_groups",
    "logsumexp_backward",
    "logsumexp_messages",
    "plan_logsumexp",
    "plan_softmax",
    "plan_softmax_grad",
    "softmax_messages",
]


def entry_groups(plan: Plan) -> Tensor:
    """Group of each entry, `[E]` int64. Shared: do not edit."""
    return plan.memo("dst64", lambda: plan.array("dst").long())


def _group_sums(plan: Plan, values: Tensor) -> Tensor:
    """Sums of values per entry of each group, for a plan over edges too."""
    if plan.over_index:
        return plan_sum(plan, values.contiguous())
    return sum_at(plan, values, "dst")


# ---- softmax -------------------------------------------------------------------------------------


def plan_softmax(plan: Plan, src: Tensor) -> Tensor:
    """`out[e] = exp(src[e]) / sum(exp(src[f]) for f in e's group)`."""
    if _tracked(src):
        return cast(Tensor, _Softmax.apply(plan, src))
    return _Softmax.forward(plan, src)


def plan_softmax_grad(plan: Plan, result: Tensor, grad: Tensor) -> Tensor:
    """`result * (grad - sum(result * grad))`, the sum over each group."""
    if not _tracked(result, grad):
        return cast(Tensor, plan.ops.plan_softmax_grad(plan.handle, result, grad))
    wide = _wide(result.dtype)
    y, g = result.to(wide), grad.to(wide)
    total = _group_sums(plan, y * g)
    return (y * (g - total.index_select(-2, entry_groups(plan)))).to(result.dtype)


class _Softmax(PlanFunction):
    @staticmethod
    def forward(plan: Plan, src: Tensor) -> Tensor:
        return cast(Tensor, plan.ops.plan_softmax(plan.handle, src))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.plan = inputs[0]
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (result,) = ctx.saved_tensors
        return None, plan_softmax_grad(ctx.plan, result, grads[0].contiguous())

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        (result,) = ctx.saved_tensors
        return plan_softmax_grad(ctx.plan, result, cast(Tensor, tangents[1]).contiguous())

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], plan: Plan, src: Tensor
    ) -> tuple[Tensor, int]:
        rank = src.dim() - 1
        folded, _ = _fold_batch(info.batch_size, src, in_dims[1], None, None, 1)
        return _unfold_batch(plan_softmax(plan, folded), info.batch_size), rank - 1


def softmax_messages(src: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """`plan_softmax` as plain torch operations, for any device and differentiable to any order."""
    values = src.to(_wide(src.dtype))
    shift = _largest(values, groups, num_groups, keep=float("inf"))
    p = (values - shift.index_select(-2, groups)).exp()
    total = torch.zeros_like(shift).index_add(-2, groups, p)
    return (p / total.index_select(-2, groups)).to(src.dtype)


def _largest(values: Tensor, groups: Tensor, num_groups: int, keep: float) -> Tensor:
    """What is subtracted: the maximum; 0 where that is infinite, but for `keep`. No gradient."""
    values = values.detach()
    shape = (*values.shape[:-2], num_groups, values.shape[-1])
    lowest = torch.full(shape, float("-inf"), dtype=values.dtype, device=values.device)
    index = groups.unsqueeze(-1).expand(values.shape)
    # A NaN is left to the sums: there is no number to subtract that would matter.
    top = lowest.scatter_reduce(-2, index, values.nan_to_num(0.0, float("inf"), float("-inf")),
                                "amax")  # fmt: skip
    return torch.where(top.isinf() & (top != keep), 0.0, top)


# ---- logsumexp -----------------------------------------------------------------------------------


def plan_logsumexp(plan: Plan, src: Tensor) -> Tensor:
    """`out[i] = log(sum(exp(src[e]) for e in group i))`, -inf for an empty group."""
    if _tracked(src):
        out, _ = _LogSumExp.apply(plan, src)
        return cast(Tensor, out)
    return _LogSumExp.forward(plan, src)[0]


def logsumexp_backward(plan: Plan, src: Tensor, wide: Tensor, grad: Tensor) -> Tensor:
    """`grad[i] * exp(src[e] - wide[i])`; `wide` is the result before it was rounded."""
    if not _tracked(src, wide, grad):
        return cast(Tensor, plan.ops.plan_logsumexp_grad(plan.handle, src, wide, grad))
    groups = entry_groups(plan)
    share = (src.to(wide.dtype) - wide.index_select(-2, groups)).exp()
    return (share * grad.to(wide.dtype).index_select(-2, groups)).to(src.dtype)


class _LogSumExp(PlanFunction):
    """Both the result and, for the derivatives, the result before it is rounded to src's dtype."""

    @staticmethod
    def forward(plan: Plan, src: Tensor) -> tuple[Tensor, Tensor]:
        shift, total = plan.ops.plan_exp_sums(plan.handle, src)
        wide = total.log_().add_(shift)
        # Two outputs of an autograd function must be two tensors.
        return wide.to(src.dtype, copy=True), wide

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.plan = inputs[0]
        ctx.save_for_backward(inputs[1], output[1])
        ctx.save_for_forward(inputs[1], output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        src, wide = ctx.saved_tensors
        out = None
        for grad in grads:  # of the result, and of the one before rounding in second derivatives
            if grad is not None:
                part = logsumexp_backward(ctx.plan, src, wide, grad.to(src.dtype).contiguous())
                out = part if out is None else out + part
        return None, out

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, Tensor]:
        src, wide = ctx.saved_tensors
        groups = entry_groups(ctx.plan)
        share = (src.to(wide.dtype) - wide.index_select(-2, groups)).exp()
        tangent = share * cast(Tensor, tangents[1]).to(wide.dtype)
        total = _group_sums(ctx.plan, tangent)
        return total.to(src.dtype, copy=True), total

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], plan: Plan, src: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        rank = src.dim() - 1
        folded, _ = _fold_batch(info.batch_size, src, in_dims[1], None, None, 1)
        out, wide = _LogSumExp.apply(plan, folded)
        both = (_unfold_batch(out, info.batch_size), _unfold_batch(wide, info.batch_size))
        return both, (rank - 1, rank - 1)


def logsumexp_messages(src: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """`plan_logsumexp` as plain torch operations."""
    values = src.to(_wide(src.dtype))
    shift = _largest(values, groups, num_groups, keep=float("nan"))
    p = (values - shift.index_select(-2, groups)).exp()
    total = torch.zeros_like(shift).index_add(-2, groups, p)
    return (total.log() + shift).to(src.dtype)
