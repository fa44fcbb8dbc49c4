"""Layers whose messages go through a network of their own, tile by tile."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    MLP,
    CGConv,
    EdgeCNN,
    EdgeConv,
    GINEConv,
    MessagePassing,
    NNConv,
    PointNetConv,
)
from torch_geometric.nn.dense.linear import Linear

import edgeweave.pyg
from edgeweave._plan import _edge_network, plan_for_edges
from edgeweave._plan._tiles import edge_tiles

FLOWS = ["source_to_target", "target_to_source"]
AGGRS = ["sum", "mean", "max", "min"]
F, E = 6, 200

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "two layers": lambda: nn.Sequential(nn.Linear(2 * F, 5), nn.ReLU(), nn.Linear(5, 7)),
    "in place": lambda: nn.Sequential(nn.Linear(2 * F, 5), nn.ReLU(inplace=True), nn.Linear(5, 7)),
    "one layer": lambda: nn.Linear(2 * F, 5, bias=False),
    "PyG's layer": lambda: nn.Sequential(Linear(2 * F, 5), nn.LayerNorm(5), nn.Tanh()),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(2 * F, 5), nn.SiLU()), nn.Sequential(nn.Linear(5, 4), nn.ELU())
    ),
    "MLP": lambda: MLP([2 * F, 5, 4, 3], norm=None),
    "MLP, active last": lambda: MLP([2 * F, 5, 3], norm=None, plain_last=False, act="elu"),
    "dropout that is off": lambda: nn.Sequential(nn.Linear(2 * F, 5), nn.Dropout(0.0), nn.Tanh()),
}


@pytest.fixture(params=["at once", "many tiles"])
def tiles(request, monkeypatch) -> None:
    """Tiles of 12 edges: a few nodes, and some nodes with more."""
    if request.param == "many tiles":
        monkeypatch.setattr(_edge_network, "_MOST_EDGES", 12)


def features(rows: int = 40, width: int = F) -> Tensor:
    return torch.randn(rows, width, dtype=torch.float64, requires_grad=True)


# Every network; and one of them with every reduction and in both directions.
CASES = [(name, aggr, FLOWS[0]) for name in NETWORKS for aggr in ("mean", "max")]
CASES += [("two layers", aggr, flow) for aggr in ("sum", "min") for flow in FLOWS]


@pytest.mark.parametrize(("name", "aggr", "flow"), CASES)
def test_edge_conv(name, aggr, flow, edge_index, tiles, same_as_stock, only_fused):
    x = features()
    layer = EdgeConv(NETWORKS[name](), aggr=aggr, flow=flow).double()
    same_as_stock(lambda: layer(x, edge_index), [x, *layer.parameters()])
    only_fused("EdgeConv", 1)


def test_edge_cnn(edge_index, same_as_stock, only_fused):
    x = features()
    model = EdgeCNN(F, 8, num_layers=2, out_channels=3).double()
    same_as_stock(lambda: model(x, edge_index), [x, *model.parameters()])
    only_fused("EdgeConv", 2)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("aggr", AGGRS)
@pytest.mark.parametrize("options", [{}, {"dim": 3}, {"bias": False, "dim": 3}])
def test_cg_conv(options, aggr, flow, edge_index, tiles, same_as_stock, only_fused):
    x = features()
    attr = features(E, 3) if "dim" in options else None
    layer = CGConv(F, aggr=aggr, flow=flow, **options).double()
    leaves = [x, *([] if attr is None else [attr]), *layer.parameters()]
    same_as_stock(lambda: layer(x, edge_index, attr), leaves)
    only_fused("CGConv", 1)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("aggr", AGGRS)
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_gine(edge_dim, aggr, flow, edge_index, tiles, same_as_stock, only_fused):
    x, attr = features(), features(E, edge_dim or F)
    network = nn.Sequential(nn.Linear(F, 5), nn.ReLU(), nn.Linear(5, 4))
    layer = GINEConv(network, edge_dim=edge_dim, train_eps=True, aggr=aggr, flow=flow).double()
    same_as_stock(lambda: layer(x, edge_index, attr), [x, attr, *layer.parameters()])
    only_fused("GINEConv", 1)


MATRICES: dict[str, Callable[[], nn.Module]] = {
    "two layers": lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, F * 4)),
    "one layer": lambda: nn.Linear(3, F * 4),
    "no bias": lambda: nn.Sequential(nn.Linear(3, F * 4, bias=False), nn.Tanh()),
    "MLP": lambda: MLP([3, 5, F * 4], norm=None),
}


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize(
    ("name", "aggr"), [*((name, "mean") for name in MATRICES), *(("two layers", a) for a in AGGRS)]
)
def test_nn_conv(name, aggr, flow, edge_index, tiles, same_as_stock, only_fused):
    x, attr = features(), features(E, 3)
    layer = NNConv(F, 4, MATRICES[name](), aggr=aggr, flow=flow).double()
    same_as_stock(lambda: layer(x, edge_index, attr), [x, attr, *layer.parameters()])
    only_fused("NNConv", 1)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("aggr", AGGRS)
@pytest.mark.parametrize("width", [0, 4])
@pytest.mark.parametrize("loops", [False, True])
def test_point_net(loops, width, aggr, flow, edge_index, tiles, same_as_stock, only_fused):
    pos, x = features(40, 3), features(40, width) if width else None
    local = nn.Sequential(nn.Linear(width + 3, 5), nn.ReLU(), nn.Linear(5, 4))
    layer = PointNetConv(local, nn.Linear(4, 2), add_self_loops=loops, aggr=aggr, flow=flow)
    layer = layer.double()
    leaves = [pos, *([] if x is None else [x]), *layer.parameters()]
    same_as_stock(lambda: layer(x, pos, edge_index), leaves)
    only_fused("PointNetConv", 1)


def test_points_far_from_the_origin_are_as_exact_as_stock(edge_index):
    """Neighbours that are a millimetre apart, a kilometre from the origin."""
    pos = 1000 + torch.rand(40, 3) / 64
    layer = PointNetConv(nn.Sequential(nn.Linear(3, 8), nn.Tanh()))
    exact = copy.deepcopy(layer).double()(None, pos.double(), edge_index)
    stock = layer(None, pos, edge_index)
    with edgeweave.pyg.accelerated():
        ours = layer(None, pos, edge_index)
    assert edgeweave.pyg.report()["PointNetConv"].fused == 1
    floor = 16 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= 4 * (stock - exact).abs().max() + floor


def test_wide_networks_get_small_tiles(edge_index, monkeypatch, same_as_stock, only_fused):
    monkeypatch.setattr(_edge_network, "_TILE_WIDTH", 0.01)
    monkeypatch.setattr(_edge_network, "_LEAST_EDGES", 12)
    x, attr = features(), features(E, 3)
    layer = NNConv(F, 4, MATRICES["two layers"]()).double()
    same_as_stock(lambda: layer(x, edge_index, attr), [x, attr, *layer.parameters()])
    only_fused("NNConv", 1)
    seen: list[torch.Size] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: (seen.append(t.shape), t)[1], lambda t: t
    )
    with edgeweave.pyg.accelerated(), hooks:
        layer(x, edge_index, attr)
    # The features of the edges themselves, and no matrix of any.
    assert {shape for shape in seen if E in shape} == {(E, 3)}


def test_networks_that_are_not_known(edge_index, same_as_stock):
    x, attr = features(), features(E, 3)
    layer = NNConv(F, 4, nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, F * 4))).double().eval()
    same_as_stock(lambda: layer(x, edge_index, attr), [x, attr, *layer.parameters()])
    report = edgeweave.pyg.report()["NNConv"]
    assert report.fused == 0
    assert any("not linear layers" in reason for reason in report.reasons)


def test_two_sides(tiles, same_as_stock, only_fused):
    edges = torch.stack([torch.randint(0, 30, (90,)), torch.randint(0, 12, (90,))])
    x, y = features(30), features(12)
    layer = EdgeConv(NETWORKS["two layers"]()).double()
    same_as_stock(lambda: layer((x, y), edges), [x, y, *layer.parameters()])
    only_fused("EdgeConv", 1)
    wide = CGConv((F, 4), dim=2).double()
    z, attr = features(12, 4), features(90, 2)
    same_as_stock(lambda: wide((x, z), edges, attr), [x, z, attr, *wide.parameters()])
    only_fused("CGConv", 1)
    gine = GINEConv(nn.Linear(F, 3)).double()
    e = features(90)
    same_as_stock(lambda: gine((x, None), edges, e, size=(30, 12)), [x, e, *gine.parameters()])
    only_fused("GINEConv", 1)
    matrix = NNConv((F, 4), 3, nn.Linear(2, F * 3)).double()
    same_as_stock(lambda: matrix((x, z), edges, attr), [x, z, attr, *matrix.parameters()])
    matrix = NNConv(F, 3, nn.Linear(2, F * 3), root_weight=False).double()
    same_as_stock(lambda: matrix((x, None), edges, attr, size=(30, 12)), [x, attr])
    only_fused("NNConv", 2)
    near, far = features(30, 2), features(12, 2)
    points = PointNetConv(nn.Linear(F + 2, 3), add_self_loops=False).double()
    same_as_stock(lambda: points((x, None), (near, far), edges), [x, near, far])
    only_fused("PointNetConv", 1)


def test_float32_is_as_close_to_float64_as_stock(edge_index):
    x = torch.randn(40, F)
    layer = EdgeConv(NETWORKS["two layers"]())

    def run(layer: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        out = layer(x, edge_index)
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])]

    exact = run(copy.deepcopy(layer).double(), x.double())
    stock = run(layer, x)
    with edgeweave.pyg.accelerated():
        ours = run(layer, x)
    assert edgeweave.pyg.report()["EdgeConv"].fused == 1
    for a, s, e in zip(ours, stock, exact, strict=True):
        # Other orders of the same sums: a few roundings of the largest entry.
        floor = 16 * torch.finfo(torch.float32).eps * e.abs().max()
        assert (a - e).abs().max() <= 4 * (s - e).abs().max() + floor


@pytest.mark.parametrize("shape", [(0, 0), (7, 0), (1, 1)])
def test_hardly_any_graph(shape, tiles, same_as_stock):
    nodes, edges = shape
    x = features(nodes)
    layer = EdgeConv(NETWORKS["two layers"]()).double()
    index = torch.zeros(2, edges, dtype=torch.long)
    same_as_stock(lambda: layer(x, index), [x, *layer.parameters()])


@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_second_derivatives(aggr, edge_index, tiles, only_fused):
    x = features(40, 3)
    network = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    layer = EdgeConv(network, aggr=aggr).double()

    def run() -> list[Tensor]:
        out = layer(x, edge_index)
        first = torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()], create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), x))

    stock = run()
    with edgeweave.pyg.accelerated():
        ours = run()
    only_fused("EdgeConv", 1)
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b)


def test_many_gradients_at_once(edge_index, tiles):
    x = features()
    layer = EdgeConv(NETWORKS["two layers"]()).double()

    def jacobian() -> Tensor:
        out = layer(x, edge_index)[3]
        eye = torch.eye(out.numel(), dtype=torch.float64)
        return torch.autograd.grad(out, x, eye, is_grads_batched=True)[0]

    stock = jacobian()
    with edgeweave.pyg.accelerated():
        ours = jacobian()
    torch.testing.assert_close(ours, stock)


def test_only_some_want_gradients(edge_index, tiles, same_as_stock, only_fused):
    x = torch.randn(40, F, dtype=torch.float64)
    layer = EdgeConv(NETWORKS["two layers"]()).double()
    same_as_stock(lambda: layer(x, edge_index), list(layer.parameters()))
    layer.nn[2].weight.requires_grad_(False)
    same_as_stock(lambda: layer(x, edge_index), [layer.nn[0].weight, layer.nn[2].bias])
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    x.requires_grad_()
    same_as_stock(lambda: layer(x, edge_index), [x])
    only_fused("EdgeConv", 3)


def test_nothing_per_edge_is_kept_for_backward(edge_index, monkeypatch):
    monkeypatch.setattr(_edge_network, "_MOST_EDGES", 12)
    x = features()
    layer = EdgeConv(NETWORKS["two layers"]()).double()
    seen: list[torch.Size] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: (seen.append(t.shape), t)[1], lambda t: t
    )
    with edgeweave.pyg.accelerated(), hooks:
        layer(x, edge_index)
    assert seen
    assert all(E not in shape for shape in seen)


def test_tiles_hold_every_edge_once(edge_index):
    plan = plan_for_edges(edge_index, 40, 40)
    made = edge_tiles(plan, 12)
    assert edge_tiles(plan, 12) is made
    assert len(made.tiles) > 5
    assert sorted(torch.cat([t.position for t in made.tiles]).tolist()) == list(range(E))
    rows = [r for t in made.tiles for r in range(t.rows.start, t.rows.stop)]
    assert rows == list(range(40))
    degrees = torch.bincount(edge_index[1], minlength=40)
    for tile in made.tiles:
        assert torch.equal(edge_index[0, tile.position], tile.sources)
        own = edge_index[1, tile.position]
        assert int(own.numel()) == int(degrees[tile.rows].sum())
        assert tile.edges.num_edges <= 12 or tile.rows.stop - tile.rows.start == 1


def test_tiles_count_as_part_of_the_plan(edge_index):
    edgeweave.sparse.cache_clear()
    plan = plan_for_edges(edge_index, 40, 40)
    before = edgeweave.sparse.cache_info().bytes
    assert before == plan.nbytes_bound
    tiles = edge_tiles(plan, 12)
    after = edgeweave.sparse.cache_info().bytes
    assert after == plan.nbytes_bound >= before + sum(t.edges.nbytes_bound for t in tiles.tiles)
    edgeweave.sparse.cache_clear()
    assert edgeweave.sparse.cache_info().bytes == 0


def _message_hook(layer: EdgeConv) -> EdgeConv:
    layer.register_message_forward_hook(lambda *args: None)
    return layer


def _inner_hook(layer: EdgeConv) -> EdgeConv:
    layer.nn[2].register_forward_hook(lambda *args: None)
    return layer


def _batch_norm(layer: EdgeConv) -> EdgeConv:
    layer.nn = nn.Sequential(nn.Linear(2 * F, 5), nn.BatchNorm1d(5)).double()
    return layer


def _dropout(layer: EdgeConv) -> EdgeConv:
    layer.nn = nn.Sequential(nn.Linear(2 * F, 5), nn.Dropout(0.5)).double()
    return layer


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * F, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).flip(0)


def _own_module(layer: EdgeConv) -> EdgeConv:
    layer.nn = _Own().double()
    return layer


def _mlp_with_norm(layer: EdgeConv) -> EdgeConv:
    layer.nn = MLP([2 * F, 5, 3], norm="batch_norm").double()
    return layer


def _median(layer: EdgeConv) -> EdgeConv:
    return EdgeConv(layer.nn, aggr="median").double()


UNKNOWN = "its nn is not linear layers and activations of torch"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_message_hook, "a message-passing hook is registered"),
        (_inner_hook, UNKNOWN),
        (_batch_norm, UNKNOWN),
        (_dropout, UNKNOWN),
        (_own_module, UNKNOWN),
        (_mlp_with_norm, UNKNOWN),
        (_median, "the aggregation is not a plain sum, mean, max or min"),
    ],
)
def test_falls_back(change, reason, edge_index, same_as_stock):
    x = features()
    layer = change(EdgeConv(NETWORKS["two layers"]()).double())
    same_as_stock(lambda: layer(x, edge_index), [x, *layer.parameters()])
    assert reason in edgeweave.pyg.report()["EdgeConv"].reasons


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_keep_the_one_rounding_of_stock(dtype, edge_index):
    x = torch.randn(40, F, dtype=dtype)
    layer = EdgeConv(NETWORKS["two layers"]()).to(dtype)
    stock = layer(x, edge_index)
    with edgeweave.pyg.accelerated():
        ours = layer(x, edge_index)
    assert torch.equal(ours, stock)
    assert f"x has dtype {dtype}" in edgeweave.pyg.report()["EdgeConv"].reasons


def test_wrong_input_raises_as_stock(edge_index):
    x = torch.randn(40, F, dtype=torch.float64)
    layer = EdgeConv(NETWORKS["two layers"]()).double()
    gine = GINEConv(nn.Linear(F, 3)).double()
    attr = torch.randn(E, 2, dtype=torch.float64)
    for call, error in (
        (lambda: layer(x[:, :5], edge_index), RuntimeError),
        (lambda: gine(x, edge_index, attr), ValueError),
        (lambda: layer(x, edge_index + 35), IndexError),
    ):
        with pytest.raises(error) as stock:
            call()
        with edgeweave.pyg.accelerated(), pytest.raises(error) as ours:
            call()
        assert str(ours.value) == str(stock.value)


class _OwnForward(EdgeConv):
    """Another `forward` round the same messages is fused too."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x + self.propagate(edge_index, x=(x.sin(), x))


class _OwnMessage(EdgeConv):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.nn(torch.cat([x_i, x_j], dim=-1))


def test_subclasses(edge_index, same_as_stock, only_fused):
    x = features()
    layer: MessagePassing = _OwnForward(nn.Linear(2 * F, F)).double()
    same_as_stock(lambda: layer(x, edge_index), [x, *layer.parameters()])
    only_fused(f"{__name__}._OwnForward", 1)
    layer = _OwnMessage(nn.Linear(2 * F, F)).double()
    same_as_stock(lambda: layer(x, edge_index), [x, *layer.parameters()])
    assert edgeweave.pyg.report()[f"{__name__}._OwnMessage"].fused == 0


def test_a_copy_and_a_pickle_are_fused_too(edge_index, only_fused):
    x = torch.randn(40, F, dtype=torch.float64)
    layer = EdgeConv(NETWORKS["two layers"]()).double()
    stock = layer(x, edge_index)
    with edgeweave.pyg.accelerated():
        for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            torch.testing.assert_close(again(x, edge_index), stock)
    only_fused("EdgeConv", 2)
