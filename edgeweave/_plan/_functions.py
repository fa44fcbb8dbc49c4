"""Differentiable reductions over a plan: the eager path from Python to the native ops.

Features are `[N, H * D]` or `[B, N, H * D]`, contiguous; weights `[E, H]` in input order.
`plan_sum` and `plan_dot` are each other's derivatives, so any order of derivative exists; the
derivative of a min or max is linear in the gradient and constant in where the winners are, and its
own derivative goes through plain torch operations.

`torch.autograd.Function` costs several us a call, so it is left out where nothing needs a gradient;
`torch.compile` never comes here (see `edgeweave._plan._compiled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _composite
from ._plan import Plan

__all__ = ["PlanFunction", "plan_arg", "plan_dot", "plan_minmax", "plan_sum"]

# A tensor, or a tensor or None.
_T = TypeVar("_T", Tensor, "Tensor | None")

_SUM: Final = 0
_MEAN: Final = 1
_MAX: Final = 2
_MIN: Final = 3


def _tracked(*tensors: Tensor | None) -> bool:
    """Whether autograd, forward-mode AD or a functorch transform has to see the call."""
    if _in_transform():
        return True
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def _in_transform() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_batched(grad: Tensor) -> bool:
    """Whether a gradient stands for a batch of them, which only torch's own operators see.

    `torch.vmap` makes such, and `is_grads_batched=True` (so `jacobian(vectorize=True)`) another
    kind.
    """
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._functorch.is_legacy_batchedtensor(grad)
    )


def aliases(tensors: Sequence[_T]) -> list[_T]:
    """Each tensor as a view of its own, for a backward pass that is itself differentiated.

    To differentiate by the tensors that an outer pass goes on from would count a way from one to
    the other twice, and call their hooks twice. To be called with gradients on.
    """
    return [t if t is None else t.view_as(t) for t in tensors]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype that sums are held in, and that scales must have."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class PlanFunction(torch.autograd.Function):
    """`torch.autograd.Function` without the cost of its `apply`, for positional arguments.

    torch's binds the arguments by `inspect.signature` whenever there is a `setup_context`, which
    takes longer than a reduction over a small graph. Without functorch transforms what it does then
    is the same call of the C++ side as here.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Runs `forward` and records it for backward."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _PlainSum(PlanFunction):
    """`_Sum` without a weight, outside transforms: with little to pass and nothing to save."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: tuple[Any, ...]) -> Tensor:
        ctx.spec = spec
        plan, transpose, mean, row_scale, col_scale = spec
        code = _MEAN if mean else _SUM
        return cast(
            Tensor, plan.ops.spmm(plan.handle, transpose, x, 1, None, row_scale, col_scale, code)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, transpose, mean, row_scale, col_scale = ctx.spec
        grad = grads[0].contiguous()
        if mean:
            row_scale = _times(row_scale, plan.mean_scale(accumulator_dtype(grad.dtype)))
        turned = not transpose
        return plan_sum(
            plan, grad, transpose=turned, row_scale=col_scale, col_scale=row_scale
        ), None


# ---- sum and mean --------------------------------------------------------------------------------


def plan_sum(
    plan: Plan,
    x: Tensor,
    weight: Tensor | None = None,
    *,
    heads: int = 1,
    transpose: bool = False,
    mean: bool = False,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> Tensor:
    """`out[i] = row_scale[i] * sum_e weight[e] * col_scale[j] * x[j]`, over in-edges.

    Args:
        plan: The edges.
        x: `[num_src, H * D]` or `[B, num_src, H * D]`, contiguous (`transpose`: num_dst rows).
        weight: `[E, H]` in input order and x's dtype, or None.
        heads: H, where there is a weight.
        transpose: Sum over out-edges into sources instead.
        mean: Divide by the number of edges of the row; not with `transpose`.
        row_scale: `[rows of out]` in the accumulator's dtype; a constant.
        col_scale: `[rows of x]` in the accumulator's dtype; a constant.

    Returns:
        Like `x`, with a row for each destination.
    """
    if weight is None and not _in_transform():
        spec = (plan, transpose, mean, row_scale, col_scale)
        if torch.is_grad_enabled() and x.requires_grad:
            return cast(Tensor, _PlainSum.apply(x, spec))
        return _Sum.forward(plan, x, None, 1, transpose, mean, row_scale, col_scale)
    if _tracked(x, weight):
        out = _Sum.apply(plan, x, weight, heads, transpose, mean, row_scale, col_scale)
        return cast(Tensor, out)
    return _Sum.forward(plan, x, weight, heads, transpose, mean, row_scale, col_scale)


def sum_backward(
    plan: Plan,
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    *,
    heads: int,
    transpose: bool,
    mean: bool,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `plan_sum` with respect to x and weight, differentiable themselves.

    `x` is needed only for the weight's.
    """
    out_scale = row_scale
    if mean:
        out_scale = _times(out_scale, plan.mean_scale(accumulator_dtype(grad.dtype)))
    dx = dw = None
    if need_x:
        dx = plan_sum(
            plan,
            grad,
            weight,
            heads=heads,
            transpose=not transpose,
            row_scale=col_scale,
            col_scale=out_scale,
        )
    if need_weight:
        assert x is not None, "x is saved wherever there is a weight"
        if transpose:
            dw = plan_dot(plan, x, grad, heads=heads, row_scale=col_scale, col_scale=out_scale)
        else:
            dw = plan_dot(plan, grad, x, heads=heads, row_scale=out_scale, col_scale=col_scale)
    return dx, dw


