"""The TorchScript way to oneDNN fusion, made safe.

`fuser` is `torch.jit.fuser` with flags that never leak. `optimize` is the whole recipe of tracing,
freezing and warming up, with a check of the traced graph for what torch's bridge gets wrong.
"""

from edgeweave.jitfuser._flags import flags, fuser
from edgeweave.jitfuser._optimize import OptimizedModel, optimize
from edgeweave.jitfuser._report import GroupReport, JitReport, ShapeReport

__all__ = [
    "GroupReport",
    "JitReport",
    "OptimizedModel",
    "ShapeReport",
    "flags",
    "fuser",
    "optimize",
]
