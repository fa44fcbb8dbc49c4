"""The reductions as registered ops, for `torch.compile`, `torch.export` and fake tensors.

Here a plan cannot enter by handle (a number baked into a graph would outlive the plan), nor may an
op return what a cache holds (Inductor reuses result buffers). So these ops take the index tensor,
look the plan up inside, and return fresh tensors. They cost more per call than the eager path in
`_functions`, which is why that one exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import _composite
from ._cache import plan_for_edges, plan_for_index
from ._device import has_kernels
from ._functions import minmax_backward, plan_arg, plan_minmax, plan_sum, sum_backward
from ._gather import checked_rows
from ._plan import Plan
from ._prod import plan_prod, plan_prod_grad

__all__ = [
    "gather_op",
    "is_batched",
    "mm_elsewhere",
    "mm_op",
    "must_trace",
    "scatter_arg_op",
    "scatter_op",
]


def must_trace(x: Tensor) -> bool:
    """Whether the call is being traced, or has no data to look at."""
    return torch.compiler.is_compiling() or (type(x) is not Tensor and isinstance(x, FakeTensor))


def is_batched(index: Tensor) -> bool:
    """Whether `torch.vmap` runs over the index: then there is no one plan for it."""
    return bool(torch._C._functorch.is_batchedtensor(index))


# Any: torch's library class has no annotations.
_library: Any = torch.library.Library("edgeweave", "FRAGMENT")  # type: ignore[no-untyped-call]
# No CUDA graphs: a recorded look-up would find the plan of the edges it was recorded with. A torch
# without the tag would record, and fail at what a look-up may have to ask the device.
UNRECORDED: tuple[Any, ...] = tuple(
    getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name)
)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides, *UNRECORDED)
_library.define(
    "mm(Tensor edge_index, Tensor x, Tensor? weight, int heads, SymInt num_dst, bool flip,"
    " str reduce, str ties) -> Tensor",
    tags=_TAGS,
)
_library.define(
    "mm_backward(Tensor grad, Tensor edge_index, Tensor x, Tensor? weight, Tensor? result,"
    " int heads, SymInt num_dst, bool flip, str reduce, str ties, bool need_x, bool need_weight)"
    " -> (Tensor, Tensor)",
    tags=_TAGS,
)
_library.define(
    "scatter(Tensor src, Tensor index, SymInt dim_size, str reduce, str ties) -> Tensor", tags=_TAGS
)
_library.define(
    "scatter_backward(Tensor grad, Tensor src, Tensor index, Tensor? result, SymInt dim_size,"
    " str reduce, str ties) -> Tensor",
    tags=_TAGS,
)
_library.define(
    "scatter_arg(Tensor src, Tensor index, Tensor result, SymInt dim_size) -> Tensor", tags=_TAGS
)
_library.define("gather(Tensor x, Tensor index) -> Tensor", tags=_TAGS)

_ops = torch.ops.edgeweave


_F = TypeVar("_F", bound=Callable[..., Any])


def _impl(name: str) -> Callable[[_F], _F]:
    """Makes a function the op's implementation, for every backend and beneath autograd."""

    def register(function: _F) -> _F:
        _library.impl(name, function, "CompositeExplicitAutograd")
        return function

    return register


def _fake(name: str) -> Callable[[_F], _F]:
    """Makes a function the op's answer for tensors without data: `register_fake`, with types."""

    def register(function: _F) -> _F:
        torch.library.register_fake(f"edgeweave::{name}", function, lib=_library)
        return function

    return register


def _rows_like(x: Tensor, rows: Any) -> Tensor:
    return x.new_empty((*x.shape[:-2], rows, x.shape[-1]))


# ---- mm ------------------------------------------------------------------------------------------


def mm_op(
    edge_index: Tensor,
    x: Tensor,
    weight: Tensor | None,
    heads: int,
    num_dst: int,
    flip: bool,
    reduce: str,
    ties: str,
) -> Tensor:
    """`sparse.mm` on folded features, as one traceable op."""
    return cast(Tensor, _ops.mm(edge_index, x, weight, heads, num_dst, flip, reduce, ties))


@_impl("mm")
def _mm(
    edge_index: Tensor,
    x: Tensor,
    weight: Tensor | None,
    heads: int,
    num_dst: int,
    flip: bool,
    reduce: str,
    ties: str,
) -> Tensor:
    x = x.contiguous()
    if not has_kernels(x):
        return mm_elsewhere(edge_index, x, weight, heads, num_dst, flip, reduce, ties)
    weight = None if weight is None else weight.contiguous()
    plan = plan_for_edges(edge_index, x.shape[-2], num_dst, flip=flip, compiled=True)
    if reduce in ("sum", "mean"):
        return plan_sum(plan, x, weight, heads=heads, mean=reduce == "mean")
    return plan_minmax(plan, x, weight, heads=heads, is_max=reduce == "amax", ties=ties)


