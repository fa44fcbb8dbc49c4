"""Softmax, log-sum-exp and their kin as registered ops, for tracing: see `_compiled`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ._batched import check_values
from ._cache import plan_for_index
from ._compiled import _TAGS, _fake, _impl, _library, _no_second_derivative, _rows_like
from ._device import has_kernels
from ._multi import multi_backward_anew, multi_messages, plan_multi
from ._softmax import logsumexp_messages, plan_logsumexp, plan_softmax, softmax_messages

__all__ = ["checked_index", "logsumexp_op", "multi_op", "softmax_op"]

_library.define("checked_index(Tensor index, SymInt bound, str what) -> Tensor", tags=_TAGS)
_library.define("softmax(Tensor src, Tensor index, SymInt dim_size) -> Tensor", tags=_TAGS)
_library.define(
    "softmax_backward(Tensor grad, Tensor result, Tensor index, SymInt dim_size) -> Tensor",
    tags=_TAGS,
)
_library.define("logsumexp(Tensor src, Tensor index, SymInt dim_size) -> Tensor", tags=_TAGS)
_library.define(
    "logsumexp_backward(Tensor grad, Tensor src, Tensor result, Tensor index, SymInt dim_size)"
    " -> Tensor",
    tags=_TAGS,
)

_ops = torch.ops.edgeweave


def checked_index(index: Tensor, bound: int, what: str) -> Tensor:
    """A copy of `index` `[E]` whose every entry was seen to be in `[0, bound)`, as an op.

    For programs that index by torch operations, of which the compiled ones may take a negative
    index to count from the end.

    Args:
        index: int32 or int64, on the CPU.
        bound: What each entry must be below.
        what: The operator and the argument, as an error names them.

    Raises:
        IndexError: If an entry is out of range.
    """
    return cast(Tensor, _ops.checked_index(index, bound, what))


@_impl("checked_index")
def _checked_index(index: Tensor, bound: int, what: str) -> Tensor:
    if index.device.type == "cpu" and index.numel() > 0:
        lowest, highest = index.aminmax()
        if int(lowest) < 0 or int(highest) >= bound:
            check_values(what, index, bound)
    return index.clone(memory_format=torch.contiguous_format)


@_fake("checked_index")
def _checked_index_fake(index: Tensor, bound: int, what: str) -> Tensor:
    return torch.empty_like(index, memory_format=torch.contiguous_format)


def softmax_op(src: Tensor, index: Tensor, dim_size: int) -> Tensor:
    """`scatter.softmax` on folded entries, as one traceable op."""
    return cast(Tensor, _ops.softmax(src, index, dim_size))


@_impl("softmax")
def _softmax(src: Tensor, index: Tensor, dim_size: int) -> Tensor:
    if not has_kernels(src):
        return softmax_messages(src, index.long(), dim_size)
    plan = plan_for_index(index, dim_size, op="softmax", compiled=True)
    return plan_softmax(plan, src.contiguous())


@_fake("softmax")
def _softmax_fake(src: Tensor, index: Tensor, dim_size: int) -> Tensor:
    return torch.empty_like(src, memory_format=torch.contiguous_format)


@_impl("softmax_backward")
def _softmax_backward(grad: Tensor, result: Tensor, index: Tensor, dim_size: int) -> Tensor:
    grad, result = grad.contiguous(), result.contiguous()
    if has_kernels(result):
        plan = plan_for_index(index, dim_size, op="softmax", compiled=True)
        return cast(Tensor, plan.ops.plan_softmax_grad(plan.handle, result, grad))
    groups = index.long()
    wide = torch.float64 if result.dtype == torch.float64 else torch.float32
    y, g = result.to(wide), grad.to(wide)
    total = y.new_zeros(*y.shape[:-2], dim_size, y.shape[-1]).index_add(-2, groups, y * g)
    return (y * (g - total.index_select(-2, groups))).to(result.dtype)


@_fake("softmax_backward")
def _softmax_backward_fake(grad: Tensor, result: Tensor, index: Tensor, dim_size: int) -> Tensor:
    return torch.empty_like(result, memory_format=torch.contiguous_format)


def _softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output, inputs[1])
    ctx.dim_size = inputs[2]


def _softmax_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    result, index = ctx.saved_tensors
    return _ops.softmax_backward(grad, result, index, ctx.dim_size), None, None


def logsumexp_op(src: Tensor, index: Tensor, dim_size: int) -> Tensor:
    """`scatter.logsumexp` on folded entries, as one traceable op."""
    return cast(Tensor, _ops.logsumexp(src, index, dim_size))


@_impl("logsumexp")
def _logsumexp(src: Tensor, index: Tensor, dim_size: int) -> Tensor:
    if not has_kernels(src):
        return logsumexp_messages(src, index.long(), dim_size)
    plan = plan_for_index(index, dim_size, op="logsumexp", compiled=True)
    return plan_logsumexp(plan, src.contiguous())


@_fake("logsumexp")
def _logsumexp_fake(src: Tensor, index: Tensor, dim_size: int) -> Tensor:
    return _rows_like(src, dim_size)


@_impl("logsumexp_backward")
def _logsumexp_backward(
    grad: Tensor, src: Tensor, result: Tensor, index: Tensor, dim_size: int
) -> Tensor:
    wide = torch.float64 if src.dtype == torch.float64 else torch.float32
    grad, src = grad.contiguous(), src.contiguous()
    if has_kernels(src):
        plan = plan_for_index(index, dim_size, op="logsumexp", compiled=True)
        # Of half precision, the result before it was rounded: made anew rather than kept.
        exact = result if src.dtype == wide else plan_logsumexp(plan, src.to(wide))
        made = plan.ops.plan_logsumexp_grad(plan.handle, src, exact.contiguous(), grad)
        return cast(Tensor, made)
    groups = index.long()
    exact = result if src.dtype == wide else logsumexp_messages(src.to(wide), groups, dim_size)
    share = (src.to(wide) - exact.index_select(-2, groups)).exp()
    return (share * grad.to(wide).index_select(-2, groups)).to(src.dtype)


@_fake("logsumexp_backward")
def _logsumexp_backward_fake(
    grad: Tensor, src: Tensor, result: Tensor, index: Tensor, dim_size: int
) -> Tensor:
    return torch.empty_like(src, memory_format=torch.contiguous_format)


def _logsumexp_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output, inputs[1])
    ctx.dim_size = inputs[2]


def _logsumexp_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    src, result, index = ctx.saved_tensors
    return _ops.logsumexp_backward(grad, src, result, index, ctx.dim_size), None, None


for _name, _backward, _setup in (
    ("softmax", _softmax_grad, _softmax_setup),
    ("logsumexp", _logsumexp_grad, _logsumexp_setup),
):
    torch.library.register_autograd(
        f"edgeweave::{_name}", _backward, setup_context=_setup, lib=_library
    )
    torch.library.register_autograd(
        f"edgeweave::{_name}_backward", _no_second_derivative, lib=_library
    )


# ---- several reductions --------------------------------------------------------------------------

_library.define(
    "multi_reduce(Tensor src, Tensor index, SymInt dim_size, str[] reduces, int correction)"
    " -> Tensor[]",
    tags=_TAGS,
)
_library.define(
    "multi_reduce_backward(Tensor[] grads, Tensor src, Tensor index, SymInt dim_size,"
    " str[] reduces, int correction) -> Tensor",
    tags=_TAGS,
)


def multi_op(
    src: Tensor, index: Tensor, dim_size: int, reduces: Sequence[str], correction: int
) -> tuple[Tensor, ...]:
    """`scatter.multi_reduce` on folded entries, as one traceable op."""
    return tuple(_ops.multi_reduce(src, index, dim_size, list(reduces), correction))


@_impl("multi_reduce")
def _multi_reduce(
    src: Tensor, index: Tensor, dim_size: int, reduces: list[str], correction: int
) -> list[Tensor]:
    if not has_kernels(src):
        return list(multi_messages(src, index.long(), dim_size, reduces, correction))
    plan = plan_for_index(index, dim_size, op="multi_reduce", compiled=True)
    with torch.no_grad():
        return list(plan_multi(plan, src.contiguous(), reduces, correction))


@_fake("multi_reduce")
def _multi_reduce_fake(
    src: Tensor, index: Tensor, dim_size: int, reduces: list[str], correction: int
) -> list[Tensor]:
    return [_rows_like(src, dim_size) for _ in reduces]


@_impl("multi_reduce_backward")
def _multi_reduce_backward(
    grads: list[Tensor],
    src: Tensor,
    index: Tensor,
    dim_size: int,
    reduces: list[str],
    correction: int,
) -> Tensor:
    if not has_kernels(src):
        with torch.enable_grad():
            leaf = src.detach().requires_grad_()
            made = multi_messages(leaf, index.long(), dim_size, reduces, correction)
            return torch.autograd.grad(made, leaf, grads)[0]
    plan = plan_for_index(index, dim_size, op="multi_reduce", compiled=True)
    return multi_backward_anew(plan, src.contiguous(), reduces, correction, grads)


@_fake("multi_reduce_backward")
def _multi_reduce_backward_fake(
    grads: list[Tensor],
    src: Tensor,
    index: Tensor,
    dim_size: int,
    reduces: list[str],
    correction: int,
) -> Tensor:
    return torch.empty_like(src, memory_format=torch.contiguous_format)


def _multi_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    src, index, dim_size, reduces, correction = inputs
    ctx.save_for_backward(src, index)
    ctx.options = (dim_size, reduces, correction)


def _multi_grad(ctx: Any, grads: Any) -> tuple[Any, ...]:
    src, index = ctx.saved_tensors
    shape = (*src.shape[:-2], ctx.options[0], src.shape[-1])
    given = [src.new_zeros(shape) if g is None else g for g in grads]
    dx = _ops.multi_reduce_backward(given, src, index, *ctx.options)
    return dx, None, None, None, None


torch.library.register_autograd(
    "edgeweave::multi_reduce", _multi_grad, setup_context=_multi_setup, lib=_library
)
torch.library.register_autograd(
    "edgeweave::multi_reduce_backward", _no_second_derivative, lib=_library
)
