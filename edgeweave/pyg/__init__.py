"""The PyTorch Geometric drop-in: unchanged PyG layers on edgeweave's kernels.

`accelerate()` patches PyG at class and module level, never on instances, so `deepcopy`, `pickle`
and `state_dict` work as before; `restore()` puts the originals back. What is not covered runs
PyG's own code, and `report()` says what that was and why; `compare()` says what each layer of a
model gains.

Importing this package does not import `torch_geometric`; `accelerate()` does.
"""

from edgeweave._errors import UntestedVersionWarning
from edgeweave.pyg._compare import Comparison, LayerComparison, compare
from edgeweave.pyg._report import Report, SiteReport, report, reset_report
from edgeweave.pyg._state import accelerate, accelerated, is_accelerated, restore

__all__ = [
    "Comparison",
    "LayerComparison",
    "Report",
    "SiteReport",
    "UntestedVersionWarning",
    "accelerate",
    "accelerated",
    "compare",
    "is_accelerated",
    "report",
    "reset_report",
    "restore",
]