def mm_elsewhere(
    edge_index: Tensor,
    x: Tensor,
    weight: Tensor | None,
    heads: int,
    num_dst: int,
    flip: bool,
    reduce: str,
    ties: str,
) -> Tensor:
    """`mm_op` as plain torch operations, for any device and differentiable to any order."""
    dst, src = (edge_index[0], edge_index[1]) if flip else (edge_index[1], edge_index[0])
    messages = _composite._messages(x, weight, src.long(), heads)
    return _composite.reduce_messages(messages, dst.long(), num_dst, reduce, ties)


@_fake("mm")
def _mm_fake(
    edge_index: Tensor,
    x: Tensor,
    weight: Tensor | None,
    heads: int,
    num_dst: int,
    flip: bool,
    reduce: str,
    ties: str,
) -> Tensor:
    return _rows_like(x, num_dst)


@_impl("mm_backward")
def _mm_backward(
    grad: Tensor,
    edge_index: Tensor,
    x: Tensor,
    weight: Tensor | None,
    result: Tensor | None,
    heads: int,
    num_dst: int,
    flip: bool,
    reduce: str,
    ties: str,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    grad, x = grad.contiguous(), x.contiguous()
    if not has_kernels(x):
        dx, dw = _backward_elsewhere(
            grad, edge_index, x, weight, heads, num_dst, flip, reduce, ties, need_x, need_weight
        )
    else:
        weight = None if weight is None else weight.contiguous()
        plan = plan_for_edges(edge_index, x.shape[-2], num_dst, flip=flip, compiled=True)
        dx, dw = _plan_backward(
            plan, grad, x, weight, result, heads, reduce, ties, need_x, need_weight
        )
    return x.new_empty(0) if dx is None else dx, x.new_empty(0) if dw is None else dw


def _plan_backward(
    plan: Plan,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    result: Tensor | None,
    heads: int,
    reduce: str,
    ties: str,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    if reduce in ("sum", "mean"):
        return sum_backward(
            plan,
            grad,
            x,
            weight,
            heads=heads,
            transpose=False,
            mean=reduce == "mean",
            row_scale=None,
            col_scale=None,
            need_x=need_x,
            need_weight=need_weight,
        )
    if reduce == "prod":
        return plan_prod_grad(plan, x, grad), None
    assert result is not None, "setup_context saves the result of a min or max"
    return minmax_backward(
        plan,
        grad,
        x,
        weight,
        result.contiguous(),
        heads=heads,
        ties=ties,
        need_x=need_x,
        need_weight=need_weight,
    )


def _backward_elsewhere(
    grad: Tensor,
    edge_index: Tensor,
    x: Tensor,
    weight: Tensor | None,
    heads: int,
    num_dst: int,
    flip: bool,
    reduce: str,
    ties: str,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Without kernels for the device: differentiate the plain torch operations."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_(need_x)
        leaf_weight = None if weight is None else weight.detach().requires_grad_(need_weight)
        out = mm_elsewhere(edge_index, leaf, leaf_weight, heads, num_dst, flip, reduce, ties)
        wanted = [
            t for t, need in ((leaf, need_x), (leaf_weight, need_weight)) if need and t is not None
        ]
        grads = iter(torch.autograd.grad(out, wanted, grad) if wanted else ())
    return next(grads) if need_x else None, next(grads) if need_weight else None


@_fake("mm_backward")
def _mm_backward_fake(
    grad: Tensor,
    edge_index: Tensor,
    x: Tensor,
    weight: Tensor | None,
    result: Tensor | None,
    heads: int,
    num_dst: int,
    flip: bool,
    reduce: str,
    ties: str,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    dx = dw = None
    if need_x:
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if need_weight:
        dw = x.new_empty(edge_index.shape[1], heads)
    return x.new_empty(0) if dx is None else dx, x.new_empty(0) if dw is None else dw


def _mm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    edge_index, x, weight, heads, num_dst, flip, reduce, ties = inputs
    ctx.save_for_backward(edge_index, x, weight, output if reduce in ("amax", "amin") else None)
    ctx.options = (heads, num_dst, flip, reduce, ties)


def _mm_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    edge_index, x, weight, result = ctx.saved_tensors
    heads, num_dst, flip, reduce, ties = ctx.options
    need_x, need_weight = ctx.needs_input_grad[1], weight is not None and ctx.needs_input_grad[2]
    dx, dw = _ops.mm_backward(
        grad, edge_index, x, weight, result, heads, num_dst, flip, reduce, ties, need_x, need_weight
    )
    return None, dx if need_x else None, dw if need_weight else None, None, None, None, None, None


torch.library.register_autograd("edgeweave::mm", _mm_grad, setup_context=_mm_setup, lib=_library)


def _no_second_derivative(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    raise RuntimeError(
        "edgeweave: second derivatives must be taken outside torch.compile, got a call to backward "
        "through a compiled graph's backward; run the model in eager mode for them"
    )


# Without these, torch would take the derivative of a backward op for zero.
for _name in ("mm_backward", "scatter_backward"):
    torch.library.register_autograd(f"edgeweave::{_name}", _no_second_derivative, lib=_library)


# ---- scatter and gather --------------------------------------------------------------------------


def scatter_op(src: Tensor, index: Tensor, dim_size: int, reduce: str, ties: str) -> Tensor:
    """`scatter.scatter_reduce` on folded features, as one traceable op."""
    return cast(Tensor, _ops.scatter(src, index, dim_size, reduce, ties))


@_impl("scatter")
def _scatter(src: Tensor, index: Tensor, dim_size: int, reduce: str, ties: str) -> Tensor:
    src = src.contiguous()
    if not has_kernels(src):
        return _composite.reduce_messages(src, index.long(), dim_size, reduce, ties)
    plan = plan_for_index(index, dim_size, compiled=True)
    if reduce in ("sum", "mean"):
        return plan_sum(plan, src, mean=reduce == "mean")
    if reduce == "prod":
        return plan_prod(plan, src)
    return plan_minmax(plan, src, is_max=reduce == "amax", ties=ties)


@_fake("scatter")
def _scatter_fake(src: Tensor, index: Tensor, dim_size: int, reduce: str, ties: str) -> Tensor:
    return _rows_like(src, dim_size)


@_impl("scatter_backward")
def _scatter_backward(
    grad: Tensor,
    src: Tensor,
    index: Tensor,
    result: Tensor | None,
    dim_size: int,
    reduce: str,
    ties: str,
) -> Tensor:
    grad, src = grad.contiguous(), src.contiguous()
    if has_kernels(src):
        plan = plan_for_index(index, dim_size, compiled=True)
        dx, _ = _plan_backward(plan, grad, src, None, result, 1, reduce, ties, True, False)
        return cast(Tensor, dx)
    with torch.enable_grad():
        leaf = src.detach().requires_grad_()
        out = _composite.reduce_messages(leaf, index.long(), dim_size, reduce, ties)
        return torch.autograd.grad(out, leaf, grad)[0]


@_fake("scatter_backward")
def _scatter_backward_fake(
    grad: Tensor,
    src: Tensor,
    index: Tensor,
    result: Tensor | None,
    dim_size: int,
    reduce: str,
    ties: str,
) -> Tensor:
    return torch.empty_like(src, memory_format=torch.contiguous_format)


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    src, index, dim_size, reduce, ties = inputs
    ctx.save_for_backward(src, index, output if reduce in ("amax", "amin") else None)
    ctx.options = (dim_size, reduce, ties)


def _scatter_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    src, index, result = ctx.saved_tensors
    return _ops.scatter_backward(grad, src, index, result, *ctx.options), None, None, None, None


torch.library.register_autograd(
    "edgeweave::scatter", _scatter_grad, setup_context=_scatter_setup, lib=_library
)


def scatter_arg_op(src: Tensor, index: Tensor, result: Tensor, dim_size: int) -> Tensor:
    """The first entry that reaches each slot's result, E where there is none, as a traceable op."""
    return cast(Tensor, _ops.scatter_arg(src, index, result, dim_size))


@_impl("scatter_arg")
def _scatter_arg(src: Tensor, index: Tensor, result: Tensor, dim_size: int) -> Tensor:
    if not has_kernels(src):
        return _composite.first_winner(src, result, index.long())
    plan = plan_for_index(index, dim_size, compiled=True)
    return plan_arg(plan, src.contiguous(), result.contiguous())


@_fake("scatter_arg")
def _scatter_arg_fake(src: Tensor, index: Tensor, result: Tensor, dim_size: int) -> Tensor:
    return _rows_like(src, dim_size).to(torch.int64)


def gather_op(x: Tensor, index: Tensor) -> Tensor:
    """`scatter.gather` on folded features, as one traceable op."""
    return cast(Tensor, _ops.gather(x, index))


@_impl("gather")
def _gather(x: Tensor, index: Tensor) -> Tensor:
    if not has_kernels(x):
        return x.index_select(-2, index)
    return checked_rows(x.contiguous(), index, op="gather", compiled=True)


@_fake("gather")
def _gather_fake(x: Tensor, index: Tensor) -> Tensor:
    return _rows_like(x, index.shape[0])


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, index = inputs
    ctx.save_for_backward(index)
    ctx.rows = x.shape[-2]


def _gather_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (index,) = ctx.saved_tensors
    return _ops.scatter(grad, index, ctx.rows, "sum", "even"), None


torch.library.register_autograd(
    "edgeweave::gather", _gather_grad, setup_context=_gather_setup, lib=_library
)
