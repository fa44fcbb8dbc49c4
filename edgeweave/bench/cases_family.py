"""Cases of softmax, segments, several reductions at once, and grouped products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from edgeweave import scatter, sparse
from edgeweave.bench.cases import CaseSpec, column_reference
from edgeweave.bench.op_graph import OpGraph, distinct_features
from edgeweave.bench.records import Case, Reference, Side, Traffic

_MULTI = ("sum", "mean", "amax", "amin")


def family_specs(graph: OpGraph, name: str, quick: bool) -> Iterator[CaseSpec]:
    """Lists the cases of one graph.

    Args:
        graph: The graph; its destinations are the groups, its edges the entries.
        name: Its name.
        quick: Fewer widths.

    Yields:
        Specs of the groups `softmax`, `softmax-forward-backward`, `segment`, `multi-reduce` and
        `segment-matmul`.
    """
    for heads in (1, 8) if quick else (1, 2, 4, 8, 16):
        for group, make in (("softmax", _softmax), ("softmax-forward-backward", _softmax_both)):
            case_id = f"{group}/{name}/H{heads}"
            params: dict[str, str | int] = {"graph": name, "H": heads}
            yield CaseSpec(group, case_id, partial(make, graph, case_id, params, heads))
    for columns in (64,) if quick else (1, 8, 64, 128):
        for reduce in ("sum", "amax"):
            case_id = f"segment/{name}/{reduce}/F{columns}"
            params = {"graph": name, "reduce": reduce, "F": columns}
            yield CaseSpec("segment", case_id, partial(_segment, graph, case_id, params, columns))
    for columns in (64,) if quick else (16, 64, 128):
        case_id = f"multi-reduce/{name}/F{columns}"
        params = {"graph": name, "F": columns}
        build = partial(_multi, graph, case_id, params, columns)
        yield CaseSpec("multi-reduce", case_id, build)
    for segments in (8, 200) if quick else (8, 64, 500, 4000):
        case_id = f"segment-matmul/{name}/B{segments}"
        params = {"graph": name, "B": segments, "K": 64, "N": 64}
        build = partial(_segment_matmul, graph, case_id, params, segments)
        yield CaseSpec("segment-matmul", case_id, build)


def _with_gradient(
    inputs: tuple[Tensor, ...], grad: Tensor | tuple[Tensor, ...], forward: Callable[[], Tensor]
) -> tuple[Tensor, ...]:
    out = forward()
    return (out, *torch.autograd.grad(out, inputs, grad))


def _softmax64(graph: OpGraph, src: Tensor) -> Tensor:
    """In float64, by groups."""
    x = src.double()
    top = graph.edges_to_dst.forward(x, "amax")[graph.dst]
    p = (x - top).exp()
    return p / graph.edges_to_dst.forward(p, "sum")[graph.dst]


def _softmax(graph: OpGraph, case_id: str, params: dict[str, str | int], heads: int) -> Case:
    from torch_geometric.utils import softmax as pyg_softmax

    src, index = distinct_features(graph.num_edges, heads), graph.dst.clone()
    num_nodes = graph.num_nodes
    traffic = 4 * (2 * heads + 1) * graph.num_edges + 4 * (num_nodes + 1)
    return Case(
        "softmax",
        case_id,
        params,
        Side("edgeweave", lambda _: scatter.softmax(src, index, dim_size=num_nodes)),
        (Side("PyG softmax", lambda _: pyg_softmax(src, index, num_nodes=num_nodes)),),
        column_reference(heads, lambda chosen: (_softmax64(graph, src[:, chosen]),)),
        Traffic(traffic, traffic),
    )


def _softmax_both(graph: OpGraph, case_id: str, params: dict[str, str | int], heads: int) -> Case:
    from torch_geometric.utils import softmax as pyg_softmax

    src = distinct_features(graph.num_edges, heads).requires_grad_()
    grad = torch.randn(graph.num_edges, heads, generator=torch.Generator().manual_seed(1))
    index, num_nodes = graph.dst.clone(), graph.num_nodes

    def values(chosen: Tensor) -> tuple[Tensor, ...]:
        y, g = _softmax64(graph, src.detach()[:, chosen]), grad[:, chosen].double()
        total = graph.edges_to_dst.forward(y * g, "sum")[graph.dst]
        return y, y * (g - total)

    def ours() -> Tensor:
        return scatter.softmax(src, index, dim_size=num_nodes)

    def theirs() -> Tensor:
        out: Tensor = pyg_softmax(src, index, num_nodes=num_nodes)
        return out

    return Case(
        "softmax-forward-backward",
        case_id,
        params,
        Side("edgeweave", lambda _: _with_gradient((src,), grad, ours)),
        (Side("PyG softmax", lambda _: _with_gradient((src,), grad, theirs)),),
        column_reference(heads, values),
    )


def _segment(graph: OpGraph, case_id: str, params: dict[str, str | int], columns: int) -> Case:
    from torch_geometric.utils import scatter as pyg_scatter

    reduce, num_nodes = str(params["reduce"]), graph.num_nodes
    src = distinct_features(graph.num_edges, columns)
    index, order = graph.dst.sort(stable=True)
    # In the order of the segments: entry e of src is edge order[e].
    ptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    ptr[1:] = torch.bincount(graph.dst, minlength=num_nodes).cumsum(0)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel())

    def scattered() -> Tensor:
        out: Tensor = pyg_scatter(src, index, 0, num_nodes, reduce.removeprefix("a"))
        return out

    peers = [Side("PyG scatter", lambda _: scattered())]
    if reduce == "sum":  # torch leaves infinities in the empty segments of a maximum
        peers.append(
            Side(
                "torch.segment_reduce",
                lambda _: torch.segment_reduce(src, "sum", offsets=ptr, initial=0),
            )
        )
    traffic = 4 * columns * (graph.num_edges + num_nodes) + 8 * (num_nodes + 1)
    return Case(
        "segment",
        case_id,
        params,
        Side("edgeweave", lambda _: scatter.segment_reduce(src, ptr, reduce)),
        tuple(peers),
        column_reference(
            columns,
            lambda chosen: (graph.edges_to_dst.forward(src[place][:, chosen], reduce),),
        ),
        Traffic(traffic, traffic),
    )


def _multi(graph: OpGraph, case_id: str, params: dict[str, str | int], columns: int) -> Case:
    """Four reductions and their gradient."""
    from torch_geometric.utils import scatter as pyg_scatter

    src = distinct_features(graph.num_edges, columns).requires_grad_()
    index, num_nodes = graph.dst.clone(), graph.num_nodes
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(len(_MULTI), num_nodes, columns, generator=generator)

    def in_one_pass() -> Tensor:
        return torch.stack(scatter.multi_reduce(src, index, _MULTI, dim_size=num_nodes))

    def one_by_one() -> Tensor:
        return torch.stack([scatter.scatter_reduce(src, index, 0, num_nodes, r) for r in _MULTI])

    def by_pyg() -> Tensor:
        names = [r.removeprefix("a") for r in _MULTI]
        return torch.stack([pyg_scatter(src, index, 0, num_nodes, r) for r in names])

    def values(chosen: Tensor) -> tuple[Tensor, ...]:
        x, edges = src.detach()[:, chosen].double(), graph.edges_to_dst
        made = [edges.forward(x, r) for r in _MULTI]
        g = grad[:, :, chosen].double()
        count = edges.forward(torch.ones(graph.num_edges, 1), "sum").clamp(min=1)
        dst = graph.dst
        # Values are distinct, so each group has one winner.
        dx = (g[0] + g[1] / count)[dst]
        dx += (x == made[2][dst]) * g[2][dst] + (x == made[3][dst]) * g[3][dst]
        return torch.stack(made), dx

    return Case(
        "multi-reduce",
        case_id,
        params,
        Side("edgeweave", lambda _: _with_gradient((src,), grad, in_one_pass)),
        (
            Side("PyG scatters", lambda _: _with_gradient((src,), grad, by_pyg)),
            Side("edgeweave, one by one", lambda _: _with_gradient((src,), grad, one_by_one)),
        ),
        column_reference(columns, values),
    )


def _segment_matmul(
    graph: OpGraph, case_id: str, params: dict[str, str | int], segments: int
) -> Case:
    """As many rows as there are nodes, in segments of random lengths; with gradients."""
    columns, out_columns = int(params["K"]), int(params["N"])
    generator = torch.Generator().manual_seed(1)
    rows = graph.num_nodes
    cuts = torch.randint(0, rows + 1, (segments - 1,), generator=generator).sort().values
    ptr = torch.cat([torch.tensor([0]), cuts, torch.tensor([rows])])
    x = distinct_features(rows, columns).requires_grad_()
    weight = torch.randn(segments, columns, out_columns, generator=generator).requires_grad_()
    grad = torch.randn(rows, out_columns, generator=generator)
    bounds = ptr.tolist()

    def loop() -> Tensor:
        pairs = pairwise(bounds)
        return torch.cat([x[i:j] @ weight[b] for b, (i, j) in enumerate(pairs)])

    def reference() -> Reference:
        wide, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
        parts = [wide[i:j] @ wide_weight[b] for b, (i, j) in
                 enumerate(pairwise(bounds))]  # fmt: skip
        out = torch.cat(parts)
        return Reference(
            (out.detach(), *torch.autograd.grad(out, (wide, wide_weight), grad.double()))
        )

    return Case(
        "segment-matmul",
        case_id,
        params,
        Side(
            "edgeweave",
            lambda _: _with_gradient(
                (x, weight), grad, lambda: sparse.segment_matmul(x, ptr, weight)
            ),
        ),
        (Side("loop", lambda _: _with_gradient((x, weight), grad, loop)),),
        reference,
    )
