"""`edgeweave.optimize` on stock PyG layers: no graph break, two compilations, trains as eager."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_geometric
from _compiled_layers import LAYERS, F, Net, breaks, gradients, ops_of
from _neighbor_sampler import NumpySampler, graph
from torch import Tensor, nn
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import GCNConv, GINEConv, RGCNConv

import edgeweave
from edgeweave._plan import _edge_network
from edgeweave.compile._record import recording

pytestmark = pytest.mark.usefixtures("fresh_compiler")

_INDUCTOR = ("SAGE", "GCN", "GAT", "PNA")  # each takes up to half a minute of C++ compiling


def batch(name: str, nodes: int = 20, edges: int = 90) -> tuple[Tensor, ...]:
    index = torch.randint(0, nodes - 1, (2, edges))
    index[:, 0] = 1  # a self-loop
    weight = (torch.rand(edges),) if "weighted" in name else ()
    return torch.randn(nodes, F), index, *weight


def assert_as_close_as_eager(net: nn.Module, compiled: nn.Module, inputs: tuple[Tensor, ...]):
    """Check outputs and gradients by their distance from float64, beside eager's own."""
    ours, eager = gradients(compiled, *inputs), gradients(net, *inputs)
    twin = copy.deepcopy(net).double()
    exact = gradients(twin, *[t.double() if t.is_floating_point() else t for t in inputs])
    for mine, theirs, true in zip(ours, eager, exact, strict=True):
        scale = max(1.0, float(true.abs().max()))
        off = float((theirs.double() - true).abs().max())
        # 64 ulp: two layers of sums with some ten terms, in another order.
        limit = 4 * off + 64 * torch.finfo(torch.float32).eps * scale
        assert float((mine.double() - true).abs().max()) <= limit


CASES = [(name, None) for name in LAYERS]
CASES += [(name, True) for name in ("SAGE", "GCN", "GAT", "GCN, weighted")]


@pytest.mark.parametrize(("name", "dynamic"), CASES)
def test_no_breaks_and_at_most_two_compilations(name, dynamic):
    make, ops = LAYERS[name]
    net = Net(make)
    compiled = edgeweave.optimize(net, engine="eager", dynamic=dynamic)
    with recording() as records:
        for nodes, edges in ((20, 90), (33, 140), (12, 61), (50, 125)):
            assert_as_close_as_eager(net, compiled, batch(name, nodes, edges))
    assert breaks() == {}
    assert len(records) <= (1 if dynamic else 2)
    assert [ops_of(record) for record in records] == [ops] * len(records)


@pytest.mark.parametrize("chosen", [None, False])
def test_rgcn_is_one_graph_whether_or_not_it_would_choose_by_the_edges(monkeypatch, chosen):
    monkeypatch.setattr(torch_geometric.backend, "use_segment_matmul", chosen)
    net = Net(lambda: RGCNConv(F, F, num_relations=3))
    compiled = edgeweave.optimize(net, engine="eager")
    with recording() as records, torch.no_grad():
        for nodes, edges in ((20, 90), (33, 140), (12, 61)):
            inputs = *batch("", nodes, edges), torch.randint(0, 3, (edges,))
            torch.testing.assert_close(compiled(*inputs), net(*inputs), rtol=1e-4, atol=1e-5)
    assert breaks() == {}
    assert [ops_of(record) for record in records] == [{"mm": 6}, {"mm": 6}]


