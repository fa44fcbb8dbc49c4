"""oneDNN Graph for conv and matmul chains of any PyTorch model, without a compiler."""

from __future__ import annotations

from ._backend import edgeweave_onednn
from ._library import Library, OneDnnUnavailableError, load_library
from ._module import FusedModule, FuseError, fuse
from ._report import FuseReport, PartitionReport, Refusal, Verification
from ._save import load

__all__ = [
    "FuseError",
    "FuseReport",
    "FusedModule",
    "Library",
    "OneDnnUnavailableError",
    "PartitionReport",
    "Refusal",
    "Verification",
    "edgeweave_onednn",
    "fuse",
    "load",
    "load_library",
]
