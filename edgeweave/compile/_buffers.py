"""Large buffers of Inductor's code on the CPU: in huge pages, as the outputs of edgeweave's ops are.

A message per edge is a hundred megabytes, and Inductor's code asks for it anew at each call: half of
the time of writing it is page faults of 4 KiB. The generated code takes its allocator from a module
of torch's when it is loaded, so another one is there while a graph of ours is compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._native import ops

__all__ = ["large_buffers"]

# Below some huge pages, asking for them costs what it saves.
_LEAST_BYTES = 8 << 20

_guards: Any = torch._C._dynamo.guards
_plain: Callable[..., Tensor] = _guards._empty_strided_cpu
_lock = threading.RLock()


@cache
def _like(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype)


def _empty_strided_cpu(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """An uninitialised tensor as Inductor's code asks for it."""
    span = 1
    for n, step in zip(size, stride, strict=True):
        if n == 0:
            return _plain(size, stride, dtype)
        span += (n - 1) * step
    if span * dtype.itemsize < _LEAST_BYTES:
        return _plain(size, stride, dtype)
    flat: Tensor = ops.empty_rows(_like(dtype), 1, span)
    # No view: what leaves the graph must have no base.
    return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, size, stride)


@contextmanager
def large_buffers() -> Any:
    """Code of Inductor's that is loaded in the block allocates large buffers in huge pages."""
    with _lock:
        before = _guards._empty_strided_cpu
        _guards._empty_strided_cpu = _empty_strided_cpu
        try:
            yield
        finally:
            _guards._empty_strided_cpu = before
