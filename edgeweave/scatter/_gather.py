"""`gather`: rows of a tensor picked by an index; the transpose of `scatter_reduce`'s sum."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .._checks import check_features, check_index_dtype, describe, normalize_dim, shape_text
from .._plan import plan_for_index, plan_sum
from .._plan._compiled import gather_op, must_trace
from .._plan._device import has_kernels
from .._plan._functions import PlanFunction, _tracked
from .._plan._gather import checked_rows
from ._layout import Layout, check_devices, index_along, is_full_rank

__all__ = ["gather"]

_OP = "gather"


def gather(x: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """Picks entries of `x` along `dim`: `out[e] = x[index[e]]`.

    With a 1-D index, or one which only repeats it along other dimensions (what
    `index.view(-1, 1).expand(-1, F)` gives), this is `index_select`, and its gradient a fused
    scatter-sum over a cached plan. With an index that really differs along another dimension it is
    `torch.gather`.

    Args:
        x: Values, `[..., N, ...]` with N along `dim`; floating point or integer (not bool), any
            strides.
        index: int32 or int64, `[E]`, or of x's rank.
        dim: The dimension to pick along.

    Returns:
        `[..., E, ...]` in x's dtype.

    Raises:
        IndexError: If an index is outside `[0, N)`; names the value, its position and N.
        ValueError: If the shapes do not fit.
        TypeError: If a dtype does not fit.

    Example:
        >>> import torch
        >>> from edgeweave.scatter import gather
        >>> gather(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 1, 0]))
        tensor([[3., 4.],
                [3., 4.],
                [1., 2.]])
    """
    check_features(_OP, "x", x)
    check_index_dtype(_OP, "index", index)
    if x.dim() == 0:
        raise ValueError(f"{_OP}: x must have at least one dimension, got {describe(x)}")
    dim = normalize_dim(_OP, dim, x.dim())
    check_devices(_OP, x, index)
    if is_full_rank(index, x, dim):
        return _gather_full_rank(x, index, dim)
    if index.dim() not in (1, x.dim()):
        raise ValueError(
            f"{_OP}: index must be one-dimensional or of x's rank {x.dim()}, got shape "
            f"{shape_text(index.shape)}"
        )
    expected = list(x.shape)
    expected[dim] = index.shape[0 if index.dim() == 1 else dim]
    index = index_along(_OP, index, torch.Size(expected), dim)
    layout = Layout.of(x, dim)
    folded = layout.fold(x)
    count = index.shape[0]
    if must_trace(x):
        return layout.unfold(gather_op(folded, index), count)
    if not has_kernels(x):
        return layout.unfold(folded.index_select(-2, index), count)
    if _tracked(x):
        return layout.unfold(cast(Tensor, _Gather.apply(folded, index)), count)
    return layout.unfold(checked_rows(folded, index, op=_OP), count)


def _gather_full_rank(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """`torch.gather`, with our errors: the index differs along more dimensions than `dim`."""
    if any(index.shape[d] != x.shape[d] for d in range(x.dim()) if d != dim):
        raise ValueError(
            f"{_OP}: index must have x's sizes {shape_text(x.shape)} beside dim {dim}, got "
            f"{shape_text(index.shape)}"
        )
    if not must_trace(x) and has_kernels(index) and index.numel() > 0:
        bad = (index < 0) | (index >= x.shape[dim])
        if bad.any():
            position = tuple(bad.nonzero()[0].tolist())
            raise IndexError(
                f"{_OP}: index must be in [0, {x.shape[dim]}), got {int(index[position])} at "
                f"position {position}"
            )
    return torch.gather(x, dim, index.long())


class _Gather(PlanFunction):
    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        return checked_rows(x, index, op=_OP)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, index = inputs
        ctx.rows = x.shape[-2]
        ctx.save_for_backward(index)
        ctx.save_for_forward(index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return plan_sum(plan_for_index(index, ctx.rows, op=_OP), grads[0].contiguous()), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        (index,) = ctx.saved_tensors
        return gather(cast(Tensor, tangents[0]), index, dim=-2)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, index: Tensor
    ) -> tuple[Tensor, int]:
        if in_dims[1] is None:
            moved = x.movedim(cast(int, in_dims[0]), 0)
            return gather(moved, index, dim=-2), 0
        # A different index for each example: the rows of all of them end to end.
        size = info.batch_size
        moved = (
            x.unsqueeze(0).expand(size, *x.shape)
            if in_dims[0] is None
            else x.movedim(in_dims[0], 0)
        )
        indices = index.movedim(in_dims[1], 0)
        return torch.stack([gather(moved[b], indices[b], dim=-2) for b in range(size)]), 0
