"""Pieces that several kernels share. Written in Triton's language: no annotations but constants'.

Tiles are `[BE, BH, BD]`: edges, heads, features of a head. `f` is the position of a feature in a
row of `F = H * D`, `inside` says which of a block's features exist.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Codes of csrc/kernels/args.h, and one more.
SUM = tl.constexpr(0)
MEAN = tl.constexpr(1)
MAX = tl.constexpr(2)
MIN = tl.constexpr(3)
PROD = tl.constexpr(4)

_LOG2E = tl.constexpr(1.4426950408889634)
_LOG2E_REST = tl.constexpr(1.9259629911266175e-08)  # what float32 leaves of it
_LN2 = tl.constexpr(0.6931471805599453)
_INF = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(9223372036854775807)


@triton.jit
def exponential(x, ACC: tl.constexpr):
    """`exp(x)`; in float32 within 2 ulp, where `tl.exp` errs by as many as x is large."""
    if ACC == tl.float64:
        return tl.exp(x)
    else:
        t = x * _LOG2E
        # The product again, exactly: what t lost by rounding is put back as a factor near 1.
        rest = tl.fma(x, _LOG2E, -t) + x * _LOG2E_REST
        rest = tl.where(tl.abs(t) < 1e4, rest, 0.0)
        return tl.exp2(t) * (1.0 + rest * _LN2)


@triton.jit
def divide(a, b, ACC: tl.constexpr):
    """`a / b` rounded once; `/` of float32 is an approximation in Triton."""
    if ACC == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def start_of(REDUCE: tl.constexpr, ACC: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr,
             BD: tl.constexpr):  # fmt: skip
    """What a reduction starts from."""
    # One chain: what follows a `return` is compiled too, and an integer has no infinity.
    if REDUCE == PROD:
        return tl.full([BE, BH, BD], 1, ACC)
    elif REDUCE <= MEAN:
        return tl.zeros([BE, BH, BD], ACC)
    elif ACC == tl.int64:
        if REDUCE == MAX:
            return tl.full([BE, BH, BD], -_LARGEST - 1, ACC)
        else:
            return tl.full([BE, BH, BD], _LARGEST, ACC)
    elif REDUCE == MAX:
        return tl.full([BE, BH, BD], -_INF, ACC)
    else:
        return tl.full([BE, BH, BD], _INF, ACC)


@triton.jit
def take(acc, value, live, REDUCE: tl.constexpr):
    """Reduces a tile of values into the accumulators, entry by entry; NaN stays."""
    if REDUCE <= MEAN:
        return acc + tl.where(live, value, 0)
    elif REDUCE == PROD:
        return acc * tl.where(live, value, 1)
    elif REDUCE == MAX:
        return tl.where(live & ((value > acc) | (value != value)), value, acc)
    else:
        return tl.where(live & ((value < acc) | (value != value)), value, acc)


@triton.jit
def _times(a, b):
    return a * b


@triton.jit
def fold(acc, REDUCE: tl.constexpr, ACC: tl.constexpr):
    """The accumulators of all edges of a tile as one, `[BH, BD]`."""
    if REDUCE <= MEAN:
        return tl.sum(acc, axis=0)
    elif REDUCE == PROD:
        return tl.reduce(acc, 0, _times)
    elif ACC == tl.int64:
        if REDUCE == MAX:
            return tl.max(acc, axis=0)
        else:
            return tl.min(acc, axis=0)
    else:
        # Triton's own maximum may drop a NaN.
        missing = acc != acc
        any_missing = tl.max(missing.to(tl.int32), axis=0) > 0
        if REDUCE == MAX:
            best = tl.max(tl.where(missing, -_INF, acc), axis=0)
        else:
            best = tl.min(tl.where(missing, _INF, acc), axis=0)
        return tl.where(any_missing, float("nan"), best)  # as a global it would differ from itself


@triton.jit
def block_of_features(H, D, BH: tl.constexpr, BD: tl.constexpr):
    """`(head numbers [BH], positions in a row [BH, BD], which of them exist)` of a program."""
    block = tl.program_id(1)
    across = tl.cdiv(D, BD)
    h = (block // across) * BH + tl.arange(0, BH)
    d = (block % across) * BD + tl.arange(0, BD)
    inside = (h < H)[:, None] & (d < D)[None, :]
    return h, h[:, None] * D + d[None, :], inside


@triton.jit
def span_of(program, ptr, part_row, part_begin, CHUNK: tl.constexpr):
    """`(row, number of its edges, first edge of the program, one past its last edge)`."""
    if part_row is None:
        row = program.to(tl.int64)
        begin = tl.load(ptr + row)
        end = tl.load(ptr + row + 1)
        return row, end - begin, begin, end
    else:
        row = tl.load(part_row + program).to(tl.int64)
        begin = tl.load(part_begin + program)
        last = tl.load(ptr + row + 1)
        count = last - tl.load(ptr + row)
        return row, count, begin, tl.minimum(begin + CHUNK, last)


@triton.jit
def finish(value, row, count, f, inside, row_scale, init, out, F, init_scale, empty,
           REDUCE: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """Writes a row's result: the mean's division, the scale, what is added, the empty row."""
    if REDUCE == MEAN:
        n = tl.maximum(count, 1).to(ACC)
        if ACC == tl.int64:
            # Towards minus infinity; `//` of numbers that are no constants goes towards 0.
            quotient = value // n
            value = quotient - ((quotient * n != value) & (value < 0)).to(ACC)
        else:
            value = divide(value, tl.zeros_like(value) + n, ACC)
    if row_scale is not None:
        # A row without edges stays 0: its scale may be infinite.
        value = tl.where(count > 0, value * tl.load(row_scale + row), 0)
    if (REDUCE == MAX) or (REDUCE == MIN):
        value = tl.where(count > 0, value, empty)
    at = row * F + f
    if init is not None:
        value += init_scale * tl.load(init + at, mask=inside, other=0).to(ACC)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
