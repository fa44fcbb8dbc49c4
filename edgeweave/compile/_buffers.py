"""Large buffers of Inductor's code on the CPU, kept from one call to the next.

A message per edge is a hundred megabytes. The C library hands a block of that size back to the
kernel when it is freed, so that code which asks for it at each call pays for every page again: as
much as for the arithmetic. The generated code takes its allocator from a module of torch's when it
is loaded; while a graph of ours is compiled, the one below is there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Pool", "kept_buffers", "large_buffers", "release_buffers"]

# Smaller blocks come from what the C library keeps itself.
_LEAST_BYTES = 1 << 20
# Of the memory that the process may use.
_SHARE = 0.25
_VARIABLE = "EDGEWEAVE_BUFFER_BYTES"

_guards: Any = torch._C._dynamo.guards
_plain: Callable[..., Tensor] = _guards._empty_strided_cpu
_patch_lock = threading.RLock()


class Pool:
    """Blocks of memory that tensors are made of, and that wait for the next one when those die.

    Args:
        most_bytes: All blocks together, in use or not; what does not fit is allocated as ever.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._lock = threading.Lock()
        self._blocks: dict[int, list[Tensor]] = {}
        self._bytes = 0

    @property
    def kept_bytes(self) -> int:
        """All blocks together, in use or not."""
        return self._bytes

    def block(self, num_bytes: int) -> Tensor | None:
        """A block that no tensor uses, `[bytes]` uint8; None if there is no room for one.

        Args:
            num_bytes: At least; blocks are up to an eighth larger, so that sizes which differ
                little share them.
        """
        step = max(1 << (num_bytes.bit_length() - 4), 1)
        size = -(-num_bytes // step) * step
        with self._lock:
            # The last that was given back first: it is the likeliest to be in a cache.
            for block in reversed(self._blocks.get(size, ())):
                if _is_free(block):
                    return block.view(-1)
            if self._bytes + size > self.most_bytes:
                self._drop_free()
            if self._bytes + size > self.most_bytes:
                return None
            block = torch.empty(size, dtype=torch.uint8)
            self._blocks.setdefault(size, []).append(block)
            self._bytes += size
            return block.view(-1)

    def release(self) -> None:
        """Give back to the system what no tensor uses."""
        with self._lock:
            self._drop_free()

    def _drop_free(self) -> None:
        for size, blocks in list(self._blocks.items()):
            used = [block for block in blocks if not _is_free(block)]
            self._bytes -= size * (len(blocks) - len(used))
            self._blocks[size] = used
            if not used:
                del self._blocks[size]


def _is_free(block: Tensor) -> bool:
    """Whether the pool alone holds a block's storage."""
    storage = block.untyped_storage()
    # One holder is the pool's tensor, one the object asked here.
    return bool(torch._C._storage_Use_Count(storage._cdata) <= 2)


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
    block = _pool().block(num_bytes) if num_bytes >= _LEAST_BYTES else None
    if block is None:
        return _plain(size, stride, dtype)
    # No view: what leaves the graph must have no base.
    return torch.empty(0, dtype=dtype).set_(block.untyped_storage(), 0, size, stride)


@contextmanager
def large_buffers() -> Iterator[None]:
    """Code of Inductor's that is loaded in the block takes large buffers from the pool."""
    with _patch_lock:
        before = _guards._empty_strided_cpu
        _guards._empty_strided_cpu = _empty_strided_cpu
        try:
            yield
        finally:
            _guards._empty_strided_cpu = before