@pytest.mark.parametrize("name", ["SAGE", "GIN", "GCN", "GAT", "Transformer", "EdgeConv"])
def test_with_the_drop_in_as_well(name):
    make, ops = LAYERS[name]
    net, inputs = Net(make), batch(name)
    stock = gradients(net, *inputs)
    with edgeweave.accelerated(), recording() as records:
        ours = gradients(edgeweave.optimize(net, engine="eager"), *inputs)
    assert breaks() == {}
    assert set(ops_of(records[0])) <= set(ops) | {"gather"}
    for mine, theirs in zip(ours, stock, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["EdgeConv, two layers", "EdgeConv, mean", "GINE"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_networks_of_edges(monkeypatch, name, dynamic):
    """Graphs of many tiles, each with a node that has no edge."""
    monkeypatch.setattr(_edge_network, "_MOST_EDGES", 16)
    make = LAYERS[name][0] if name in LAYERS else lambda: GINEConv(nn.Linear(F, F), edge_dim=3)
    net = Net(make)
    compiled = edgeweave.optimize(net, engine="eager", dynamic=dynamic)
    with recording() as records:
        for nodes, edges in ((20, 90), (33, 140), (12, 61), (50, 175)):
            more = (torch.randn(edges, 3),) if name == "GINE" else ()
            assert_as_close_as_eager(net, compiled, (*batch(name, nodes, edges), *more))
    assert breaks() == {}
    assert len(records) <= (1 if dynamic else 2)
    assert all(ops_of(record)["edge_network"] == 2 for record in records)
    assert all("gather" not in ops_of(record) for record in records)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_inductor_trains_networks_of_edges(monkeypatch):
    monkeypatch.setattr(_edge_network, "_MOST_EDGES", 16)
    net = Net(LAYERS["EdgeConv, two layers"][0])
    compiled = edgeweave.optimize(net, engine="inductor", dynamic=True)
    with recording() as records:
        for nodes, edges in ((20, 90), (33, 140)):
            assert_as_close_as_eager(net, compiled, batch("", nodes, edges))
    (record,) = records
    assert (record.engine, ops_of(record)["edge_network"]) == ("inductor", 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", _INDUCTOR)
def test_inductor_trains_the_same(name):
    make, ops = LAYERS[name]
    net = Net(make)
    compiled = edgeweave.optimize(net, engine="inductor", dynamic=True)
    with recording() as records:
        for nodes, edges in ((20, 90), (33, 140)):
            assert_as_close_as_eager(net, compiled, batch(name, nodes, edges))
    (record,) = records
    assert (record.engine, ops_of(record)) == ("inductor", ops)


@pytest.mark.parametrize("name", ["GCN", "SAGE", "GATv2", "PNA"])
def test_adam_takes_the_same_steps(name):
    stock = Net(LAYERS[name][0])
    ours = copy.deepcopy(stock)
    compiled = edgeweave.optimize(ours, training=True, engine="eager")
    inputs = batch(name)
    labels = torch.randint(0, F, (20,))
    losses: list[list[float]] = []
    for model, run in ((stock, stock), (ours, compiled)):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses.append([])
        for _ in range(10):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run(*inputs), labels)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0]
    # Adam divides by the gradient's size: rounding of tiny gradients grows to 1e-3 of a step.
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["GCN", "SAGE", "GAT", "GIN"])
def test_autocast_around_the_model(name):
    net, inputs = Net(LAYERS[name][0]), batch(name)
    compiled = edgeweave.optimize(net, engine="eager")
    with torch.autocast("cpu", torch.bfloat16), recording() as records:
        ours = gradients(compiled, *inputs)
    with torch.autocast("cpu", torch.bfloat16):
        eager = gradients(net, *inputs)
    assert breaks() == {}
    assert ops_of(records[0]) == LAYERS[name][1]
    for mine, theirs in zip(ours, eager, strict=True):
        assert mine.dtype is theirs.dtype
        # 8 bits; stock rounds each partial sum, the kernels a sum once.
        size = float(theirs.abs().max())
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=0.06 * size)


def test_the_model_of_an_epoch_of_batches_compiles_twice():
    """Neighbour batches: other sizes each time, edges that end in the first nodes."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    graphs = [
        Data(x=torch.randn(n, F), edge_index=torch.randint(0, n, (2, 3 * n)))
        for n in torch.randint(4, 12, (60,)).tolist()
    ]
    net = Net(lambda: GCNConv(F, F))
    compiled = edgeweave.optimize(net, engine="eager")
    with recording() as records, torch.no_grad():
        for each in DataLoader(graphs, batch_size=5):
            out = compiled(each.x, each.edge_index)
            torch.testing.assert_close(out, net(each.x, each.edge_index), rtol=1e-4, atol=1e-5)
    assert len(records) == 2
    assert breaks() == {}


@pytest.mark.parametrize("name", ["SAGE", "GCN", "GAT"])
def test_an_epoch_of_a_neighbour_loader_trains_with_at_most_two_compilations(name):
    """Sampled neighbourhoods: each batch has other numbers of nodes and edges."""
    data = graph(width=F)
    loader = NodeLoader(data, NumpySampler(data, [4, 3]), batch_size=40)
    net = Net(LAYERS[name][0])
    compiled = edgeweave.optimize(net, engine="eager")
    sizes = set()
    with recording() as records:
        for batch in loader:
            sizes.add((batch.num_nodes, batch.num_edges))
            mine = gradients(compiled, batch.x, batch.edge_index)
            theirs = gradients(net, batch.x, batch.edge_index)
            for ours, stock in zip(mine, theirs, strict=True):
                torch.testing.assert_close(ours, stock, rtol=1e-3, atol=1e-4)
    assert len(sizes) > 4
    assert len(records) <= 2
    assert breaks() == {}
