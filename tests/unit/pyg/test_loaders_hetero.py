"""Mini-batches of several kinds of nodes, and of many small graphs, are computed as by stock."""

import pytest
import torch
from _neighbor_sampler import NumpySampler, hetero_graph, molecules
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader, NodeLoader
from torch_geometric.nn import (
    GATConv,
    GINConv,
    GINEConv,
    GraphConv,
    HeteroConv,
    SAGEConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
    to_hetero,
)
from torch_geometric.utils import trim_to_layer

import edgeweave.pyg
from edgeweave._plan import plan_for_edges

F, HIDDEN, CLASSES = 6, 8, 4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # small batches; threads would wait for each other


def double(data):
    """Features in float64, so that what is compared differs by a wrong edge or not at all."""
    return data.apply(lambda t: t.double() if t.is_floating_point() else t)


# ---- several kinds of nodes --------------------------------------------------------------------


def hetero_batches() -> list[object]:
    data = double(hetero_graph())
    sampler = NumpySampler(data, [3, 3])
    return list(NodeLoader(data, sampler, input_nodes="user", batch_size=30))


class HeteroNet(nn.Module):
    """Two layers of `HeteroConv`, a different layer for each relation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            HeteroConv(
                {
                    ("user", "likes", "item"): SAGEConv((-1, -1), HIDDEN),
                    ("item", "liked_by", "user"): GATConv((-1, -1), HIDDEN, add_self_loops=False),
                    ("user", "knows", "user"): GraphConv(-1, HIDDEN, aggr="mean"),
                    ("tag", "on", "item"): GraphConv((-1, -1), HIDDEN, aggr="max"),
                    ("item", "has", "tag"): SAGEConv((-1, -1), HIDDEN, aggr="min"),
                },
                aggr="sum",
            )
            for _ in range(2)
        )

    def forward(self, x, edge_index, batch, trim: bool = False):
        for i, layer in enumerate(self.layers):
            if trim:
                x, edge_index, _ = trim_to_layer(
                    i, batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict, x, edge_index
                )
            x = {kind: value.tanh() for kind, value in layer(x, edge_index).items()}
        return x["user"]


@pytest.mark.parametrize("trim", [False, True])
def test_hetero_batches_as_stock(trim, same_as_stock):
    batches = hetero_batches()
    net = HeteroNet().double()
    net(batches[0].x_dict, batches[0].edge_index_dict, batches[0])  # sizes the lazy layers
    for batch in batches:
        x = {kind: value.clone().requires_grad_() for kind, value in batch.x_dict.items()}
        same_as_stock(
            lambda x=x, batch=batch: net(x, batch.edge_index_dict, batch, trim)[
                : batch["user"].batch_size
            ],
            [*x.values(), *net.parameters()],
        )
    report = edgeweave.pyg.report()
    times = 2 * len(batches)
    assert {e.site: (e.fused, dict(e.reasons)) for e in report.sites} == {
        "SAGEConv": (2 * times, {}),
        "GATConv": (times, {}),
        "GraphConv": (2 * times, {}),
    }


def test_hetero_edges_are_recognised_as_sorted():
    seen = 0
    for batch in hetero_batches():
        for (src, _, dst), edges in batch.edge_index_dict.items():
            assert plan_for_edges(edges, batch[src].num_nodes, batch[dst].num_nodes).is_sorted
            seen += edges.size(1)
    assert seen > 1000


@pytest.mark.parametrize("when", ["before", "after"])
def test_to_hetero(when, same_as_stock, only_fused):
    """A model of one kind of nodes that PyG turned into one of several, before or accelerated."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = SAGEConv((-1, -1), HIDDEN), SAGEConv((-1, -1), CLASSES)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.second(self.first(x, edge_index).relu(), edge_index)

    data = double(hetero_graph())
    if when == "before":
        net = to_hetero(Plain(), data.metadata()).double()
    else:
        with edgeweave.pyg.accelerated():
            net = to_hetero(Plain(), data.metadata()).double()
    net(data.x_dict, data.edge_index_dict)
    x = {kind: value.clone().requires_grad_() for kind, value in data.x_dict.items()}
    edgeweave.pyg.reset_report()
    same_as_stock(
        lambda: torch.cat(list(net(x, data.edge_index_dict).values())),
        [*x.values(), *net.parameters()],
    )
    only_fused("SAGEConv", 2 * 5)


# ---- many small graphs -------------------------------------------------------------------------


class MoleculeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GINEConv(nn.Linear(F, HIDDEN), edge_dim=3)
        self.second = GINConv(nn.Linear(HIDDEN, HIDDEN))
        self.out = nn.Linear(3 * HIDDEN, 1)

    def forward(self, batch: Data) -> Tensor:
        x = self.first(batch.x, batch.edge_index, batch.edge_attr).tanh()
        x = self.second(x, batch.edge_index).tanh()
        pools = (global_add_pool, global_mean_pool, global_max_pool)
        return self.out(torch.cat([pool(x, batch.batch, batch.num_graphs) for pool in pools], 1))


def test_molecule_batches_as_stock(same_as_stock):
    net = MoleculeNet().double()
    seen = 0
    for batch in DataLoader([double(m) for m in molecules()], batch_size=16):
        batch.x.requires_grad_()
        batch.edge_attr.requires_grad_()
        same_as_stock(lambda b=batch: net(b), [batch.x, batch.edge_attr, *net.parameters()])
        seen += batch.num_graphs
    assert seen == 40
    report = edgeweave.pyg.report()
    assert report["GINConv"].fused == 3
    assert report["utils.scatter"].fused == 9
    assert not report["utils.scatter"].reasons


def test_a_batch_gives_what_its_graphs_give_alone():
    net = MoleculeNet().double().eval()
    graphs = [double(m) for m in molecules(12)]
    with edgeweave.pyg.accelerated():
        together = net(Batch.from_data_list(graphs))
        alone = torch.cat([net(Batch.from_data_list([g])) for g in graphs])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
