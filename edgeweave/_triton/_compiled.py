"""Launches of compiled kernels without what Triton works out anew at each call.

A launch through `kernel[grid](...)` costs some 50 microseconds of Python: arguments are bound by
name, each is classified for specialisation, the globals that a kernel read are compared. A layer's
step is a dozen launches, and on a graph of two million edges the device is done before the next one
arrives. Here a launch is classified by Triton's own rules, in one pass, and what was compiled for
the same classes is called.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from torch import Tensor

__all__ = ["run"]

_LARGEST_INT32: Final = (1 << 31) - 1
_IS_HIP: Final = torch.version.hip is not None

_kept: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_specialized: dict[int, tuple[Any, tuple[bool, ...]]] = {}


def _of(kernel: Any) -> tuple[bool, ...]:
    """Which arguments of a kernel Triton compiles for, by position."""
    found = _specialized.get(id(kernel))
    if found is None:
        # The kernel is kept with it, so that its id stays its own.
        found = (kernel, tuple(not param.do_not_specialize for param in kernel.params))
        _specialized[id(kernel)] = found
    return found[1]


def _class_of(value: Any, is_specialized: bool) -> Any:
    """What Triton's code for an argument depends on."""
    if isinstance(value, Tensor):
        # AMD's buffer instructions are for storages of less than 2 GiB.
        is_small = _IS_HIP and value.untyped_storage().nbytes() <= _LARGEST_INT32
        return value.dtype, value.data_ptr() % 16 == 0, is_small
    if isinstance(value, bool):
        return bool, value
    if isinstance(value, int):
        wide = not -_LARGEST_INT32 - 1 <= value <= _LARGEST_INT32
        return (wide, value == 1, value % 16 == 0) if is_specialized else wide
    return value if value is None else type(value)


def run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: Any) -> None:
    """Launches a kernel on the current device and stream.

    Args:
        kernel: Made by `triton.jit`, its constants behind its other parameters.
        grid: One or two numbers of programs.
        args: Its arguments: tensors, ints, floats and None.
        constants: Its constants by name, and options like `num_warps`.
    """
    if not isinstance(kernel, triton.JITFunction):  # the interpreter's
        kernel[grid](*args, **constants)
        return
    key = (
        id(kernel),
        torch.cuda.current_device(),
        *map(_class_of, args, _of(kernel)),
        *constants.items(),
    )
    found = _kept.get(key)
    if found is None:
        compiled = kernel[grid](*args, **constants)
        values = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        _kept[key] = (compiled, values)
        return
    compiled, values = found
    compiled[(*grid, 1, 1)[:3]](*args, *values)
