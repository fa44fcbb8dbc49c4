"""Reductions over the edges of each row: one program per row (or chunk of a long row) and block.

Who writes what: a program owns its row of `out`, or its slot of `partial`; nobody adds to memory
that another program writes, so that no atomics are needed and a row's bits depend on its own edges
and the width of its features alone. Within a program, edges are taken `BE` at a time, in order;
entry `k` of a tile adds up edges `k, k + BE, ...`, and the tile is folded at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._parts import block_of_features, exponential, finish, fold, span_of, start_of, take

# What of an edge is reduced; x is gathered by column, `centre` is the row's own.
PLAIN = tl.constexpr(0)  # w * x
SQUARED = tl.constexpr(1)  # (x - centre)^2
EXPONENTIAL = tl.constexpr(2)  # exp(x - centre), where a centre of -inf counts as 0
TIMES = tl.constexpr(3)  # x * other
WINS = tl.constexpr(4)  # 1 where w * x is the centre, else 0
FIRST = tl.constexpr(5)  # the edge's position where w * x is the centre, else the number of edges
ROUTE = tl.constexpr(6)  # w * x where w * centre is `other`, else 0
ROUTE_FIRST = tl.constexpr(7)  # w * x where `other` is the edge's position, else 0

_UNSPECIALIZED = [
    "num_programs",
    "num_rows",
    "num_cols",
    "num_slots",
    "num_edges",
    "init_scale",
    "num_long",
]


@triton.jit
def _same(value, result):
    return (value == result) | ((value != value) & (result != result))


@triton.jit(do_not_specialize=_UNSPECIALIZED[:-1])
def reduce_rows(
    x, other, weight, centre, row_scale, col_scale, init, out, partial,
    ptr, col, perm, part_row, part_begin, part_slot,
    num_programs, num_rows, num_cols, num_slots, num_edges, F, H, D, init_scale,
    REDUCE: tl.constexpr, MESSAGE: tl.constexpr, ACC: tl.constexpr, HELD: tl.constexpr,
    CHUNK: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """`out[r] = reduce(message of edge e for e into r)` for a batch of `[num_cols, F]`.

    Messages are computed in ACC and reduced in HELD, which differs where they are positions.
    """
    program = tl.program_id(0)
    batch = (program // num_programs).to(tl.int64)
    program = program % num_programs
    h, f, inside = block_of_features(H, D, BH, BD)
    row, count, begin, end = span_of(program, ptr, part_row, part_begin, CHUNK)
    x += batch * num_cols * F
    out += batch * num_rows * F
    if other is not None:
        other += batch * num_cols * F
    if centre is not None:
        own = tl.load(centre + batch * num_rows * F + row * F + f, mask=inside, other=0)
        own = own.to(ACC)[None]
        if MESSAGE == EXPONENTIAL:
            own = tl.where(own == -float("inf"), 0.0, own)

    acc = start_of(REDUCE, HELD, BE, BH, BD)
    # Indices are read one step ahead: a step then waits for rows and weights alone.
    e = begin + tl.arange(0, BE)
    next_j = tl.load(col + e, mask=e < end, other=0)
    if (weight is not None) or (MESSAGE == FIRST) or (MESSAGE == ROUTE_FIRST):
        next_position = tl.load(perm + e, mask=e < end, other=0)
    for _ in range(begin, end, BE):
        real = e < end
        live = real[:, None, None] & inside[None]
        j = next_j.to(tl.int64)
        at = (j * F)[:, None, None] + f[None]
        value = tl.load(x + at, mask=live, other=0).to(ACC)
        e += BE
        next_j = tl.load(col + e, mask=e < end, other=0)
        if (weight is not None) or (MESSAGE == FIRST) or (MESSAGE == ROUTE_FIRST):
            position = next_position.to(tl.int64)
            next_position = tl.load(perm + e, mask=e < end, other=0)
        if weight is not None:
            w = tl.load(
                weight + position[:, None] * H + h[None, :],
                mask=real[:, None] & (h < H)[None, :],
                other=0,
            ).to(ACC)[:, :, None]
        if col_scale is not None:
            value *= tl.load(col_scale + j, mask=real, other=0)[:, None, None]

        if MESSAGE == SQUARED:
            value = (value - own) * (value - own)
        elif MESSAGE == EXPONENTIAL:
            value = exponential(value - own, ACC)
        elif MESSAGE == TIMES:
            value *= tl.load(other + at, mask=live, other=0).to(ACC)
        elif (MESSAGE == WINS) or (MESSAGE == FIRST):
            if weight is not None:
                # Rounded as the result was: whether products tie is told by what it can hold.
                value = (value * w).to(x.dtype.element_ty).to(ACC)
            wins = _same(value, own)
            if MESSAGE == WINS:
                value = wins.to(ACC)
            else:
                value = tl.where(wins, position[:, None, None], num_edges)
        elif (MESSAGE == ROUTE) or (MESSAGE == ROUTE_FIRST):
            result = tl.load(other + at, mask=live, other=0)
            if MESSAGE == ROUTE_FIRST:
                wins = result == position[:, None, None]
            elif weight is not None:
                wins = _same((own * w).to(centre.dtype.element_ty).to(ACC), result.to(ACC))
            else:
                wins = _same(own, result.to(ACC))
            if weight is not None:
                value *= w
            value = tl.where(wins, value, 0)
        elif weight is not None:
            value *= w
        acc = take(acc, value.to(HELD), live, REDUCE)

    value = fold(acc, REDUCE, HELD)
    empty = 0
    if MESSAGE == FIRST:
        empty = num_edges
    if part_row is None:
        finish(value, row, count, f, inside, row_scale, init, out, F, init_scale, empty,
               REDUCE, HELD)  # fmt: skip
    else:
        slot = tl.load(part_slot + program).to(tl.int64)
        if slot < 0:
            finish(value, row, count, f, inside, row_scale, init, out, F, init_scale, empty,
                   REDUCE, HELD)  # fmt: skip
        else:
            at_slot = partial + (batch * num_slots + slot) * F + f
            tl.store(at_slot, value, mask=inside)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def merge_rows(
    partial, row_scale, init, out, ptr, long_row, long_first, long_count,
    num_long, num_rows, num_slots, num_edges, F, H, D, init_scale,
    REDUCE: tl.constexpr, HELD: tl.constexpr, IS_FIRST: tl.constexpr, BE: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The rows of `reduce_rows` that were cut: their partial results, reduced in order."""
    program = tl.program_id(0)
    batch = (program // num_long).to(tl.int64)
    program = program % num_long
    _, f, inside = block_of_features(H, D, BH, BD)
    row = tl.load(long_row + program).to(tl.int64)
    first = tl.load(long_first + program)
    chunks = tl.load(long_count + program)
    count = tl.load(ptr + row + 1) - tl.load(ptr + row)
    out += batch * num_rows * F
    partial += batch * num_slots * F
    acc = start_of(REDUCE, HELD, BE, BH, BD)
    for start in range(0, chunks, BE):
        k = start + tl.arange(0, BE)
        live = (k < chunks)[:, None, None] & inside[None]
        at = ((first + k).to(tl.int64) * F)[:, None, None] + f[None]
        acc = take(acc, tl.load(partial + at, mask=live, other=0), live, REDUCE)
    value = fold(acc, REDUCE, HELD)
    empty = 0
    if IS_FIRST:
        empty = num_edges
    finish(value, row, count, f, inside, row_scale, init, out, F, init_scale, empty,
           REDUCE, HELD)  # fmt: skip
