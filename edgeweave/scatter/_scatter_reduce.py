"""`scatter_reduce`: rows of a tensor reduced into slots named by an index."""

from __future__ import annotations

from typing import Literal, cast, overload

import torch
from torch import Tensor

from .._checks import (
    check_features,
    check_ties,
    describe,
    normalize_dim,
    normalize_reduce,
)
from .._plan import plan_arg, plan_for_index, plan_minmax, plan_sum
from .._plan._batched import check_batched_index
from .._plan._compiled import is_batched, must_trace, scatter_arg_op, scatter_op
from .._plan._composite import first_winner, reduce_messages
from .._plan._device import has_kernels
from .._plan._prod import plan_prod
from ._groups import slots
from ._layout import Layout, check_devices, index_along

__all__ = ["scatter_reduce"]

_OP = "scatter_reduce"


@overload
def scatter_reduce(
    src: Tensor,
    index: Tensor,
    dim: int = 0,
    dim_size: int | None = None,
    reduce: str = "sum",
    include_self: bool = False,
    out: Tensor | None = None,
    return_arg: Literal[False] = False,
    ties: str = "even",
) -> Tensor: ...


@overload
def scatter_reduce(
    src: Tensor,
    index: Tensor,
    dim: int = 0,
    dim_size: int | None = None,
    reduce: str = "sum",
    include_self: bool = False,
    out: Tensor | None = None,
    *,
    return_arg: Literal[True],
    ties: str = "even",
) -> tuple[Tensor, Tensor]: ...


def scatter_reduce(
    src: Tensor,
    index: Tensor,
    dim: int = 0,
    dim_size: int | None = None,
    reduce: str = "sum",
    include_self: bool = False,
    out: Tensor | None = None,
    return_arg: bool = False,
    ties: str = "even",
) -> Tensor | tuple[Tensor, Tensor]:
    """Reduces the entries of `src` that share an index.

    `out[i] = reduce(src[e] for e with index[e] == i)`

    Args:
        src: Values, `[..., E, ...]` with E along `dim`; floating point or integer (not bool), any
            strides.
        index: Slot of each entry, int32 or int64: `[E]`, or of src's rank and expanding to it by
            dimensions of size 1 or stride 0 (what `index.view(-1, 1).expand_as(src)` gives).
        dim: The dimension to reduce along.
        dim_size: Number of slots; None means `index.max() + 1` (or out's size).
        reduce: "sum", "mean", "amax", "amin" or "prod"; "add", "max", "min" and "mul" mean the
            same. Second derivatives of "prod" exist where no entry is 0.
        include_self: Reduce what `out` holds along with the entries, as the last of each slot;
            needs `out`.
        out: Tensor to write the result into, `[..., dim_size, ...]` in src's dtype; slots that no
            entry names keep their value. Without it they are 0 (1 for "prod").
        return_arg: For amax and amin, also return the position of the first winning entry.
        ties: How equal winners share a gradient: "even", or "first" (the first in order takes it).

    Returns:
        `[..., dim_size, ...]` in src's dtype, bitwise the same for any number of threads. float16
        and bfloat16 are summed in float32 and rounded once. With `return_arg` also an int64 tensor
        of the same shape, E where a slot has no entries.

    Raises:
        IndexError: If an index is outside `[0, dim_size)`.
        ValueError: If shapes, `reduce` or `ties` do not fit.
        TypeError: If a dtype does not fit.

    Example:
        >>> import torch
        >>> from edgeweave.scatter import scatter_reduce
        >>> src = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> scatter_reduce(src, torch.tensor([0, 2, 0]), dim_size=3, reduce="mean")
        tensor([[3., 4.],
                [0., 0.],
                [3., 4.]])
    """
    check_features(_OP, "src", src)
    reduce = normalize_reduce(_OP, reduce, prod=True)
    check_ties(_OP, ties)
    if src.dim() == 0:
        raise ValueError(f"{_OP}: src must have at least one dimension, got {describe(src)}")
    dim = normalize_dim(_OP, dim, src.dim())
    index = index_along(_OP, index, src.shape, dim)
    check_devices(_OP, src, index)
    dim_size = _slots(index, dim_size, out, dim)
    if return_arg and reduce not in ("amax", "amin"):
        raise ValueError(f"{_OP}: return_arg must go with amax or amin, got reduce={reduce!r}")
    if include_self and out is None:
        raise ValueError(f"{_OP}: include_self must come with out, got out=None")
    if out is None:
        return _reduce(src, index, dim, dim_size, reduce, ties, return_arg)
    if return_arg:
        raise ValueError(f"{_OP}: return_arg must come without out, got both")
    _check_out(out, src, dim, dim_size)
    return out.copy_(_reduce_into(out, src, index, dim, dim_size, reduce, ties, include_self))


