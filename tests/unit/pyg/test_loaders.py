"""Mini-batches of PyG's loaders are planned without sorting, and computed as by stock."""

import copy
import gc

import pytest
import torch
import torch_geometric.typing
from _neighbor_sampler import NumpySampler, graph
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import (
    ClusterData,
    ClusterLoader,
    NeighborLoader,
    NodeLoader,
    RandomNodeLoader,
)
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    GraphConv,
    SAGEConv,
)
from torch_geometric.utils import trim_to_layer

import edgeweave.pyg
from edgeweave._plan import _cache, plan_for_edges
from edgeweave.sparse import Graph, cache_clear, cache_info, set_cache_limit

F, HIDDEN, CLASSES = 6, 8, 4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # small batches; threads would wait for each other


def double(data):
    """Features in float64, so that what is compared differs by a wrong edge or not at all."""
    return data.apply(lambda t: t.double() if t.is_floating_point() else t)


class Net(nn.Module):
    """Two layers over one mini-batch; with `trim`, without what the second one does not need."""

    def __init__(self, make, trim: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make(F, HIDDEN), make(HIDDEN, CLASSES)])
        self.trim = trim

    def forward(self, x: Tensor, edge_index: Tensor, batch: Data) -> Tensor:
        for i, layer in enumerate(self.layers):
            if self.trim:
                x, edge_index, _ = trim_to_layer(
                    i, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index
                )
            x = layer(x, edge_index)
            if i == 0:
                x = x.relu()
        return x


LAYERS = {
    "SAGEConv": SAGEConv,
    "GCNConv": GCNConv,
    "GraphConv": GraphConv,
    "GATConv": GATConv,
    "GINConv": lambda a, b: GINConv(nn.Linear(a, b)),
}


def node_batches(batch_size: int = 40, **options) -> list[Data]:
    data = double(graph())
    sampler = NumpySampler(data, [4, 3])
    return list(NodeLoader(data, sampler, batch_size=batch_size, **options))


def test_batches_have_the_structure_of_neighbor_loader():
    """Else the tests below would say nothing about it."""
    data = graph()
    for batch in NodeLoader(data, NumpySampler(data, [4, 3]), batch_size=40):
        assert torch.equal(batch.n_id[: batch.batch_size], batch.input_id)
        assert torch.equal(batch.x, data.x[batch.n_id])
        assert sum(batch.num_sampled_nodes) == batch.num_nodes == batch.n_id.unique().numel()
        assert sum(batch.num_sampled_edges) == batch.num_edges
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
        inside = batch.num_nodes - batch.num_sampled_nodes[-1]
        assert int(batch.edge_index[1].max()) < inside, "the last hop has no edges of its own"
        assert int(torch.bincount(batch.edge_index[1]).max()) <= 4


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_neighbour_batches_as_stock(name, trim, same_as_stock, only_fused):
    net = Net(LAYERS[name], trim).double()
    batches = node_batches()
    for batch in batches:
        x = batch.x.clone().requires_grad_()
        same_as_stock(
            lambda x=x, batch=batch: net(x, batch.edge_index, batch)[: batch.batch_size],
            [x, *net.parameters()],
        )
    only_fused(name, 2 * len(batches))


def test_trimming_leaves_the_seeds_as_they_are():
    """GraphConv adds up neighbours: without its last hop, a batch gives its seeds the same."""
    net = Net(GraphConv).double()
    with edgeweave.pyg.accelerated():
        for batch in node_batches():
            whole = net(batch.x, batch.edge_index, batch)[: batch.batch_size]
            net.trim = True
            trimmed = net(batch.x, batch.edge_index, batch)[: batch.batch_size]
            net.trim = False
            torch.testing.assert_close(trimmed, whole, rtol=1e-12, atol=1e-12)


def test_sampled_edges_are_recognised_as_sorted():
    for batch in node_batches():
        nodes = batch.num_nodes
        assert Graph(batch.edge_index, (nodes, nodes)).is_sorted
        for layer in range(2):
            x, edges, _ = trim_to_layer(
                layer, batch.num_sampled_nodes, batch.num_sampled_edges, batch.x, batch.edge_index
            )
            assert plan_for_edges(edges, x.size(0), x.size(0)).is_sorted
        mixed = batch.edge_index[:, torch.randperm(batch.num_edges)]
        assert not Graph(mixed, (nodes, nodes)).is_sorted


def test_bipartite_blocks(same_as_stock, only_fused):
    """Sources and destinations of one hop, as loaders of older PyG and DGL hand them out."""
    layer = SAGEConv((F, F), CLASSES).double()
    batches = node_batches()
    for batch in batches:
        sources = batch.num_nodes
        destinations = sources - batch.num_sampled_nodes[-1]
        x = batch.x.clone().requires_grad_()
        same_as_stock(
            lambda x=x, e=batch.edge_index, n=destinations: layer((x, x[:n]), e),
            [x, *layer.parameters()],
        )
        assert plan_for_edges(batch.edge_index, sources, destinations).is_sorted
    only_fused("SAGEConv", len(batches))


# ---- parts of a graph --------------------------------------------------------------------------


class Chunks(ClusterData):
    """Clusters of consecutive nodes: METIS needs `pyg_lib` or `torch_sparse`."""

    def _metis(self, edge_index: Tensor, num_nodes: int) -> Tensor:
        return torch.arange(num_nodes) * self.num_parts // num_nodes


def part_loaders():
    data = double(graph())
    yield RandomNodeLoader(data, num_parts=5, shuffle=True)
    for order in ("csr", "csc"):
        parts = Chunks(data, num_parts=10, log=False, sparse_format=order)
        yield ClusterLoader(parts, batch_size=3, shuffle=True)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["random", "by row", "by column"])
