"""One `torch.compile` pipeline: graph passes, oneDNN partitions, Inductor for the rest."""

from __future__ import annotations

from ._backend import edgeweave_backend
from ._buffers import release_buffers
from ._explain import GraphBreak, Report, explain
from ._optimize import Decision, OptimizedModel, optimize
from ._passes import PASSES, Pass, run_passes
from ._record import GraphRecord, Rewrite
from ._verify import VerificationError

__all__ = [
    "PASSES",
    "Decision",
    "GraphBreak",
    "GraphRecord",
    "OptimizedModel",
    "Pass",
    "Report",
    "Rewrite",
    "VerificationError",
    "edgeweave_backend",
    "explain",
    "optimize",
    "release_buffers",
    "run_passes",
]