def _slots(index: Tensor, dim_size: int | None, out: Tensor | None, dim: int) -> int:
    if out is not None:
        check_features(_OP, "out", out)
        if dim < out.dim() and dim_size is not None and dim_size != out.shape[dim]:
            raise ValueError(
                f"{_OP}: dim_size must be out's size along dim {dim}, {out.shape[dim]}, got "
                f"{dim_size}"
            )
        return int(out.shape[dim]) if dim < out.dim() else 0
    return slots(_OP, index, dim_size)


def _check_out(out: Tensor, src: Tensor, dim: int, dim_size: int) -> None:
    expected = (*src.shape[:dim], dim_size, *src.shape[dim + 1 :])
    if tuple(out.shape) != tuple(expected):
        raise ValueError(f"{_OP}: out must have shape {list(expected)}, got {list(out.shape)}")
    if out.dtype != src.dtype:
        raise TypeError(f"{_OP}: out must have src's dtype {src.dtype}, got {out.dtype}")
    if out.requires_grad and out.is_leaf and torch.is_grad_enabled():
        raise ValueError(
            f"{_OP}: out must not be a leaf that requires grad, got one; pass out.clone()"
        )
    if any(n > 1 and step == 0 for n, step in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(
            f"{_OP}: out must have memory of its own for each entry, got strides "
            f"{tuple(out.stride())}; pass out.clone()"
        )


def _reduce(
    src: Tensor,
    index: Tensor,
    dim: int,
    dim_size: int,
    reduce: str,
    ties: str,
    return_arg: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    layout = Layout.of(src, dim)
    folded = layout.fold(src)
    if must_trace(src) or not has_kernels(src) or is_batched(index):
        if must_trace(src):
            out = scatter_op(folded, index, dim_size, reduce, ties)
        else:
            if is_batched(index):
                check_batched_index(_OP, index, dim_size)
            out = reduce_messages(folded, index.long(), dim_size, reduce, ties)
        plan = None
    else:
        plan = plan_for_index(index, dim_size, op=_OP)
        if reduce in ("sum", "mean"):
            out = plan_sum(plan, folded, mean=reduce == "mean")
        elif reduce == "prod":
            out = plan_prod(plan, folded)
        else:
            out = plan_minmax(plan, folded, is_max=reduce == "amax", ties=ties)
    if not return_arg:
        return layout.unfold(out, dim_size)
    if plan is None or torch._C._are_functorch_transforms_active():
        arg = _first(folded, index, out, dim_size)
    else:
        arg = plan_arg(plan, folded, out)
    return layout.unfold(out, dim_size), layout.unfold(arg, dim_size)


def _first(src: Tensor, index: Tensor, out: Tensor, dim_size: int) -> Tensor:
    """`plan_arg` for callers that a native op cannot serve."""
    if must_trace(src):
        return scatter_arg_op(src.detach(), index, out.detach(), dim_size)
    return first_winner(src.detach(), out.detach(), index.long())


def _touched(index: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Entries of each slot, shaped to broadcast against the result."""
    counts = torch.zeros(shape[dim], dtype=torch.int64, device=index.device)
    counts = counts.index_add(0, index.long(), torch.ones_like(index, dtype=torch.int64))
    return counts.view([-1 if d == dim else 1 for d in range(len(shape))])


def _reduce_into(
    out: Tensor,
    src: Tensor,
    index: Tensor,
    dim: int,
    dim_size: int,
    reduce: str,
    ties: str,
    include_self: bool,
) -> Tensor:
    if not include_self:
        fresh = cast(Tensor, _reduce(src, index, dim, dim_size, reduce, ties))
        return torch.where(_touched(index, out.shape, dim) > 0, fresh, out)
    # The slots' own values are entries like any others: one more each, behind the rest.
    own = torch.arange(dim_size, dtype=index.dtype, device=index.device)
    return cast(
        Tensor,
        _reduce(torch.cat([src, out], dim), torch.cat([index, own]), dim, dim_size, reduce, ties),
    )
