"""One `torch.compile` pipeline: graph passes, oneDNN partitions, Inductor for the rest."""

from __future__ import annotations

from ._backend import edgeweave_backend
from ._optimize import OptimizedModel, optimize
from ._passes import PASSES, Pass, run_passes
from ._record import Rewrite
from ._verify import VerificationError

__all__ = [
    "PASSES",
    "OptimizedModel",
    "Pass",
    "Rewrite",
    "VerificationError",
    "edgeweave_backend",
    "optimize",
    "run_passes",
]