def minmax_backward(
    plan: Plan,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    result: Tensor,
    *,
    heads: int,
    ties: str,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `plan_minmax` with respect to x and weight, by the fused kernels.

    Not differentiable.
    """
    op = plan.ops.minmax_grad if ties == "even" else plan.ops.minmax_grad_first
    dx, dw = op(plan.handle, x, heads, weight, result, grad, need_x, need_weight)
    return dx.to(x.dtype) if need_x else None, dw.to(x.dtype) if need_weight else None


def _times(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else b
    return a * b


class _Sum(PlanFunction):
    @staticmethod
    def forward(
        plan: Plan,
        x: Tensor,
        weight: Tensor | None,
        heads: int,
        transpose: bool,
        mean: bool,
        row_scale: Tensor | None,
        col_scale: Tensor | None,
    ) -> Tensor:
        return cast(
            Tensor,
            plan.ops.spmm(
                plan.handle,
                transpose,
                x,
                heads,
                weight,
                row_scale,
                col_scale,
                _MEAN if mean else _SUM,
            ),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        plan, x, weight, heads, transpose, mean, row_scale, col_scale = inputs
        ctx.plan, ctx.heads, ctx.transpose, ctx.mean = plan, heads, transpose, mean
        ctx.row_scale, ctx.col_scale = row_scale, col_scale
        # x is needed for the weight's gradient alone: without one, holding it would keep a feature
        # matrix alive.
        kept = x if weight is not None else None
        ctx.save_for_backward(kept, weight)
        ctx.save_for_forward(kept, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dw = sum_backward(
            ctx.plan,
            grads[0].contiguous(),
            x,
            weight,
            heads=ctx.heads,
            transpose=ctx.transpose,
            mean=ctx.mean,
            row_scale=ctx.row_scale,
            col_scale=ctx.col_scale,
            need_x=ctx.needs_input_grad[1],
            need_weight=ctx.needs_input_grad[2],
        )
        return None, dx, dw, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        x, weight = ctx.saved_tensors
        keywords = {
            "heads": ctx.heads,
            "transpose": ctx.transpose,
            "mean": ctx.mean,
            "row_scale": ctx.row_scale,
            "col_scale": ctx.col_scale,
        }
        tx, tw = tangents[1], tangents[2]
        out = plan_sum(ctx.plan, tx.contiguous(), weight, **keywords) if tx is not None else None
        if tw is not None:
            part = plan_sum(ctx.plan, x, tw.contiguous(), **keywords)
            out = part if out is None else out + part
        assert out is not None, "autograd calls jvp only if an input has a tangent"
        return out

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        plan: Plan,
        x: Tensor,
        weight: Tensor | None,
        heads: int,
        transpose: bool,
        mean: bool,
        row_scale: Tensor | None,
        col_scale: Tensor | None,
    ) -> tuple[Tensor, int]:
        size, rank = info.batch_size, x.dim() - (in_dims[1] is not None)
        x, weight = _fold_batch(size, x, in_dims[1], weight, in_dims[2], heads)
        out = plan_sum(
            plan,
            x,
            weight,
            heads=heads * size if weight is not None else 1,
            transpose=transpose,
            mean=mean,
            row_scale=row_scale,
            col_scale=col_scale,
        )
        return _unfold_batch(out, size), rank - 1


def _fold_batch(
    size: int,
    x: Tensor,
    x_dim: int | None,
    weight: Tensor | None,
    weight_dim: int | None,
    heads: int,
) -> tuple[Tensor, Tensor | None]:
    """Makes the vmapped dimension the outermost of the features.

    They become `[..., N, B * H * D]`, weights `[E, B * H]`.
    """
    x = x.unsqueeze(-2) if x_dim is None else x.movedim(x_dim, -2)
    x = x.expand(*x.shape[:-2], size, x.shape[-1]).flatten(-2).contiguous()
    if weight is not None:
        weight = weight.unsqueeze(-2) if weight_dim is None else weight.movedim(weight_dim, -2)
        weight = weight.expand(weight.shape[0], size, heads).flatten(-2).contiguous()
    return x, weight


def _unfold_batch(out: Tensor, size: int) -> Tensor:
    return out.reshape(*out.shape[:-1], size, out.shape[-1] // size)


# ---- dot -----------------------------------------------------------------------------------------


def plan_dot(
    plan: Plan,
    a: Tensor,
    b: Tensor,
    *,
    heads: int = 1,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
) -> Tensor:
    """`out[e, h] = row_scale[i] * col_scale[j] * <a[i, h], b[j, h]>` for each edge j -> i.

    Edges are in input order.

    Args:
        plan: The edges.
        a: `[num_dst, H * D]`, contiguous.
        b: `[num_src, H * D]`, contiguous.
        heads: H.
        row_scale: `[num_dst]`, a constant.
        col_scale: `[num_src]`, a constant.

    Returns:
        `[E, H]`.
    """
    if _tracked(a, b):
        out = _Dot.apply(plan, a, b, heads, row_scale, col_scale)
        return cast(Tensor, out)
    return _Dot.forward(plan, a, b, heads, row_scale, col_scale)


class _Dot(PlanFunction):
    @staticmethod
    def forward(
        plan: Plan,
        a: Tensor,
        b: Tensor,
        heads: int,
        row_scale: Tensor | None,
        col_scale: Tensor | None,
    ) -> Tensor:
        return cast(Tensor, plan.ops.sddmm(plan.handle, a, b, heads, row_scale, col_scale))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.plan, a, b, ctx.heads, ctx.row_scale, ctx.col_scale = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        grad = grads[0].contiguous()
        da = db = None
        if ctx.needs_input_grad[1]:
            da = plan_sum(
                ctx.plan, b, grad, heads=ctx.heads, row_scale=ctx.row_scale, col_scale=ctx.col_scale
            )
        if ctx.needs_input_grad[2]:
            db = plan_sum(
                ctx.plan,
                a,
                grad,
                heads=ctx.heads,
                transpose=True,
                row_scale=ctx.col_scale,
                col_scale=ctx.row_scale,
            )
        return None, da, db, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        a, b = ctx.saved_tensors
        keywords = {"heads": ctx.heads, "row_scale": ctx.row_scale, "col_scale": ctx.col_scale}
        ta, tb = tangents[1], tangents[2]
        out = plan_dot(ctx.plan, ta.contiguous(), b, **keywords) if ta is not None else None
        if tb is not None:
            part = plan_dot(ctx.plan, a, tb.contiguous(), **keywords)
            out = part if out is None else out + part
        assert out is not None, "autograd calls jvp only if an input has a tangent"
        return out

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        plan: Plan,
        a: Tensor,
        b: Tensor,
        heads: int,
        row_scale: Tensor | None,
        col_scale: Tensor | None,
    ) -> tuple[Tensor, int]:
        a, _ = _fold_batch(info.batch_size, a, in_dims[1], None, None, heads)
        b, _ = _fold_batch(info.batch_size, b, in_dims[2], None, None, heads)
        out = plan_dot(
            plan, a, b, heads=heads * info.batch_size, row_scale=row_scale, col_scale=col_scale
        )
        return _unfold_batch(out, info.batch_size), 1


# ---- min and max ---------------------------------------------------------------------------------


def plan_minmax(
    plan: Plan,
    x: Tensor,
    weight: Tensor | None = None,
    *,
    heads: int = 1,
    is_max: bool = True,
    ties: str = "even",
) -> Tensor:
    """`out[i] = max_e weight[e] * x[j]` over in-edges (or min), 0 where there are none.

    Args:
        plan: The edges.
        x: `[num_src, H * D]` or `[B, num_src, H * D]`, contiguous.
        weight: `[E, H]` in input order and x's dtype, or None.
        heads: H, where there is a weight.
        is_max: Maximum, or minimum.
        ties: "even": tied edges share the gradient; "first": the first in input order takes it.

    Returns:
        Like `x`, with a row for each destination.
    """
    if _tracked(x, weight):
        out = _MinMax.apply(plan, x, weight, heads, is_max, ties)
        return cast(Tensor, out)
    return _MinMax.forward(plan, x, weight, heads, is_max, ties)


def plan_arg(
    plan: Plan, x: Tensor, result: Tensor, weight: Tensor | None = None, *, heads: int = 1
) -> Tensor:
    """The first edge, as a position in the input, that reaches `result`.

    int64, like `result`; E for an empty row.
    """
    return cast(
        Tensor, plan.ops.minmax_arg(plan.handle, x.detach(), heads, weight, result.detach())
    )


class _MinMax(PlanFunction):
    @staticmethod
    def forward(
        plan: Plan, x: Tensor, weight: Tensor | None, heads: int, is_max: bool, ties: str
    ) -> Tensor:
        return cast(
            Tensor,
            plan.ops.spmm(
                plan.handle, False, x, heads, weight, None, None, _MAX if is_max else _MIN
            ),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        plan, x, weight, heads, _, ties = inputs
        ctx.plan, ctx.heads, ctx.ties = plan, heads, ties
        ctx.save_for_backward(x, weight, output)
        ctx.save_for_forward(x, weight, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, result = ctx.saved_tensors
        grad = grads[0].contiguous()
        need_x, need_w = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        dx: Tensor | None
        dw: Tensor | None
        if _tracked(x, weight, grad):  # somebody wants the derivative of this derivative
            dx, dw = _composite.minmax_backward(
                ctx.plan, x, weight, result, grad, ctx.heads, ctx.ties
            )
        else:
            dx, dw = minmax_backward(
                ctx.plan,
                grad,
                x,
                weight,
                result,
                heads=ctx.heads,
                ties=ctx.ties,
                need_x=need_x,
                need_weight=need_w,
            )
        return None, dx if need_x else None, dw if need_w else None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        x, weight, result = ctx.saved_tensors
        return _composite.minmax_forward_derivative(
            ctx.plan, x, weight, result, tangents[1], tangents[2], ctx.heads, ctx.ties
        )

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        plan: Plan,
        x: Tensor,
        weight: Tensor | None,
        heads: int,
        is_max: bool,
        ties: str,
    ) -> tuple[Tensor, int]:
        size, rank = info.batch_size, x.dim() - (in_dims[1] is not None)
        x, weight = _fold_batch(size, x, in_dims[1], weight, in_dims[2], heads)
        out = plan_minmax(
            plan,
            x,
            weight,
            heads=heads * size if weight is not None else 1,
            is_max=is_max,
            ties=ties,
        )
        return _unfold_batch(out, size), rank - 1
