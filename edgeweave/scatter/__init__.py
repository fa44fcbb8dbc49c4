"""Reductions and gathers over plain index tensors (COO): `scatter_reduce` and `gather`."""

from __future__ import annotations

from ._gather import gather
from ._scatter_reduce import scatter_reduce

__all__ = ["gather", "scatter_reduce"]
