"""The reductions as plain torch operations over messages `[E, ...]`.

Slower and with every message in memory, but differentiable to any order and at home on every
device: used for tensors that are not on the CPU, for meta tensors, and for derivatives of
derivatives of min and max.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ._plan import Plan

__all__ = [
    "first_winner",
    "minmax_backward",
    "minmax_forward_derivative",
    "reduce_messages",
    "winner_share",
]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over messages of this dtype are held in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _sum_rows(rows: int, index: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` `[..., E, F]` added up by `index`, in float32 at least, rounded once to `dtype`."""
    values = values.to(_wide(values.dtype))
    shape = (*values.shape[:-2], rows, values.shape[-1])
    out = torch.zeros(shape, dtype=values.dtype, device=values.device)
    return out.index_add(-2, index, values).to(dtype)


def _ends(plan: Plan) -> tuple[Tensor, Tensor]:
    """Destination and source of each edge, `[E]` int64."""
    return (
        plan.memo("dst64", lambda: plan.array("dst").long()),
        plan.memo("src64", lambda: plan.array("src").long()),
    )


def _messages(x: Tensor, weight: Tensor | None, src: Tensor, heads: int) -> Tensor:
    messages = x.index_select(-2, src)
    if weight is None:
        return messages
    shape = messages.shape
    split = messages.reshape(*shape[:-1], heads, shape[-1] // heads)
    return (split * weight.unsqueeze(-1)).reshape(shape)


def _wins(messages: Tensor, result: Tensor, dst: Tensor) -> Tensor:
    """Where a message is its slot's result: equal, or both NaN."""
    reached = result.index_select(-2, dst)
    return (messages == reached) | (messages.isnan() & reached.isnan())


def winner_share(messages: Tensor, result: Tensor, dst: Tensor, ties: str) -> Tensor:
    """What part of its row's gradient each message gets.

    Like `messages`, constant under differentiation.
    """
    with torch.no_grad():
        if ties == "even":
            win = _wins(messages, result, dst)
            counts = torch.zeros(result.shape, dtype=torch.int32, device=result.device)
            counts = counts.index_add(-2, dst, win.to(torch.int32)).clamp(min=1)
            return win / counts.index_select(-2, dst).to(_wide(messages.dtype))
        first = first_winner(messages, result, dst).index_select(-2, dst)
        position = torch.arange(dst.numel(), device=dst.device).unsqueeze(-1)
        return (position == first).to(messages.dtype)


def first_winner(messages: Tensor, result: Tensor, dst: Tensor) -> Tensor:
    """The first message that reaches its slot's result, int64 like `result`.

    E where a slot has none.
    """
    win = _wins(messages, result, dst)
    edges = dst.numel()
    position = torch.arange(edges, device=dst.device).unsqueeze(-1).expand(win.shape)
    position = torch.where(win, position, edges)
    first = torch.full(result.shape, edges, device=dst.device, dtype=torch.int64)
    return first.scatter_reduce(-2, dst.unsqueeze(-1).expand(win.shape), position, "amin")


def minmax_backward(
    plan: Plan,
    x: Tensor,
    weight: Tensor | None,
    result: Tensor,
    grad: Tensor,
    heads: int,
    ties: str,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of a min or max with respect to `x` and `weight`, themselves differentiable."""
    dst, src = _ends(plan)
    share = winner_share(_messages(x, weight, src, heads), result, dst, ties)
    per_edge = share * grad.index_select(-2, dst)
    if weight is None:
        return _sum_rows(x.shape[-2], src, per_edge, x.dtype), None
    # reshape, not unflatten: the older vmap, of jacobian(vectorize=True), has no rule for that.
    split = (*per_edge.shape[:-1], heads, x.shape[-1] // heads)
    weighted = (per_edge.reshape(split) * weight.unsqueeze(-1)).reshape(per_edge.shape)
    dx = _sum_rows(x.shape[-2], src, weighted, x.dtype)
    dw = (per_edge * x.index_select(-2, src)).reshape(split).sum(-1)
    return dx, dw.to(x.dtype)


def minmax_forward_derivative(
    plan: Plan,
    x: Tensor,
    weight: Tensor | None,
    result: Tensor,
    tangent_x: Tensor | None,
    tangent_weight: Tensor | None,
    heads: int,
    ties: str,
) -> Tensor:
    """Directional derivative of a min or max: winners' tangents, shared as their gradients are."""
    dst, src = _ends(plan)
    share = winner_share(_messages(x, weight, src, heads), result, dst, ties)
    tangent = torch.zeros_like(share)
    if tangent_x is not None:
        tangent = tangent + _messages(tangent_x, weight, src, heads)
    if tangent_weight is not None:
        tangent = tangent + _messages(x, tangent_weight, src, heads)
    return _sum_rows(result.shape[-2], dst, share * tangent, result.dtype)


class _Winners(torch.autograd.Function):
    """`out` as a function of `values` whose gradient goes to the winners by their share."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, out: Tensor, share: Tensor, dst: Tensor) -> Tensor:
        return out.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2], inputs[3])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        share, dst = ctx.saved_tensors
        return grads[0].index_select(-2, dst) * share, None, None, None


class _Rest(torch.autograd.Function):
    """`values`, but 1 with the sign of a zero or an infinity in its place; no gradient there."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        special = (values == 0) | values.isinf()
        return torch.where(special, torch.ones_like(values).copysign(values), values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Only second derivatives come here. At a zero they are other products than those at hand.
        (values,) = ctx.saved_tensors
        return (torch.where((values == 0) | values.isinf(), float("nan"), grads[0]),)


class _Products(torch.autograd.Function):
    """Products of floating point `values` `[..., E, F]` by `dst`, as the kernels have them.

    The product of the rest may overflow: then torch's own is NaN where one entry is 0, and its
    gradient cannot be batched. Here zeros and infinities are counted, and the rest is multiplied.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, dst: Tensor, num_dst: int) -> Tensor:
        rest = _Rest.forward(values)
        shape = (*values.shape[:-2], num_dst, values.shape[-1])
        ones = torch.ones(shape, dtype=values.dtype, device=values.device)
        product = ones.scatter_reduce(-2, dst.unsqueeze(-1).expand(rest.shape), rest, "prod")
        zeros, infinities = _specials(values, dst, num_dst)
        return _with_specials(product, zeros > 0, infinities > 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, dst, ctx.num_dst = inputs
        ctx.save_for_backward(values, dst)
        ctx.save_for_forward(values, dst)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, dst = ctx.saved_tensors
        others = _other_products(values, dst, ctx.num_dst)
        return grads[0].index_select(-2, dst) * others, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        values, dst = ctx.saved_tensors
        others = _other_products(values, dst, ctx.num_dst)
        shape = (*values.shape[:-2], ctx.num_dst, values.shape[-1])
        out = torch.zeros(shape, dtype=values.dtype, device=values.device)
        return out.index_add(-2, dst, others * cast(Tensor, tangents[0]))


def _other_products(values: Tensor, dst: Tensor, num_dst: int) -> Tensor:
    """For each entry the product of the others in its slot."""
    rest = _Rest.apply(values)  # type: ignore[no-untyped-call]
    product = _Products.apply(rest, dst, num_dst)  # type: ignore[no-untyped-call]
    zeros, infinities = _specials(values, dst, num_dst)
    return _with_specials(
        product.index_select(-2, dst) / rest,
        zeros.index_select(-2, dst) > (values == 0).to(zeros.dtype),
        infinities.index_select(-2, dst) > values.isinf().to(zeros.dtype),
    )


def _specials(values: Tensor, dst: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
    """How many zeros and infinities each slot has."""
    shape = (*values.shape[:-2], num_dst, values.shape[-1])
    none = torch.zeros(shape, dtype=torch.int32, device=values.device)
    zeros, infinities = (values == 0).to(torch.int32), values.isinf().to(torch.int32)
    return none.index_add(-2, dst, zeros), none.index_add(-2, dst, infinities)


def _with_specials(product: Tensor, has_zero: Tensor, has_infinity: Tensor) -> Tensor:
    """What zeros and infinities make of the product of the rest, whose sign has theirs in it."""
    lost = product.isnan() | (has_zero & has_infinity)
    out = torch.where(has_zero, torch.zeros_like(product).copysign(product), product)
    out = torch.where(has_infinity, torch.full_like(product, float("inf")).copysign(product), out)
    return torch.where(lost, float("nan"), out)


def reduce_messages(messages: Tensor, dst: Tensor, num_dst: int, reduce: str, ties: str) -> Tensor:
    """Reduces `[..., E, F]` messages into `[..., num_dst, F]`, on any device and differentiable.

    Args:
        messages: The values, `[..., E, F]`.
        dst: Slot of each, `[E]` int64.
        num_dst: Number of slots.
        reduce: sum, mean, amax, amin or prod.
        ties: How tied maxima share a gradient, "even" or "first".
    """
    half = messages.dtype in (torch.float16, torch.bfloat16)
    values = messages.float() if half else messages
    shape = (*values.shape[:-2], num_dst, values.shape[-1])
    zeros = torch.zeros(shape, dtype=values.dtype, device=values.device)
    if reduce in ("sum", "mean"):
        out = zeros.index_add(-2, dst, values)
        if reduce == "mean":
            counts = torch.zeros(num_dst, dtype=torch.int64, device=dst.device).index_add(
                0, dst, torch.ones_like(dst)
            )
            counts = counts.clamp(min=1).unsqueeze(-1)
            out = (
                out / counts if out.is_floating_point() else out.div(counts, rounding_mode="floor")
            )
    elif reduce == "prod" and values.is_floating_point():
        made = _Products.apply(values, dst, num_dst)  # type: ignore[no-untyped-call]
        out = cast(Tensor, made)
    elif reduce == "prod":
        index = dst.unsqueeze(-1).expand(values.shape)
        out = (zeros + 1).scatter_reduce(-2, index, values, "prod")
    else:
        index = dst.unsqueeze(-1).expand(values.shape)
        out = zeros.scatter_reduce(-2, index, values.detach(), reduce, include_self=False)
        if values.is_floating_point():
            share = winner_share(values.detach(), out, dst, ties)
            winners = _Winners.apply(values, out, share, dst)  # type: ignore[no-untyped-call]
            out = cast(Tensor, winners)
    return out.to(messages.dtype) if half else out
