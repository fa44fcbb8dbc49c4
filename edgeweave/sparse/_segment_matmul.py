"""`segment_matmul`: each segment of rows times a matrix of its own (grouped GEMM)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, cast

import torch
from torch import Tensor

from .._checks import FLOAT_DTYPES, check_features, check_index_dtype, describe, shape_text
from .._plan._compiled import _TAGS, _fake, _impl, _library, _no_second_derivative, must_trace
from .._plan._functions import PlanFunction
from .._plan._segments import check_ptr_values

__all__ = ["choose_strategy", "segment_matmul"]

_OP = "segment_matmul"

# Measured on one core of a Zen 3 with MKL, K = N = 16 to 256 and 1 to 512 rows a segment. Segment
# by segment: a `torch.mm` into a slice costs 10 us beside its arithmetic. Padded: what surrounds
# `torch.bmm` costs 150 us in all, each matrix half a microsecond; small products run slower, and
# rows are copied there and back.
_CALL_NS: Final = 10_000.0
_MADDS_PER_NS: Final = 35.0
_PADDING_NS: Final = 150_000.0
_MATRIX_NS: Final = 500.0
_BATCHED_MADDS_PER_NS: Final = 20.0
_COPY_IN_NS: Final = 1.0
_COPY_OUT_NS: Final = 0.3


def segment_matmul(x: Tensor, ptr: Tensor, weight: Tensor) -> Tensor:
    """Each segment of rows times its own matrix.

    `out[ptr[b]:ptr[b + 1]] = x[ptr[b]:ptr[b + 1]] @ weight[b]`

    What relational and heterogeneous layers do with one linear map per type. Runs as one batched
    product where all segments are of one length, padded to the longest where there are many short
    ones, and segment by segment otherwise.

    Args:
        x: Rows in the order of their segments, `[E, K]`, floating point.
        ptr: `[B + 1]` int32 or int64, from 0 to E, not decreasing.
        weight: `[B, K, N]` in x's dtype.

    Returns:
        `[E, N]` in x's dtype. Differentiable to any order.

    Raises:
        ValueError: If shapes do not fit, or `ptr` is not as above.
        TypeError: If a dtype does not fit.

    Example:
        >>> import torch
        >>> from edgeweave.sparse import segment_matmul
        >>> weight = torch.stack([torch.eye(2), 2 * torch.eye(2)])
        >>> segment_matmul(torch.ones(3, 2), torch.tensor([0, 1, 3]), weight)
        tensor([[1., 1.],
                [2., 2.],
                [2., 2.]])
    """
    _check(x, ptr, weight)
    if must_trace(x) or x.is_meta:
        return cast(Tensor, torch.ops.edgeweave.segment_matmul(x, ptr, weight))
    check_ptr_values(_OP, ptr, x.shape[0])
    return _matmul(x, weight, tuple(ptr.tolist()))


def _check(x: Tensor, ptr: Tensor, weight: Tensor) -> None:
    check_features(_OP, "x", x)
    check_features(_OP, "weight", weight)
    check_index_dtype(_OP, "ptr", ptr)
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{_OP}: x must be floating point, got {describe(x)}")
    if weight.dtype != x.dtype:
        raise TypeError(f"{_OP}: weight must have x's dtype {x.dtype}, got {weight.dtype}")
    if x.dim() != 2:
        raise ValueError(f"{_OP}: x must have shape [E, K], got {shape_text(x.shape)}")
    if ptr.dim() != 1 or ptr.shape[0] == 0:
        raise ValueError(f"{_OP}: ptr must have shape [B + 1], got {shape_text(ptr.shape)}")
    if weight.dim() != 3 or weight.shape[0] != ptr.shape[0] - 1 or weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"{_OP}: weight must have shape [B, K, N] = [{ptr.shape[0] - 1}, {x.shape[1]}, N], got "
            f"{shape_text(weight.shape)}"
        )
    for name, t in (("ptr", ptr), ("weight", weight)):
        if t.device != x.device:
            raise ValueError(f"{_OP}: {name} must be on x's device {x.device}, got {t.device}")


def choose_strategy(bounds: Sequence[int], columns: int, out_columns: int) -> str:
    """How to multiply: "batched", "padded" or "loop".

    Args:
        bounds: The segments, `[B + 1]`.
        columns: K.
        out_columns: N.
    """
    lengths = [end - begin for begin, end in pairwise(bounds)]
    if not lengths:
        return "loop"
    longest = max(lengths)
    if min(lengths) == longest:
        return "batched"
    filled = sum(1 for n in lengths if n > 0)
    rows = bounds[-1]
    padded = longest * len(lengths)
    product = columns * out_columns
    loop_ns = filled * _CALL_NS + rows * product / _MADDS_PER_NS
    padded_ns = _PADDING_NS + len(lengths) * _MATRIX_NS + padded * product / _BATCHED_MADDS_PER_NS
    padded_ns += padded * columns * _COPY_IN_NS + rows * out_columns * _COPY_OUT_NS
    return "padded" if padded_ns < loop_ns else "loop"


def _pad(x: Tensor, bounds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`[B, longest, K]` with zeros behind each segment, and where each row of x went."""
    ptr = torch.tensor(bounds, device=x.device)
    lengths = ptr.diff()
    longest = int(lengths.max())
    groups = torch.arange(lengths.numel(), device=x.device)
    shift = torch.repeat_interleave(groups * longest - ptr[:-1], lengths, output_size=x.shape[0])
    place = torch.arange(x.shape[0], device=x.device) + shift
    padded = x.new_zeros(lengths.numel() * longest, x.shape[1]).index_copy_(0, place, x)
    return padded.view(lengths.numel(), longest, x.shape[1]), place


