"""Several reductions of the features at the other end of each row's edges, in one pass.

What PNA and lists of aggregations need: no message is ever in memory. Forward reads each edge's
row once for all the reductions. Backward splits in two: sum, mean and variance are linear in the
gradient, with one coefficient per row that stands alone and one that x is multiplied by, so that
one transposed sum over both gives their share; max and min send theirs to the winners.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ._composite import _ends
from ._functions import (
    PlanFunction,
    _in_transform,
    accumulator_dtype,
    aliases,
    is_batched,
    plan_sum,
)
from ._multi import (
    _WIDE_MEAN,
    _WIDE_STD,
    _bits,
    _results,
    _spreads,
    gradient_coefficients,
    multi_messages,
)
from ._plan import Plan

__all__ = ["plan_edge_multi"]


def plan_edge_multi(
    plan: Plan, x: Tensor, reduces: Sequence[str], correction: int
) -> tuple[Tensor, ...]:
    """One result per name in `reduces`, `[num_dst, F]` in x's dtype; 0 where a row has no edges.

    Args:
        plan: A plan over edges.
        x: `[num_src, F]`, contiguous, floating point.
        reduces: Names of `MULTI_REDUCES`, each once.
        correction: var and std divide by `max(count - correction, 1)`.
    """
    names = tuple(reduces)
    if _in_transform():
        return _composite(plan, x, names, correction)
    if torch.is_grad_enabled() and x.requires_grad:
        return cast(tuple[Tensor, ...], _EdgeMulti.apply(plan, x, names, correction))
    return _results(plan.ops.plan_multi(plan.handle, x, _bits(names), correction), names)


def _composite(
    plan: Plan, x: Tensor, names: tuple[str, ...], correction: int
) -> tuple[Tensor, ...]:
    dst, src = _ends(plan)
    return multi_messages(x.index_select(0, src), dst, plan.num_dst, names, correction)


class _EdgeMulti(PlanFunction):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, x: Tensor, names: tuple[str, ...], correction: int
    ) -> tuple[Tensor, ...]:
        bits = _bits(names)
        spread: tuple[Tensor, ...] = ()
        if _spreads(names):
            bits |= 1 << _WIDE_MEAN | 1 << _WIDE_STD
        made = plan.ops.plan_multi(plan.handle, x, bits, correction)
        if _spreads(names):
            spread = made[_WIDE_MEAN], made[_WIDE_STD]
        results = _results(made, names)
        extremes = [r for n, r in zip(names, results, strict=True) if n in ("amax", "amin")]
        ctx.plan, ctx.names, ctx.correction, ctx.dtype = plan, names, correction, x.dtype
        ctx.set_materialize_grads(False)
        # Sums need nothing of x: nobody is kept from editing it then.
        ctx.needs_x = bool(spread or extremes)
        ctx.save_for_backward(*([x] if ctx.needs_x else []), *spread, *extremes)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        x = saved.pop(0) if ctx.needs_x else None
        given = {n: g for n, g in zip(ctx.names, grads, strict=True) if g is not None}
        if not given:
            return None, None, None, None
        # Somebody wants the derivative of this derivative, or many gradients at once.
        if x is not None and (torch.is_grad_enabled() or any(map(is_batched, given.values()))):
            return None, _backward_again(ctx.plan, x, given, ctx.correction), None, None
        mean = std = None
        if _spreads(ctx.names):
            mean, std, *saved = saved
        kept = dict(zip([n for n in ctx.names if n in ("amax", "amin")], saved, strict=True))
        if mean is not None and std is not None:
            kept |= {"mean": mean, "std": std}
        return None, multi_gradient(ctx.plan, x, given, kept, ctx.correction, ctx.dtype), None, None


def multi_gradient(
    plan: Plan,
    x: Tensor | None,
    given: dict[str, Tensor],
    kept: dict[str, Tensor],
    correction: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Gradient of `plan_edge_multi`, not differentiable; None if it is 0.

    Args:
        plan: The plan.
        x: As in forward; None if only sums and means were asked for.
        given: Gradients of the results by their names.
        kept: The results amax and amin where their gradients are given; mean where var's is, and
            mean and std where std's is, in the accumulator's dtype.
        correction: As in forward.
        dtype: That of x.
    """
    dx = _linear_part(plan, x, given, correction, kept.get("mean"), kept.get("std"), dtype)
    for name in ("amax", "amin"):
        if name not in given:
            continue
        grad = given[name].contiguous()
        more = plan.ops.minmax_grad(plan.handle, x, 1, None, kept[name], grad, True, False)[0]
        dx = more if dx is None else dx.add_(more)
    return None if dx is None else dx.to(dtype)


def _linear_part(
    plan: Plan,
    x: Tensor | None,
    given: dict[str, Tensor],
    correction: int,
    mean: Tensor | None,
    std: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """The share of sum, mean, var and std, in the accumulator's dtype; None if there is none.

    x and its mean are there where var or std was asked for.
    """
    wide = accumulator_dtype(dtype)
    constant, slope = gradient_coefficients(plan, given, std, correction, wide)
    if slope is None:
        return None if constant is None else plan_sum(plan, constant.contiguous(), transpose=True)
    assert x is not None, "kept wherever var or std was asked for"
    assert mean is not None, "likewise"
    # Over the rows i that x_j goes to: sum constant_i + slope_i * (x_j - mean_i)
    #   = sum (constant_i - slope_i * mean_i) + x_j * sum slope_i
    constant = -slope * mean if constant is None else constant - slope * mean
    sums = plan_sum(plan, torch.cat((constant, slope), dim=1), transpose=True)
    apart, factor = sums.chunk(2, dim=1)
    return torch.addcmul(apart, factor, x.to(wide))


def _backward_again(plan: Plan, x: Tensor, given: dict[str, Tensor], correction: int) -> Tensor:
    """The gradient as differentiable operations, over messages in memory."""
    with torch.enable_grad():
        leaf = aliases((x,))[0] if x.requires_grad else x.detach().requires_grad_()
        results = _composite(plan, leaf, tuple(given), correction)
        (dx,) = torch.autograd.grad(results, leaf, tuple(given.values()), create_graph=True)
    return dx
