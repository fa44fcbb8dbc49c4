"""Linear layers between the reductions, on the faster of torch's two matrix libraries.

torch multiplies float32 matrices on the CPU with MKL, which takes its AVX2 path on AMD processors;
oneDNN, also in torch, has AVX-512 code for them. Measured on a Zen 5 core,
`[84672, 128] @ [128, 128]`: MKL 93 GFLOP/s, oneDNN 230 (the core's peak is 267). Which one runs
depends on the processor alone, so results repeat from run to run. Both sum in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from edgeweave import runtime
from edgeweave._native import ops, supported_isas
from edgeweave._plan._functions import PlanFunction, is_batched
from edgeweave.pyg._eligibility import has_hooks
from edgeweave.pyg._rebind import is_own_method
from edgeweave.pyg._rows import are_finite, rows_in_use

__all__ = [
    "add_product",
    "affine_parameters",
    "can_multiply",
    "comes_in_fresh_pages",
    "has_faster_linear",
    "linear",
    "multiply",
    "multiply_backward",
    "plain_parameters",
    "prefers_onednn",
    "row_blocks",
]

# glibc keeps freed blocks up to this size (DEFAULT_MMAP_THRESHOLD_MAX); larger ones go back.
_KEPT_BYTES = 32 << 20
# Two such blocks fit a core's share of a common L3.
_BLOCK_BYTES = 4 << 20
# Below this a call is bound by overhead, not by arithmetic.
_MIN_ROWS = 256

_Second = tuple[Tensor, Tensor] | None


@functools.cache
def prefers_onednn() -> bool:
    """Whether this processor multiplies float32 faster in oneDNN than in MKL."""
    if not torch._C._has_mkldnn or "avx512" not in supported_isas():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:  # no such file: not Linux
        return False


def affine_parameters(module: Any) -> tuple[nn.Parameter, nn.Parameter | None] | None:
    """The weight and bias of a linear layer, None if they are not parameters of its own.

    Looked up where `register_parameter` puts them: to read a parametrized `module.weight` would
    compute it, once more than PyG does.
    """
    parameters = module.__dict__["_parameters"]
    weight = parameters.get("weight")
    bias = parameters.get("bias", NotImplemented)  # a layer without one has None under this name
    if type(weight) is not nn.Parameter or not (bias is None or type(bias) is nn.Parameter):
        return None
    return weight, bias


def plain_parameters(module: Any, cls: type) -> tuple[nn.Parameter, nn.Parameter | None] | None:
    """Weight and bias, if calling the module is `forward` as `cls` defines it and nothing else."""
    if type(module) is not cls or has_hooks(module) or not is_own_method(cls, "forward"):
        return None
    return affine_parameters(module)


def _is_plain_matrix(tensor: Tensor, dims: int) -> bool:
    return (
        tensor.dtype is torch.float32
        and tensor.dim() == dims
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )


def can_multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `multiply` and `linear` may stand in for torch's own matrix product here.

    They may not where torch's has an error to raise, nor where oneDNN would read by other strides
    than torch: it takes a bias to be `[M]` and contiguous whatever it is.
    """
    return (
        type(x) is Tensor
        and _is_plain_matrix(x, 2)
        and x.shape[0] >= _MIN_ROWS
        and _is_plain_matrix(weight, 2)
        and weight.numel() > 0
        and weight.shape[1] == x.shape[1]
        and (bias is None or (_is_plain_matrix(bias, 1) and bias.shape[0] == weight.shape[0]))
        and torch._C._get_mkldnn_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
    )


def comes_in_fresh_pages(rows: int, width: int) -> bool:
    """Whether a float32 result of this size is touched for the first time, page by page.

    glibc gives blocks above 32 MiB back to the kernel at once and gets every next one page by page:
    touching a fresh one costs more than the product that fills it. Ours come on huge pages.
    """
    return rows * width * 4 >= _KEPT_BYTES and runtime._returns_freed_blocks()


