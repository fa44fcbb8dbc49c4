"""Plans on CUDA, and which tensors have kernels at all.

A plan of CUDA indices is sorted on the device, by torch, and its operators are Triton kernels
(`edgeweave._triton`), imported when the first such plan is made.
"""

from __future__ import annotations

import importlib.util
import warnings

import torch
from torch import Tensor

from .._errors import EdgeweaveWarning
from .._native import ops as native_ops
from .._triton import DeviceEdges
from .._triton._edges import finish
from ._plan import Plan, outside_modes

__all__ = [
    "DevicePlan",
    "has_kernels",
    "index_fingerprint",
    "is_native",
    "make_plan",
    "same_device",
]

# For tests alone: plans of CPU tensors as on CUDA, for kernels under Triton's interpreter.
_as_on_cuda = False
_has_triton = importlib.util.find_spec("triton") is not None
_said_so = False


def _has_gpu_kernels() -> bool:
    """Whether Triton is there; that it is not is said once."""
    global _said_so
    if not _has_triton and not _said_so:
        _said_so = True
        warnings.warn(
            "edgeweave: Triton was not found, so CUDA tensors are reduced by torch's own "
            "operations, in no fixed order; install the triton that torch asks for",
            EdgeweaveWarning,
            stacklevel=3,
        )
    return _has_triton


def has_kernels(x: Tensor) -> bool:
    """Whether plans and their kernels work where a tensor is: on the CPU, and on CUDA by Triton."""
    return x.is_cpu or (x.is_cuda and _has_gpu_kernels())


def is_native(x: Tensor) -> bool:
    """Whether the native library's operators take a tensor: it is on the CPU."""
    return x.is_cpu and not _as_on_cuda


def same_device(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are where one kernel can read both."""
    return (first.is_cpu and second.is_cpu) or first.device == second.device


class DevicePlan(Plan):
    """A plan whose arrays are on CUDA: the same questions, the same operators, other kernels.

    Args:
        dst: Destination of each edge, `[E]`.
        src: Source of each edge, or None.
        num_dst: Number of destinations.
        num_src: Number of sources.
        force_wide: As for `Plan`.

    Raises:
        IndexError: If an index is out of range.
    """

    on_device = True

    def __init__(
        self,
        dst: Tensor,
        src: Tensor | None,
        num_dst: int,
        num_src: int,
        *,
        force_wide: bool = False,
    ) -> None:
        from .._triton import _ops

        self.ops = _ops
        self.device = dst.device
        with outside_modes(dst.device):
            edges = DeviceEdges(
                dst.detach(),
                None if src is None else src.detach(),
                num_dst,
                num_src,
                force_wide,
                outside_modes,
            )
        self.handle: DeviceEdges = edges
        self._describe(
            edges.num_edges,
            edges.num_dst,
            edges.num_src,
            edges.wide,
            edges.is_sorted,
            edges.over_index,
        )
        # Beside the copies that `Plan` has: how long rows are cut, at most three per row.
        self.nbytes_bound += (8 if edges.wide else 4) * 3 * (edges.num_dst + edges.num_src)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that exist now."""
        return self.handle.nbytes

    @property
    def has_transpose(self) -> bool:
        """Whether the CSC form has been built."""
        return self.handle.has_transpose

    def array(self, name: str) -> Tensor:
        """A fresh copy of one array: rowptr, col, perm, colptr, row, perm_t, dst or src."""
        with outside_modes(self.device):
            return self.handle.array(name)

    def matches(self, edges: Tensor, dst_row: int) -> bool:
        """Whether the plan was made of exactly these indices; looks at the device."""
        with outside_modes(self.device):
            return self.handle.matches(edges.detach(), dst_row)

    def _degree(self, transpose: bool) -> Tensor:
        return self.handle.degree(transpose)

    def _settle(self) -> None:
        finish(self.device)


def make_plan(
    dst: Tensor,
    src: Tensor | None,
    num_dst: int,
    num_src: int,
    *,
    force_wide: bool = False,
) -> Plan:
    """A plan for where the indices are; arguments as of `Plan`."""
    kind = Plan if is_native(dst) else DevicePlan
    return kind(dst, src, num_dst, num_src, force_wide=force_wide)


# Odd numbers whose multiples differ in all bits, as in the native library's fingerprint.
_STEP = -7046029254386353131
_LEAP = -4417276706812531889


def index_fingerprint(index: Tensor, dst_row: int, samples: int) -> int:
    """A hash of an index `[E]` or `[2, E]`, of all of it or of so many samples.

    Off the CPU it looks at the device, and depends on neither strides nor dtype.

    Args:
        index: int32 or int64.
        dst_row: Row of the destinations, -1 for `[E]`.
        samples: How many entries to look at; 0 for all.
    """
    if is_native(index):
        return int(native_ops.fingerprint(index, dst_row, samples))
    with outside_modes(index.device):
        index = index.detach()
        count = index.shape[-1]
        position = torch.arange(count if samples == 0 else min(samples, count))
        if samples != 0 and count > samples:
            position = position * (count - 1) // (samples - 1)
            index = index.index_select(-1, position)
        mixed = (index.long() + 1) * _STEP
        mixed = (mixed ^ (mixed >> 29)) * ((position + 1) * _LEAP | 1)
        if mixed.dim() == 2:
            mixed = mixed[0] * 3 + mixed[1] * 5
        return int(mixed.sum()) ^ (dst_row + 1)
