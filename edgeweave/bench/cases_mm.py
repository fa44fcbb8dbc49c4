"""Cases of `sparse.mm`: against torch, MKL, scipy, PyG's eager message passing, and in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgeweave import sparse
from edgeweave.bench.cases import REDUCTIONS, CaseSpec, column_reference, mm_traffic
from edgeweave.bench.harness import fastest
from edgeweave.bench.op_graph import OpGraph, distinct_features
from edgeweave.bench.peers import optional_mm_peers
from edgeweave.bench.records import Case, Reference, Side

_INDEX_DTYPES = {"int32": torch.int32, "int64": torch.int64}
_INT32_SORT_NODES = 46_340  # the largest N with N * N < 2**31
_BF16_EPS = torch.finfo(torch.bfloat16).eps


def mm_specs(graph: OpGraph, name: str, quick: bool) -> Iterator[CaseSpec]:
    """Lists the cases of one graph.

    Args:
        graph: The graph.
        name: Its name.
        quick: Fewer widths.

    Yields:
        Specs of the groups `mm-*`, `propagate-*`, `bf16` and `plan`.
    """
    for columns in (16, 64, 128) if quick else (16, 32, 64, 128, 256):
        for reduce in REDUCTIONS:
            yield _spec("mm-forward", name, reduce, columns, _mm_forward, graph)
            yield _spec("mm-forward-backward", name, reduce, columns, _mm_backward, graph)
        yield _spec("mm-mkl", name, "sum", columns, _mm_mkl, graph)
        yield _spec("mm-weighted", name, "sum", columns, _mm_weighted, graph)
    # PyG's eager path holds several [E, F] tensors: 128 columns of the largest graph are 1.2 GB.
    for columns in (64,) if quick else (16, 64, 128):
        for reduce in REDUCTIONS:
            yield _spec("propagate-forward", name, reduce, columns, _propagate_forward, graph)
            yield _spec("propagate-uncached", name, reduce, columns, _propagate_uncached, graph)
            yield _spec(
                "propagate-forward-backward", name, reduce, columns, _propagate_backward, graph
            )
    for columns in (128,) if quick else (128, 256):
        for reduce in ("sum", "mean", "amax"):
            yield _spec("bf16", name, reduce, columns, _bf16, graph)
    yield CaseSpec("plan", f"plan/{name}", partial(_plan, graph, f"plan/{name}", name))


def _spec(
    group: str,
    name: str,
    reduce: str,
    columns: int,
    build: Callable[[OpGraph, str, dict[str, str | int]], Case],
    graph: OpGraph,
) -> CaseSpec:
    case_id = f"{group}/{name}/{reduce}/F{columns}"
    params: dict[str, str | int] = {"graph": name, "reduce": reduce, "F": columns}
    return CaseSpec(group, case_id, lambda: build(graph, case_id, params))


def _best_csr(
    graph: OpGraph, call: Callable[[Tensor], object], **options: Any
) -> tuple[Tensor, str]:
    """The CSR tensor with the index type that makes the peer's call fastest."""
    matrices = {name: graph.torch_csr(dtype, **options) for name, dtype in _INDEX_DTYPES.items()}
    best = fastest({name: partial(call, matrix) for name, matrix in matrices.items()})
    return matrices[best], best


def _mm_forward(graph: OpGraph, case_id: str, params: dict[str, str | int]) -> Case:
    reduce, columns = str(params["reduce"]), int(params["F"])
    x = distinct_features(graph.num_nodes, columns)
    csr, index_dtype = _best_csr(graph, lambda a: torch.sparse.mm(a, x, reduce))
    plan = graph.plan
    return Case(
        "mm-forward",
        case_id,
        {**params, "peer_index": index_dtype},
        Side("edgeweave", lambda _: sparse.mm(plan, x, reduce)),
        (
            Side("torch.sparse.mm", lambda _: torch.sparse.mm(csr, x, reduce)),
            *optional_mm_peers(graph, x, reduce),
        ),
        column_reference(columns, lambda c: (graph.reference.forward(x[:, c], reduce),)),
        mm_traffic(graph.num_nodes, graph.num_nodes, graph.num_edges, columns),
    )


