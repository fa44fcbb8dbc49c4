"""Reductions over edge sets in CSR and CSC form: `Graph`, `mm`, and the plan cache behind both."""

from __future__ import annotations

from .._plan import CacheInfo, cache_clear, cache_info, set_cache_limit
from ._graph import Graph
from ._mm import mm

__all__ = ["CacheInfo", "Graph", "cache_clear", "cache_info", "mm", "set_cache_limit"]
