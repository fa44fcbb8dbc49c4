"""Several reductions of the same entries in one pass: sum, mean, amax, amin, var, std.

Forward reads each entry once; backward, whatever was asked for, is one more pass which writes the
gradient: `constant + slope * (x - mean)` plus the winners' shares, with coefficients per group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor

from ._composite import _wide, reduce_messages, winner_share
from ._functions import (
    PlanFunction,
    _fold_batch,
    _tracked,
    _unfold_batch,
    accumulator_dtype,
    plan_sum,
)
from ._plan import Plan
from ._softmax import entry_groups

__all__ = ["MULTI_REDUCES", "multi_backward", "multi_backward_anew", "multi_messages", "plan_multi"]

# In the order of the bits of csrc/ops/family.cpp's plan_multi, which has two more: mean and std in
# the accumulator's dtype, for the derivatives.
MULTI_REDUCES: Final = ("sum", "mean", "amax", "amin", "var", "std")
_WIDE_MEAN: Final = 6
_WIDE_STD: Final = 7


def plan_multi(
    plan: Plan, src: Tensor, reduces: Sequence[str], correction: int
) -> tuple[Tensor, ...]:
    """One result per name in `reduces`, `[..., num_groups, F]` in src's dtype.

    Args:
        plan: A plan over an index.
        src: `[E, F]` or `[B, E, F]`, contiguous, floating point.
        reduces: Names of `MULTI_REDUCES`, each once.
        correction: var divides by `max(count - correction, 1)`.
    """
    names = tuple(reduces)
    if not _tracked(src):
        return _results(plan.ops.plan_multi(plan.handle, src, _bits(names), correction), names)
    made = _Multi.apply(plan, src, names, correction)
    return cast(tuple[Tensor, ...], made[: len(names)])


def _bits(names: Sequence[str]) -> int:
    return sum(1 << MULTI_REDUCES.index(name) for name in names)


def _results(made: Sequence[Tensor], names: Sequence[str]) -> tuple[Tensor, ...]:
    return tuple(made[MULTI_REDUCES.index(name)] for name in names)


def _spreads(names: Sequence[str]) -> bool:
    return "var" in names or "std" in names


def _freedom(plan: Plan, dtype: torch.dtype, correction: int) -> Tensor:
    """What var divides by, `[num_groups, 1]`."""

    def build() -> Tensor:
        return (plan.in_degree() - correction).clamp(min=1).to(dtype).unsqueeze(-1)

    return plan.memo(("freedom", dtype, correction), build)


def gradient_coefficients(
    plan: Plan,
    given: Mapping[str, Tensor],
    std: Tensor | None,
    correction: int,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """`(constant, slope)` of sum, mean, var and std: `constant + slope * (x - mean)` is a gradient.

    Args:
        plan: The plan.
        given: Gradients by the name of their result.
        std: In `dtype`, where its gradient is given.
        correction: As in `plan_multi`.
        dtype: That of the coefficients, the accumulator's.

    Returns:
        `[..., num_groups, F]` each; None for 0 everywhere.
    """
    constant = slope = None
    if "sum" in given:
        constant = given["sum"].to(dtype)
    if "mean" in given:
        part = given["mean"].to(dtype) * plan.mean_scale(dtype).unsqueeze(-1)
        constant = part if constant is None else constant + part
    if "var" in given:
        slope = 2 * given["var"].to(dtype)
    if "std" in given:  # as torch: no gradient where nothing spreads
        assert std is not None, "kept wherever var or std was asked for"
        part = (given["std"].to(dtype) / std).masked_fill(std == 0, 0)
        slope = part if slope is None else slope + part
    return constant, None if slope is None else slope / _freedom(plan, dtype, correction)


def multi_backward(
    plan: Plan,
    src: Tensor,
    names: Sequence[str],
    correction: int,
    grads: Sequence[Tensor | None],
    extremes: Sequence[Tensor],
    mean: Tensor | None,
    std: Tensor | None,
) -> Tensor:
    """Gradient of `plan_multi` by the fused kernel; not differentiable.

    Args:
        plan: The plan.
        src: The entries.
        names: What was asked for.
        correction: As in `plan_multi`.
        grads: Gradient of each result, or None.
        extremes: The results amax and amin, as far as they were asked for.
        mean: In the accumulator's dtype, where var or std was asked for.
        std: Likewise.
    """
    wide = accumulator_dtype(src.dtype)
    given = {n: g.contiguous() for n, g in zip(names, grads, strict=True) if g is not None}
    constant, slope = gradient_coefficients(plan, given, std, correction, wide)
    if constant is None:
        constant = src.new_zeros((*src.shape[:-2], plan.num_dst, src.shape[-1]), dtype=wide)
    extreme = dict(zip([n for n in names if n in ("amax", "amin")], extremes, strict=True))
    high, low = given.get("amax"), given.get("amin")
    return cast(
        Tensor,
        plan.ops.plan_multi_grad(
            plan.handle,
            src,
            constant,
            slope,
            mean if slope is not None else None,
            extreme["amax"] if high is not None else None,
            high,
            extreme["amin"] if low is not None else None,
            low,
        ),
    )


def multi_backward_anew(
    plan: Plan,
    src: Tensor,
    names: Sequence[str],
    correction: int,
    grads: Sequence[Tensor | None],
) -> Tensor:
    """`multi_backward` for a caller that kept no results: they are made again."""
    kept = [n for n in names if n in ("amax", "amin")]
    bits = _bits(kept)
    if _spreads(names):
        bits |= 1 << _WIDE_MEAN | 1 << _WIDE_STD
    made: Sequence[Tensor] = plan.ops.plan_multi(plan.handle, src, bits, correction) if bits else ()
    mean, std = (made[_WIDE_MEAN], made[_WIDE_STD]) if _spreads(names) else (None, None)
    return multi_backward(plan, src, names, correction, grads, _results(made, kept), mean, std)


class _Multi(PlanFunction):
    """The results in the order asked for; behind them mean and std in the accumulator's dtype."""

    @staticmethod
    def forward(
        plan: Plan, src: Tensor, names: tuple[str, ...], correction: int
    ) -> tuple[Tensor, ...]:
        bits = _bits(names)
        if _spreads(names):
            bits |= 1 << _WIDE_MEAN | 1 << _WIDE_STD
        made = plan.ops.plan_multi(plan.handle, src, bits, correction)
        return (*_results(made, names), made[_WIDE_MEAN], made[_WIDE_STD])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plan, src, ctx.names, ctx.correction = inputs
        kept = [o for n, o in zip(ctx.names, output, strict=False) if n in ("amax", "amin")]
        ctx.mark_non_differentiable(*output[-2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(src, *output[-2:], *kept)
        ctx.save_for_forward(src, *output[-2:], *kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        src, mean, std, *extremes = ctx.saved_tensors
        wanted = grads[: len(ctx.names)]
        if all(g is None for g in wanted):
            return None, None, None, None
        if _tracked(src, *wanted):
            dx = _backward_again(ctx.plan, src, ctx.names, ctx.correction, wanted, extremes)
        else:
            spread = (mean, std) if _spreads(ctx.names) else (None, None)
            dx = multi_backward(ctx.plan, src, ctx.names, ctx.correction, wanted, extremes, *spread)
        return None, dx, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        src, mean, std, *extremes = ctx.saved_tensors
        wide, groups = _wide(src.dtype), entry_groups(ctx.plan)
        tangent = cast(Tensor, tangents[1]).to(wide)
        left = list(extremes)
        out: list[Tensor | None] = []
        for name in ctx.names:
            if name in ("sum", "mean"):
                part = plan_sum(ctx.plan, tangent.contiguous(), mean=name == "mean")
            elif name in ("amax", "amin"):
                share = winner_share(src, left.pop(0), groups, "even")
                part = plan_sum(ctx.plan, (share.to(wide) * tangent).contiguous())
            else:
                apart = src.to(wide) - mean.index_select(-2, groups)
                part = plan_sum(ctx.plan, (apart * tangent).contiguous())
                part = part / _freedom(ctx.plan, wide, ctx.correction)
                part = 2 * part if name == "var" else (part / std).masked_fill(std == 0, 0)
            out.append(part.to(src.dtype))
        return (*out, None, None)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        plan: Plan,
        src: Tensor,
        names: tuple[str, ...],
        correction: int,
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        rank = src.dim() - 1
        folded, _ = _fold_batch(info.batch_size, src, in_dims[1], None, None, 1)
        made = _Multi.apply(plan, folded, names, correction)
        count = len(made) if _spreads(names) else len(names)
        out = [_unfold_batch(o, info.batch_size) for o in made[:count]]
        dims: list[int | None] = [rank - 1] * count
        return (*out, *made[count:]), (*dims, *[None] * (len(made) - count))


def _backward_again(
    plan: Plan,
    src: Tensor,
    names: Sequence[str],
    correction: int,
    grads: Sequence[Tensor | None],
    extremes: Sequence[Tensor],
) -> Tensor:
    """`multi_backward` as differentiable operations."""
    wide, groups = _wide(src.dtype), entry_groups(plan)
    values = src.to(wide)
    out = torch.zeros_like(values)
    left = list(extremes)
    for name, grad in zip(names, grads, strict=True):
        result = left.pop(0) if name in ("amax", "amin") else None
        if grad is None:
            continue
        grad = grad.to(wide)
        if result is not None:
            share = winner_share(src, result, groups, "even").to(wide)
            out = out + share * grad.index_select(-2, groups)
        elif name in ("sum", "mean"):
            if name == "mean":
                grad = grad * plan.mean_scale(wide).unsqueeze(-1)
            out = out + grad.index_select(-2, groups)
        else:
            mean = plan_sum(plan, values.contiguous(), mean=True)
            apart = values - mean.index_select(-2, groups)
            slope = grad / _freedom(plan, wide, correction)
            if name == "var":
                slope = 2 * slope
            else:
                squares = plan_sum(plan, (apart * apart).contiguous())
                flat = squares == 0
                spread = (squares / _freedom(plan, wide, correction)).masked_fill(flat, 1).sqrt()
                slope = (slope / spread).masked_fill(flat, 0)
            out = out + apart * slope.index_select(-2, groups)
    return out.to(src.dtype)


def multi_messages(
    src: Tensor, groups: Tensor, num_groups: int, reduces: Sequence[str], correction: int
) -> tuple[Tensor, ...]:
    """`plan_multi` as plain torch operations."""
    wide = _wide(src.dtype)
    values = src.to(wide)
    out = []
    for name in reduces:
        if name not in ("var", "std"):
            out.append(reduce_messages(src, groups, num_groups, name, "even"))
            continue
        mean = reduce_messages(values, groups, num_groups, "mean", "even")
        apart = values - mean.index_select(-2, groups)
        squares = reduce_messages(apart * apart, groups, num_groups, "sum", "even")
        counts = torch.zeros(num_groups, dtype=torch.int64, device=groups.device)
        counts = counts.index_add(0, groups, torch.ones_like(groups))
        var = squares / (counts - correction).clamp(min=1).unsqueeze(-1)
        if name == "std":
            flat = var == 0
            var = var.masked_fill(flat, 1).sqrt().masked_fill(flat, 0)
        out.append(var.to(src.dtype))
    return tuple(out)
