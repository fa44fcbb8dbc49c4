"""The plan of an edge set: validated CSR and CSC, and what is derived from the graph alone."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from .._native import ops as native_ops
from .._native import release

__all__ = ["Plan", "outside_modes", "outside_tracing"]

T = TypeVar("T")

# Positions in csrc/ops/plan_ops.cpp's plan_array.
ARRAYS = {"rowptr": 0, "col": 1, "perm": 2, "colptr": 3, "row": 4, "perm_t": 5, "dst": 6, "src": 7}

_CPU = torch.device("cpu")

# One for all plans: a lock of each plan's own could not be made anew in a forked child.
_memo_lock = threading.RLock()


def _reset_after_fork() -> None:
    global _memo_lock
    _memo_lock = threading.RLock()  # the parent's may be held by a thread that does not exist here


os.register_at_fork(after_in_child=_reset_after_fork)


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Runs its body as if no functorch transform and no dispatch mode were on.

    Enough for native ops over indices whose results are not kept: no other mode of the caller
    reaches those. `outside_modes` is for torch's own operations and for tensors that stay, and
    costs more to enter.
    """
    with torch._C._DisableFuncTorch(), _no_dispatch_modes():
        yield


def _no_dispatch_modes() -> AbstractContextManager[object]:
    # Usually there is none, and to find that out as torch does costs 4 us.
    pre_dispatch = _len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
    if torch._C._len_torch_dispatch_stack() or pre_dispatch:
        return _disable_current_modes()
    return nullcontext()


@contextmanager
def outside_modes(device: torch.device) -> Iterator[None]:
    """Runs its body as if no mode of the caller's were on.

    What is built once and kept must not depend on who asked first: a tensor made in inference mode
    could not be saved for a later backward, one made under a fake-tensor mode or a functorch
    transform would hold no data, and autocast or a default device would change its dtype or place.
    """
    # A device context makes every torch call inside slower by 1 to 2 us: only where it matters.
    default_device = device.type == "cpu" and torch._C._len_torch_function_stack() == 0
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        nullcontext() if default_device else device,
        outside_tracing(),
    ):
        yield


class Plan:
    """One edge set in the forms that kernels want.

    The arrays live in the library, which made private copies of the indices and checked every one
    of them; this object holds the handle and frees it. Immutable, and safe to share between
    threads. To be made `outside_tracing`.

    On the CPU; `_device.DevicePlan` is the same for other devices, and `make_plan` picks.

    Attributes:
        ops: The operators that take the plan's `handle`.
        device: Where the indices are.
        on_device: Whether the kernels are a GPU's, which gain nothing by small tiles of edges.

    Args:
        dst: Destination of each edge, `[E]`, int32 or int64, any stride.
        src: Source of each edge, `[E]`, or None for a plan over a plain index (an edge then reads
            row `e`).
        num_dst: Number of destinations (rows of a result).
        num_src: Number of sources (rows of the features); E without `src`.
        force_wide: Keep int64 indices even where int32 would do (for tests of very large graphs'
            code).

    Raises:
        IndexError: If an index is out of range; names the value, its position and the bound.
    """

    on_device = False

    def __init__(
        self,
        dst: Tensor,
        src: Tensor | None,
        num_dst: int,
        num_src: int,
        *,
        force_wide: bool = False,
    ) -> None:
        self.ops: Any = native_ops
        self.device = _CPU
        made = native_ops.plan_create(dst, src, num_dst, num_src, force_wide)
        self.handle: Any = made[0]
        # Not at exit: the interpreter takes torch's operators apart in an order of its own.
        weakref.finalize(self, release, native_ops.plan_release, self.handle).atexit = False
        self._describe(made[1], num_dst, made[2], made[3], made[4], src is None)

    def _describe(
        self,
        num_edges: int,
        num_dst: int,
        num_src: int,
        wide: bool,
        is_sorted: bool,
        over_index: bool,
    ) -> None:
        self.num_edges = num_edges
        self.num_dst, self.num_src = num_dst, num_src
        self.wide, self.is_sorted, self.over_index = wide, is_sorted, over_index
        # What the plan will hold once its transpose is built too: the cache's bound must not grow
        # behind its back.
        element = 8 if wide else 4
        self.nbytes_bound = element * (8 * num_edges + num_dst + num_src) + 4096
        self._memo: dict[Hashable, object] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the library holds for this plan now."""
        with outside_tracing():
            return int(native_ops.plan_info(self.handle)[1])

    @property
    def has_transpose(self) -> bool:
        """Whether the CSC form has been built."""
        with outside_tracing():
            return bool(native_ops.plan_info(self.handle)[0])

    def array(self, name: str) -> Tensor:
        """A fresh copy of one array: rowptr, col, perm, colptr, row, perm_t, dst or src."""
        with torch.inference_mode(False), outside_tracing():
            return cast(Tensor, native_ops.plan_array(self.handle, ARRAYS[name]))

    def matches(self, edges: Tensor, dst_row: int) -> bool:
        """Whether the plan was made of exactly these indices.

        `[2, E]` with the destinations in row `dst_row`, or `[E]` where that is -1.
        """
        return cast(bool, native_ops.plan_matches(self.handle, edges, dst_row))

    def memo(self, key: Hashable, build: Callable[[], T]) -> T:
        """What `build` returned the first time for `key`.

        For values that depend on the graph alone. `build` runs outside inference mode, grad mode,
        autocast and every other mode of the caller. The value is shared: do not edit it.
        """
        try:
            return cast(T, self._memo[key])
        except KeyError:
            pass
        with _memo_lock:
            if key not in self._memo:
                with outside_modes(self.device):
                    made = build()
                    self._settle()
                self._memo[key] = made
            return cast(T, self._memo[key])

    def _settle(self) -> None:
        """Called when something was built that will be kept."""

    def in_degree(self) -> Tensor:
        """Edges into each destination, `[num_dst]` int64. Shared: do not edit."""
        return self.memo("in_degree", lambda: self._degree(False))

    def out_degree(self) -> Tensor:
        """Edges out of each source, `[num_src]` int64. Shared: do not edit."""
        return self.memo("out_degree", lambda: self._degree(True))

    def _degree(self, transpose: bool) -> Tensor:
        return cast(Tensor, native_ops.plan_degree(self.handle, transpose))

    def mean_scale(self, dtype: torch.dtype) -> Tensor:
        """1 / in-degree (0 for an empty row), `[num_dst]`: what a mean's backward multiplies by."""

        def build() -> Tensor:
            degree = self.in_degree().to(dtype)
            return torch.where(degree > 0, 1 / degree, degree)

        return self.memo(("mean_scale", dtype), build)

    def __repr__(self) -> str:
        return f"Plan(num_edges={self.num_edges}, num_src={self.num_src}, num_dst={self.num_dst})"
