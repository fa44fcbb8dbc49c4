"""Rows by an index, which is seen to be in range before anything is read."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from .._native import ops as native_ops
from ._cache import named, plan_for_index
from ._device import is_native

__all__ = ["checked_rows", "known_rows"]


def checked_rows(x: Tensor, index: Tensor, *, op: str, compiled: bool = False) -> Tensor:
    """`x[..., index[e], :]`, where that has kernels.

    Args:
        x: `[N, F]` or `[B, N, F]`, contiguous.
        index: `[E]` int32 or int64.
        op: Named by errors.
        compiled: As in `plan_for_edges`.

    Raises:
        IndexError: If an index is out of range; names the value, its position and the bound.
    """
    if is_native(x):
        try:
            return cast(Tensor, native_ops.gather_rows(x, index))
        except IndexError as error:
            raise named(error, op) from None
    # Its plan says that it was checked, so that nobody has to wait for the device again; nothing is
    # sorted for that.
    plan_for_index(index, x.shape[-2], op=op, compiled=compiled)
    return x.index_select(-2, index)


def known_rows(x: Tensor, index: Tensor) -> Tensor:
    """The same for an index that comes from a plan."""
    if is_native(x):
        return cast(Tensor, native_ops.gather_rows(x, index))
    return x.index_select(-2, index)
