"""Reductions over device edges: sums, extremes and their gradients, products, several at once.

Under the names and with the arguments of the native library's operators; where those take a plan's
handle, these take `DeviceEdges`. Features are `[N, F]` or `[B, N, F]`, contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._dots import edge_dots
from ._edges import DeviceEdges, Direction
from ._launch import MAX, MEAN, MIN, PROD, SUM, accumulator, map_entries, reduce_rows
from .kernels import edges as edge_kernels
from .kernels import entries as values
from .kernels import rows

__all__ = [
    "as_entries",
    "minmax_arg",
    "minmax_grad",
    "minmax_grad_first",
    "plan_multi",
    "plan_multi_grad",
    "plan_prod",
    "plan_prod_grad",
    "spmm",
]


def spmm(
    edges: DeviceEdges,
    transpose: bool,
    x: Tensor,
    heads: int,
    weight: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    reduce: int,
    init: Tensor | None = None,
    init_scale: float = 1.0,
) -> Tensor:
    """`row_scale[i] * reduce_e(weight[e] * col_scale[j] * x[j]) + init_scale * init[i]`."""
    if transpose and edges.over_index and weight is None and reduce == SUM and init is None:
        # Each row is one entry: rows are gathered, by tiles of them.
        return map_entries(
            values.GATHER, edges.dst, edges.num_dst, x, row_scale=row_scale, col_scale=col_scale
        )
    return reduce_rows(
        edges.direction(transpose),
        x,
        reduce,
        heads=heads,
        weight=weight,
        row_scale=row_scale,
        col_scale=col_scale,
        init=init,
        init_scale=init_scale,
    )


def as_entries(edges: DeviceEdges) -> Direction:
    """The edges by destination, where x has a row for each edge in input order."""
    forward = edges.forward
    return Direction(
        forward.ptr, forward.perm, forward.perm, forward.num_rows, edges.num_edges, forward.parts
    )


def _tie_scaled(
    direction: Direction,
    x: Tensor,
    heads: int,
    weight: Tensor | None,
    result: Tensor,
    grad: Tensor,
) -> Tensor:
    """The gradient of each row over the number of edges that reach its result."""
    wide = accumulator(x.dtype)
    count = reduce_rows(
        direction,
        x,
        SUM,
        message=rows.WINS,
        heads=heads,
        weight=weight,
        centre=result,
        out_dtype=wide,
    )
    return grad.to(wide) / count.clamp_(min=1)


def minmax_grad(
    edges: DeviceEdges,
    x: Tensor,
    heads: int,
    weight: Tensor | None,
    result: Tensor,
    grad: Tensor,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of a min or max with ties shared evenly, in x's dtype; empty where not wanted."""
    scaled = _tie_scaled(edges.forward, x, heads, weight, result, grad)
    dx = dw = x.new_empty(0)
    if need_x:
        dx = reduce_rows(
            edges.transposed,
            scaled,
            SUM,
            message=rows.ROUTE,
            heads=heads,
            weight=weight,
            centre=x,
            other=result,
            out_dtype=x.dtype,
        )
    if need_weight:
        dw = edge_dots(
            edges, edge_kernels.WON, result, x, heads, third=scaled, weight=weight, dtype=x.dtype
        )
    return dx, dw


def minmax_arg(
    edges: DeviceEdges, x: Tensor, heads: int, weight: Tensor | None, result: Tensor
) -> Tensor:
    """The first edge, as a position in the input, that reaches each result; int64, E for none."""
    return reduce_rows(
        edges.forward,
        x,
        MIN,
        message=rows.FIRST,
        heads=heads,
        weight=weight,
        centre=result,
        out_dtype=torch.int64,
    )


