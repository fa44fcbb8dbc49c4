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
from edgeweave._plan import plan_for_edges
from edgeweave.pyg import _fused_layers, _linear, _rows

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


# ---- batches of a sampler: zeros at the end ------------------------------------------------------


@pytest.fixture
def sampled(monkeypatch) -> Tensor:
    """Two hops, into 30 seeds and into the 170 nodes after them; so few rows are searched too."""
    monkeypatch.setattr(_rows, "_MIN_ROWS", 1)
    src = torch.cat([torch.randint(0, 200, (600,)), torch.randint(0, NODES, (2400,))])
    dst = torch.cat([torch.randint(0, 30, (600,)), torch.randint(30, 200, (2400,))])
    return torch.stack([src, dst])


def seed_gradients(layer: nn.Module, x: Tensor, edges: Tensor) -> list[Tensor]:
    """Output and gradients of two layers in a row, where only the first 30 rows have a loss."""
    x = x.detach().requires_grad_(x.requires_grad)
    hidden = layer(x, edges)
    out = layer(hidden.relu(), edges)
    leaves = [*([x] if x.requires_grad else []), *layer.parameters()]
    return [out.detach(), *torch.autograd.grad(out[:30].square().sum(), leaves)]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_zeros_of_a_sampled_batch_are_left_out(sampled, products, monkeypatch, aggr, requires_grad):
    rows: list[int] = []
    original = _linear._weight_grads
    monkeypatch.setattr(
        _linear, "_weight_grads", lambda g, *a: (rows.append(g.shape[0]), original(g, *a))[1]
    )
    layer = SAGEConv(24, 24, aggr=aggr)
    x = torch.randn(NODES, 24, requires_grad=requires_grad)
    exact = seed_gradients(
        copy.deepcopy(layer).double(), x.detach().double().requires_grad_(requires_grad), sampled
    )
    stock = seed_gradients(layer, x, sampled)
    with edgeweave.pyg.accelerated():
        ours = seed_gradients(layer, x, sampled)
    for a, s, e in zip(ours, stock, exact, strict=True):
        allowed = 4 * (s - e).abs().max() + 8 * torch.finfo(torch.float32).eps * e.abs().max()
        assert (a - e).abs().max() <= allowed
    assert rows
    assert min(rows) <= 30  # the last layer's: the seeds
    if not requires_grad:
        assert max(rows) <= 200  # the first layer's: what has an incoming edge


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["x", "lin_l", "lin_r"])
def test_infinite_numbers_meet_zeros_all_the_same(sampled, products, monkeypatch, place, bad):
    layer, x = SAGEConv(24, 24), torch.randn(NODES, 24)
    with torch.no_grad():
        target = x if place == "x" else getattr(layer, place).weight
        target[-1, 3] = bad
    edges = sampled.clamp(max=NODES - 2)  # the last node is alone
    with edgeweave.pyg.accelerated():
        ours = gradients_of_seeds(layer, x, edges)
        monkeypatch.setattr(_rows, "_MIN_ROWS", NODES + 1)
        whole = gradients_of_seeds(layer, x, edges)
    assert not all(w.isfinite().all() for w in whole)
    for a, w in zip(ours, whole, strict=True):
        assert torch.equal(a.isnan(), w.isnan())
        assert torch.equal(a.isinf(), w.isinf())


def gradients_of_seeds(layer: nn.Module, x: Tensor, edges: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x, edges)
    return [out.detach(), *torch.autograd.grad(out[:30].sum(), [x, *layer.parameters()])]


def test_rows_in_use(monkeypatch):
    monkeypatch.setattr(_rows, "_MIN_ROWS", 4)
    values = torch.zeros(9, 3)
    assert _rows.rows_in_use(values) == 1
    for row, number in ((2, -1e-30), (4, float("nan")), (5, 2.0), (8, -float("inf"))):
        values[row, 1] = number
        assert _rows.rows_in_use(values) == row + 1
    assert _rows.rows_in_use(torch.zeros(3, 3)) == 3  # too few to look
    assert _rows.rows_in_use(torch.zeros(9, 0)) == 9


def test_rows_reached(monkeypatch):
    monkeypatch.setattr(_rows, "_MIN_ROWS", 4)
    for destinations, reached in (([0, 5, 2], 6), ([8], 9), ([], 0)):
        dst = torch.tensor(destinations, dtype=torch.int64)
        plan = plan_for_edges(torch.stack([dst.new_zeros(dst.shape), dst]), 9, 9)
        assert _rows.rows_reached(plan) == reached
    assert _rows.rows_reached(plan_for_edges(torch.tensor([[0], [1]]), 3, 3)) == 3


def test_are_finite():
    big = torch.full((4,), torch.finfo(torch.float32).max)
    assert _rows.are_finite(torch.ones(3), torch.zeros(0, 2))
    assert not _rows.are_finite(torch.ones(3), torch.tensor([1.0, float("inf"), -float("inf")]))
    assert not _rows.are_finite(torch.tensor([float("nan")]))
    assert not _rows.are_finite(big)  # the safe answer


def test_no_edge_at_all(sampled, products):
    layer, x = SAGEConv(24, 24), torch.randn(NODES, 24, requires_grad=True)
    assert_as_close_as_stock(layer, x, torch.empty(2, 0, dtype=torch.int64))


def test_no_gradient_at_all(sampled, products):
    layer, x = SAGEConv(24, 24), torch.randn(NODES, 24, requires_grad=True)
    with edgeweave.pyg.accelerated():
        found = torch.autograd.grad(
            layer(x, sampled), [x, *layer.parameters()], torch.zeros(NODES, 24)
        )
    assert all(torch.equal(g, torch.zeros_like(g)) for g in found)