def _mm_backward(graph: OpGraph, case_id: str, params: dict[str, str | int]) -> Case:
    reduce, columns = str(params["reduce"]), int(params["F"])
    x = distinct_features(graph.num_nodes, columns).requires_grad_()
    grad = torch.randn(graph.num_nodes, columns, generator=torch.Generator().manual_seed(1))
    plan = graph.plan

    def with_gradient(forward: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        out = forward()
        return out, torch.autograd.grad(out, x, grad)[0]

    # With int32 torch's backward sorts by row * N + column in int32, which overflows for more
    # nodes and gives wrong gradients (seen with torch 2.13).
    index_dtype = torch.int32 if graph.num_nodes <= _INT32_SORT_NODES else torch.int64
    csr = graph.torch_csr(index_dtype)
    return Case(
        "mm-forward-backward",
        case_id,
        {**params, "peer_index": str(index_dtype).removeprefix("torch.")},
        Side("edgeweave", lambda _: with_gradient(lambda: sparse.mm(plan, x, reduce))),
        (
            Side(
                "torch.sparse.mm",
                lambda _: with_gradient(lambda: torch.sparse.mm(csr, x, reduce)),
            ),
        ),
        _gradient_reference(graph, x, grad, reduce),
    )


def _mm_mkl(graph: OpGraph, case_id: str, params: dict[str, str | int]) -> Case:
    columns = int(params["F"])
    x = distinct_features(graph.num_nodes, columns)
    csr, index_dtype = _best_csr(graph, lambda a: a @ x)
    plan, matrix, x_numpy = graph.plan, graph.scipy_csr, x.numpy()
    return Case(
        "mm-mkl",
        case_id,
        {**params, "peer_index": index_dtype},
        Side("edgeweave", lambda _: sparse.mm(plan, x, "sum")),
        (
            Side("MKL (A @ x)", lambda _: csr @ x),
            Side("scipy (1 thread)", lambda _: torch.from_numpy(matrix @ x_numpy)),
        ),
        column_reference(columns, lambda c: (graph.reference.forward(x[:, c], "sum"),)),
        mm_traffic(graph.num_nodes, graph.num_nodes, graph.num_edges, columns),
    )


def _mm_weighted(graph: OpGraph, case_id: str, params: dict[str, str | int]) -> Case:
    columns = int(params["F"])
    x = distinct_features(graph.num_nodes, columns)
    weight = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(2))
    csr, index_dtype = _best_csr(graph, lambda a: a @ x, weight=weight)
    plan = graph.plan
    return Case(
        "mm-weighted",
        case_id,
        {**params, "peer_index": index_dtype},
        Side("edgeweave", lambda _: sparse.mm(plan, x, "sum", weight=weight)),
        (
            Side("torch.sparse.mm", lambda _: torch.sparse.mm(csr, x, "sum")),
            Side("MKL (A @ x)", lambda _: csr @ x),
        ),
        column_reference(columns, lambda c: (graph.reference.forward(x[:, c], "sum", weight),)),
    )


def _propagate_forward(graph: OpGraph, case_id: str, params: dict[str, str | int]) -> Case:
    reduce, columns = str(params["reduce"]), int(params["F"])
    x = distinct_features(graph.num_nodes, columns)
    edge_index = graph.data.edge_index
    return Case(
        "propagate-forward",
        case_id,
        params,
        Side("edgeweave", lambda _: sparse.mm(edge_index, x, reduce)),
        (Side("PyG eager", lambda _: _pyg_propagate(graph, x, reduce)),),
        column_reference(columns, lambda c: (graph.reference.forward(x[:, c], reduce),)),
        mm_traffic(graph.num_nodes, graph.num_nodes, graph.num_edges, columns),
    )


