"""Fast graph reductions for PyTorch and PyTorch Geometric on CPUs, without changing the model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._errors import EdgeweaveError, EdgeweaveWarning, NativeLibraryError, UntestedVersionWarning
from ._version import __version__

if TYPE_CHECKING:
    from . import compile, jitfuser, runtime, scatter, sparse
    from ._native import active_isa
    from .compile import optimize
    from .jitfuser import fuser
    from .pyg import accelerate, accelerated, restore
    from .sparse import Graph

__all__ = [
    "EdgeweaveError",
    "EdgeweaveWarning",
    "Graph",
    "NativeLibraryError",
    "UntestedVersionWarning",
    "__version__",
    "accelerate",
    "accelerated",
    "active_isa",
    "compile",
    "fuser",
    "jitfuser",
    "optimize",
    "restore",
    "runtime",
    "scatter",
    "sparse",
]

# Loaded at first use. `edgeweave doctor` must start where torch or the native library is missing,
# `tune_allocator` should run before torch makes its first blocks, and the drop-in imports
# torch_geometric, which is an extra and takes seconds.
_ROOMS = ("compile", "jitfuser", "runtime", "scatter", "sparse")
_ROOM_OF = {
    "Graph": "sparse",
    "accelerate": "pyg",
    "accelerated": "pyg",
    "active_isa": "_native",
    "fuser": "jitfuser",
    "optimize": "compile",
    "restore": "pyg",
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    if name in _ROOM_OF:
        value = getattr(import_module(f".{_ROOM_OF[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'edgeweave' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
