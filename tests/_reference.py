"""The reductions written as slow, obvious loops in float64, with their gradients as formulas.

Nothing here uses edgeweave or autograd, so that a shared mistake cannot hide. Everything is
numpy: floating point data is float64, integers are int64. Messages are `[E, K]` matrices (all
feature dimensions flattened), groups are rows of a `[num_groups, K]` result.

The tolerances of the tests come from here too. `error_bound` is a theorem, not a guess: a sum
of `d` terms in any order with unit roundoff `u` is wrong by at most `d * u * sum(|term|)` (to
first order), and one final rounding adds `u_out * |result|`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

SPELLINGS = {"add": "sum", "max": "amax", "min": "amin"}

# Half the distance from 1 to the next number: 2^-p for a significand of p bits.
UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A reduced `[num_groups, K]` result and what is needed to judge and to differentiate it."""

    value: np.ndarray  # [num_groups, K], float64 or int64
    arg: np.ndarray  # [num_groups, K], first winning edge, E where there is none
    degree: np.ndarray  # [num_groups], edges in each group
    mass: np.ndarray  # [num_groups, K], the same reduction of the absolute values


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return `tensor` as float64 or int64, exactly."""
    wide = torch.float64 if tensor.is_floating_point() else torch.int64
    return tensor.detach().to(wide).contiguous().cpu().numpy()


def reduce_edges(
    messages: np.ndarray,
    index: np.ndarray,
    num_groups: int,
    reduce: str,
    initial: np.ndarray | None = None,
) -> Reduction:
    """Reduce `messages` [E, K] into `num_groups` rows; `initial` [num_groups, K] takes part."""
    reduce = SPELLINGS.get(reduce, reduce)
    num_edges, width = messages.shape
    value = np.zeros((num_groups, width), dtype=messages.dtype)
    mass = value.copy()
    arg = np.full((num_groups, width), num_edges, dtype=np.int64)
    degree = np.zeros(num_groups, dtype=np.int64)
    filled = np.zeros(num_groups, dtype=bool)
    count = np.zeros(num_groups, dtype=np.int64)
    if initial is not None:
        value = initial.astype(messages.dtype).copy()
        mass = np.abs(value)
        filled[:] = True
        count[:] = 1
    with np.errstate(all="ignore"):
        for edge in range(num_edges):
            row, message = index[edge], messages[edge]
            degree[row] += 1
            count[row] += 1
            if reduce in ("sum", "mean"):
                value[row] += message
                mass[row] += np.abs(message)
            else:
                better = message > value[row] if reduce == "amax" else message < value[row]
                # The first NaN wins over every number and is never replaced.
                better = (better | np.isnan(message)) & ~np.isnan(value[row])
                if not filled[row]:
                    better = np.ones(width, dtype=bool)
                    filled[row] = True
                value[row] = np.where(better, message, value[row])
                arg[row] = np.where(better, edge, arg[row])
        if reduce == "mean":
            divisor = np.maximum(count, 1)[:, None]
            value, mass = value / divisor, mass / divisor
        elif reduce in ("amax", "amin"):
            mass = np.abs(value)
    return Reduction(value, arg, degree, mass)


def reduce_edges_grad(
    messages: np.ndarray,
    index: np.ndarray,
    num_groups: int,
    reduce: str,
    grad: np.ndarray,
    ties: str = "even",
    initial: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the gradients [E, K] of the messages and [num_groups, K] of `initial`."""
    reduce = SPELLINGS.get(reduce, reduce)
    forward = reduce_edges(messages, index, num_groups, reduce, initial)
    with np.errstate(all="ignore"):
        if reduce in ("sum", "mean"):
            divisor = np.ones(num_groups)
            if reduce == "mean":
                divisor = np.maximum(forward.degree + (initial is not None), 1)
            scaled = grad / divisor[:, None]
            return scaled[index], None if initial is None else scaled
        return _extremum_grad(messages, index, num_groups, grad, ties, initial, forward)


def _extremum_grad(
    messages: np.ndarray,
    index: np.ndarray,
    num_groups: int,
    grad: np.ndarray,
    ties: str,
    initial: np.ndarray | None,
    forward: Reduction,
) -> tuple[np.ndarray, np.ndarray | None]:
    num_edges, width = messages.shape
    wins = np.zeros((num_edges, width), dtype=bool)
    for edge in range(num_edges):
        best = forward.value[index[edge]]
        wins[edge] = (messages[edge] == best) | (np.isnan(messages[edge]) & np.isnan(best))
    initial_wins = np.zeros((num_groups, width), dtype=bool)
    if initial is not None:
        initial_wins = (initial == forward.value) | (np.isnan(initial) & np.isnan(forward.value))
    result = np.zeros((num_edges, width))
    if ties == "first":
        for row in range(num_groups):
            for k in range(width):
                if not initial_wins[row, k] and forward.arg[row, k] < num_edges:
                    result[forward.arg[row, k], k] = grad[row, k]
        return result, None if initial is None else np.where(initial_wins, grad, 0.0)
    winners = initial_wins.astype(np.int64)
    for edge in range(num_edges):
        winners[index[edge]] += wins[edge]
    share = grad / np.maximum(winners, 1)
    for edge in range(num_edges):
        result[edge] = np.where(wins[edge], share[index[edge]], 0.0)
    return result, None if initial is None else np.where(initial_wins, share, 0.0)


