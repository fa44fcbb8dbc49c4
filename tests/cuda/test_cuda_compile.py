"""Compiled code on CUDA: no graph breaks, Triton from Inductor, our ops with their kernels."""

from __future__ import annotations

import copy

import pytest
import torch
from _cuda_graphs import random_edges

import edgeweave
import edgeweave.compile
from edgeweave import scatter, sparse
from edgeweave.compile._record import recording

pyg = pytest.importorskip("torch_geometric")
from torch_geometric import nn as layers  # noqa: E402

WIDTH = 16


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _gin() -> torch.nn.Module:
    mlp = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    return layers.GINConv(mlp)


LAYERS = {
    "GCN": lambda: layers.GCNConv(WIDTH, 8),
    "GraphSAGE": lambda: layers.SAGEConv(WIDTH, 8),
    "GIN": _gin,
    "GAT": lambda: layers.GATConv(WIDTH, 4, heads=2),
    "GATv2": lambda: layers.GATv2Conv(WIDTH, 4, heads=2),
    "Transformer": lambda: layers.TransformerConv(WIDTH, 4, heads=2),
}
# What each must be rewritten to.
OPS = {
    "GCN": {"edgeweave.gcn"},
    "GraphSAGE": {"edgeweave.mm"},
    "GIN": {"edgeweave.mm"},
    "GAT": {"edgeweave.mm", "edgeweave.softmax", "edgeweave.add_self_loops"},
    "GATv2": {
        "edgeweave.mm",
        "edgeweave.softmax",
        "edgeweave.add_self_loops",
        "edgeweave.edge_scores",
    },
    "Transformer": {"edgeweave.mm", "edgeweave.softmax", "edgeweave.edge_dots"},
}


def _run(model, x, edges, upstream):
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    out = model(leaf, edges)
    out.backward(upstream)
    return [out.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(LAYERS))
def test_optimize(name, dtype, gpu):
    edges = random_edges(60, 60, 400).to(gpu)
    layer = LAYERS[name]().to(gpu, dtype)
    x = torch.randn(60, WIDTH, device=gpu).to(dtype)
    upstream = torch.randn_like(layer(x, edges))
    exact = _run(copy.deepcopy(layer).double(), x.double(), edges, upstream.double())
    stock = _run(layer, x, edges, upstream)
    compiled = edgeweave.optimize(copy.deepcopy(layer))
    with recording() as records:
        ours = _run(compiled, x, edges, upstream)
    assert len(records) == 1, "one graph: nothing broke it"
    assert records[0].engine == "inductor"
    assert set(records[0].ops) >= OPS[name], records[0].ops
    eps = float(torch.finfo(dtype).eps)
    for mine, theirs, true in zip(ours, stock, exact, strict=True):
        scale = float(true.abs().max()) + 1e-30
        off, stock_off = (float((t.double() - true).abs().max()) / scale for t in (mine, theirs))
        assert off <= max(4 * stock_off, 16 * eps), (off, stock_off)
    again = _run(compiled, x, edges, upstream)
    for first, second in zip(ours[:2], again[:2], strict=True):
        assert torch.equal(first, second)


def test_inductor_writes_triton_around_our_ops(gpu):
    from torch._inductor.utils import run_and_get_code

    edges = random_edges(60, 60, 400).to(gpu)
    layer = layers.GCNConv(WIDTH, 8).to(gpu)

    def run(x):
        return layer(x, edges).relu() * 2 + 1

    fused = torch.compile(run, backend="edgeweave", fullgraph=True)
    x = torch.randn(60, WIDTH, device=gpu)
    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
    ):
        out, codes = run_and_get_code(fused, x)
    torch.testing.assert_close(out, run(x), rtol=1e-4, atol=1e-4)
    code = "\n".join(codes)
    assert "@triton" in code
    assert "edgeweave.gcn" in code
    assert "tl.atomic_add" not in code


