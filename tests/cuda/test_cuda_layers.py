"""PyG's layers on CUDA under `accelerated()`: as close to float64 as stock, and really fused."""

from __future__ import annotations

import copy

import pytest
import torch
from _cuda_graphs import hub_edges, random_edges

import edgeweave

pyg = pytest.importorskip("torch_geometric")
from torch_geometric import nn as layers  # noqa: E402

import edgeweave.pyg  # noqa: E402

WIDTH = 12


def _gin(i: int, o: int) -> torch.nn.Module:
    mlp = torch.nn.Sequential(torch.nn.Linear(i, o), torch.nn.ReLU(), torch.nn.Linear(o, o))
    return layers.GINConv(mlp)


LAYERS = {
    "GCNConv": lambda: layers.GCNConv(WIDTH, 8),
    "GCNConv without loops": lambda: layers.GCNConv(WIDTH, 8, add_self_loops=False),
    "SAGEConv": lambda: layers.SAGEConv(WIDTH, 8),
    "SAGEConv max": lambda: layers.SAGEConv(WIDTH, 8, aggr="max"),
    "GINConv": lambda: _gin(WIDTH, 8),
    "GraphConv": lambda: layers.GraphConv(WIDTH, 8),
    "GATConv": lambda: layers.GATConv(WIDTH, 4, heads=3),
    "GATv2Conv": lambda: layers.GATv2Conv(WIDTH, 4, heads=3),
    "TransformerConv": lambda: layers.TransformerConv(WIDTH, 4, heads=3),
    "EdgeConv": lambda: layers.EdgeConv(torch.nn.Linear(2 * WIDTH, 8)),
    "PNAConv": lambda: layers.PNAConv(
        WIDTH, 8, ["mean", "min", "max", "std"], ["identity", "amplification"], torch.arange(1, 9)
    ),
}
# Sites that are fused whole or by their `propagate`.
FUSED = {name: name.split()[0] for name in LAYERS}


def _run(layer, x, edges, upstream):
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(leaf, edges)
    out.backward(upstream)
    return [out.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())]


def check_as_close_as_stock(ours, stock, exact, eps, times=4.0):
    """Each result is at most some times as far from float64 as stock's, or some roundings."""
    for mine, theirs, true in zip(ours, stock, exact, strict=True):
        assert mine.shape == true.shape
        scale = float(true.abs().max()) + 1e-30
        mine_off = float((mine.double() - true).abs().max()) / scale
        theirs_off = float((theirs.double() - true).abs().max()) / scale
        assert mine_off <= max(times * theirs_off, 16 * eps), (mine_off, theirs_off)


@pytest.mark.parametrize("hub", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(LAYERS))
def test_accelerated(name, dtype, hub, device):
    if hub and name in ("PNAConv", "EdgeConv"):
        pytest.skip("covered by the others")
    if dtype is torch.bfloat16 and name in ("PNAConv", "EdgeConv"):
        pytest.skip("their fused form is for float32")
    edges = (hub_edges(30) if hub else random_edges(30, 30, 120)).to(device)
    layer = LAYERS[name]().to(device, dtype)
    x = torch.randn(30, WIDTH, device=device).to(dtype)
    upstream = torch.randn_like(layer(x, edges))
    exact_layer = copy.deepcopy(layer).double()
    exact = _run(exact_layer, x.double(), edges, upstream.double())
    stock = _run(layer, x, edges, upstream)
    edgeweave.pyg.reset_report()
    with edgeweave.accelerated():
        ours = _run(layer, x, edges, upstream)
        again = _run(layer, x, edges, upstream)
    site = edgeweave.pyg.report()[FUSED[name]]
    assert site.fused == 2
    assert site.reasons == {}
    check_as_close_as_stock(ours, stock, exact, float(torch.finfo(dtype).eps))
    for first, second in zip(ours[:2], again[:2], strict=True):
        assert torch.equal(first, second)


def test_helpers_are_fused(device):
    edges = random_edges(30, 30, 120).to(device)
    src = torch.randn(120, 4, device=device, requires_grad=True)
    from torch_geometric import utils

    edgeweave.pyg.reset_report()
    with edgeweave.accelerated():
        utils.scatter(src, edges[1], 0, 30, "mean").sum().backward()
        utils.softmax(src, edges[1], num_nodes=30)
    report = edgeweave.pyg.report()
    assert report["utils.scatter"].fused == 1
    assert report["utils.softmax"].fused == 1


def test_tensors_on_two_devices_go_to_stock(gpu):
    layer = layers.SAGEConv(WIDTH, 8).to(gpu)
    x, edges = torch.randn(30, WIDTH, device=gpu), random_edges(30, 30, 120)
    edgeweave.pyg.reset_report()
    with edgeweave.accelerated(), pytest.raises(RuntimeError):
        layer(x, edges)
    assert edgeweave.pyg.report()["SAGEConv"].fused == 0


def test_training_agrees_with_stock(gpu):
    """Twenty steps of Adam on a network of three kinds of layers."""
    edges = random_edges(500, 500, 6000).to(gpu)
    x = torch.randn(500, WIDTH, device=gpu)
    target = torch.randint(0, 5, (500,), device=gpu)
    losses = {}
    for name in ("stock", "ours"):
        torch.manual_seed(3)
        net = torch.nn.ModuleList(
            [layers.GCNConv(WIDTH, 16), layers.SAGEConv(16, 16), layers.GATConv(16, 5)]
        ).to(gpu)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        losses[name] = []
        context = edgeweave.accelerated() if name == "ours" else torch.enable_grad()
        with context:
            for _ in range(20):
                optimizer.zero_grad()
                h = x
                for conv in net:
                    h = conv(h.relu(), edges)
                loss = torch.nn.functional.cross_entropy(h, target)
                loss.backward()
                optimizer.step()
                losses[name].append(loss.item())
    assert losses["ours"] == pytest.approx(losses["stock"], rel=1e-3)
