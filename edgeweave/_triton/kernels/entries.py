"""Values per entry of a plan from the entry itself and what was reduced for its group.

One program per tile of entries in the order of the input, `[BE, BF]`; the rows of the groups are
gathered. Nothing is reduced here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._parts import divide, exponential

SOFTMAX = tl.constexpr(0)  # exp(x - first) / second, where a `first` of -inf counts as 0
SOFTMAX_GRAD = tl.constexpr(1)  # x * (y - first)
LSE_GRAD = tl.constexpr(2)  # second * exp(x - first)
MOMENTS = tl.constexpr(3)  # first + second * (x - third), + high where x wins, + low where x wins
GATHER = tl.constexpr(4)  # scales times the group's row of x
ADD = tl.constexpr(5)  # x of the destination + y of the source
SUB = tl.constexpr(6)
MUL = tl.constexpr(7)

_UNSPECIALIZED = ["num_entries", "num_groups", "num_blocks", "num_others"]


@triton.jit
def _wins(value, result, grad):
    same = (value == result) | ((value != value) & (result != result))
    return tl.where(same, grad, 0)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def map_entries(
    x, y, first, second, third, high, high_grad, low, low_grad, row_scale, col_scale, out,
    group, other, num_entries, num_groups, num_others, num_blocks, F,
    VALUE: tl.constexpr, ACC: tl.constexpr, BE: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """`out[b, e] = value of x[b, e], y[b, e] and the rows of the entry's group`, `[B, E, F]`.

    From GATHER on, x is `[B, num_groups, F]` and y `[num_others, F]`.
    """
    program = tl.program_id(0)
    batch = (program // num_blocks).to(tl.int64)
    e = ((program % num_blocks) * BE + tl.arange(0, BE)).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    real = e < num_entries
    live = real[:, None] & (f < F)[None, :]
    g = tl.load(group + e, mask=real, other=0).to(tl.int64)
    at = batch * num_entries * F + e[:, None] * F + f[None, :]
    of_group = batch * num_groups * F + g[:, None] * F + f[None, :]
    if VALUE >= GATHER:
        value = tl.load(x + of_group, mask=live, other=0).to(ACC)
        if VALUE == GATHER:
            if row_scale is not None:
                value *= tl.load(row_scale + e, mask=real, other=0)[:, None]
            if col_scale is not None:
                value *= tl.load(col_scale + g, mask=real, other=0)[:, None]
        else:
            s = tl.load(other + e, mask=real, other=0).to(tl.int64)
            more = tl.load(y + s[:, None] * F + f[None, :], mask=live, other=0).to(ACC)
            if VALUE == ADD:
                value += more
            elif VALUE == SUB:
                value -= more
            else:
                value *= more
    else:
        own = tl.load(x + at, mask=live, other=0).to(ACC)
        one = tl.load(first + of_group, mask=live, other=0).to(ACC)
        if VALUE == SOFTMAX:
            one = tl.where(one == -float("inf"), 0.0, one)
            total = tl.load(second + of_group, mask=live, other=1).to(ACC)
            value = divide(exponential(own - one, ACC), total, ACC)
        elif VALUE == SOFTMAX_GRAD:
            value = own * (tl.load(y + at, mask=live, other=0).to(ACC) - one)
        elif VALUE == LSE_GRAD:
            grad = tl.load(second + of_group, mask=live, other=0).to(ACC)
            value = grad * exponential(own - one, ACC)
        else:
            value = one
            if second is not None:
                slope = tl.load(second + of_group, mask=live, other=0).to(ACC)
                value += slope * (own - tl.load(third + of_group, mask=live, other=0).to(ACC))
            if high is not None:
                result = tl.load(high + of_group, mask=live, other=0).to(ACC)
                grad = tl.load(high_grad + of_group, mask=live, other=0).to(ACC)
                value += _wins(own, result, grad)
            if low is not None:
                result = tl.load(low + of_group, mask=live, other=0).to(ACC)
                grad = tl.load(low_grad + of_group, mask=live, other=0).to(ACC)
                value += _wins(own, result, grad)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=live)