def _products(x: Tensor, weight: Tensor, bounds: Sequence[int]) -> Tensor:
    """Rows of each segment times its matrix; no derivatives."""
    strategy = choose_strategy(bounds, weight.shape[1], weight.shape[2])
    if strategy == "batched":
        stacked = x.reshape(weight.shape[0], bounds[1] - bounds[0], x.shape[1])
        return torch.bmm(stacked, weight).reshape(x.shape[0], weight.shape[2])
    if strategy == "padded":
        padded, place = _pad(x, bounds)
        out = torch.bmm(padded, weight)
        return out.flatten(0, 1).index_select(0, place)
    out = x.new_empty(x.shape[0], weight.shape[2])
    for b, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            torch.mm(x[begin:end], weight[b], out=out[begin:end])
    return out


def _outers(x: Tensor, grad: Tensor, bounds: Sequence[int]) -> Tensor:
    """`x_b^T grad_b` for each segment, `[B, K, N]`; no derivatives."""
    count = len(bounds) - 1
    strategy = choose_strategy(bounds, x.shape[1], grad.shape[1])
    if strategy == "batched":
        length = bounds[1] - bounds[0]
        left = x.reshape(count, length, x.shape[1])
        return torch.bmm(left.mT, grad.reshape(count, length, grad.shape[1]))
    if strategy == "padded":
        return torch.bmm(_pad(x, bounds)[0].mT, _pad(grad, bounds)[0])
    out = x.new_zeros(count, x.shape[1], grad.shape[1])
    for b, (begin, end) in enumerate(pairwise(bounds)):
        if begin < end:
            torch.mm(x[begin:end].t(), grad[begin:end], out=out[b])
    return out


def _matmul(x: Tensor, weight: Tensor, bounds: tuple[int, ...]) -> Tensor:
    return cast(Tensor, _Matmul.apply(x, weight, bounds))


def _outer(x: Tensor, grad: Tensor, bounds: tuple[int, ...]) -> Tensor:
    return cast(Tensor, _Outer.apply(x, grad, bounds))


class _Matmul(PlanFunction):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bounds: tuple[int, ...]) -> Tensor:
        return _products(x, weight, bounds)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ctx.bounds = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = _matmul(grads[0], weight.mT, ctx.bounds) if ctx.needs_input_grad[0] else None
        dw = _outer(x, grads[0], ctx.bounds) if ctx.needs_input_grad[1] else None
        return dx, dw, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        x, weight = ctx.saved_tensors
        parts = []
        if tangents[0] is not None:
            parts.append(_matmul(tangents[0], weight, ctx.bounds))
        if tangents[1] is not None:
            parts.append(_matmul(x, tangents[1], ctx.bounds))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


class _Outer(PlanFunction):
    @staticmethod
    def forward(x: Tensor, grad: Tensor, bounds: tuple[int, ...]) -> Tensor:
        return _outers(x, grad, bounds)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, grad, ctx.bounds = inputs
        ctx.save_for_backward(x, grad)
        ctx.save_for_forward(x, grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, grad = ctx.saved_tensors
        dx = _matmul(grad, grads[0].mT, ctx.bounds) if ctx.needs_input_grad[0] else None
        dg = _matmul(x, grads[0], ctx.bounds) if ctx.needs_input_grad[1] else None
        return dx, dg, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        x, grad = ctx.saved_tensors
        parts = []
        if tangents[0] is not None:
            parts.append(_outer(tangents[0], grad, ctx.bounds))
        if tangents[1] is not None:
            parts.append(_outer(x, tangents[1], ctx.bounds))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


# ---- as registered ops ---------------------------------------------------------------------------

_library.define("segment_matmul(Tensor x, Tensor ptr, Tensor weight) -> Tensor", tags=_TAGS)
_library.define(
    "segment_matmul_backward(Tensor grad, Tensor x, Tensor ptr, Tensor weight) -> (Tensor, Tensor)",
    tags=_TAGS,
)


@_impl("segment_matmul")
def _segment_matmul(x: Tensor, ptr: Tensor, weight: Tensor) -> Tensor:
    check_ptr_values(_OP, ptr, x.shape[0])
    return _products(x, weight, tuple(ptr.tolist()))


@_fake("segment_matmul")
def _segment_matmul_fake(x: Tensor, ptr: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@_impl("segment_matmul_backward")
def _segment_matmul_backward(
    grad: Tensor, x: Tensor, ptr: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    bounds = tuple(ptr.tolist())
    return _products(grad, weight.mT, bounds), _outers(x, grad, bounds).contiguous()


@_fake("segment_matmul_backward")
def _segment_matmul_backward_fake(
    grad: Tensor, x: Tensor, ptr: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
    x, ptr, weight = ctx.saved_tensors
    dx, dw = torch.ops.edgeweave.segment_matmul_backward(grad, x, ptr, weight)
    return dx, None, dw


torch.library.register_autograd(
    "edgeweave::segment_matmul", _grad, setup_context=_setup, lib=_library
)
torch.library.register_autograd(
    "edgeweave::segment_matmul_backward", _no_second_derivative, lib=_library
)
