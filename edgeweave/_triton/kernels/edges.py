"""Values per edge of the features at its two ends, and GATv2's gradient.

One program per row and block of heads: the row's own features are read once, those at the other
ends per edge, and nothing of size `[E, H, D]` is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._parts import block_of_features, span_of

DOT = tl.constexpr(0)  # own * other
SCORE = tl.constexpr(1)  # att * leaky_relu(own + other)
WON = tl.constexpr(2)  # other * scaled where w * other is the row's result
WON_FIRST = tl.constexpr(3)  # other * scaled where the row's winner is this edge

_UNSPECIALIZED = ["num_programs", "num_rows", "num_slots", "slope"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def edge_dots(
    own, other, third, weight, row_scale, col_scale, out,
    ptr, col, perm, part_row, part_begin, num_programs, num_rows, H, D, slope,
    VALUE: tl.constexpr, ACC: tl.constexpr, CHUNK: tl.constexpr,
    BE: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """`out[position of e, h] = sum of a value over the features of head h`, for each edge e.

    `own` `[num_rows, F]` is the row's; `third` is att `[F]`, or the scaled gradient, like `own`.
    """
    program = tl.program_id(0)
    row, _, begin, end = span_of(program, ptr, part_row, part_begin, CHUNK)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    F = H * D
    for start in range(begin, end, BE):
        e = start + tl.arange(0, BE)
        real = e < end
        j = tl.load(col + e, mask=real, other=0).to(tl.int64)
        position = tl.load(perm + e, mask=real, other=0).to(tl.int64)
        places = position[:, None] * H + h[None, :]
        exists = real[:, None] & (h < H)[None, :]
        if weight is not None:
            w = tl.load(weight + places, mask=exists, other=0).to(ACC)[:, :, None]
        acc = tl.zeros([BE, BH], ACC)
        for d0 in range(0, D, BD):
            d = d0 + tl.arange(0, BD)
            inside = (h < H)[:, None] & (d < D)[None, :]
            f = h[:, None] * D + d[None, :]
            live = real[:, None, None] & inside[None]
            b = tl.load(other + (j * F)[:, None, None] + f[None], mask=live, other=0).to(ACC)
            a = tl.load(own + row * F + f, mask=inside, other=0)
            if VALUE == DOT:
                value = a.to(ACC)[None] * b
            elif VALUE == SCORE:
                z = a.to(ACC)[None] + b
                att = tl.load(third + f, mask=inside, other=0).to(ACC)[None]
                value = att * tl.where(z > 0, z, z * slope)
            else:
                if VALUE == WON_FIRST:
                    wins = a[None] == position[:, None, None]
                else:
                    message = (b * w).to(other.dtype.element_ty).to(ACC)
                    result = a.to(ACC)[None]
                    both_missing = (message != message) & (result != result)
                    wins = (message == result) | both_missing
                scaled = tl.load(third + row * F + f, mask=inside, other=0).to(ACC)[None]
                value = tl.where(wins & live, scaled * b, 0)
            acc += tl.sum(value, axis=2)
        if row_scale is not None:
            acc *= tl.load(row_scale + row)
        if col_scale is not None:
            acc *= tl.load(col_scale + j, mask=real, other=0)[:, None]
        tl.store(out + places, acc.to(out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def score_grad(
    own, other, att, grad, out, att_out, partial, att_partial,
    ptr, col, perm, part_row, part_begin, part_slot, num_programs, num_rows, num_slots,
    F, H, D, slope,
    ACC: tl.constexpr, CHUNK: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """The gradient of GATv2's scores for the rows of one side, and each row's share of att's.

    With `w` the gradient of a score, `z = own + other` and `s` the activation's slope at z:
    `out = att * sum(w * s)`, `att_out = sum(w * s * z)`. Long rows leave both sums, without att,
    among the partial results.
    """
    program = tl.program_id(0)
    h, f, inside = block_of_features(H, D, BH, BD)
    row, _, begin, end = span_of(program, ptr, part_row, part_begin, CHUNK)
    mine = tl.load(own + row * F + f, mask=inside, other=0).to(ACC)[None]
    acc = tl.zeros([BE, BH, BD], ACC)
    att_acc = tl.zeros([BE, BH, BD], ACC)
    for start in range(begin, end, BE):
        e = start + tl.arange(0, BE)
        real = e < end
        live = real[:, None, None] & inside[None]
        j = tl.load(col + e, mask=real, other=0).to(tl.int64)
        position = tl.load(perm + e, mask=real, other=0).to(tl.int64)
        at = (j * F)[:, None, None] + f[None]
        z = mine + tl.load(other + at, mask=live, other=0).to(ACC)
        w = tl.load(
            grad + position[:, None] * H + h[None, :],
            mask=real[:, None] & (h < H)[None, :],
            other=0,
        ).to(ACC)[:, :, None]
        steep = tl.where(live, tl.where(z > 0, w, w * slope), 0)
        acc += steep
        if att_out is not None:
            att_acc += tl.where(live, steep * z, 0)
    total = tl.sum(acc, axis=0)
    slot = -1
    if part_row is not None:
        slot = tl.load(part_slot + program).to(tl.int64)
    if slot < 0:
        factor = tl.load(att + f, mask=inside, other=0).to(ACC)
        value = (total * factor).to(out.dtype.element_ty)
        tl.store(out + row * F + f, value, mask=inside)
        if att_out is not None:
            tl.store(att_out + row * F + f, tl.sum(att_acc, axis=0), mask=inside)
    else:
        if part_row is not None:
            tl.store(partial + slot * F + f, total, mask=inside)
            if att_out is not None:
                tl.store(att_partial + slot * F + f, tl.sum(att_acc, axis=0), mask=inside)