def minmax_grad_first(
    edges: DeviceEdges,
    x: Tensor,
    heads: int,
    weight: Tensor | None,
    result: Tensor,
    grad: Tensor,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of a min or max whose first winner takes all, in the accumulator's dtype."""
    wide = accumulator(x.dtype)
    first = minmax_arg(edges, x, heads, weight, result)
    grad = grad.to(wide)
    dx = dw = x.new_empty(0, dtype=wide)
    if need_x:
        dx = reduce_rows(
            edges.transposed,
            grad,
            SUM,
            message=rows.ROUTE_FIRST,
            heads=heads,
            weight=weight,
            other=first,
        )
    if need_weight:
        dw = edge_dots(edges, edge_kernels.WON_FIRST, first, x, heads, third=grad, dtype=wide)
    return dx, dw


# ---- products ------------------------------------------------------------------------------------


def _without_specials(x: Tensor) -> Tensor:
    """In the accumulator's dtype; 1 with the sign of a zero or an infinity in its place."""
    x = x.to(accumulator(x.dtype))
    return torch.where((x == 0) | x.isinf(), torch.ones_like(x).copysign(x), x)


def _specials(product: Tensor, has_zero: Tensor, has_infinity: Tensor) -> Tensor:
    """What zeros and infinities make of the product of the rest, whose sign has theirs in it."""
    lost = product.isnan() | (has_zero & has_infinity)
    out = torch.where(has_zero, torch.zeros_like(product).copysign(product), product)
    out = torch.where(has_infinity, torch.full_like(out, float("inf")).copysign(product), out)
    return torch.where(lost, float("nan"), out)


def _product_parts(edges: DeviceEdges, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(x without specials, its product, zeros, infinities)`, the last three of each group."""
    rest = _without_specials(x)
    entries = as_entries(edges)
    product = reduce_rows(entries, rest, PROD)
    zeros = reduce_rows(entries, (x == 0).to(torch.int32), SUM)
    infinities = reduce_rows(entries, x.isinf().to(torch.int32), SUM)
    return rest, product, zeros, infinities


def plan_prod(edges: DeviceEdges, src: Tensor) -> Tensor:
    """The product of each group's entries; 1 for an empty group."""
    if not src.is_floating_point():
        return reduce_rows(as_entries(edges), src, PROD)
    _, product, zeros, infinities = _product_parts(edges, src)
    return _specials(product, zeros > 0, infinities > 0).to(src.dtype)


def plan_prod_grad(edges: DeviceEdges, src: Tensor, grad: Tensor) -> Tensor:
    """The gradient of each group times the product of the group's other entries."""
    rest, product, zeros, infinities = _product_parts(edges, src)
    group = edges.dst
    others = _specials(
        product.index_select(-2, group) / rest,
        zeros.index_select(-2, group) > (src == 0).to(torch.int32),
        infinities.index_select(-2, group) > src.isinf().to(torch.int32),
    )
    return (others * grad.index_select(-2, group)).to(src.dtype)


# ---- several reductions --------------------------------------------------------------------------


def plan_multi(edges: DeviceEdges, src: Tensor, wanted: int, correction: int) -> list[Tensor]:
    """Sum, mean, max, min, var, std, and mean and std in the accumulator's dtype, by bits.

    For a plan over edges, of the rows at their sources. Empty where a bit is not set.
    """
    forward, wide = edges.forward, accumulator(src.dtype)
    made = [src.new_empty(0)] * 8
    for bit, reduce in enumerate((SUM, MEAN, MAX, MIN)):
        if wanted >> bit & 1:
            made[bit] = reduce_rows(forward, src, reduce)
    if wanted >> 4 == 0:
        return made
    mean = reduce_rows(forward, src, MEAN, out_dtype=wide)
    squares = reduce_rows(forward, src, SUM, message=rows.SQUARED, centre=mean, out_dtype=wide)
    freedom = (forward.ptr.diff() - correction).clamp(min=1).to(wide).unsqueeze(-1)
    var = squares / freedom
    std = var.sqrt()
    # Results of one autograd function must be different tensors.
    rounded = std.to(src.dtype, copy=True)
    for bit, result in ((4, var.to(src.dtype)), (5, rounded), (6, mean), (7, std)):
        if wanted >> bit & 1:
            made[bit] = result
    return made


def plan_multi_grad(
    edges: DeviceEdges,
    src: Tensor,
    constant: Tensor,
    slope: Tensor | None,
    mean: Tensor | None,
    high: Tensor | None,
    high_grad: Tensor | None,
    low: Tensor | None,
    low_grad: Tensor | None,
) -> Tensor:
    """`constant + slope * (src - mean)` and what max and min send to their winners."""
    entries = as_entries(edges)
    extremes: list[tuple[Tensor, Tensor] | None] = []
    for result, grad in ((high, high_grad), (low, low_grad)):
        if result is None or grad is None:
            extremes.append(None)
        else:
            extremes.append((result, _tie_scaled(entries, src, 1, None, result, grad)))
    return map_entries(
        values.MOMENTS,
        edges.dst,
        edges.num_dst,
        src,
        first=constant,
        second=slope,
        third=mean,
        high=extremes[0],
        low=extremes[1],
    )
