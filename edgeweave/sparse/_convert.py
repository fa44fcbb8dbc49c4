"""What `mm` accepts as its left operand, brought to one form."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import describe, shape_text
from .._plan import Plan, check_everything, plan_for_edges
from .._plan._compiled import must_trace
from .._plan._device import has_kernels, index_fingerprint
from ._graph import Graph, known_size, plain_edges

__all__ = ["Operand", "as_operand", "check_edge_list", "is_sparse_tensor", "matrix_graph"]


class Operand(NamedTuple):
    """An edge list with its sizes and values in its order.

    Also the graph that keeps the plan, if there is one.
    """

    edge_index: Tensor
    num_src: int
    num_dst: int
    values: Tensor | None
    graph: Graph | None
    is_matrix: bool = False

    def plan(self, flip: bool, op: str = "mm") -> Plan:
        """The plan of the edges; `op` is named by its errors."""
        if self.graph is not None:
            return self.graph.plan(flip)
        num_src, num_dst = (self.num_dst, self.num_src) if flip else (self.num_src, self.num_dst)
        return plan_for_edges(self.edge_index, num_src, num_dst, flip=flip, op=op)


def as_operand(op: str, A: object, num_nodes: int, device: torch.device) -> Operand:
    """Brings `A` to an edge list.

    Args:
        op: Name for error messages.
        A: A Graph, an edge list, an EdgeIndex or a matrix.
        num_nodes: Number of nodes on both sides of an edge list that does not say.
        device: Where the features are; the edges must be there too.

    Raises:
        TypeError: If `A` is none of these.
        ValueError: If it is on another device.
    """
    if isinstance(A, Graph):
        operand = Operand(A.edge_index, A.num_src, A.num_dst, None, A)
    elif isinstance(A, Tensor) and A.layout is torch.strided:
        edges = plain_edges(A)
        num_src, num_dst = (num_nodes if n is None else n for n in known_size(A))
        check_edge_list(op, edges)
        operand = Operand(edges, num_src, num_dst, None, None)
    else:
        graph, values = kept_matrix_graph(op, A)
        operand = Operand(graph.edge_index, graph.num_src, graph.num_dst, values, graph, True)
    if operand.edge_index.device != device:
        raise ValueError(f"{op}: A must be on x's device {device}, got {operand.edge_index.device}")
    return operand


def check_edge_list(op: str, edge_index: Tensor) -> None:
    """`edge_index` must be `[2, E]` of int32 or int64."""
    if edge_index.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"{op}: A must be an edge list of int32 or int64, or a sparse matrix, got "
            f"{describe(edge_index)}"
        )
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(
            f"{op}: an edge list must have shape [2, E], got {shape_text(edge_index.shape)}"
            + ("; transpose it with .t()" if edge_index.dim() == 2 else "")
        )


def is_sparse_tensor(A: object) -> bool:
    """Whether `A` is one of torch's sparse tensors."""
    return isinstance(A, Tensor) and A.layout is not torch.strided


class _Stored(NamedTuple):
    """A matrix' stored entries.

    `ptr` compresses the rows (`by_row`) or columns; None: both are per entry.
    """

    ptr: Tensor | None
    first: Tensor  # the other side of each entry (with ptr), or its row
    second: Tensor | None  # its column, without ptr
    by_row: bool
    values: Tensor | None
    shape: tuple[int, int]
    versioned: bool = True  # False: the memory is numpy's

    def row_and_col(self) -> tuple[Tensor, Tensor]:
        if self.ptr is None:
            assert self.second is not None, "a COO matrix has rows and columns"
            return self.first, self.second
        counts = self.ptr.diff()
        if not must_trace(self.ptr):
            self._check_pointers(counts)
        lines = torch.arange(counts.numel(), dtype=self.first.dtype, device=counts.device)
        expanded = torch.repeat_interleave(lines, counts, output_size=self.first.numel())
        return (expanded, self.first) if self.by_row else (self.first, expanded)

    def _check_pointers(self, counts: Tensor) -> None:
        # Neither torch nor scipy checks them by default, and torch's repeat_interleave writes out
        # of bounds for a negative count.
        assert self.ptr is not None, "only compressed matrices have pointers"
        lines = self.shape[0] if self.by_row else self.shape[1]
        entries = self.first.numel()
        fits = self.ptr.numel() == lines + 1 and int(self.ptr[0]) == 0
        if not fits or int(self.ptr[-1]) != entries or bool((counts < 0).any()):
            raise ValueError(
                f"mm: the pointers of a compressed matrix must rise from 0 to its {entries} stored "
                f"entries in {lines} steps, got {self.ptr.numel() - 1} steps from "
                f"{int(self.ptr[0]) if self.ptr.numel() else None} to "
                f"{int(self.ptr[-1]) if self.ptr.numel() else None}"
            )

    def fingerprint(self) -> tuple[int, ...]:
        """What the indices are known by: their versions, and hashes of them.

        Hashes of all of them for a small matrix, of samples for a large one; of all for a numpy
        array, which has no version to tell of edits.
        """
        parts = [t for t in (self.ptr, self.first, self.second) if t is not None]
        versioned = self.versioned and not any(t.is_inference() for t in parts)
        on_cpu = self.first.is_cpu
        full = check_everything(self.first.numel(), on_cpu=on_cpu) or not versioned
        versions = tuple(t._version for t in parts) if versioned else ()
        return (
            *versions,
            *(index_fingerprint(t.detach(), -1, 0 if full else 64) for t in parts),
        )


