"""A benchmark graph in the form that each side likes best, built outside every timed region."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

import edgeweave
from edgeweave.bench.generators import GraphData
from edgeweave.bench.reference import EdgeReference

_CHUNK_ROWS = 1 << 16


@dataclass(frozen=True)
class OpGraph:
    """One graph and its representations, all built when first asked for.

    Attributes:
        make: Generates the graph.
    """

    make: Callable[[], GraphData]

    @cached_property
    def data(self) -> GraphData:
        """The generated graph."""
        return self.make()

    @property
    def num_nodes(self) -> int:
        """Number of nodes, sources and destinations alike."""
        return self.data.num_nodes

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.data.num_edges

    @property
    def src(self) -> Tensor:
        """int64 `[E]` sources."""
        return self.data.edge_index[0]

    @property
    def dst(self) -> Tensor:
        """int64 `[E]` destinations."""
        return self.data.edge_index[1]

    @cached_property
    def plan(self) -> Any:
        """The `edgeweave.Graph`."""
        return edgeweave.Graph(self.data.edge_index, size=(self.num_nodes, self.num_nodes))

    @cached_property
    def reference(self) -> EdgeReference:
        """Float64 reference of reductions over this graph."""
        return EdgeReference(self.src, self.dst, self.num_nodes, self.num_nodes)

    @cached_property
    def edges_to_dst(self) -> EdgeReference:
        """Float64 reference of reductions of one row per edge at the edge's destination."""
        edges = torch.arange(self.num_edges)
        return EdgeReference(edges, self.dst, self.num_edges, self.num_nodes)

    @cached_property
    def edges_to_src(self) -> EdgeReference:
        """The same at the edge's source."""
        edges = torch.arange(self.num_edges)
        return EdgeReference(edges, self.src, self.num_edges, self.num_nodes)

    @cached_property
    def csr_order(self) -> Tensor:
        """int64 `[E]`: edge numbers in the order of the CSR matrices."""
        # By row, then column: the layout that MKL and torch read fastest. Repeated edges stay.
        order = np.lexsort((self.src.numpy(), self.dst.numpy()))
        return torch.from_numpy(order)

    @cached_property
    def rowptr(self) -> Tensor:
        """int64 `[N + 1]` row pointers by destination."""
        degree = torch.bincount(self.dst, minlength=self.num_nodes)
        return torch.cat([degree.new_zeros(1), degree.cumsum(0)])

    def torch_csr(
        self,
        index_dtype: torch.dtype,
        dtype: torch.dtype = torch.float32,
        weight: Tensor | None = None,
    ) -> Tensor:
        """The adjacency matrix (rows are destinations) as a torch CSR tensor.

        Args:
            index_dtype: int32 or int64.
            dtype: Type of the values.
            weight: `[E]` values in input order; ones if None.

        Returns:
            Sparse CSR `[N, N]`.
        """
        values = torch.ones(self.num_edges) if weight is None else weight[self.csr_order]
        with warnings.catch_warnings():
            # Torch announces once per process that CSR is beta.
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return torch.sparse_csr_tensor(
                self.rowptr.to(index_dtype),
                self.src[self.csr_order].to(index_dtype),
                values.to(dtype),
                (self.num_nodes, self.num_nodes),
                check_invariants=False,
            )

    @cached_property
    def scipy_csr(self) -> Any:
        """The same as a `scipy.sparse.csr_matrix` of fp32 ones."""
        indices = self.src[self.csr_order].to(torch.int32).numpy()
        parts = (np.ones(self.num_edges, np.float32), indices, self.rowptr.to(torch.int32).numpy())
        return scipy.sparse.csr_matrix(parts, shape=(self.num_nodes, self.num_nodes))


def distinct_features(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Makes fp32 features whose columns hold no value twice, so that max and min have no ties.

    Column f holds `(a_f * i + b_f) mod p` for a prime p, mapped to `(-1, 1)`: as irregular as
    a random draw to a reduction, and distinct by construction.

    Args:
        rows: Number of rows, at most 2**22 (beyond, fp32 could not keep them apart).
        columns: Number of columns.
        seed: Seed of the multipliers and offsets.

    Returns:
        fp32 `[rows, columns]`.

    Raises:
        ValueError: If there are too many rows.

    Example:
        >>> from edgeweave.bench.op_graph import distinct_features
        >>> distinct_features(1000, 2)[:, 1].unique().numel()
        1000
    """
    if rows > 1 << 22:
        raise ValueError(f"distinct_features: rows must be at most {1 << 22}, got {rows}")
    prime = _next_prime(max(rows, 2))
    rng = np.random.default_rng(seed)
    factor = torch.from_numpy(rng.integers(1, prime, columns))
    offset = torch.from_numpy(rng.integers(0, prime, columns))
    out = torch.empty(rows, columns)
    for start in range(0, rows, _CHUNK_ROWS):
        row = torch.arange(start, min(start + _CHUNK_ROWS, rows))
        residue = (row[:, None] * factor + offset) % prime
        # A quarter, so that no value is 0: torch.scatter_reduce's gradient of a maximum of 0 is
        # wrong (it counts the excluded initial 0 as a tie), and the peer would fail its check.
        out[start : start + _CHUNK_ROWS] = (residue + 0.25) * (2.0 / prime) - 1.0
    return out


def _next_prime(least: int) -> int:
    candidate = least
    while any(candidate % d == 0 for d in range(2, int(candidate**0.5) + 1)):
        candidate += 1
    return candidate
