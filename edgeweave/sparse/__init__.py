"""Edge sets in CSR and CSC form: `Graph`, `mm`, `sddmm`, and the plan cache behind them."""

from __future__ import annotations

from .._plan import CacheInfo, cache_clear, cache_info, set_cache_limit
from ._graph import Graph
from ._mm import mm
from ._sddmm import sddmm
from ._segment_matmul import segment_matmul

__all__ = [
    "CacheInfo",
    "Graph",
    "cache_clear",
    "cache_info",
    "mm",
    "sddmm",
    "segment_matmul",
    "set_cache_limit",
]
