"""The messages of layers that are not fused: gathered on our kernels for the sake of backward."""

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GENConv, GMMConv, MessagePassing, ResGatedGraphConv

import edgeweave.pyg
from edgeweave.pyg import _functions


@pytest.fixture(autouse=True)
def _every_size_is_worth_it(monkeypatch):
    monkeypatch.setattr(_functions, "_WORTH_A_PLAN", 0)


class Own(MessagePassing):
    """A message that nobody can know."""

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        return (x_j * x_i + e).sin()


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_own_message(flow, edge_index, same_as_stock):
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    e = torch.randn(200, 6, dtype=torch.float64, requires_grad=True)
    layer = Own(flow=flow)
    same_as_stock(lambda: layer(x, edge_index, e), [x, e])
    assert edgeweave.pyg.report()["gather"].fused == 2
    assert edgeweave.pyg.report()["SumAggregation"].fused == 1
    # Not compared with stock: the backward of torch's scatter_add is wrong for an int32 index.
    with edgeweave.pyg.accelerated():
        grads = [
            torch.autograd.grad(layer(x, edges, e).sin().sum(), (x, e))
            for edges in (edge_index, edge_index.int())
        ]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("node_dim", [0, -2, 1])
def test_node_dim(node_dim, edge_index, same_as_stock):
    shape = (40, 3, 5) if node_dim == 0 else (3, 40, 5)
    edge_shape = (200, 3, 5) if node_dim == 0 else (3, 200, 5)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    e = torch.randn(edge_shape, dtype=torch.float64)
    layer = Own(node_dim=node_dim)
    same_as_stock(lambda: layer(x, edge_index, e), [x])
    assert edgeweave.pyg.report()["gather"].fused == 2


@pytest.mark.parametrize("name", ["GMMConv", "ResGatedGraphConv", "GENConv"])
def test_layers_of_pyg(name, edge_index, same_as_stock):
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    attr = torch.randn(200, 3, dtype=torch.float64)
    layer = {
        "GMMConv": lambda: GMMConv(6, 4, dim=3, kernel_size=2),
        "ResGatedGraphConv": lambda: ResGatedGraphConv(6, 4),
        "GENConv": lambda: GENConv(6, 4, edge_dim=3),
    }[name]().double()
    arguments = (x, edge_index) if name == "ResGatedGraphConv" else (x, edge_index, attr)
    same_as_stock(lambda: layer(*arguments), [x, *layer.parameters()])
    assert edgeweave.pyg.report()["gather"].fused >= 1


def test_second_derivatives(edge_index):
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    layer = Own()

    def run() -> Tensor:
        (first,) = torch.autograd.grad(
            layer(x, edge_index, x.new_ones(1)).sum(), x, create_graph=True
        )
        return torch.autograd.grad(first.square().sum(), x)[0]

    stock = run()
    with edgeweave.pyg.accelerated():
        torch.testing.assert_close(run(), stock)
    assert edgeweave.pyg.report()["gather"].fused == 2


def test_where_torch_is_as_good_it_is_left_alone(edge_index, monkeypatch):
    x = torch.randn(40, 6)
    layer = Own()
    with edgeweave.pyg.accelerated():
        layer(x, edge_index, x.new_ones(1))
        with torch.no_grad():
            layer(x.clone().requires_grad_(), edge_index, x.new_ones(1))
        monkeypatch.setattr(_functions, "_WORTH_A_PLAN", 200 * 6 + 1)
        layer(x.clone().requires_grad_(), edge_index, x.new_ones(1))
    assert edgeweave.pyg.report()["gather"].fused == 0


def test_an_index_out_of_range_raises_as_stock(edge_index):
    x = torch.randn(40, 6, requires_grad=True)
    edge_index[0, 7] = 40
    layer = Own()
    with pytest.raises(IndexError) as stock:
        layer(x, edge_index, x.new_ones(1))
    with edgeweave.pyg.accelerated(), pytest.raises(IndexError) as ours:
        layer(x, edge_index, x.new_ones(1))
    assert str(ours.value) == str(stock.value)
    assert "larger than 39" in str(ours.value)
