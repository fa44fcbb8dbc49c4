"""`torch.compile` of an accelerated model: PyG's own code is traced, nothing breaks."""

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, GraphConv, SAGEConv, global_mean_pool

import edgeweave.pyg

N, E, F = 12, 60, 4


class Net(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.first, self.second = make(F, 6), make(6, F)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        return global_mean_pool(self.second(x, edge_index), batch, size=3)


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(N, F, requires_grad=True)
    return x, torch.randint(0, N, (2, E)), torch.arange(3).repeat_interleave(4)


@pytest.mark.parametrize("make", [SAGEConv, GraphConv])
def test_full_graph(make, inputs):
    net = Net(make)
    stock = net(*inputs)
    (stock_grad,) = torch.autograd.grad(stock.square().sum(), inputs[0])
    with edgeweave.pyg.accelerated():
        ours = torch.compile(net, backend="aot_eager", fullgraph=True)(*inputs)
        (our_grad,) = torch.autograd.grad(ours.square().sum(), inputs[0])
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_grad, stock_grad, rtol=1e-5, atol=1e-5)


# dynamo looks at `.grad` of what crosses a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("make", [GCNConv, GATConv])
def test_layers_that_break_the_graph_in_stock_pyg(make, inputs):
    net = Net(make)
    stock = net(*inputs)
    with edgeweave.pyg.accelerated():
        ours = torch.compile(net, backend="aot_eager")(*inputs)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)


def test_compiled_before_and_called_in_every_state(inputs):
    net = Net(SAGEConv)
    stock = net(*inputs)
    compiled = torch.compile(net, backend="eager")
    torch.testing.assert_close(compiled(*inputs), stock)
    with edgeweave.pyg.accelerated():
        torch.testing.assert_close(compiled(*inputs), stock)
    torch.testing.assert_close(compiled(*inputs), stock)


def test_eager_is_still_fused_after_compiling(inputs):
    net = Net(SAGEConv)
    with edgeweave.pyg.accelerated():
        torch.compile(net, backend="eager")(*inputs)
        edgeweave.pyg.reset_report()
        net(*inputs)
    assert edgeweave.pyg.report()["SAGEConv"].fused == 2
