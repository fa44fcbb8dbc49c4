"""Rows at the end of a matrix that no product needs.

A batch of a neighbour sampler starts with its seeds and ends with the nodes of the last hop, which
are most of all. Those have no incoming edges, so that what they aggregate is zero; and gradients
start at the seeds and reach them only in a network's first layer, if at all. Stock multiplies these
zeros like any other number.
"""

from __future__ import annotations

import math

from torch import Tensor

from edgeweave._plan import Plan

__all__ = ["are_finite", "rows_in_use", "rows_reached"]

# Below this a product is about as short as the search for what may be left out of it.
_MIN_ROWS = 2048


def rows_in_use(values: Tensor) -> int:
    """Number of rows up to the last one that holds anything but zeros; at least one.

    Args:
        values: `[N, F]` floating point. NaN is no zero.
    """
    rows = values.shape[0]
    # Where every row counts, as on a whole graph, the last one says so.
    if rows < _MIN_ROWS or values.shape[1] == 0 or bool(values[-1].any()):
        return rows
    used = ((values.amax(1) != 0) | (values.amin(1) != 0)).nonzero()
    return int(used[-1]) + 1 if used.shape[0] else 1


def rows_reached(plan: Plan) -> int:
    """Number of destinations up to the last one with an incoming edge.

    Args:
        plan: The edges.
    """
    rows = plan.num_dst
    if rows < _MIN_ROWS:
        return rows

    def build() -> int:
        reached = plan.in_degree().nonzero()
        return int(reached[-1]) + 1 if reached.shape[0] else 0

    return plan.memo("pyg.rows_reached", build)


def are_finite(*tensors: Tensor) -> bool:
    """Whether zeros times these numbers are zeros: none of them is infinite or NaN.

    A sum that overflows says no to finite numbers too, which costs time only.

    Args:
        *tensors: Floating point, any shape.
    """
    return all(math.isfinite(tensor.sum()) for tensor in tensors)