def test_parts_as_stock(which, same_as_stock, only_fused):
    loader = list(part_loaders())[which]
    net = Net(GCNConv).double()
    count = 0
    for batch in loader:
        batch.x.requires_grad_()
        same_as_stock(lambda b=batch: net(b.x, b.edge_index, b), [batch.x, *net.parameters()])
        assert batch.num_edges
        count += 1
    only_fused("GCNConv", 2 * count)
    assert count in (4, 5)


def test_clusters_by_column_are_sorted():
    for batch in list(part_loaders())[2]:
        assert plan_for_edges(batch.edge_index, batch.num_nodes, batch.num_nodes).is_sorted


@pytest.mark.skipif(
    torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE,
    reason="a package is installed that samples for PyG",
)
@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without a 'pyg-lib':UserWarning")
def test_loaders_that_need_other_packages_say_so():
    """What the sampler and the clusters of this file stand in for."""
    data = graph()
    with edgeweave.pyg.accelerated():
        with pytest.raises(ImportError, match=r"pyg-lib.*torch-sparse"):
            next(iter(NeighborLoader(data, [4, 3], batch_size=40)))
        with pytest.raises(ImportError, match=r"pyg-lib.*torch-sparse"):
            ClusterData(data, num_parts=4, log=False)


# ---- the cache ---------------------------------------------------------------------------------


def test_the_cache_stays_bounded_over_many_batches(empty_cache):
    limit = 200_000
    set_cache_limit(limit)
    net = Net(SAGEConv, trim=True).double()
    most = 0
    with edgeweave.pyg.accelerated():
        for seed in range(6):
            for batch in node_batches(shuffle=True, generator=torch.Generator().manual_seed(seed)):
                net(batch.x, batch.edge_index, batch).sum().backward()
                info = cache_info()
                assert info.bytes <= limit
                most = max(most, info.entries)
    info = cache_info()
    # Two plans for each of 48 batches: the whole one and that of the second layer.
    assert info.misses == 2 * 6 * 8
    assert 2 < most < info.misses / 2, "the limit did not make anything go"


def test_batches_that_are_gone_leave_nothing_behind(empty_cache):
    net = Net(GCNConv).double()
    with edgeweave.pyg.accelerated():
        for batch in node_batches():
            net(batch.x, batch.edge_index, batch).sum().backward()
        del batch
        gc.collect()
        # What leads from a tensor to a plan goes with the tensor; plans stay until the limit, for
        # equal edges in a new tensor.
        kept = {id(link.owner()) for links in _cache._links.values() for link in links}
        assert id(None) not in kept
        before = cache_info()
        for batch in node_batches():
            net(batch.x, batch.edge_index, batch)
        after = cache_info()
    assert after.misses == before.misses
    assert after.entries == before.entries
    cache_clear()
    assert cache_info().entries == 0


def test_training_over_batches_gives_the_same_model():
    """Two epochs of Adam: every step's difference would go into all that follow."""
    data = double(graph())
    sampler = NumpySampler(data, [4, 3])
    start = Net(SAGEConv, trim=True).double()

    def train(net: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(2):
            for batch in NodeLoader(data, sampler, batch_size=40):
                optimizer.zero_grad()
                out = net(batch.x, batch.edge_index, batch)[: batch.batch_size]
                nn.functional.cross_entropy(out, batch.y[: batch.batch_size]).backward()
                optimizer.step()
        return [p.detach() for p in net.parameters()]

    stock = train(copy.deepcopy(start))
    with edgeweave.pyg.accelerated():
        ours = train(copy.deepcopy(start))
    for a, b, first in zip(ours, stock, start.parameters(), strict=True):
        # Adam divides by the root of squared gradients, which near zero blows rounding up.
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
        assert not torch.allclose(a, first)


WORKERS = """
import sys, warnings
import torch
import _neighbor_sampler
from _neighbor_sampler import NumpySampler, graph
warnings.simplefilter("ignore")  # of fork beside threads, and of torch.jit
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import SAGEConv, SimpleConv
import edgeweave, edgeweave.pyg


def smooth(batch):
    # In the worker: a forked one is accelerated as its parent is, a spawned one is not.
    batch.smooth = SimpleConv("mean")(batch.x, batch.edge_index)
    batch.fused = edgeweave.pyg.report()["SimpleConv"].fused
    return batch


def main(how):
    torch.set_num_threads(2)
    data = graph()
    layer = SAGEConv(6, 4)
    stock = SimpleConv("mean")
    loader = NodeLoader(data, NumpySampler(data, [4, 3]), batch_size=60, num_workers=2,
                        transform=smooth, filter_per_worker=True, multiprocessing_context=how)
    inputs = list(NodeLoader(data, NumpySampler(data, [4, 3]), batch_size=60))
    expected = [(stock(b.x, b.edge_index), layer(b.x, b.edge_index)) for b in inputs]
    with edgeweave.accelerated():
        layer(inputs[0].x, inputs[0].edge_index).sum().backward()  # the parent's cache and threads
        edgeweave.pyg.reset_report()
        seen = 0
        for batch, plain, (smoothed, out) in zip(loader, inputs, expected, strict=True):
            assert torch.equal(batch.edge_index, plain.edge_index)
            torch.testing.assert_close(batch.smooth, smoothed)
            torch.testing.assert_close(layer(batch.x, batch.edge_index), out)
            assert (batch.fused > 0) == (how == "fork"), batch.fused
            seen += 1
        assert edgeweave.pyg.report()["SAGEConv"].fused == seen == 5
    print("batches", seen)


if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_worker_processes(how, run_python, tmp_path):
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    assert "batches 5" in run_python(script=str(script), args=(how,)).stdout
