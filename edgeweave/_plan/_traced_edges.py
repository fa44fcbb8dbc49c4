"""Attention's scores of edges as registered ops, for the graphs that the passes rewrite.

As in `_compiled`: they take the edges, look the plan up inside, and return fresh tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._attention import (
    plan_scores,
    scores_backward,
    scores_messages,
    scores_messages_backward,
)
from ._cache import plan_for_edges
from ._compiled import _TAGS, _fake, _impl, _library, _no_second_derivative
from ._device import has_kernels
from ._functions import plan_dot, plan_sum
from ._pair import pair_messages

__all__ = ["registered"]

registered = ("edgeweave::edge_dots", "edgeweave::edge_scores")
"""Names of the ops that importing this module registers."""

_library.define(
    "edge_dots(Tensor edge_index, Tensor dst, Tensor src, int heads, bool flip) -> Tensor",
    tags=_TAGS,
)
_library.define(
    "edge_dots_backward(Tensor grad, Tensor edge_index, Tensor dst, Tensor src, int heads,"
    " bool flip, bool need_dst, bool need_src) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_library.define(
    "edge_scores(Tensor edge_index, Tensor dst, Tensor src, Tensor att, int heads, float slope,"
    " bool flip) -> Tensor",
    tags=_TAGS,
)
_library.define(
    "edge_scores_backward(Tensor grad, Tensor edge_index, Tensor dst, Tensor src, Tensor att,"
    " int heads, float slope, bool flip, bool[] needs) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_ops: Any = torch.ops.edgeweave


def _ends(edge_index: Tensor, flip: bool) -> tuple[Tensor, Tensor]:
    """Destination and source of each edge."""
    return (edge_index[0], edge_index[1]) if flip else (edge_index[1], edge_index[0])


def _given(made: Tensor | None, like: Tensor) -> Tensor:
    """A result that nobody asked for is an empty tensor."""
    return like.new_empty(0) if made is None else made


# ---- dot products --------------------------------------------------------------------------------


@_impl("edge_dots")
def _edge_dots(edge_index: Tensor, dst: Tensor, src: Tensor, heads: int, flip: bool) -> Tensor:
    """`out[e, h] = <dst[i, h], src[j, h]>` for the edge e from j to i; rows are `[N, H * C]`."""
    dst, src = dst.contiguous(), src.contiguous()
    if not has_kernels(dst):
        products = pair_messages(dst, src, *_ends(edge_index, flip), "mul")
        return products.view(products.shape[0], heads, -1).sum(-1)
    plan = plan_for_edges(edge_index, src.shape[0], dst.shape[0], flip=flip, compiled=True)
    return plan_dot(plan, dst, src, heads=heads)


@_fake("edge_dots")
def _edge_dots_fake(edge_index: Tensor, dst: Tensor, src: Tensor, heads: int, flip: bool) -> Tensor:
    return dst.new_empty(edge_index.shape[1], heads)


@_impl("edge_dots_backward")
def _edge_dots_backward(
    grad: Tensor,
    edge_index: Tensor,
    dst: Tensor,
    src: Tensor,
    heads: int,
    flip: bool,
    need_dst: bool,
    need_src: bool,
) -> tuple[Tensor, Tensor]:
    grad, dst, src = grad.contiguous(), dst.contiguous(), src.contiguous()
    d_dst = d_src = None
    if has_kernels(dst):
        plan = plan_for_edges(edge_index, src.shape[0], dst.shape[0], flip=flip, compiled=True)
        if need_dst:
            d_dst = plan_sum(plan, src, grad, heads=heads)
        if need_src:
            d_src = plan_sum(plan, dst, grad, heads=heads, transpose=True)
    else:
        to, come = _ends(edge_index, flip)
        each = grad.repeat_interleave(dst.shape[1] // heads, dim=-1)
        if need_dst:
            d_dst = torch.zeros_like(dst).index_add(0, to, each * src.index_select(0, come))
        if need_src:
            d_src = torch.zeros_like(src).index_add(0, come, each * dst.index_select(0, to))
    return _given(d_dst, dst), _given(d_src, src)


@_fake("edge_dots_backward")
def _edge_dots_backward_fake(
    grad: Tensor,
    edge_index: Tensor,
    dst: Tensor,
    src: Tensor,
    heads: int,
    flip: bool,
    need_dst: bool,
    need_src: bool,
) -> tuple[Tensor, Tensor]:
    return _like(dst, need_dst), _like(src, need_src)


def _like(x: Tensor, needed: bool) -> Tensor:
    contiguous = torch.contiguous_format
    return torch.empty_like(x, memory_format=contiguous) if needed else x.new_empty(0)


def _edge_dots_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _edge_dots_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    edge_index, dst, src = ctx.saved_tensors
    _, need_dst, need_src, *_ = ctx.needs_input_grad
    d_dst, d_src = _ops.edge_dots_backward(
        grad, edge_index, dst, src, *ctx.options, need_dst, need_src
    )
    return None, d_dst if need_dst else None, d_src if need_src else None, None, None


# ---- GATv2's scores ------------------------------------------------------------------------------


@_impl("edge_scores")
def _edge_scores(
    edge_index: Tensor, dst: Tensor, src: Tensor, att: Tensor, heads: int, slope: float, flip: bool
) -> Tensor:
    """`out[e, h] = sum_c att[h, c] * leaky_relu(dst[i, h, c] + src[j, h, c])`."""
    dst, src, att = dst.contiguous(), src.contiguous(), att.contiguous()
    if not has_kernels(dst):
        return scores_messages(dst, src, att, *_ends(edge_index, flip), heads, slope)
    plan = plan_for_edges(edge_index, src.shape[0], dst.shape[0], flip=flip, compiled=True)
    return plan_scores(plan, dst, src, att, heads, slope)


@_fake("edge_scores")
def _edge_scores_fake(
    edge_index: Tensor, dst: Tensor, src: Tensor, att: Tensor, heads: int, slope: float, flip: bool
) -> Tensor:
    return dst.new_empty(edge_index.shape[1], heads)


@_impl("edge_scores_backward")
def _edge_scores_backward(
    grad: Tensor,
    edge_index: Tensor,
    dst: Tensor,
    src: Tensor,
    att: Tensor,
    heads: int,
    slope: float,
    flip: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    grad, dst, src, att = (t.contiguous() for t in (grad, dst, src, att))
    if has_kernels(dst):
        plan = plan_for_edges(edge_index, src.shape[0], dst.shape[0], flip=flip, compiled=True)
        made = scores_backward(plan, grad, dst, src, att, heads, slope, needs)
    else:
        ends = _ends(edge_index, flip)
        made = scores_messages_backward(grad, dst, src, att, *ends, heads, slope, needs)
    d_dst, d_src, d_att = made
    return _given(d_dst, dst), _given(d_src, src), _given(d_att, att)


@_fake("edge_scores_backward")
def _edge_scores_backward_fake(
    grad: Tensor,
    edge_index: Tensor,
    dst: Tensor,
    src: Tensor,
    att: Tensor,
    heads: int,
    slope: float,
    flip: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(dst, needs[0]), _like(src, needs[1]), _like(att, needs[2])


def _edge_scores_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _edge_scores_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[1:4])
    made = _ops.edge_scores_backward(grad, *ctx.saved_tensors, *ctx.options, needs)
    found = (m if n else None for m, n in zip(made, needs, strict=True))
    return None, *found, None, None, None


for _name, _backward, _setup in (
    ("edge_dots", _edge_dots_grad, _edge_dots_setup),
    ("edge_scores", _edge_scores_grad, _edge_scores_setup),
):
    torch.library.register_autograd(
        f"edgeweave::{_name}", _backward, setup_context=_setup, lib=_library
    )
    torch.library.register_autograd(
        f"edgeweave::{_name}_backward", _no_second_derivative, lib=_library
    )
