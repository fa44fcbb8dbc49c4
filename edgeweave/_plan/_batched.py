"""Checks of an index that `torch.vmap` runs over: no plan is made of it that would check it."""

from __future__ import annotations

import torch
from torch import Tensor

from ._segments import check_ptr_values

__all__ = ["check_batched_index", "check_batched_ptr", "check_values"]


def check_batched_index(op: str, index: Tensor, bound: int, what: str = "index") -> None:
    """Each example's `index` `[E]` must be in `[0, bound)`.

    Raises:
        IndexError: If one is not; names the value, its position in its example and the bound.
    """
    values = _all_examples(index)
    if values.is_meta:
        return
    check_values(f"{op}: {what}", values, bound)


def check_values(what: str, index: Tensor, bound: int) -> None:
    """Each entry of `index` `[..., E]` must be in `[0, bound)`.

    Raises:
        IndexError: If one is not; names the value, its position along the last dimension and the
            bound.
    """
    bad = ((index < 0) | (index >= bound)).nonzero()
    if bad.numel() > 0:
        where = tuple(bad[0].tolist())
        raise IndexError(
            f"{what} must be in [0, {bound}), got {int(index[where])} at position {where[-1]}"
        )


def check_batched_ptr(op: str, ptr: Tensor, num_entries: int) -> None:
    """Each example's `ptr` `[G + 1]` must cut `num_entries` entries into segments.

    Raises:
        ValueError: If one does not.
    """
    values = _all_examples(ptr)
    if values.is_meta:
        return
    for example in values.reshape(-1, values.shape[-1]):
        check_ptr_values(op, example, num_entries)


def _all_examples(index: Tensor) -> Tensor:
    """What is behind the wrappers of `torch.func`, `[..., E]` with the examples first."""
    dims = []
    while torch._C._functorch.is_functorch_wrapped_tensor(index):
        if torch._C._functorch.is_batchedtensor(index):
            dims.append(torch._C._functorch.maybe_get_bdim(index))
        index = torch._C._functorch.get_unwrapped(index)
    # The innermost dimension counts in what lies there, each further one in what is left of it.
    for count, dim in enumerate(reversed(dims)):
        index = index.movedim(dim + count, count)
    return index
