"""`layer.edgeweave = False`: one layer, or all of a class, on PyG's own code and nothing else."""

import copy
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    PNAConv,
    RGCNConv,
    SAGEConv,
)

import edgeweave.pyg

REASON = "edgeweave = False is set on the layer or its class"


def layers() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    types = torch.randint(0, 3, (200,))
    return {
        "SAGEConv": (SAGEConv(6, 5), ()),
        "GATConv": (GATConv(6, 5), ()),
        "GATv2Conv": (GATv2Conv(6, 5), ()),
        "PNAConv": (PNAConv(6, 5, ["mean", "std"], ["identity"], torch.ones(4)), ()),
        "RGCNConv": (RGCNConv(6, 5, 3), (types,)),
        "EdgeConv": (EdgeConv(nn.Sequential(nn.Linear(12, 5))), ()),
    }


@pytest.mark.parametrize("name", list(layers()))
def test_a_layer_left_out_runs_nothing_of_ours(name, edge_index):
    layer, more = layers()[name]
    x = torch.randn(40, 6)
    stock = layer(x, edge_index, *more)
    layer.edgeweave = False
    with edgeweave.pyg.accelerated():
        assert torch.equal(layer(x, edge_index, *more), stock)
    report = edgeweave.pyg.report()
    assert REASON in report[name].reasons
    assert sum(site.fused for site in report.sites) == 0


def test_the_others_stay_fused(edge_index, only_fused):
    x = torch.randn(40, 6)
    out, fused = GCNConv(6, 5), SAGEConv(6, 5)
    out.edgeweave = False
    with edgeweave.pyg.accelerated():
        out(x, edge_index)
        fused(x, edge_index)
    only_fused("SAGEConv", 1)
    assert edgeweave.pyg.report()["GCNConv"].fused == 0


def test_copies_keep_it_and_it_can_be_taken_back(edge_index, only_fused):
    x = torch.randn(40, 6)
    layer = SAGEConv(6, 5)
    layer.edgeweave = False
    with edgeweave.pyg.accelerated():
        for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            again(x, edge_index)
        assert edgeweave.pyg.report()["SAGEConv"].fused == 0
        del layer.edgeweave
        layer(x, edge_index)
    assert edgeweave.pyg.report()["SAGEConv"].fused == 1


class Left(SAGEConv):
    edgeweave = False


def test_a_class(edge_index):
    with edgeweave.pyg.accelerated():
        Left(6, 5)(torch.randn(40, 6), edge_index)
    assert REASON in edgeweave.pyg.report()[f"{__name__}.Left"].reasons


def test_an_error_inside_does_not_leave_others_out(edge_index, only_fused):
    layer = GATConv(6, 5)
    layer.edgeweave = False
    with edgeweave.pyg.accelerated():
        with pytest.raises(RuntimeError):
            layer(torch.randn(40, 7), edge_index)
        SAGEConv(6, 5)(torch.randn(40, 6), edge_index)
    only_fused("SAGEConv", 1)


def test_other_threads_are_not_left_out(edge_index):
    x = torch.randn(40, 6)
    fused = SAGEConv(6, 5)

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: fused(x[:, :6], edge_index % 40))
            thread.start()
            thread.join()
            return x

    layer = EdgeConv(Slow())
    layer.edgeweave = False
    with edgeweave.pyg.accelerated():
        layer(x.repeat(5, 1), edge_index)
    assert edgeweave.pyg.report()["SAGEConv"].fused == 1
