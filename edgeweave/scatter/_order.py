"""`argmax`, `argmin` and `index_sort`: positions rather than values."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import check_count, check_index_dtype, describe, shape_text
from .._plan import plan_arg, plan_for_index, plan_minmax
from .._plan._compiled import is_batched, must_trace, scatter_arg_op, scatter_op
from .._plan._composite import first_winner, reduce_messages
from .._plan._device import has_kernels
from .._plan._traced import checked_index
from ._groups import groups_of_index

__all__ = ["argmax", "argmin", "index_sort"]

# A counting sort needs a counter per value: beyond this many values per entry, torch's sort.
_MOST_VALUES_PER_ENTRY = 8


def argmax(src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None) -> Tensor:
    """Position of the first largest entry among those that share an index.

    Args:
        src: Values, `[..., E, ...]` with E along `dim`; floating point or integer (not bool), any
            strides.
        index: Slot of each entry, int32 or int64: `[E]`, or of src's rank and expanding to it by
            dimensions of size 1 or stride 0.
        dim: The dimension to reduce along.
        dim_size: Number of slots; None means `index.max() + 1`.

    Returns:
        `[..., dim_size, ...]` int64 positions along `dim`; E where a slot has no entries. A NaN is
        larger than every number, and the first one wins.

    Raises:
        IndexError: If an index is outside `[0, dim_size)`.
        ValueError: If shapes do not fit.
        TypeError: If a dtype does not fit.

    Example:
        >>> import torch
        >>> from edgeweave.scatter import argmax
        >>> argmax(torch.tensor([1.0, 7.0, 7.0, 2.0]), torch.tensor([0, 2, 2, 0]))
        tensor([3, 4, 1])
    """
    return _arg("argmax", src, index, dim, dim_size, "amax")


def argmin(src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None) -> Tensor:
    """Position of the first smallest entry among those that share an index.

    Args:
        src: Values, `[..., E, ...]` with E along `dim`, as in `argmax`.
        index: Slot of each entry, as in `argmax`.
        dim: The dimension to reduce along.
        dim_size: Number of slots; None means `index.max() + 1`.

    Returns:
        `[..., dim_size, ...]` int64 positions along `dim`; E where a slot has no entries. A NaN is
        smaller than every number, and the first one wins.

    Raises:
        IndexError: If an index is outside `[0, dim_size)`.
        ValueError: If shapes do not fit.
        TypeError: If a dtype does not fit.

    Example:
        >>> import torch
        >>> from edgeweave.scatter import argmin
        >>> argmin(torch.tensor([1.0, 7.0, 7.0, 2.0]), torch.tensor([0, 2, 2, 0]))
        tensor([0, 4, 1])
    """
    return _arg("argmin", src, index, dim, dim_size, "amin")


def _arg(
    op: str, src: Tensor, index: Tensor, dim: int, dim_size: int | None, reduce: str
) -> Tensor:
    g = groups_of_index(op, src.detach() if isinstance(src, Tensor) else src, index, dim_size, dim)
    if g.plan is not None and not torch._C._are_functorch_transforms_active():
        best = plan_minmax(g.plan, g.src, is_max=reduce == "amax")
        return g.per_group(plan_arg(g.plan, g.src, best))
    if must_trace(src):
        best = scatter_op(g.src, g.groups(), g.num_groups, reduce, "even")
        return g.per_group(scatter_arg_op(g.src, g.groups(), best, g.num_groups))
    groups = g.groups() if g.plan is None else g.plan.array("dst").long()
    best = reduce_messages(g.src, groups, g.num_groups, reduce, "even")
    return g.per_group(first_winner(g.src, best, groups))


def index_sort(index: Tensor, max_value: int | None = None) -> tuple[Tensor, Tensor]:
    """Sorts an index, stably and in linear time.

    The order is kept with the index' plan: sorting an index and reducing over it costs one sort.

    Args:
        index: `[E]` int32 or int64.
        max_value: A bound that no value exceeds, or None to look for it. With one, values must
            not be negative.

    Returns:
        The sorted values, like `index`, and the position that each came from, `[E]` int64.

    Raises:
        IndexError: If a value is outside `[0, max_value]`.
        ValueError: If `index` is not one-dimensional or `max_value` is negative.
        TypeError: If a dtype does not fit.

    Example:
        >>> import torch
        >>> from edgeweave.scatter import index_sort
        >>> index_sort(torch.tensor([2, 0, 2, 1]))
        (tensor([0, 1, 2, 2]), tensor([1, 3, 0, 2]))
    """
    op = "index_sort"
    check_index_dtype(op, "index", index)
    if index.dim() != 1:
        raise ValueError(
            f"{op}: index must be one-dimensional, got shape {shape_text(index.shape)}"
        )
    if max_value is not None:
        if not isinstance(max_value, (int, torch.SymInt)) or isinstance(max_value, bool):
            raise TypeError(f"{op}: max_value must be an integer, got {describe(max_value)}")
        if max_value < 0:
            raise ValueError(f"{op}: max_value must not be negative, got {max_value}")
    if must_trace(index) and index.device.type == "cpu" and max_value is not None:
        index = checked_index(index, max_value + 1, f"{op}: index")
    if must_trace(index) or not has_kernels(index) or is_batched(index):
        ordered, order = torch.sort(index, stable=True)
        return ordered, order
    if max_value is None and index.numel() > 0:
        lowest, highest = index.aminmax()
        max_value = int(highest) if int(lowest) >= 0 else None
    if max_value is None or max_value > _MOST_VALUES_PER_ENTRY * max(index.numel(), 1024):
        _check_values(op, index, max_value)
        ordered, order = torch.sort(index, stable=True)
        return ordered, order
    check_count(op, max_value + 1)
    order = plan_for_index(index, max_value + 1, op=op).array("col").long()
    return index.index_select(0, order), order


def _check_values(op: str, index: Tensor, max_value: int | None) -> None:
    if max_value is None:
        return
    bad = ((index < 0) | (index > max_value)).nonzero()
    if bad.numel() > 0:
        position = int(bad[0])
        raise IndexError(
            f"{op}: index must be in [0, {max_value + 1}), got {int(index[position])} at position "
            f"{position}"
        )
