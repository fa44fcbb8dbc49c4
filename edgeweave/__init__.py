"""Fast graph reductions, operator fusion and serving for PyTorch and PyTorch Geometric.

Without changing the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import runtime, scatter, sparse
from ._errors import EdgeweaveError, EdgeweaveWarning, NativeLibraryError, UntestedVersionWarning
from ._native import active_isa
from ._version import __version__
from .sparse import Graph

if TYPE_CHECKING:
    from .pyg import accelerate, accelerated, restore

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
    "restore",
    "runtime",
    "scatter",
    "sparse",
]

_FROM_PYG = ("accelerate", "accelerated", "restore")


def __getattr__(name: str) -> Any:
    # The drop-in imports torch_geometric, which is an extra and takes seconds.
    if name in _FROM_PYG:
        from . import pyg

        return getattr(pyg, name)
    raise AttributeError(f"module 'edgeweave' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
