"""Float64 references of the reductions, with scipy and numpy: slow, plain and independent of torch.

Every column of the features is reduced on its own, so a reference of a few columns checks every
row and every edge. `sample_columns` picks them from both ends and in between, where kernels
that work in vectors would go wrong.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import scipy.sparse
import torch
from torch import Tensor

_Float64Array = npt.NDArray[np.float64]
_MAX_COLUMNS = 16


def sample_columns(num_columns: int) -> Tensor:
    """Picks at most 16 columns, first and last included: one of each vector up to 256 columns.

    Args:
        num_columns: Width of the features, at least 1.

    Returns:
        int64 column numbers, ascending.

    Example:
        >>> from edgeweave.bench.reference import sample_columns
        >>> sample_columns(128)[:4].tolist()
        [0, 8, 17, 25]
    """
    count = min(num_columns, _MAX_COLUMNS)
    return torch.from_numpy(np.unique(np.linspace(0, num_columns - 1, count).round().astype(int)))


class EdgeReference:
    """Reference of `out[i] = reduce(x[j] for edges j -> i)` and of its gradient.

    Args:
        src: int64 `[E]` sources.
        dst: int64 `[E]` destinations.
        num_src: Number of rows of x.
        num_dst: Number of rows of the result.

    Example:
        >>> import torch
        >>> from edgeweave.bench.reference import EdgeReference
        >>> edges = EdgeReference(torch.tensor([0, 1]), torch.tensor([0, 0]), 2, 1)
        >>> edges.forward(torch.tensor([[1.0], [4.0]]), "amax").tolist()
        [[4.0]]
    """

    def __init__(self, src: Tensor, dst: Tensor, num_src: int, num_dst: int) -> None:
        self._num_src = num_src
        self._num_dst = num_dst
        self._order = np.argsort(dst.numpy(), kind="stable")
        self._src = src.numpy()[self._order]
        self._dst = dst.numpy()[self._order]
        self._degree = np.bincount(self._dst, minlength=num_dst)
        edges = self._dst.size
        ones, numbers = np.ones(edges), np.arange(edges)
        shape_in, shape_out = (num_dst, edges), (num_src, edges)
        # Sums over the incoming (outgoing) edges of each destination (source) of values per edge.
        self._sum_in = scipy.sparse.csr_matrix((ones, (self._dst, numbers)), shape=shape_in)
        self._sum_out = scipy.sparse.csr_matrix((ones, (self._src, numbers)), shape=shape_out)

    def forward(self, x: Tensor, reduce: str, weight: Tensor | None = None) -> Tensor:
        """Reduces `x`.

        Args:
            x: `[num_src, K]`, any float dtype.
            reduce: `sum`, `mean`, `amax` or `amin`.
            weight: `[E]` factor of each edge in input order, or None.

        Returns:
            float64 `[num_dst, K]`; zero where there are no edges.
        """
        values = _float64(x)[self._src]
        if weight is not None:
            values = values * _float64(weight)[self._order][:, None]
        return torch.from_numpy(self._reduce(values, reduce))

    def grad_x(self, x: Tensor, grad: Tensor, reduce: str) -> Tensor:
        """Gradient of `(forward(x, reduce) * grad).sum()`, ties sharing evenly.

        Args:
            x: `[num_src, K]`.
            grad: `[num_dst, K]`.
            reduce: As in `forward`.

        Returns:
            float64 `[num_src, K]`.
        """
        x64, grad64 = _float64(x), _float64(grad)
        if reduce == "mean":
            grad64 = grad64 / np.maximum(self._degree, 1)[:, None]
        per_edge = grad64[self._dst]
        if reduce in ("amax", "amin"):
            values = x64[self._src]
            wins = (values == self._reduce(values, reduce)[self._dst]).astype(np.float64)
            per_edge *= wins / (self._sum_in @ wins)[self._dst]
        return torch.from_numpy(np.asarray(self._sum_out @ per_edge))

    def _reduce(self, values: _Float64Array, reduce: str) -> _Float64Array:
        if reduce not in ("sum", "mean", "amax", "amin"):
            raise ValueError(
                f"reference: reduce must be 'sum', 'mean', 'amax' or 'amin', got {reduce!r}"
            )
        if reduce in ("sum", "mean"):
            out: _Float64Array = np.asarray(self._sum_in @ values)
            return out / np.maximum(self._degree, 1)[:, None] if reduce == "mean" else out
        out = np.zeros((self._num_dst, values.shape[1]))
        filled = np.flatnonzero(self._degree)
        if filled.size:
            starts = (np.cumsum(self._degree) - self._degree)[filled]
            ufunc = np.maximum if reduce == "amax" else np.minimum
            out[filled] = ufunc.reduceat(values, starts, axis=0)
        return out


def _float64(values: Tensor) -> _Float64Array:
    array: _Float64Array = values.detach().double().numpy()
    return array
