"""Peers that are measured only where they are installed: torch_scatter, torch_sparse and DGL."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from edgeweave.bench.environment import is_installed
from edgeweave.bench.op_graph import OpGraph
from edgeweave.bench.records import Side


def optional_mm_peers(graph: OpGraph, x: Tensor, reduce: str) -> list[Side]:
    """Forward reductions over a graph by the installed add-ons.

    Args:
        graph: The graph.
        x: `[N, F]` features.
        reduce: `sum`, `mean`, `amax` or `amin`.

    Returns:
        One side per installed package.
    """
    sides = []
    plain = reduce.removeprefix("a")
    if is_installed("torch_sparse"):
        torch_sparse = importlib.import_module("torch_sparse")
        adj = sparse_tensor(graph)
        sides.append(Side("torch_sparse.matmul", lambda _: torch_sparse.matmul(adj, x, plain)))
    if is_installed("dgl"):
        dgl = importlib.import_module("dgl")
        dgl_graph = dgl.graph((graph.src, graph.dst), num_nodes=graph.num_nodes).formats("csc")
        copy_u = getattr(importlib.import_module("dgl.ops"), f"copy_u_{plain}")
        # DGL leaves infinities in the rows of nodes without edges where torch has zeros.
        sides.append(Side("dgl.copy_u", lambda _: copy_u(dgl_graph, x), trusted=False))
    return sides


def optional_scatter_peers(src: Tensor, index: Tensor, dim_size: int, reduce: str) -> list[Side]:
    """Scatter reductions along dimension 0 by `torch_scatter`.

    Args:
        src: `[E, F]` values.
        index: int64 `[E]` rows of the result.
        dim_size: Number of rows of the result.
        reduce: As for `optional_mm_peers`.

    Returns:
        One side, or none.
    """
    if not is_installed("torch_scatter"):
        return []
    scatter = importlib.import_module("torch_scatter").scatter
    plain = reduce.removeprefix("a")
    return [
        Side(
            "torch_scatter",
            lambda _: scatter(src, index, 0, dim_size=dim_size, reduce=plain),
        )
    ]


def sparse_tensor(graph: OpGraph) -> Any:
    """The adjacency (rows are destinations) as `torch_sparse.SparseTensor`.

    Args:
        graph: The graph.

    Returns:
        A `SparseTensor` without values, its row pointers and its transpose built.
    """
    torch_sparse = importlib.import_module("torch_sparse")
    order = graph.csr_order
    adj = torch_sparse.SparseTensor(
        rowptr=graph.rowptr,
        col=graph.src[order],
        sparse_sizes=(graph.num_nodes, graph.num_nodes),
        is_sorted=True,
    )
    return adj.fill_cache_()  # as PyG's ToSparseTensor does: its backward needs the transpose
