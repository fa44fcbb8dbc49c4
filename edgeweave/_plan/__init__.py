"""Plans: validated CSR/CSC of edge sets, their cache, and differentiable reductions over them.

Private, below `edgeweave.scatter` and `edgeweave.sparse`; `edgeweave.sparse.Graph` is its public
face.
"""

from __future__ import annotations

from ._cache import (
    CacheInfo,
    cache_clear,
    cache_info,
    check_everything,
    forget_plan,
    named,
    plan_for_edges,
    plan_for_index,
    set_cache_limit,
)
from ._functions import plan_arg, plan_minmax, plan_sum
from ._plan import Plan, outside_modes

__all__ = [
    "CacheInfo",
    "Plan",
    "cache_clear",
    "cache_info",
    "check_everything",
    "forget_plan",
    "named",
    "outside_modes",
    "plan_arg",
    "plan_for_edges",
    "plan_for_index",
    "plan_minmax",
    "plan_sum",
    "set_cache_limit",
]
