"""Every operator over groups as a function of the same arguments, and its value by obvious code."""

from __future__ import annotations

import math

import _group_reference as groups
import _reference as ref
import numpy as np
import torch

from edgeweave import scatter

MULTI = ("std", "sum", "amax", "mean", "var", "amin")


def _by_reduce(reduce):
    return lambda s, i, n, d=0: scatter.scatter_reduce(s, i, d, n, reduce)


def _by_multi(position):
    return lambda s, i, n, d=0: scatter.multi_reduce(s, i, MULTI, d, n)[position]


def _by_ptr(function, per_entry=False):
    """Run a function of a ptr on entries brought into the order of their groups, and back."""

    def run(src, index, num_groups, dim=0):
        order = index.argsort(stable=True)
        ptr = torch.zeros(num_groups + 1, dtype=index.dtype)
        ptr[1:] = torch.bincount(index, minlength=num_groups).cumsum(0)
        out = function(src.index_select(dim, order), ptr, dim)
        return out.index_select(dim, order.argsort()) if per_entry else out

    return run


# Each operator as `(src, index, num_groups, dim=0)`, named by what it computes and how.
BY_INDEX = {f"{r}": _by_reduce(r) for r in ("sum", "mean", "amax", "amin", "prod")}
BY_INDEX |= {f"{name} multi": _by_multi(k) for k, name in enumerate(MULTI)}
BY_INDEX |= {
    "var": lambda s, i, n, d=0: scatter.var(s, i, d, n),
    "std": lambda s, i, n, d=0: scatter.std(s, i, d, n),
    "softmax": lambda s, i, n, d=0: scatter.softmax(s, i, None, n, d),
    "logsumexp": lambda s, i, n, d=0: scatter.logsumexp(s, i, None, n, d),
    "argmax": lambda s, i, n, d=0: scatter.argmax(s, i, d, n),
    "argmin": lambda s, i, n, d=0: scatter.argmin(s, i, d, n),
}
OPS = BY_INDEX | {
    f"{r} segments": _by_ptr(lambda s, p, d, r=r: scatter.segment_reduce(s, p, r, d))
    for r in ("sum", "mean", "amax", "amin", "prod")
}
OPS |= {
    "softmax segments": _by_ptr(lambda s, p, d: scatter.softmax(s, ptr=p, dim=d), True),
    "logsumexp segments": _by_ptr(lambda s, p, d: scatter.logsumexp(s, ptr=p, dim=d)),
}
TRAINABLE = [name for name in OPS if not name.startswith("arg")]


def those(*kinds: str) -> list[str]:
    """Return the names of all ways to compute what is named."""
    return [name for name in OPS if name.split()[0] in kinds]


def reference(name: str, x: np.ndarray, index: np.ndarray, num_groups: int) -> np.ndarray:
    """Return the result for entries `[E, K]`, in float64 (positions in int64)."""
    kind = name.split()[0]
    if kind in ("argmax", "argmin"):
        return ref.reduce_edges(x, index, num_groups, "a" + kind[3:]).arg
    if kind == "std":
        return np.sqrt(groups.var(x, index, num_groups, 1))
    if kind == "var":
        return groups.var(x, index, num_groups, 1)
    if kind in ("softmax", "logsumexp", "prod"):
        return getattr(groups, kind)(x, index, num_groups)
    return ref.reduce_edges(x, index, num_groups, kind).value


def check(name: str, src: torch.Tensor, index: torch.Tensor, num_groups: int, dim: int = 0) -> None:
    """Compare a result in float64 with the reference.

    Sums, products, extrema and positions of small integers are exact. The rest adds a few dozen
    numbers below 10: 1e-13 is a thousand units in the last place of their sum.
    """
    out = OPS[name](src, index, num_groups, dim)
    moved = src.movedim(dim, 0)
    rows = ref.to_numpy(moved).reshape(moved.shape[0], math.prod(moved.shape[1:]))
    expected = torch.from_numpy(reference(name, rows, ref.to_numpy(index), num_groups))
    expected = expected.reshape(-1 if moved.numel() else len(expected), *moved.shape[1:])
    tolerance = 0.0 if name in those("sum", "amax", "amin", "prod", "argmax", "argmin") else 1e-12
    torch.testing.assert_close(out, expected.movedim(0, dim), rtol=tolerance, atol=tolerance)


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


def small_integers(*shape: int) -> torch.Tensor:
    """Return non-zero integers whose products of a dozen stay exact in float64."""
    return torch.randint(1, 4, shape).double() * (2 * torch.randint(0, 2, shape) - 1)
