"""Conditions under which a call keeps PyG's own code, whatever the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import Parameter

from edgeweave._plan._device import has_kernels, same_device

_FEATURE_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
INDEX_DTYPES = frozenset({torch.int64, torch.int32})


def may_trace() -> bool:
    """Return whether `torch.compile` may put edgeweave's operators into the graph it is tracing.

    `torch.export` may not: an exported program must load where edgeweave is not installed.
    """
    return not torch.compiler.is_exporting()


def mode_refusal() -> str | None:
    """Return why the current interpreter state asks for PyG's own code, or None.

    `torch.compiler.is_compiling()` is left to the callers: it must be asked before anything that
    dynamo cannot trace, this function included.
    """
    if torch._C._is_tracing():
        return "torch.jit.trace is running"
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform is active"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    if torch._C._len_torch_dispatch_stack():
        return "a torch dispatch mode is active"
    return None


def features_refusal(x: Any, name: str) -> str | None:
    """Return why a feature or weight tensor cannot go to a kernel, or None.

    Args:
        x: What was passed where a dense floating-point tensor is needed.
        name: Its name in the message.

    Returns:
        The reason in words, None if `x` is a plain dense floating-point tensor on the CPU or CUDA.
    """
    # Exact types: a subclass may give `*` or `index_select` another meaning.
    if type(x) is not Tensor and type(x) is not Parameter:
        return f"{name} is a {type(x).__name__}"
    if not has_kernels(x):
        return f"{name} is on {x.device.type}"
    if x.dtype not in _FEATURE_DTYPES:
        return f"{name} has dtype {x.dtype}"
    if x.layout is not torch.strided:
        return f"{name} has layout {x.layout}"
    return None


def devices_refusal(first: Tensor, *others: Tensor | None) -> str | None:
    """Return that tensors are on more than one device, or None."""
    if all(other is None or same_device(first, other) for other in others):
        return None
    return "tensors are on different devices"


def leave_error_to_stock(index: Tensor) -> bool:
    """Whether PyG's own code raises an error of its own about indices that are out of range.

    On CUDA it stops the device instead: there the error is ours.
    """
    return not index.is_cuda


def autocast_is_on() -> bool:
    """Whether autocast is on where edgeweave has kernels."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


_any_global_hook: Callable[[], bool] = nn.modules.module._has_any_global_hook


def has_hooks(module: Any) -> bool:
    """Whether calling the module is more than its class's `forward`."""
    state = module.__dict__
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "forward" in state
        or _any_global_hook()
    )
