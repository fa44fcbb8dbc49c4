"""Cases of `scatter.scatter_reduce` and `scatter.gather` against torch as PyG calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from edgeweave import scatter, sparse
from edgeweave.bench.cases import REDUCTIONS, CaseSpec, column_reference
from edgeweave.bench.op_graph import OpGraph, distinct_features
from edgeweave.bench.peers import optional_scatter_peers
from edgeweave.bench.records import Case, Reference, Side, Traffic
from edgeweave.bench.reference import EdgeReference

# A quarter of the edges in each of 4 batches: as much data as one pass over all edges.
_BATCHES = 4
_BATCH_COLUMNS = 8


def scatter_specs(graph: OpGraph, name: str, quick: bool) -> Iterator[CaseSpec]:
    """Lists the cases of one graph.

    Args:
        graph: The graph; its destinations are the index, its edges the values.
        name: Its name.
        quick: Fewer widths.

    Yields:
        Specs of the groups `scatter-*`, `narrow` and `gather`.
    """
    widths = (64,) if quick else (16, 64, 128)
    for columns in widths:
        for reduce in REDUCTIONS:
            for group, cached in (("scatter-cached", True), ("scatter-uncached", False)):
                yield _spec(group, graph, name, reduce, columns, cached=cached)
    for columns in (1, 8) if quick else (1, 2, 4, 8):
        for reduce in ("sum", "amax"):
            yield _spec("narrow", graph, name, reduce, columns, cached=True)
    for reduce in ("sum", "amax"):
        case_id = f"narrow/{name}/{reduce}/dim1-F{_BATCH_COLUMNS}"
        params: dict[str, str | int] = {"graph": name, "reduce": reduce, "F": _BATCH_COLUMNS}
        build = partial(_scatter_dim1, graph, case_id, {**params, "dim": 1})
        yield CaseSpec("narrow", case_id, build)
    for columns in widths:
        case_id = f"gather/{name}/F{columns}"
        yield CaseSpec("gather", case_id, partial(_gather, graph, case_id, name, columns))


def _spec(
    group: str, graph: OpGraph, name: str, reduce: str, columns: int, cached: bool
) -> CaseSpec:
    case_id = f"{group}/{name}/{reduce}/F{columns}"
    params: dict[str, str | int] = {"graph": name, "reduce": reduce, "F": columns}
    return CaseSpec(group, case_id, partial(_scatter, group, graph, case_id, params, cached))


def _scatter(
    group: str, graph: OpGraph, case_id: str, params: dict[str, str | int], cached: bool
) -> Case:
    reduce, columns = str(params["reduce"]), int(params["F"])
    src = distinct_features(graph.num_edges, columns)
    index = graph.dst.clone()
    num_nodes = graph.num_nodes

    def fresh_index() -> Tensor:
        sparse.cache_clear()
        return graph.dst.clone()

    def ours(fresh: Tensor | None) -> Tensor:
        chosen = index if fresh is None else fresh
        return scatter.scatter_reduce(src, chosen, 0, num_nodes, reduce)

    def values(chosen: Tensor) -> tuple[Tensor, ...]:
        return (graph.edges_to_dst.forward(src[:, chosen], reduce),)

    graph_bytes = 8 * (num_nodes + 1) + (4 if cached else 8) * graph.num_edges
    traffic = 4 * columns * (graph.num_edges + num_nodes) + graph_bytes
    return Case(
        group,
        case_id,
        params,
        Side("edgeweave", ours, None if cached else fresh_index),
        (
            Side("PyG scatter", lambda _: _pyg_scatter(src, index, 0, num_nodes, reduce)),
            *optional_scatter_peers(src, index, num_nodes, reduce),
        ),
        column_reference(columns, values),
        Traffic(traffic, traffic),
    )


def _scatter_dim1(graph: OpGraph, case_id: str, params: dict[str, str | int]) -> Case:
    """`[B, E, F]` reduced along dimension 1."""
    reduce = str(params["reduce"])
    edges = graph.num_edges // _BATCHES
    index = graph.dst[:: graph.num_edges // edges][:edges].clone()
    num_nodes = graph.num_nodes
    src = distinct_features(_BATCHES * edges, _BATCH_COLUMNS).view(_BATCHES, edges, -1)

    def reference() -> Reference:
        to_nodes = EdgeReference(torch.arange(edges), index, edges, num_nodes)
        return Reference((torch.stack([to_nodes.forward(part, reduce) for part in src]),))

    return Case(
        "narrow",
        case_id,
        params,
        Side("edgeweave", lambda _: scatter.scatter_reduce(src, index, 1, num_nodes, reduce)),
        (Side("PyG scatter", lambda _: _pyg_scatter(src, index, 1, num_nodes, reduce)),),
        reference,
    )


def _gather(graph: OpGraph, case_id: str, name: str, columns: int) -> Case:
    """`x[src]` with an expanded index, forward and backward."""
    x = distinct_features(graph.num_nodes, columns).requires_grad_()
    grad = torch.randn(graph.num_edges, columns, generator=torch.Generator().manual_seed(1))
    index = graph.src.clone()
    expanded = index.view(-1, 1).expand(-1, columns)

    def with_gradient(forward: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        out = forward()
        return out, torch.autograd.grad(out, x, grad)[0]

    def values(chosen: Tensor) -> tuple[Tensor, ...]:
        gathered = x.detach()[:, chosen].double()[index]
        return gathered, graph.edges_to_src.forward(grad[:, chosen], "sum")

    return Case(
        "gather",
        case_id,
        {"graph": name, "F": columns},
        Side("edgeweave", lambda _: with_gradient(lambda: scatter.gather(x, expanded))),
        (
            Side("torch.gather", lambda _: with_gradient(lambda: torch.gather(x, 0, expanded))),
            Side("index_select", lambda _: with_gradient(lambda: x.index_select(0, index))),
        ),
        column_reference(columns, values),
    )


def _pyg_scatter(src: Tensor, index: Tensor, dim: int, dim_size: int, reduce: str) -> Tensor:
    from torch_geometric.utils import scatter as pyg_scatter

    out: Tensor = pyg_scatter(src, index, dim, dim_size, reduce.removeprefix("a"))
    return out