def _broadcast_weight(weight: np.ndarray | None, feature_shape: tuple[int, ...]) -> np.ndarray:
    """Return `weight` [E] or [E, H] so that it multiplies messages [E, *feature_shape]."""
    assert weight is not None
    return weight.reshape(weight.shape + (1,) * (1 + len(feature_shape) - weight.ndim))


def mm_messages(
    src: np.ndarray, x: np.ndarray, weight: np.ndarray | None
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the messages [E, K] of `mm` and the shape of a feature row."""
    gathered = x[src]
    if weight is not None:
        gathered = gathered * _broadcast_weight(weight, x.shape[1:])
    return gathered.reshape(len(src), int(np.prod(x.shape[1:]))), x.shape[1:]


def rounded_to(array: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Return float64 `array` rounded to `dtype` by way of the accumulator's dtype."""
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.from_numpy(array).to(inner).to(dtype).double().numpy()


def mm(
    edge_index: torch.Tensor,
    x: torch.Tensor,
    num_dst: int,
    reduce: str = "sum",
    weight: torch.Tensor | None = None,
) -> Reduction:
    """Reduce `weight * x[source]` over the incoming edges; arrays are [num_dst, *features]."""
    src, dst = to_numpy(edge_index)
    with np.errstate(all="ignore"):
        messages, feature_shape = mm_messages(
            src, to_numpy(x), None if weight is None else to_numpy(weight)
        )
    flat = reduce_edges(messages, dst, num_dst, reduce)
    shape = (num_dst, *feature_shape)
    return Reduction(
        flat.value.reshape(shape), flat.arg.reshape(shape), flat.degree, flat.mass.reshape(shape)
    )


def mm_grad(
    edge_index: torch.Tensor,
    x: torch.Tensor,
    grad: torch.Tensor,
    reduce: str = "sum",
    weight: torch.Tensor | None = None,
    ties: str = "even",
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the gradients of `x` and of `weight` for the incoming `grad` [num_dst, ...]."""
    src, dst = to_numpy(edge_index)
    x_wide, num_dst = to_numpy(x), grad.shape[0]
    w_wide = None if weight is None else to_numpy(weight)
    with np.errstate(all="ignore"):
        messages, feature_shape = mm_messages(src, x_wide, w_wide)
        if reduce not in ("sum", "mean") and weight is not None:
            # Whether products tie is told by the numbers that the result can hold, as in a
            # program that writes the messages down.
            messages = rounded_to(messages, torch.result_type(x, weight))
        flat_grad = to_numpy(grad).reshape(num_dst, messages.shape[1])
        per_edge, _ = reduce_edges_grad(messages, dst, num_dst, reduce, flat_grad, ties)
        per_edge = per_edge.reshape(len(src), *feature_shape)
        grad_x = np.zeros(x_wide.shape)
        routed = per_edge
        if w_wide is not None:
            routed = per_edge * _broadcast_weight(w_wide, x.shape[1:])
        product = per_edge * x_wide[src]
        if reduce in ("amax", "amin", "max", "min"):
            # An edge that lost takes no part: its gradient is 0 even if its weight is infinite.
            routed = np.where(per_edge == 0, 0.0, routed)
            product = np.where(per_edge == 0, 0.0, product)
        for edge in range(len(src)):
            grad_x[src[edge]] += routed[edge]
        if w_wide is None:
            return grad_x, None
        axes = tuple(range(w_wide.ndim, product.ndim))
        return grad_x, product.sum(axis=axes)


def scatter(
    src: torch.Tensor,
    index: torch.Tensor,
    dim: int,
    dim_size: int,
    reduce: str = "sum",
    initial: torch.Tensor | None = None,
) -> Reduction:
    """Reduce `src` along `dim` by a 1-D `index`; arrays have the shape of the result."""
    wide, moved_shape = _edges_first(to_numpy(src), dim)
    start = None if initial is None else _edges_first(to_numpy(initial), dim)[0]
    flat = reduce_edges(wide, to_numpy(index), dim_size, reduce, start)

    def back(array: np.ndarray) -> np.ndarray:
        return np.moveaxis(array.reshape(dim_size, *moved_shape), 0, dim)

    return Reduction(back(flat.value), back(flat.arg), flat.degree, back(flat.mass))


def scatter_grad(
    src: torch.Tensor,
    index: torch.Tensor,
    dim: int,
    grad: torch.Tensor,
    reduce: str = "sum",
    ties: str = "even",
    initial: torch.Tensor | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the gradients of `src` and of `initial` for the incoming `grad`."""
    wide, moved_shape = _edges_first(to_numpy(src), dim)
    flat_grad, _ = _edges_first(to_numpy(grad), dim)
    start = None if initial is None else _edges_first(to_numpy(initial), dim)[0]
    per_edge, of_initial = reduce_edges_grad(
        wide, to_numpy(index), len(flat_grad), reduce, flat_grad, ties, start
    )
    grad_src = np.moveaxis(per_edge.reshape(len(wide), *moved_shape), 0, dim)
    if of_initial is None:
        return grad_src, None
    return grad_src, np.moveaxis(of_initial.reshape(len(flat_grad), *moved_shape), 0, dim)


def _edges_first(array: np.ndarray, dim: int) -> tuple[np.ndarray, tuple[int, ...]]:
    moved = np.moveaxis(array, dim, 0)
    shape = moved.shape[1:]
    return moved.reshape(moved.shape[0], int(np.prod(shape))), shape


def csr_by_stable_sort(
    group: np.ndarray, other: np.ndarray, num_groups: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (pointer, other end, position in the input) of edges sorted stably by `group`."""
    order = np.argsort(group, kind="stable")
    pointer = np.zeros(num_groups + 1, dtype=np.int64)
    np.cumsum(np.bincount(group, minlength=num_groups), out=pointer[1:])
    return pointer, other[order], order


def error_bound(
    reduction: Reduction, terms: np.ndarray | int, out_dtype: torch.dtype, roundings: int = 1
) -> np.ndarray:
    """Bound the error of a result which adds `terms` numbers and rounds to `out_dtype`.

    bf16 and fp16 accumulate in fp32. `roundings` counts what each term suffered before it was
    added (1 for a product with a weight) and after (1 for the division of a mean). The float64
    reference itself errs by as much as a float64 result may, hence the factor 2.
    """
    inner = UNIT_ROUNDOFF[torch.float64 if out_dtype == torch.float64 else torch.float32]
    inner_error = (np.asarray(terms) + roundings) * inner * reduction.mass
    if out_dtype == torch.float64:
        return 2 * inner_error
    smallest = float(torch.finfo(out_dtype).smallest_normal) * UNIT_ROUNDOFF[out_dtype]
    return 1.01 * inner_error + UNIT_ROUNDOFF[out_dtype] * np.abs(reduction.value) + smallest


def assert_exact(actual: torch.Tensor, expected: np.ndarray, what: str = "result") -> None:
    """Check equality with `expected` after its single rounding to the dtype of `actual`.

    NaN equals NaN; the sign of zero does not matter.
    """
    assert tuple(actual.shape) == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {expected.shape}"
    )
    rounded = torch.from_numpy(np.array(expected)).to(actual.dtype)
    same = (actual.detach() == rounded) | (actual.detach().isnan() & rounded.isnan())
    if not bool(same.all()):
        where = tuple(int(i) for i in (~same).nonzero()[0])
        raise AssertionError(
            f"{what}: {int((~same).sum())} of {same.numel()} entries differ, first at {where}: "
            f"got {actual[where].item()!r}, expected {rounded[where].item()!r}"
        )


def assert_within(
    actual: torch.Tensor, expected: np.ndarray, bound: np.ndarray, what: str = "result"
) -> None:
    """Check `|actual - expected| <= bound` entry by entry; NaN and infinities must agree."""
    assert tuple(actual.shape) == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {expected.shape}"
    )
    got = to_numpy(actual)
    finite = np.isfinite(expected)
    with np.errstate(all="ignore"):
        close = np.abs(got - expected) <= bound
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    good = np.where(finite, close, same)
    if not good.all():
        where = tuple(int(i) for i in np.argwhere(~good)[0])
        limit = np.broadcast_to(bound, expected.shape)[where]
        raise AssertionError(
            f"{what}: {int((~good).sum())} of {good.size} entries are off, first at {where}: "
            f"got {got[where]!r}, expected {expected[where]!r} within {limit:.3g}"
        )


def sum_of_edges(per_edge: np.ndarray, group: np.ndarray, num_groups: int) -> Reduction:
    """Reduce per-edge values [E, ...] by plain sums; used to bound the error of gradients."""
    flat = per_edge.reshape(len(group), int(np.prod(per_edge.shape[1:])))
    result = reduce_edges(flat, group, num_groups, "sum")
    shape = (num_groups, *per_edge.shape[1:])
    return Reduction(
        result.value.reshape(shape),
        result.arg.reshape(shape),
        result.degree,
        result.mass.reshape(shape),
    )
