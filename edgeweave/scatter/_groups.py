"""What the operators over groups share: entries named by `index` or `ptr`, checked and folded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import (
    FLOAT_DTYPES,
    check_count,
    check_features,
    check_index_dtype,
    describe,
    normalize_dim,
    shape_text,
)
from .._plan import Plan, plan_for_index
from .._plan._batched import check_batched_index, check_batched_ptr
from .._plan._compiled import is_batched, must_trace
from .._plan._device import has_kernels
from .._plan._segments import check_ptr_values, plan_for_ptr, segment_groups
from ._layout import Layout, check_devices, index_along

__all__ = ["Groups", "check_floating", "groups_of_index", "groups_of_ptr", "slots"]


class Groups(NamedTuple):
    """Entries of a tensor in groups, ready for an operator.

    Attributes:
        src: The entries, `[E, F]` or `[B, E, F]`, contiguous.
        layout: How they were folded.
        ids: Group of each entry, `[E]`; None where there is a plan.
        num_groups: How many groups.
        plan: The plan for native kernels; None to trace, or for plain torch operations.
    """

    src: Tensor
    layout: Layout
    ids: Tensor | None
    num_groups: int
    plan: Plan | None

    def groups(self) -> Tensor:
        """Group of each entry, `[E]` int64, where there is no plan."""
        assert self.ids is not None, "an index is kept wherever there is no plan"
        return self.ids.long()

    def per_entry(self, out: Tensor) -> Tensor:
        """A result per entry, in the shape of the input."""
        return self.layout.unfold(out, self.layout.shape[self.layout.dim])

    def per_group(self, out: Tensor) -> Tensor:
        """A result per group, in the shape of the input but along the dimension."""
        return self.layout.unfold(out, self.num_groups)


def check_floating(op: str, src: Tensor) -> None:
    """`src` must be floating point."""
    if src.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{op}: src must be float32, float64, bfloat16 or float16, got {src.dtype}; "
            "convert it with .float()"
        )


def groups_of_index(op: str, src: Tensor, index: Tensor, dim_size: int | None, dim: int) -> Groups:
    """Groups named by an index.

    Raises:
        IndexError: If an index is outside `[0, dim_size)`.
        ValueError: If shapes or `dim_size` do not fit.
        TypeError: If a dtype does not fit.
    """
    dim = _check_src(op, src, dim)
    index = index_along(op, index, src.shape, dim)
    check_devices(op, src, index)
    num_groups = slots(op, index, dim_size)
    layout = Layout.of(src, dim)
    folded = layout.fold(src)
    if must_trace(src) or not has_kernels(src):
        return Groups(folded, layout, index, num_groups, None)
    if is_batched(index):
        check_batched_index(op, index, num_groups)
        return Groups(folded, layout, index, num_groups, None)
    return Groups(folded, layout, None, num_groups, plan_for_index(index, num_groups, op=op))


def groups_of_ptr(op: str, src: Tensor, ptr: Tensor, dim_size: int | None, dim: int) -> Groups:
    """Groups that follow each other: `ptr[g]` to `ptr[g + 1]`.

    Raises:
        ValueError: If `ptr` does not run from 0 to E without decreasing.
        TypeError: If a dtype does not fit.
    """
    dim = _check_src(op, src, dim)
    check_index_dtype(op, "ptr", ptr)
    if ptr.dim() != 1 or ptr.shape[0] == 0:
        raise ValueError(
            f"{op}: ptr must be one-dimensional with one element more than there are segments, got "
            f"shape {shape_text(ptr.shape)}"
        )
    if ptr.device != src.device:
        raise ValueError(
            f"{op}: ptr must be on the device of the values, {src.device}, got {ptr.device}"
        )
    num_groups = ptr.shape[0] - 1
    if dim_size is not None and dim_size != num_groups:
        raise ValueError(
            f"{op}: dim_size must be the number of segments of ptr, {num_groups}, or None, got "
            f"{dim_size}"
        )
    length = src.shape[dim]
    layout = Layout.of(src, dim)
    folded = layout.fold(src)
    if must_trace(src):
        return Groups(folded, layout, segment_groups(ptr, length), num_groups, None)
    if not has_kernels(src) or is_batched(ptr):
        if is_batched(ptr):
            check_batched_ptr(op, ptr, length)
        elif not ptr.is_meta:
            check_ptr_values(op, ptr, length)
        return Groups(folded, layout, segment_groups(ptr, length), num_groups, None)
    return Groups(folded, layout, None, num_groups, plan_for_ptr(ptr, length, op=op))


def _check_src(op: str, src: Tensor, dim: int) -> int:
    check_features(op, "src", src)
    if src.dim() == 0:
        raise ValueError(f"{op}: src must have at least one dimension, got {describe(src)}")
    return normalize_dim(op, dim, src.dim())


def slots(op: str, index: Tensor, dim_size: int | None) -> int:
    """The number of groups: `dim_size`, or the largest index and one."""
    if dim_size is not None:
        if not isinstance(dim_size, (int, torch.SymInt)) or isinstance(dim_size, bool):
            raise TypeError(f"{op}: dim_size must be an integer, got {describe(dim_size)}")
        check_count(op, dim_size)
        if dim_size < 0:
            raise ValueError(f"{op}: dim_size must not be negative, got {dim_size}")
        return dim_size
    if index.is_meta:
        raise ValueError(
            f"{op}: dim_size must be given with a meta index, which has no values, got None"
        )
    # Not below 0: then the first negative index is an IndexError, with its value and position.
    count = int(index.max()) + 1 if index.numel() > 0 else 0
    if must_trace(index):
        return count
    count = max(count, 0)
    check_count(op, count)
    return count
