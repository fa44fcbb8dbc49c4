"""Large buffers of Inductor's code on the CPU, kept from one call to the next.

A message per edge is a hundred megabytes. The C library hands a block of that size back to the
kernel when it is freed, so that code which asks for it at each call pays for every page again: as
much as for the arithmetic. The generated code takes its allocator from a module of torch's when it
is loaded; while a graph of ours is compiled, the one below is there.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._plan._traced_network import make_rows_by

__all__ = ["Pool", "kept_buffers", "large_buffers", "release_buffers"]

# Smaller blocks come from what the C library keeps itself.
_LEAST_BYTES = 1 << 20
# Of the memory that the process may use.
_SHARE = 0.25
_VARIABLE = "EDGEWEAVE_BUFFER_BYTES"

# Of one size: each call looks for a free one among them.
_MOST_BLOCKS = 64

_guards: Any = torch._C._dynamo.guards
_plain: Callable[..., Tensor] = _guards._empty_strided_cpu
# As in Inductor's code, neither goes through dispatch: modes and default devices do not see them.
_reinterpret: Callable[..., Tensor] = _guards._reinterpret_tensor

# Of pools, and of what Inductor's code is given.
_lock = threading.Lock()
_patch_lock = threading.Lock()

_Key = tuple[int, torch.dtype, bool]


def _holders(storage: torch.UntypedStorage) -> tuple[int, int]:
    """How many hold a storage in C++, and its one object in Python."""
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


class _Block:
    """Memory of the pool.

    Args:
        num_bytes: Whole elements.
        dtype: Of the tensors that are made of it.
    """

    def __init__(self, num_bytes: int, dtype: torch.dtype) -> None:
        self.num_bytes = num_bytes
        self.values = _plain((num_bytes // dtype.itemsize,), (1,), dtype)
        # Whoever asks a tensor for its storage gets this object: torch has one for each.
        self._storage = self.values.untyped_storage()
        self._address = self._storage.data_ptr()
        self._unheld = _holders(self._storage)
        # Bytes behind those of the last tensor are zero.
        self._written = num_bytes

    def is_free(self) -> bool:
        """Whether the pool alone holds the memory."""
        return _holders(self._storage) == self._unheld

    def is_whole(self) -> bool:
        """Whether the memory is the pool's still.

        A storage may have got other memory: of another size, or shared with a process that the
        tensor was sent to and that still reads it.
        """
        kept = self._storage
        return kept.nbytes() == self.num_bytes and kept.data_ptr() == self._address

    def tensor(self, num_bytes: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
        """A tensor of the first bytes, which has no base.

        What others have left behind its last byte goes: a storage is saved as a whole.
        """
        if num_bytes < self._written:
            ctypes.memset(self._address + num_bytes, 0, self._written - num_bytes)
        self._written = num_bytes
        return _reinterpret(self.values, size, stride, 0)


class Pool:
    """Blocks of memory that tensors are made of, and that wait for the next one when those die.

    Args:
        most_bytes: All blocks together, in use or not; what does not fit is allocated as ever.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._blocks: dict[_Key, list[_Block]] = {}
        self._bytes = 0

    @property
    def kept_bytes(self) -> int:
        """All blocks together, in use or not."""
        return self._bytes

    def tensor(
        self, num_bytes: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Tensor | None:
        """A tensor, uninitialised, in a block that no other uses; None if there is no room for one.

        Args:
            num_bytes: Of the tensor; blocks are up to an eighth larger, so that sizes which differ
                little share them.
            size: Its size.
            stride: Its strides.
            dtype: Its dtype.
        """
        step = max(1 << (num_bytes.bit_length() - 4), dtype.itemsize)
        block_bytes = -(-num_bytes // step) * step
        # Tensors that are made in inference mode stay so.
        key = (block_bytes, dtype, torch.is_inference_mode_enabled())
        with _lock:
            blocks = self._blocks.setdefault(key, [])
            # The last that was given back first: it is the likeliest to be in a cache.
            for block in reversed(blocks):
                if block.is_free():
                    if block.is_whole():
                        return block.tensor(num_bytes, size, stride)
                    self._remove(key, block)
            if len(blocks) >= _MOST_BLOCKS:
                return None
            if self._bytes + block_bytes > self.most_bytes:
                self._drop_free()
            if self._bytes + block_bytes > self.most_bytes:
                return None
            block = _Block(block_bytes, dtype)
            self._blocks.setdefault(key, []).append(block)
            self._bytes += block_bytes
            return block.tensor(num_bytes, size, stride)

    def release(self) -> None:
        """Give back to the system what no tensor uses."""
        with _lock:
            self._drop_free()

    def _drop_free(self) -> None:
        for key, blocks in list(self._blocks.items()):
            for block in list(blocks):
                if block.is_free() or not block.is_whole():
                    self._remove(key, block)
            if not blocks:
                del self._blocks[key]

    def _remove(self, key: _Key, block: _Block) -> None:
        self._blocks[key].remove(block)
        self._bytes -= block.num_bytes


@cache
def _pool() -> Pool:
    return Pool(_limit())


def _limit() -> int:
    given = os.environ.get(_VARIABLE)
    if given is not None:
        if not given.isdigit():
            raise ValueError(f"{_VARIABLE}: must be a number of bytes, 0 for none, got {given!r}")
        return int(given)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Of a container, if it has a limit of its own: not "max", and the file is there.
    with suppress(OSError, ValueError):
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return int(_SHARE * memory)


def kept_buffers() -> int:
    """Bytes of the buffers that compiled graphs keep, in use or not.

    Example:
        >>> from edgeweave.compile._buffers import kept_buffers
        >>> kept_buffers() >= 0
        True
    """
    return _pool().kept_bytes


def release_buffers() -> None:
    """Give back to the system the memory that compiled graphs keep and do not use now.

    Example:
        >>> from edgeweave.compile import release_buffers
        >>> release_buffers()
    """
    _pool().release()


def _empty_strided_cpu(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor, as Inductor's code asks for it."""
    span = 1
    for n, step in zip(size, stride, strict=True):
        if n == 0:
            return _plain(size, stride, dtype)
        span += (n - 1) * step
    num_bytes = span * dtype.itemsize
    kept = None
    if num_bytes >= _LEAST_BYTES:
        kept = _pool().tensor(num_bytes, size, stride, dtype)
    return _plain(size, stride, dtype) if kept is None else kept


def _rows(like: Tensor, rows: int, width: int) -> Tensor:
    """An uninitialised `[rows, width]`, as an op of ours asks for it within one call."""
    return _empty_strided_cpu((rows, width), (width, 1), like.dtype)


make_rows_by(_rows)

# Blocks of code that are inside `large_buffers`, in all threads.
_inside = 0


@contextmanager
def large_buffers() -> Iterator[None]:
    """Code of Inductor's that is loaded in the block takes large buffers from the pool."""
    # No lock while a graph is compiled: other threads hold locks of torch's.
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def _enter(change: int) -> None:
    global _inside
    with _patch_lock:
        _inside += change
        _guards._empty_strided_cpu = _empty_strided_cpu if _inside else _plain


def _before_fork() -> None:
    _patch_lock.acquire()
    _lock.acquire()


def _after_fork() -> None:
    _lock.release()
    _patch_lock.release()


# A child has one thread, which could not release what another one held.
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