_TORCH_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def _stored(op: str, A: Any) -> _Stored:
    if isinstance(A, Tensor):
        return _stored_torch(op, A)
    kind = type(A)
    if kind.__name__ == "SparseTensor" and hasattr(A, "storage"):
        rowptr, col, value = A.csr()
        return _Stored(rowptr, col, None, True, value, (A.size(0), A.size(1)))
    if kind.__module__.startswith("scipy.sparse"):
        return _stored_scipy(op, A)
    raise TypeError(
        f"{op}: A must be an edge list [2, E], a Graph, an EdgeIndex, a torch sparse COO/CSR/CSC "
        f"tensor, a torch_sparse.SparseTensor or a scipy sparse array, got {describe(A)}"
    )


def _stored_torch(op: str, A: Tensor) -> _Stored:
    if A.layout not in _TORCH_LAYOUTS:
        raise TypeError(f"{op}: A must be a sparse COO, CSR or CSC tensor, got layout {A.layout}")
    if A.dim() != 2 or A.dense_dim() != 0:
        raise ValueError(f"{op}: A must be a matrix of scalars, got shape {shape_text(A.shape)}")
    shape = (int(A.shape[0]), int(A.shape[1]))
    if A.layout is torch.sparse_coo:
        if not A.is_coalesced():
            raise ValueError(
                f"{op}: a COO matrix must be coalesced, got one that is not; call .coalesce()"
            )
        rows, cols = A.indices()
        return _Stored(None, rows, cols, True, A.values(), shape)
    if A.layout is torch.sparse_csr:
        return _Stored(A.crow_indices(), A.col_indices(), None, True, A.values(), shape)
    return _Stored(A.ccol_indices(), A.row_indices(), None, False, A.values(), shape)


def _stored_scipy(op: str, A: Any) -> _Stored:
    if len(A.shape) != 2:
        raise ValueError(f"{op}: A must be a matrix, got shape {shape_text(A.shape)}")
    shape = (int(A.shape[0]), int(A.shape[1]))
    if A.format in ("csr", "csc"):
        ptr, first, data = (_from_numpy(part) for part in (A.indptr, A.indices, A.data))
        return _Stored(ptr, first, None, A.format == "csr", data, shape, versioned=False)
    coo = A.tocoo()
    row, col, data = (_from_numpy(part) for part in (coo.row, coo.col, coo.data))
    return _Stored(None, row, col, True, data, shape, versioned=False)


def _from_numpy(array: Any) -> Tensor:
    if torch.compiler.is_compiling():  # Dynamo's arrays have no flags
        return torch.from_numpy(array)
    # torch has no read-only tensors, and no negative strides.
    plain = array.flags.writeable and all(step >= 0 for step in array.strides)
    return torch.from_numpy(array if plain else array.copy())


# Graphs of matrices seen before, by id; the weak reference says whether it is still the same one.
_graphs: dict[int, tuple[weakref.ref[Any], tuple[int, ...], Graph]] = {}


def matrix_graph(op: str, A: object, rows: str) -> Graph:
    """A fresh graph of a matrix, `values` its current ones.

    Args:
        op: Name for error messages.
        A: The matrix.
        rows: "dst" or "src".
    """
    stored = _stored(op, A)
    graph = _make(stored, rows)
    graph.values = stored.values
    return graph


def kept_matrix_graph(op: str, A: object) -> tuple[Graph, Tensor | None]:
    """The graph of a matrix (rows are destinations) and its values.

    The graph is kept while the matrix lives and its indices stay the same; it never leaves `mm`.
    """
    stored = _stored(op, A)
    if must_trace(stored.first) or not has_kernels(stored.first):
        return _make(stored, "dst"), stored.values
    fingerprint = (*stored.fingerprint(), *stored.shape)
    key = id(A)
    known = _graphs.get(key)
    if known is not None and known[0]() is A and known[1] == fingerprint:
        return known[2], stored.values
    graph = _make(stored, "dst")
    _graphs[key] = (weakref.ref(A, lambda _: _graphs.pop(key, None)), fingerprint, graph)
    return graph, stored.values


def _make(stored: _Stored, rows: str) -> Graph:
    row, col = stored.row_and_col()
    ends = (col, row) if rows == "dst" else (row, col)
    size = (stored.shape[1], stored.shape[0]) if rows == "dst" else stored.shape
    return Graph(torch.stack(ends), size=size)
