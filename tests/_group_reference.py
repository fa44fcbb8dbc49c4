"""Softmax, log-sum-exp, products and moments of groups as obvious numpy code, with gradients.

Entries are `[E, K]` float64 matrices, groups are named by an index `[E]`. Nothing here uses
edgeweave or autograd. Bounds on the error of a result in a dtype are at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

import _reference as ref
import numpy as np
import torch


def members(index: np.ndarray, num_groups: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each group and the positions of its entries."""
    order = np.argsort(index, kind="stable")
    cuts = np.searchsorted(index[order], np.arange(num_groups + 1))
    for group in range(num_groups):
        yield group, order[cuts[group] : cuts[group + 1]]


def softmax(x: np.ndarray, index: np.ndarray, num_groups: int) -> np.ndarray:
    out = np.empty_like(x)
    with np.errstate(all="ignore"):
        for _, at in members(index, num_groups):
            if len(at):
                p = np.exp(x[at] - x[at].max(0))
                out[at] = p / p.sum(0)
    return out


def softmax_grad(x: np.ndarray, index: np.ndarray, num_groups: int, grad: np.ndarray) -> np.ndarray:
    y = softmax(x, index, num_groups)
    out = np.empty_like(x)
    for _, at in members(index, num_groups):
        out[at] = y[at] * (grad[at] - (y[at] * grad[at]).sum(0))
    return out


def logsumexp(x: np.ndarray, index: np.ndarray, num_groups: int) -> np.ndarray:
    out = np.full((num_groups, x.shape[1]), -np.inf)
    with np.errstate(all="ignore"):
        for group, at in members(index, num_groups):
            if len(at):
                top = x[at].max(0)
                shift = np.where(np.isinf(top), 0, top)
                out[group] = np.log(np.exp(x[at] - shift).sum(0)) + shift
    return out


def prod(x: np.ndarray, index: np.ndarray, num_groups: int) -> np.ndarray:
    out = np.ones((num_groups, x.shape[1]), dtype=x.dtype)
    with np.errstate(all="ignore"):
        for group, at in members(index, num_groups):
            out[group] = x[at].prod(0)
    return out


def prod_grad(x: np.ndarray, index: np.ndarray, num_groups: int, grad: np.ndarray) -> np.ndarray:
    """Return the product of the others, taken as such: zeros need no care."""
    out = np.empty_like(x)
    for group, at in members(index, num_groups):
        for position in at:
            others = at[at != position]
            out[position] = grad[group] * x[others].prod(0)
    return out


def var(x: np.ndarray, index: np.ndarray, num_groups: int, correction: int) -> np.ndarray:
    out = np.zeros((num_groups, x.shape[1]))
    for group, at in members(index, num_groups):
        if len(at):
            apart = x[at] - x[at].mean(0)
            out[group] = (apart * apart).sum(0) / max(len(at) - correction, 1)
    return out


def inner_unit(dtype: torch.dtype) -> float:
    """Return the unit roundoff of what values of this dtype are computed in."""
    return ref.UNIT_ROUNDOFF[torch.float64 if dtype == torch.float64 else torch.float32]


def softmax_bound(
    x: np.ndarray, index: np.ndarray, num_groups: int, dtype: torch.dtype
) -> np.ndarray:
    """Bound the error of a softmax.

    Rounding x - max is worth u |x - max| in the exponent; exp, its sum over n entries and the
    division add 2 + (n + 2) + 1 units, and the result is rounded once more.
    """
    value = softmax(x, index, num_groups)
    units = np.empty_like(x)
    for _, at in members(index, num_groups):
        if len(at):
            spread = np.abs(x[at] - x[at].max(0))
            units[at] = spread + spread.max(0) + len(at) + 8
    tiny = float(torch.finfo(dtype).smallest_normal)
    return value * (units * inner_unit(dtype) + ref.UNIT_ROUNDOFF[dtype]) + tiny
