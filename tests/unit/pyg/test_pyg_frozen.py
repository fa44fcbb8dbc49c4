"""Edge networks, relations and aggregations against what happens around them.

Hooks on parameters, weights used twice, modules and features edited between forward and backward.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch_geometric.nn import CGConv, EdgeConv, GATv2Conv, GINEConv, PNAConv, RGCNConv, SAGEConv

import edgeweave.pyg
from edgeweave._plan import _edge_network

N, E = 40, 200
TOLERANCE = {"rtol": 1e-11, "atol": 1e-11}  # float64, sums in another order


@pytest.fixture(autouse=True)
def _tiles(monkeypatch):
    monkeypatch.setattr(_edge_network, "_MOST_EDGES", 12)


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.LeakyReLU(), nn.Linear(6, 6), nn.LayerNorm(6))


def both(run: Callable[[], list[Tensor]], site: str) -> None:
    stock = run()
    with edgeweave.pyg.accelerated():
        ours = run()
    assert edgeweave.pyg.report()[site].fused > 0
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


def leaf(rows: int = N, width: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, dtype=torch.float64, generator=generator).requires_grad_()


def edges() -> Tensor:
    return torch.randint(0, N, (2, E), generator=torch.Generator().manual_seed(2))


def grads_of(layer: nn.Module, x: Tensor) -> list[Tensor]:
    out = [t.grad.clone() for t in (x, *layer.parameters())]
    for t in (x, *layer.parameters()):
        t.grad = None
    return out


def layers() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    attr = leaf(E, 3).detach()
    types = torch.arange(E) % 3
    degrees = torch.ones(5)
    return {
        "EdgeConv": (EdgeConv(perceptron()), ()),
        "GATv2Conv": (GATv2Conv(4, 4, heads=2, edge_dim=3), (attr,)),
        "CGConv": (CGConv(4, dim=3), (attr,)),
        "GINEConv": (GINEConv(nn.Linear(4, 4), edge_dim=3), (attr,)),
        "RGCNConv": (RGCNConv(4, 4, 3), (types,)),
        "PNAConv": (PNAConv(4, 4, ["mean", "max", "std"], ["identity"], degrees), ()),
        "SAGEConv": (SAGEConv(4, 4, aggr=["mean", "max", "std"]), ()),
    }


# Of torch: that the gradients it leaves in `.grad` refer to the parameters. They are taken out.
CYCLE = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")


@CYCLE
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", list(layers()))
def test_hooks_on_parameters_and_features_run_once(name, again):
    layer, more = layers()[name]
    layer, x, at = layer.double(), leaf(), edges()
    for parameter in layer.parameters():
        parameter.register_hook(lambda grad: 2 * grad)
    x.register_hook(lambda grad: 3 * grad)

    def run() -> list[Tensor]:
        layer(x, at, *more).sin().sum().backward(create_graph=again)
        return grads_of(layer, x)

    both(run, name)


@pytest.mark.parametrize("name", ["EdgeConv", "RGCNConv", "PNAConv", "SAGEConv"])
def test_twice_the_same_layer_twice_differentiated(name):
    layer, more = layers()[name]
    layer, x, at = layer.double(), leaf(), edges()

    def run() -> list[Tensor]:
        out = layer(x, at, *more)
        out = layer(out[:, :4].tanh(), at, *more)
        leaves = [x, *layer.parameters()]
        first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), x)]

    both(run, name)


@CYCLE
@pytest.mark.parametrize("again", [False, True])
def test_one_linear_layer_used_twice(again):
    shared = nn.Linear(6, 6)
    layer = EdgeConv(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), shared, nn.Tanh(), shared)).double()
    x, at = leaf(), edges()

    def run() -> list[Tensor]:
        layer(x, at).sin().sum().backward(create_graph=again)
        return grads_of(layer, x)

    both(run, "EdgeConv")


@CYCLE
@pytest.mark.parametrize("again", [False, True])
def test_shared_weights_of_the_two_ends(again):
    layer = GATv2Conv(4, 4, heads=2, edge_dim=3, share_weights=True).double()
    x, at, attr = leaf(), edges(), leaf(E, 3).detach()

    def run() -> list[Tensor]:
        layer(x, at, attr).sin().sum().backward(create_graph=again)
        return grads_of(layer, x)

    both(run, "GATv2Conv")


@CYCLE
def test_edge_features_made_of_node_features():
    layer, at, x = GINEConv(nn.Linear(4, 4)).double(), edges(), leaf()

    def run() -> list[Tensor]:
        layer(x, at, x[at[0]] - x[at[1]]).sin().sum().backward(create_graph=True)
        return grads_of(layer, x)

    both(run, "GINEConv")


def _slope(layer: EdgeConv) -> None:
    layer.nn[1].negative_slope = 0.9


def _frozen(layer: EdgeConv) -> None:
    layer.requires_grad_(False)


def _exchanged(layer: EdgeConv) -> None:
    layer.nn[2].weight = nn.Parameter(torch.zeros(6, 6, dtype=torch.float64))


def _data(layer: EdgeConv) -> None:
    layer.nn[2].weight.data = layer.nn[2].weight.data * 0.5


def _training(layer: EdgeConv) -> None:
    layer.train()


@pytest.mark.parametrize("change", [_slope, _frozen, _exchanged, _data, _training])
def test_a_layer_changed_between_forward_and_backward(change):
    at = edges()

    def run() -> list[Tensor]:
        torch.manual_seed(3)
        layer, x = EdgeConv(nn.Sequential(*perceptron(), nn.Dropout(0.5))).double().eval(), leaf()
        leaves = [x, *layer.parameters()]
        out = layer(x, at)
        change(layer)
        if change is _frozen:  # of which nothing can be asked of the parameters
            leaves = leaves[:1]
        return list(torch.autograd.grad(out.sin().sum(), leaves))

    both(run, "EdgeConv")


def test_functional_call_with_parameters_of_its_own():
    layer, at, x = EdgeConv(perceptron()).double(), edges(), leaf()
    own = {
        name: (parameter + 0.5).detach().requires_grad_()
        for name, parameter in layer.named_parameters()
    }

    def run() -> list[Tensor]:
        parameters = {name: nn.Parameter(value) for name, value in own.items()}
        out = functional_call(layer, parameters, (x, at))
        return list(torch.autograd.grad(out.sin().sum(), [x, *parameters.values()]))

    both(run, "EdgeConv")


@pytest.mark.parametrize("name", ["EdgeConv", "CGConv", "GINEConv", "PNAConv"])
def test_features_may_be_edited_after_the_layer_as_with_stock(name):
    layer, more = layers()[name]
    layer, at, x = layer.double(), edges(), leaf()

    def run() -> list[Tensor]:
        h = x * 1.0
        out = layer(h, at, *more)
        h += out[:, :4]
        (h**2).sum().backward()
        return grads_of(layer, x)

    both(run, name)


def test_sums_keep_nobody_from_editing():
    layer, at, x = SAGEConv(4, 4, aggr=["mean", "sum"]).double(), edges(), leaf()

    def run() -> list[Tensor]:
        h = x * 1.0
        out = layer.propagate(at, x=(h, h), size=None)
        h += out[:, :4]
        return list(torch.autograd.grad((h**2).sum(), x))

    both(run, "SAGEConv")


@pytest.mark.parametrize("offset", [100.0, 1e4])
def test_differences_of_features_with_an_offset_do_not_cancel(offset, monkeypatch):
    monkeypatch.setattr(_edge_network, "_MOST_EDGES", 1 << 14)
    torch.manual_seed(0)
    x = torch.randn(300, 3) + offset
    at = torch.randint(0, 300, (2, 2000))
    layer = EdgeConv(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), aggr="mean")

    def run(layer: nn.Module, x: Tensor) -> list[Tensor]:
        out = layer(x, at)
        # A cotangent that does not depend on the result, whose rounding is that of 1e4.
        cotangent = torch.arange(out.numel()).view_as(out).to(out.dtype).sin()
        return [out.detach(), *torch.autograd.grad(out, layer.parameters(), cotangent)]

    stock = run(layer, x)
    with edgeweave.pyg.accelerated():
        ours = run(layer, x)
    assert edgeweave.pyg.report()["EdgeConv"].fused == 1
    exact = run(layer.double(), x.double())
    for a, s, e in zip(ours, stock, exact, strict=True):
        # Other orders of the same sums: a few roundings of the whole.
        floor = 16 * torch.finfo(torch.float32).eps * e.norm()
        assert (a - e).norm() <= 4 * (s - e).norm() + floor


def test_infinite_features_stay_where_they_are(edge_index):
    x = torch.randn(40, 4)
    x[3] = torch.inf
    layer = EdgeConv(nn.Linear(8, 5), aggr="max")
    stock = layer(x, edge_index)
    with edgeweave.pyg.accelerated():
        ours = layer(x, edge_index)
    torch.testing.assert_close(ours.isfinite(), stock.isfinite())
    here = stock.isfinite()
    torch.testing.assert_close(ours[here], stock[here], rtol=1e-4, atol=1e-5)
