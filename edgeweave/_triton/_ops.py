"""The operators over device edges, with the names and arguments of the native library's.

Where a native operator takes a plan's handle, these take `DeviceEdges`. Features are `[N, F]` or
`[B, N, F]`, contiguous; see `csrc/ops` for what each computes, and `kernels` for how.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ._dots import edge_dots
from ._edges import CHUNK, DeviceEdges
from ._launch import (
    MAX,
    SUM,
    accumulator,
    blocks_for,
    launch,
    map_entries,
    merge_sums,
    reduce_rows,
    tl_dtype,
)
from ._reductions import (
    as_entries,
    minmax_arg,
    minmax_grad,
    minmax_grad_first,
    plan_multi,
    plan_multi_grad,
    plan_prod,
    plan_prod_grad,
    spmm,
)
from .kernels import edges as edge_kernels
from .kernels import entries as values
from .kernels import rows

__all__ = [
    "empty_rows",
    "minmax_arg",
    "minmax_grad",
    "minmax_grad_first",
    "plan_exp_sums",
    "plan_logsumexp_grad",
    "plan_multi",
    "plan_multi_grad",
    "plan_pair",
    "plan_prod",
    "plan_prod_grad",
    "plan_scores",
    "plan_scores_grad",
    "plan_softmax",
    "plan_softmax_grad",
    "sddmm",
    "spmm",
]

_PAIRS: Final = (values.ADD, values.SUB, values.MUL)


def empty_rows(like: Tensor, num_rows: int, width: int) -> Tensor:
    """A new `[num_rows, width]` in the dtype and on the device of a tensor."""
    return like.new_empty(num_rows, width)


# ---- softmax -------------------------------------------------------------------------------------


def _exp_sums(edges: DeviceEdges, src: Tensor, lse: bool) -> tuple[Tensor, Tensor]:
    wide = accumulator(src.dtype)
    entries = as_entries(edges)
    shift = reduce_rows(entries, src, MAX, out_dtype=wide)
    if lse:  # infinities as in torch.logsumexp: nothing is subtracted
        shift = shift.masked_fill_(shift.isinf(), 0)
    total = reduce_rows(entries, src, SUM, message=rows.EXPONENTIAL, centre=shift, out_dtype=wide)
    return shift, total


def plan_softmax(edges: DeviceEdges, src: Tensor) -> Tensor:
    """`exp(src[e]) / sum(exp(src[f]))` over the entries f of the group of e."""
    shift, total = _exp_sums(edges, src, False)
    return map_entries(values.SOFTMAX, edges.dst, edges.num_dst, src, first=shift, second=total)


def plan_softmax_grad(edges: DeviceEdges, result: Tensor, grad: Tensor) -> Tensor:
    """`result * (grad - sum(result * grad))`, the sum over each group."""
    total = reduce_rows(
        as_entries(edges),
        result,
        SUM,
        message=rows.TIMES,
        other=grad,
        out_dtype=accumulator(result.dtype),
    )
    return map_entries(values.SOFTMAX_GRAD, edges.dst, edges.num_dst, result, y=grad, first=total)


def plan_exp_sums(edges: DeviceEdges, src: Tensor) -> tuple[Tensor, Tensor]:
    """The shift and the sum of `exp(src - shift)` of each group, in the accumulator's dtype."""
    return _exp_sums(edges, src, True)


def plan_logsumexp_grad(edges: DeviceEdges, src: Tensor, result: Tensor, grad: Tensor) -> Tensor:
    """`grad[i] * exp(src[e] - result[i])` for each entry e of group i."""
    return map_entries(values.LSE_GRAD, edges.dst, edges.num_dst, src, first=result, second=grad)


# ---- values per edge -----------------------------------------------------------------------------


def plan_pair(edges: DeviceEdges, a: Tensor, b: Tensor, op: int) -> Tensor:
    """`a[dst[e]] + b[src[e]]` (op 0), minus (1), times (2), in input order."""
    return map_entries(_PAIRS[op], edges.dst, edges.num_dst, a, y=b, other=edges.src)


def sddmm(
    edges: DeviceEdges,
    a: Tensor,
    b: Tensor,
    heads: int,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
) -> Tensor:
    """`row_scale * col_scale * <a[dst_e], b[src_e]>` for each head and edge, in input order."""
    return edge_dots(
        edges,
        edge_kernels.DOT,
        a,
        b,
        heads,
        row_scale=row_scale,
        col_scale=col_scale,
        dtype=a.dtype,
    )


def plan_scores(
    edges: DeviceEdges, dst: Tensor, src: Tensor, att: Tensor, heads: int, slope: float
) -> Tensor:
    """GATv2's scores `sum_c att[h, c] * leaky_relu(dst[i, h, c] + src[j, h, c])`, `[E, heads]`."""
    return edge_dots(
        edges, edge_kernels.SCORE, dst, src, heads, third=att, slope=slope, dtype=dst.dtype
    )


def plan_scores_grad(
    edges: DeviceEdges,
    transpose: bool,
    own: Tensor,
    other: Tensor,
    att: Tensor,
    grad: Tensor,
    heads: int,
    slope: float,
    need_att: bool,
) -> tuple[Tensor, Tensor]:
    """The gradient of one side's rows, and (or empty) what each adds to att's, accumulated."""
    direction = edges.direction(transpose)
    parts = direction.parts
    wide, width = accumulator(own.dtype), own.shape[-1]
    out = torch.empty_like(own)
    rows_of_att = own.new_empty(own.shape if need_att else (0,), dtype=wide)
    if out.numel() == 0:
        return out, rows_of_att
    blocks = blocks_for(heads, width // heads, own.element_size())
    partial = att_partial = None
    if parts is not None:
        partial = own.new_empty((parts.num_slots, width), dtype=wide)
        att_partial = torch.empty_like(partial) if need_att else None
    launch(
        edge_kernels.score_grad, (direction.num_programs, blocks.count), own,
        own, other, att, grad, out, rows_of_att if need_att else None, partial, att_partial,
        direction.ptr, direction.col, direction.perm,
        *((None,) * 3 if parts is None else (parts.row, parts.begin, parts.slot)),
        direction.num_programs, direction.num_rows, 0 if parts is None else parts.num_slots,
        width, heads, width // heads, slope,
        ACC=tl_dtype(wide), CHUNK=CHUNK,
        BE=blocks.edges, BH=blocks.heads, BD=blocks.features, num_warps=1,
    )  # fmt: skip
    if parts is not None and partial is not None:
        whole = torch.empty_like(own, dtype=wide)
        merge_sums(parts, direction, partial, whole, blocks, heads)
        long = parts.long_row.long()
        out[long] = (whole[long] * att.to(wide)).to(out.dtype)
        if att_partial is not None:
            merge_sums(parts, direction, att_partial, rows_of_att, blocks, heads)
    return out, rows_of_att
