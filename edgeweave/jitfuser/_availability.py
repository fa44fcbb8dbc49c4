"""Whether this torch still has TorchScript and its oneDNN bridge."""

from __future__ import annotations

import platform
import sys

import torch

# What `fuser` and the recipe call. All of it is private to torch, so each is looked for.
_FLAGS = (
    "_jit_can_fuse_on_cpu",
    "_jit_can_fuse_on_gpu",
    "_jit_override_can_fuse_on_cpu",
    "_jit_override_can_fuse_on_gpu",
    "_jit_texpr_fuser_enabled",
    "_jit_set_texpr_fuser_enabled",
    "_jit_set_profiling_executor",
    "_get_graph_executor_optimize",
)
_BRIDGE = ("_jit_llga_enabled", "_jit_set_llga_enabled")
_SCRIPT = ("_create_function_from_graph", "_jit_pass_remove_mutation", "_jit_set_autocast_mode")
_BRIDGE_MACHINES = ("x86_64", "AMD64")


def missing_flags() -> str | None:
    """Why the fuser flags cannot be set, or None if they can."""
    absent = [name for name in (*_FLAGS, *_BRIDGE) if not hasattr(torch._C, name)]
    if absent:
        return f"torch {torch.__version__} has no torch._C.{absent[0]}"
    return None


def missing_torchscript() -> str | None:
    """Why models cannot be traced and frozen, or None if they can."""
    # torch does not support TorchScript from Python 3.14 on; it only warns there.
    if sys.version_info >= (3, 14):
        return f"TorchScript does not support Python {platform.python_version()}"
    for name in ("trace", "freeze"):
        if not hasattr(getattr(torch, "jit", None), name):
            return f"torch {torch.__version__} has no torch.jit.{name}"
    absent = [name for name in _SCRIPT if not hasattr(torch._C, name)]
    if absent:
        return f"torch {torch.__version__} has no torch._C.{absent[0]}"
    return None


def missing_bridge() -> str | None:
    """Why TorchScript cannot hand subgraphs to oneDNN, or None if it can."""
    reason = missing_torchscript() or missing_flags()
    if reason is not None:
        return reason
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this build of torch has no oneDNN"
    if platform.machine() not in _BRIDGE_MACHINES:
        return f"torch's oneDNN bridge is built for x86-64 only, this is {platform.machine()}"
    return None


def bf16_missing() -> str | None:
    """Why bf16 models would not fuse on this processor, or None if they would."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    isa = torch.backends.cpu.get_cpu_capability()
    return f"the processor has no bf16 instructions (torch uses {isa})"
