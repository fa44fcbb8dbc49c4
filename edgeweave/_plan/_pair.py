"""A value per edge and feature of its two ends: `a[dst] + b[src]`, minus, times."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._cache import plan_for_index
from ._composite import _ends
from ._functions import PlanFunction, plan_sum
from ._plan import Plan

__all__ = ["PAIR_OPS", "pair_messages", "plan_pair", "sum_at"]

# Codes of csrc/kernels/pair-inl.h.
PAIR_OPS: Final = {"add": 0, "sub": 1, "mul": 2}


def plan_pair(plan: Plan, a: Tensor, b: Tensor, op: str) -> Tensor:
    """`out[e] = op(a[dst[e]], b[src[e]])` in input order.

    Args:
        plan: A plan over edges.
        a: `[num_dst, F]`, contiguous, floating point.
        b: `[num_src, F]`, contiguous, in a's dtype.
        op: "add", "sub" or "mul".
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        dst, src = _ends(plan)
        return pair_messages(a, b, dst, src, op)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return cast(Tensor, _Pair.apply(plan, a, b, op))
    return _Pair.forward(plan, a, b, op)


def pair_messages(a: Tensor, b: Tensor, dst: Tensor, src: Tensor, op: str) -> Tensor:
    """`plan_pair` as plain torch operations."""
    left, right = a.index_select(0, dst), b.index_select(0, src)
    if op == "add":
        return left + right
    return left - right if op == "sub" else left * right


def sum_at(plan: Plan, values: Tensor, end: str) -> Tensor:
    """Sums of values per edge at their destinations or sources."""
    index = plan.memo(f"{end}_index", lambda: plan.array(end))
    rows = plan.num_dst if end == "dst" else plan.num_src
    return plan_sum(plan_for_index(index, rows, op="sddmm"), values.contiguous())


class _Pair(PlanFunction):
    @staticmethod
    def forward(plan: Plan, a: Tensor, b: Tensor, op: str) -> Tensor:
        return cast(Tensor, plan.ops.plan_pair(plan.handle, a, b, PAIR_OPS[op]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.plan, a, b, ctx.op = inputs
        if ctx.op == "mul":
            ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        left = right = grads[0]
        if ctx.op == "mul":
            a, b = ctx.saved_tensors
            dst, src = _ends(ctx.plan)
            left, right = left * b.index_select(0, src), right * a.index_select(0, dst)
        elif ctx.op == "sub":
            right = -right
        da = sum_at(ctx.plan, left, "dst") if ctx.needs_input_grad[1] else None
        db = sum_at(ctx.plan, right, "src") if ctx.needs_input_grad[2] else None
        return None, da, db, None