def has_faster_linear(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` is worth it: for the better library, or for the pages of its results."""
    return (
        prefers_onednn()
        or comes_in_fresh_pages(x.shape[0], weight.shape[0])
        or (x.requires_grad and comes_in_fresh_pages(x.shape[0], weight.shape[1]))
    )


def row_blocks(rows: int, width: int, values: int) -> Iterator[slice]:
    """Cuts rows of a width into blocks of about so many values, but at least a few hundred rows."""
    step = max(_MIN_ROWS, values // max(width, 1))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, second: _Second) -> Tensor:
    if not prefers_onednn():
        if second is None:
            return torch.nn.functional.linear(x, weight, bias)
        out = torch.nn.functional.linear(*second, bias)
        # Adds where it multiplies: no second result, and no pass over both.
        return out.addmm_(x, weight.t())
    op = torch.ops.mkldnn._linear_pointwise
    if second is None:
        return cast(Tensor, op(x, weight, bias, "none", [], ""))
    add = op(*second, None, "none", [], "")
    return cast(Tensor, op.binary(x, add, weight, bias, "add"))


def add_product(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """`out += x @ weight.T`; not differentiable.

    Args:
        out: `[N, M]` float32.
        x: `[N, K]`.
        weight: `[M, K]`.
    """
    if prefers_onednn():
        out.add_(_multiply(x, weight, None, None))
    else:
        out.addmm_(x, weight.t())


def _multiply_into(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, second: _Second
) -> None:
    """`out[...] = x @ weight.T (+ bias) (+ x2 @ weight2.T)` for a block of rows.

    oneDNN makes a block that glibc keeps, which is copied; MKL writes to where it belongs.
    """
    if prefers_onednn():
        out.copy_(_multiply(x, weight, bias, second))
        return
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
    if second is not None:
        out.addmm_(second[0], second[1].t())


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    second: tuple[Tensor, Tensor] | None = None,
    relu: bool = False,
) -> Tensor:
    """`x @ weight.T (+ bias) (+ x2 @ weight2.T)`, optionally its relu; not differentiable.

    Args:
        x: `[N, K]` float32.
        weight: `[M, K]`.
        bias: `[M]`, or None.
        second: `(x2 [N, K2], weight2 [M, K2])`, or None.
        relu: Whether negative results become 0; NaN stays, as in torch's relu.

    Returns:
        `[N, M]`.
    """
    count, width = x.shape[0], weight.shape[0]
    if not comes_in_fresh_pages(count, width):
        whole = _multiply(x, weight, bias, second)
        return whole.relu_() if relu else whole
    out: Tensor = ops.empty_rows(x, count, width)
    for part in row_blocks(count, max(width, x.shape[1]), _BLOCK_BYTES // 4):
        other = None if second is None else (second[0][part], second[1])
        _multiply_into(out[part], x[part], weight, bias, other)
        if relu:
            out[part].relu_()
    return out


def _weight_grads(
    grad: Tensor, x: Tensor, weight: Tensor, bias: bool
) -> tuple[Tensor, Tensor | None]:
    if not prefers_onednn():
        return grad.t() @ x, grad.sum(0) if bias else None
    dw, db = torch.ops.aten.mkldnn_linear_backward_weights(
        grad.to_mkldnn(), x.to_mkldnn(), weight.to_mkldnn(), bias
    )
    return dw.to_dense(), db.to_dense() if bias else None


def multiply_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    result: Tensor | None = None,
    need_x: bool = False,
    need_weight: bool = False,
    need_bias: bool = False,
    used: int | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `multiply` with respect to x, weight and bias; not differentiable.

    Args:
        grad: `[N, M]`.
        x: `[N, K]`.
        weight: `[M, K]`.
        result: The result, if it went through a relu.
        need_x: Whether `[N, K]` is wanted.
        need_weight: Whether `[M, K]` is wanted.
        need_bias: Whether `[M]` is wanted.
        used: `rows_in_use(grad)`, where that is known.
    """
    count, width = x.shape
    turned = weight.t().contiguous() if need_x else weight
    dx: Tensor | None = None
    dw: Tensor | None = None
    db: Tensor | None = None
    if used is None:
        used = rows_in_use(grad)
    if used < count and not are_finite(weight, x[used:]):
        used = count  # 0 times an infinite number is NaN
    if need_x:
        dx = ops.empty_rows(x, count, width)  # on huge pages if it is large
        dx[used:].zero_()
    # Blocks also where the result is not: the copies that oneDNN's formats need stay in the cache.
    for part in row_blocks(used, max(width, grad.shape[1]), _BLOCK_BYTES // 4):
        g = grad[part]
        if result is not None:
            g = torch.ops.aten.threshold_backward(g, result[part], 0)
        if dx is not None:
            _multiply_into(dx[part], g, turned, None, None)
        if need_weight:
            more, more_bias = _weight_grads(g, x[part], weight, need_bias)
            dw = more if dw is None else dw.add_(more)
            if more_bias is not None:
                db = more_bias if db is None else db.add_(more_bias)
        elif need_bias:
            db = g.sum(0) if db is None else db.add_(g.sum(0))
    return dx, dw, db


class _Linear(PlanFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        out = multiply(x, weight, bias, relu=relu)
        ctx.save_for_backward(x, weight, out if relu else None)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, result = ctx.saved_tensors
        grad = grads[0].contiguous()
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        # Somebody wants the derivative of this derivative, or many gradients at once.
        if torch.is_grad_enabled() or is_batched(grad):
            if result is not None:
                # Not a product with the mask: 0 times an infinite gradient is NaN.
                grad = torch.ops.aten.threshold_backward(grad, result.detach(), 0)
            dx = grad @ weight if need_x else None
            return dx, grad.t() @ x if need_w else None, grad.sum(0) if need_b else None, None
        dx, dw, db = multiply_backward(
            grad, x, weight, result=result, need_x=need_x, need_weight=need_w, need_bias=need_b
        )
        return dx, dw, db, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool = False) -> Tensor:
    """`torch.nn.functional.linear`, optionally its relu; only where `can_multiply` says so."""
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return cast(Tensor, _Linear.apply(x, weight, bias, relu))
    return multiply(x, weight, bias, relu=relu)
