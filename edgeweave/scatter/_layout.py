"""From tensors of any rank, dimension and stride to what kernels take, and back.

Kernels take `[batch, rows, features]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import check_index_dtype, shape_text

__all__ = ["Layout", "check_devices", "index_along", "is_full_rank"]

# Below this many features beside a dimension that is not the first, one transposition of the input
# is cheaper than running the kernel on rows of a few values.
_NARROW = 8


class Layout(NamedTuple):
    """How a tensor was folded.

    Its shape and dimension, and whether that dimension was moved to the front.
    """

    shape: torch.Size
    dim: int
    moved: bool

    @classmethod
    def of(cls, x: Tensor, dim: int) -> Layout:
        """The layout for reducing or gathering `x` along `dim`."""
        trailing = 1
        for size in x.shape[dim + 1 :]:
            trailing *= size
        return cls(x.shape, dim, dim > 0 and trailing < _NARROW)

    def fold(self, x: Tensor) -> Tensor:
        """`[rows, F]` or `[batch, rows, F]`, contiguous."""
        if self.dim == 0:
            folded = x if x.dim() == 2 else x.reshape(x.shape[0], _count(x.shape[1:]))
        elif self.moved:
            rest = _count(x.shape[: self.dim]) * _count(x.shape[self.dim + 1 :])
            folded = x.movedim(self.dim, 0).reshape(x.shape[self.dim], rest)
        else:
            folded = x.reshape(
                _count(x.shape[: self.dim]), x.shape[self.dim], _count(x.shape[self.dim + 1 :])
            )
        return folded.contiguous()

    def unfold(self, out: Tensor, rows: int) -> Tensor:
        """The result in the shape of the input, with `rows` along the dimension."""
        if not self.moved:
            shape = (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])
            return out if out.shape == shape else out.reshape(shape)
        rest = (*self.shape[: self.dim], *self.shape[self.dim + 1 :])
        return out.reshape(rows, *rest).movedim(0, self.dim)


def _count(sizes: torch.Size | tuple[int, ...]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def is_full_rank(index: Tensor, x: Tensor, dim: int) -> bool:
    """Whether `index` really differs along a dimension other than `dim`."""
    if index.dim() != x.dim() or index.dim() == 1:
        return False
    return any(index.shape[d] > 1 and index.stride(d) != 0 for d in range(index.dim()) if d != dim)


def check_devices(op: str, x: Tensor, index: Tensor) -> None:
    """`index` must be where the values are."""
    if index.device != x.device:
        raise ValueError(
            f"{op}: index must be on the device of the values, {x.device}, got {index.device}"
        )


def index_along(op: str, index: Tensor, src_shape: torch.Size, dim: int) -> Tensor:
    """The 1-D index behind `index`.

    It must be 1-D or expand to the source along all other dimensions.

    Raises:
        TypeError: If `index` is not an int32 or int64 tensor.
        ValueError: If its shape fits neither form. torch would take the first column of an `[E, 1]`
            index and silently ignore the rest of the source.
    """
    check_index_dtype(op, "index", index)
    length = src_shape[dim]
    if index.dim() == 1:
        if index.shape[0] != length:
            raise ValueError(
                f"{op}: index must have the length of the source along dim {dim}, {length}, got "
                f"{index.shape[0]}"
            )
        return index
    fits = index.dim() == len(src_shape) and index.shape[dim] == length
    if fits:
        for d, size in enumerate(index.shape):
            if d != dim and size != 1 and not (index.stride(d) == 0 and size == src_shape[d]):
                fits = size == 0 and src_shape[d] == 0
                if not fits:
                    break
    if not fits:
        raise ValueError(
            f"{op}: index must be one-dimensional, or expand to the source {shape_text(src_shape)} "
            f"by dimensions of size 1 or stride 0 beside dim {dim}, got shape "
            f"{shape_text(index.shape)} with strides {index.stride()}; pass the 1-D index"
        )
    for d in reversed(range(index.dim())):
        if d != dim:
            # Nothing to select where the source is empty: any index does.
            index = (
                index.select(d, 0)
                if index.shape[d] > 0
                else index.new_zeros(index.shape[:d] + index.shape[d + 1 :])
            )
    return index
