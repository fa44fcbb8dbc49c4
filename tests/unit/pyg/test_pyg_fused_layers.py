"""SAGEConv, GINConv and linear layers in float32: whole layers fused, and the faster products.

Judged by the distance to stock PyG in float64: ours may be at most a few times as far from it as
stock PyG in float32 is, since both sum the same products in different orders.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GINConv, SAGEConv

import edgeweave.pyg
from edgeweave.pyg import _fused_layers, _linear

NODES = 700


@pytest.fixture
def edges() -> Tensor:
    return torch.randint(0, NODES - 50, (2, 5000))  # the last 50 nodes have no edges


@pytest.fixture(params=["best", "best blocks", "mkl", "mkl blocks"])
def products(request, monkeypatch):
    """How products are made: the best library here or MKL; at once, or in blocks of rows."""
    library, _, blocks = request.param.partition(" ")
    if library == "mkl":
        monkeypatch.setattr(_linear, "prefers_onednn", lambda: False)
    monkeypatch.setattr(_linear, "comes_in_fresh_pages", lambda rows, width: bool(blocks))
    if blocks:
        monkeypatch.setattr(_linear, "_BLOCK_BYTES", 1)  # then _MIN_ROWS rows a block
    return request.param


def gradients(layer: nn.Module, x: Tensor, edges: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_(x.requires_grad)
    out = layer(x, edges)
    leaves = [
        *([x] if x.requires_grad else []),
        *(p for p in layer.parameters() if p.requires_grad),
    ]
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def assert_as_close_as_stock(layer: nn.Module, x: Tensor, edges: Tensor) -> None:
    exact = gradients(
        copy.deepcopy(layer).double(), x.detach().double().requires_grad_(x.requires_grad), edges
    )
    stock = gradients(layer, x, edges)
    with edgeweave.pyg.accelerated():
        ours = gradients(layer, x, edges)
    for k, (a, s, e) in enumerate(zip(ours, stock, exact, strict=True)):
        scale = e.abs().max()
        # 4 orderings' worth of rounding; the floor is one rounding of the largest entry per term.
        allowed = 4 * (s - e).abs().max() + 8 * torch.finfo(torch.float32).eps * scale
        assert (a - e).abs().max() <= allowed, k


def count_calls(monkeypatch, owner, name: str) -> list[int]:
    calls: list[int] = []
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a: (calls.append(1), original(*a))[1])
    return calls


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize(
    ("width", "options"),
    [
        (48, {}),
        (16, {}),
        (48, {"aggr": "sum", "bias": False}),
        (16, {"aggr": "sum", "normalize": True}),
    ],
)
def test_sage_is_one_function(edges, products, monkeypatch, width, options, flow, requires_grad):
    layer = SAGEConv(32, width, flow=flow, **options)
    calls = count_calls(monkeypatch, _fused_layers._Sage, "apply")
    x = torch.randn(NODES, 32, requires_grad=requires_grad)
    assert_as_close_as_stock(layer, x, edges)
    assert len(calls) == 1
    entry = edgeweave.pyg.report()["SAGEConv"]
    assert (entry.fused, dict(entry.reasons)) == (1, {})


@pytest.mark.parametrize("eps", [0.0, 0.25])
@pytest.mark.parametrize(
    "mlp",
    [
        lambda: nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)),
        lambda: nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.ReLU()),
        lambda: nn.Linear(32, 16, bias=False),
        lambda: nn.BatchNorm1d(32),
    ],
)
def test_gin_is_one_pass(edges, products, monkeypatch, mlp, eps):
    layer = GINConv(mlp(), eps=eps)
    calls = count_calls(monkeypatch, _fused_layers._SelfSum, "apply")
    assert_as_close_as_stock(layer, torch.randn(NODES, 32, requires_grad=True), edges)
    assert len(calls) == 1
    entry = edgeweave.pyg.report()["GINConv"]
    assert (entry.fused, dict(entry.reasons)) == (1, {})


def test_gcn_multiplies_here_too(edges, products, monkeypatch):
    calls = count_calls(monkeypatch, _linear._Linear, "apply")
    assert_as_close_as_stock(GCNConv(32, 48), torch.randn(NODES, 32, requires_grad=True), edges)
    # At once and by MKL is what torch's own does.
    assert len(calls) == ("blocks" in products or _linear.prefers_onednn())


@pytest.mark.parametrize("relu", [False, True])
def test_linear_keeps_nan_and_infinities(products, relu):
    x, weight = torch.randn(300, 8), torch.randn(4, 8)
    x[3, 2], x[5, 1] = float("nan"), float("inf")
    expected = x @ weight.t()
    expected = expected.relu() if relu else expected
    ours = _linear.linear(x, weight, None, relu)
    assert ours[3].isnan().all()
    assert torch.equal(ours[5].isinf(), expected[5].isinf())
    torch.testing.assert_close(ours, expected, equal_nan=True)


def test_second_derivatives(edges, products):
    layers = [SAGEConv(8, 12), GINConv(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5)))]
    for layer in layers:
        x = torch.randn(NODES, 8, requires_grad=True)

        def penalty(layer=layer, x=x) -> list[Tensor]:
            (dx,) = torch.autograd.grad(layer(x, edges).square().sum(), x, create_graph=True)
            return list(
                torch.autograd.grad(dx.square().sum(), [x, *layer.parameters()], allow_unused=True)
            )

        stock = penalty()
        with edgeweave.pyg.accelerated():
            ours = penalty()
        for a, s in zip(ours, stock, strict=True):
            assert (a is None) == (s is None)
            if s is not None:
                # A third-degree polynomial of float32 sums; relative to its largest entry.
                assert (a - s).abs().max() <= 2e-4 * s.abs().max()


def test_hooks_on_a_linear_layer_are_called(edges):
    layer = SAGEConv(8, 8)
    seen: list[int] = []
    layer.lin_r.register_forward_hook(lambda *_: seen.append(1))
    with edgeweave.pyg.accelerated():
        layer(torch.randn(NODES, 8), edges)
    assert seen == [1]


def test_trainable_eps_gets_its_gradient(edges):
    layer = GINConv(nn.Linear(8, 8), eps=0.5, train_eps=True)
    assert_as_close_as_stock(layer, torch.randn(NODES, 8, requires_grad=True), edges)
    assert layer.eps.requires_grad


def test_forward_is_restored():
    stock = SAGEConv.forward, GINConv.forward
    with edgeweave.pyg.accelerated():
        assert SAGEConv.forward is not stock[0]
    assert (SAGEConv.forward, GINConv.forward) == stock


def test_out_of_range_index_raises_what_stock_raises(edges):
    edges[0, 17] = NODES + 3
    for layer in (SAGEConv(8, 8), GINConv(nn.Linear(8, 8))):
        with edgeweave.pyg.accelerated(), pytest.raises((IndexError, RuntimeError)):
            layer(torch.randn(NODES, 8), edges)
