"""Reductions, softmax and gathers over plain index tensors (COO) and over segments."""

from __future__ import annotations

from ._gather import gather
from ._moments import multi_reduce, std, var
from ._order import argmax, argmin, index_sort
from ._scatter_reduce import scatter_reduce
from ._segment_reduce import segment_reduce
from ._softmax import logsumexp, softmax

__all__ = [
    "argmax",
    "argmin",
    "gather",
    "index_sort",
    "logsumexp",
    "multi_reduce",
    "scatter_reduce",
    "segment_reduce",
    "softmax",
    "std",
    "var",
]