FUNCTIONS = {
    "mm": lambda s, e: sparse.mm(e, s[:60], "sum"),
    "mm amax": lambda s, e: sparse.mm(e, s[:60], "amax"),
    "mm weighted": lambda s, e: sparse.mm(e, s[:60], "mean", weight=s[:400, 0]),
    "scatter": lambda s, e: scatter.scatter_reduce(s[:400], e[1], dim_size=60),
    "scatter amin": lambda s, e: scatter.scatter_reduce(s[:400], e[1], 0, 60, "amin"),
    "scatter prod": lambda s, e: scatter.scatter_reduce(s[:400], e[1], 0, 60, "prod"),
    "gather": lambda s, e: scatter.gather(s[:60], e[0]),
    "softmax": lambda s, e: scatter.softmax(s[:400], e[1], dim_size=60),
    "logsumexp": lambda s, e: scatter.logsumexp(s[:400], e[1], dim_size=60).nan_to_num(neginf=0),
    "multi": lambda s, e: torch.cat(
        scatter.multi_reduce(s[:400], e[1], ["mean", "max", "std"], dim_size=60)
    ),
}


@pytest.mark.parametrize("backend", ["inductor", "edgeweave"])
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_functions_without_a_graph_break(name, backend, gpu):
    edges = random_edges(60, 60, 400).to(gpu)
    run = FUNCTIONS[name]

    def program(s):
        return (run(s * 1.5, edges) + 1).relu()

    compiled = torch.compile(program, backend=backend, fullgraph=True)
    results = []
    for function in (program, compiled):
        leaf = torch.linspace(0.5, 1.5, 500 * 6, device=gpu).view(500, 6).requires_grad_()
        out = function(leaf)
        out.sum().backward()
        results.append((out.detach(), leaf.grad))
    for eager, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-4, atol=1e-5)


def test_sizes_that_change(gpu):
    compiled = torch.compile(
        lambda x, e: sparse.mm(e, x, "mean"), backend="edgeweave", fullgraph=True, dynamic=True
    )
    for nodes, count in ((30, 100), (50, 170), (41, 90)):
        edges, x = random_edges(nodes, nodes, count).to(gpu), torch.randn(nodes, 8, device=gpu)
        torch.testing.assert_close(compiled(x, edges), sparse.mm(edges, x, "mean"))


def test_edges_that_are_edited_between_calls(gpu):
    compiled = torch.compile(lambda x, e: sparse.mm(e, x) * 2, backend="edgeweave", fullgraph=True)
    edges, x = random_edges(30, 30, 100).to(gpu), torch.randn(30, 8, device=gpu)
    for _ in range(3):
        expected = 2 * torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
        torch.testing.assert_close(compiled(x, edges), expected, rtol=1e-4, atol=1e-5)
        edges[1] = (edges[1] + 1) % 30


@pytest.mark.parametrize("backend", ["inductor", "edgeweave"])
def test_edges_that_are_made_within_the_graph(backend, gpu):
    """Inductor may put the second into the memory of the first, which no version tells of."""

    def program(x, e):
        first = sparse.mm((e + 1) % 30, x)
        return sparse.mm((e + 2) % 30, first.relu())

    edges, x = random_edges(30, 30, 100).to(gpu), torch.randn(30, 8, device=gpu)
    compiled = torch.compile(program, backend=backend, fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(x, edges), program(x, edges), rtol=1e-4, atol=1e-4)
        edges = edges.roll(1, 1)


def test_optimize_in_bf16_autocast(gpu):
    edges = random_edges(60, 60, 400).to(gpu)
    layer = layers.SAGEConv(WIDTH, 8).to(gpu)
    x = torch.randn(60, WIDTH, device=gpu)
    compiled = edgeweave.optimize(layer, (x, edges), precision="bf16", verify=True)
    with torch.autocast("cuda", torch.bfloat16):
        expected = layer(x, edges)
    torch.testing.assert_close(compiled(x, edges), expected, rtol=3e-2, atol=3e-2)


def test_reduce_overhead_gives_right_results(gpu):
    compiled = torch.compile(lambda x, e: sparse.mm(e, x).relu(), mode="reduce-overhead")
    edges, x = random_edges(30, 30, 100).to(gpu), torch.randn(30, 8, device=gpu)
    for _ in range(4):
        expected = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]).relu()
        torch.testing.assert_close(compiled(x, edges).clone(), expected, rtol=1e-4, atol=1e-5)
        edges = edges.roll(1, 1)[:, torch.randperm(100)]
