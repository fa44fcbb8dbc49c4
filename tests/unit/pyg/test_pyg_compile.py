"""`torch.compile` of an accelerated model: `mm` and `scatter_reduce` are traced, nothing breaks."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import utils
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


def targets_of(module: nn.Module, *inputs: Tensor) -> list[str]:
    """Return the names of the functions in the graphs that dynamo makes of a module."""
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op != "placeholder")
        return graph

    torch._dynamo.reset()
    torch.compile(module, backend=backend)(*inputs)
    return names


SQUARE = {
    "SAGEConv": SAGEConv,
    "GraphConv": GraphConv,
    "max": partial(SAGEConv, aggr="max"),
    "target_to_source": partial(SAGEConv, flow="target_to_source"),
}


@pytest.mark.parametrize("name", SQUARE)
def test_kernels_are_in_the_graph(name, inputs):
    net = Net(SQUARE[name])
    with edgeweave.pyg.accelerated():
        names = targets_of(net, *inputs)
    assert names.count("edgeweave.mm") == 2
    assert names.count("edgeweave.scatter") == 1
    assert not [name for name in names if "index_select" in name or "scatter_add" in name]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", SQUARE)
def test_full_graph(name, dynamic, inputs):
    net = Net(SQUARE[name])
    stock = net(*inputs)
    (stock_grad,) = torch.autograd.grad(stock.square().sum(), inputs[0])
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with edgeweave.pyg.accelerated():
        ours = compiled(*inputs)
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


def test_bipartite_traces_stock_code(inputs):
    conv, x = SAGEConv((F, F), F), (torch.randn(20, F), torch.randn(N, F))
    stock = conv(x, inputs[1])
    with edgeweave.pyg.accelerated():
        names = targets_of(conv, x, inputs[1])
        torch.testing.assert_close(conv(x, inputs[1]), stock, rtol=1e-5, atol=1e-5)
    assert "edgeweave.mm" not in names
    assert "index_select" in names


def test_scatter_without_dim_size(inputs):
    class Sums(nn.Module):
        def forward(self, src: Tensor, index: Tensor) -> Tensor:
            return utils.scatter(src, index)

    src, index = torch.randn(5, 2), torch.tensor([0, 1, 0, 1, 2])
    stock = utils.scatter(src, index)
    with edgeweave.pyg.accelerated():
        torch.testing.assert_close(torch.compile(Sums(), backend="eager")(src, index), stock)


def test_exported_program_does_not_need_edgeweave(inputs):
    net, x = Net(SAGEConv), inputs[0].detach()
    stock = net(x, *inputs[1:])
    with edgeweave.pyg.accelerated():
        program = torch.export.export(net, (x, *inputs[1:]))
    assert "edgeweave" not in program.graph_module.code
    torch.testing.assert_close(program.module()(x, *inputs[1:]), stock)


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