def _propagate_uncached(graph: OpGraph, case_id: str, params: dict[str, str | int]) -> Case:
    reduce, columns = str(params["reduce"]), int(params["F"])
    x = distinct_features(graph.num_nodes, columns)

    def fresh() -> Tensor:
        sparse.cache_clear()
        return graph.data.edge_index.clone()

    return Case(
        "propagate-uncached",
        case_id,
        params,
        Side("edgeweave", lambda edges: sparse.mm(edges, x, reduce), fresh),
        (Side("PyG eager", lambda _: _pyg_propagate(graph, x, reduce)),),
        column_reference(columns, lambda c: (graph.reference.forward(x[:, c], reduce),)),
    )


def _propagate_backward(graph: OpGraph, case_id: str, params: dict[str, str | int]) -> Case:
    reduce, columns = str(params["reduce"]), int(params["F"])
    x = distinct_features(graph.num_nodes, columns).requires_grad_()
    grad = torch.randn(graph.num_nodes, columns, generator=torch.Generator().manual_seed(1))
    edge_index = graph.data.edge_index

    def with_gradient(forward: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        out = forward()
        return out, torch.autograd.grad(out, x, grad)[0]

    return Case(
        "propagate-forward-backward",
        case_id,
        params,
        Side("edgeweave", lambda _: with_gradient(lambda: sparse.mm(edge_index, x, reduce))),
        (
            Side(
                "PyG eager",
                lambda _: with_gradient(lambda: _pyg_propagate(graph, x, reduce)),
            ),
        ),
        _gradient_reference(graph, x, grad, reduce),
    )


def _bf16(graph: OpGraph, case_id: str, params: dict[str, str | int]) -> Case:
    reduce, columns = str(params["reduce"]), int(params["F"])
    x = distinct_features(graph.num_nodes, columns).bfloat16()
    x_fp32 = x.float()
    csr, index_dtype = _best_csr(
        graph, lambda a: torch.sparse.mm(a, x, reduce), dtype=torch.bfloat16
    )
    plan = graph.plan
    return Case(
        "bf16",
        case_id,
        {**params, "peer_index": index_dtype},
        Side("edgeweave", lambda _: sparse.mm(plan, x, reduce)),
        (
            Side("edgeweave fp32", lambda _: sparse.mm(plan, x_fp32, reduce)),
            Side("torch.sparse.mm", lambda _: torch.sparse.mm(csr, x, reduce), trusted=False),
        ),
        column_reference(columns, lambda c: (graph.reference.forward(x[:, c], reduce),), _BF16_EPS),
        mm_traffic(graph.num_nodes, graph.num_nodes, graph.num_edges, columns, element_bytes=2),
    )


def _plan(graph: OpGraph, case_id: str, name: str) -> Case:
    """Time to build the plan that all cached cases leave out."""
    num_nodes = graph.num_nodes
    size = (num_nodes, num_nodes)

    def torch_plan(edge_index: Tensor) -> Tensor:
        dst, order = torch.sort(edge_index[1], stable=True)
        edge_index[0].index_select(0, order)
        return torch._convert_indices_from_coo_to_csr(dst, num_nodes)

    fresh = graph.data.edge_index.clone
    return Case(
        "plan",
        case_id,
        {"graph": name},
        Side("edgeweave", lambda edges: sparse.Graph(edges, size=size).rowptr, fresh),
        (Side("torch.sort + coo_to_csr", torch_plan, fresh),),
        lambda: Reference((graph.rowptr.double(),)),
    )


def _gradient_reference(graph: OpGraph, x: Tensor, grad: Tensor, reduce: str) -> Any:
    def values(columns: Tensor) -> tuple[Tensor, ...]:
        reference = graph.reference
        return (
            reference.forward(x[:, columns], reduce),
            reference.grad_x(x[:, columns], grad[:, columns], reduce),
        )

    return column_reference(x.size(1), values)


def _pyg_propagate(graph: OpGraph, x: Tensor, reduce: str) -> Tensor:
    from torch_geometric.utils import scatter

    # What MessagePassing.propagate does for a plain edge_index: every message in memory.
    messages = x.index_select(0, graph.src)
    out: Tensor = scatter(messages, graph.dst, 0, graph.num_nodes, reduce.removeprefix("a"))
    return out
