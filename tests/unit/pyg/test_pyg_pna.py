"""PNAConv as a whole, and lists of aggregations in one pass: as stock, fused, and when not."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import MultiAggregation, PNAConv, SAGEConv, SimpleConv
from torch_geometric.nn.aggr import StdAggregation, VarAggregation
from torch_geometric.nn.aggr.fused import FusedAggregation

import edgeweave.pyg

FLOWS = ["source_to_target", "target_to_source"]
AGGREGATORS = ["mean", "min", "max", "std"]
SCALERS = ["identity", "amplification", "attenuation"]
OPTIONS = [
    {},
    {"aggregators": ["sum", "var"], "scalers": ["linear", "inverse_linear", "identity"]},
    {"aggregators": ["max"], "scalers": ["identity"]},
    {"aggregators": ["std", "var", "std"]},
    {"towers": 2},
    {"towers": 2, "divide_input": True},
    {"post_layers": 3, "act": "tanh"},
    {"train_norm": True},
]


def make(inputs: int, outputs: int, **options) -> PNAConv:
    options = {"aggregators": AGGREGATORS, "scalers": SCALERS, **options}
    degrees = torch.tensor([4, 6, 9, 8, 5, 4, 3, 2, 1])
    return PNAConv(inputs, outputs, deg=degrees, **options).double()


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("options", OPTIONS)
def test_as_stock(options, flow, edge_index, same_as_stock, only_fused):
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    layer = make(6, 8, flow=flow, **options)
    same_as_stock(lambda: layer(x, edge_index), [x, *layer.parameters()])
    only_fused("PNAConv", 1)


def test_float32_is_as_close_to_float64_as_stock(edge_index):
    x = torch.randn(40, 16)
    layer = make(16, 12).float()

    def run(layer: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        out = layer(x, edge_index)
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])]

    exact = run(copy.deepcopy(layer).double(), x.double())
    stock = run(layer, x)
    with edgeweave.pyg.accelerated():
        ours = run(layer, x)
    assert edgeweave.pyg.report()["PNAConv"].fused == 1
    for a, s, e in zip(ours, stock, exact, strict=True):
        # Other orders of the same sums: a few roundings of the largest entry.
        floor = 16 * torch.finfo(torch.float32).eps * e.abs().max()
        assert (a - e).abs().max() <= 4 * (s - e).abs().max() + floor


def test_deviation_of_equal_messages_is_zero_and_has_no_gradient(only_fused):
    x = torch.full((5, 3), 1000.0).requires_grad_()
    edges = torch.tensor([[0, 1, 2, 3], [4, 4, 4, 4]])
    layer = make(3, 4, aggregators=["std"], scalers=["identity"]).float()
    with edgeweave.pyg.accelerated():
        layer(x, edges).sum().backward()
    assert x.grad.isfinite().all()
    only_fused("PNAConv", 1)


def test_a_node_without_edges_gets_nothing_of_its_own_message(same_as_stock):
    # Stock: 0 for an empty group, whatever the node itself holds.
    x = torch.randn(6, 3, dtype=torch.float64)
    x[5] = torch.inf
    edges = torch.tensor([[0, 1, 2], [1, 1, 3]])
    layer = make(3, 4, aggregators=["sum", "mean", "max"], scalers=["identity"])
    with torch.no_grad():
        for post in layer.post_nns:
            post[0].weight[:, :3] = 0
            post[0].weight[:, :3].fill_diagonal_(0)
    stock = layer(x, edges)
    with edgeweave.pyg.accelerated():
        ours = layer(x, edges)
    torch.testing.assert_close(ours[:5], stock[:5])
    assert ours[5].isnan().tolist() == stock[5].isnan().tolist()


@pytest.mark.parametrize("shape", [(0, 0), (7, 0), (1, 1)])
def test_hardly_any_graph(shape, same_as_stock):
    nodes, edges = shape
    x = torch.randn(nodes, 6, dtype=torch.float64, requires_grad=True)
    layer = make(6, 5)
    index = torch.zeros(2, edges, dtype=torch.long)
    same_as_stock(lambda: layer(x, index), [x, *layer.parameters()])


def test_second_derivatives(edge_index, only_fused):
    x = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
    layer = make(3, 2)

    def run() -> list[Tensor]:
        out = layer(x, edge_index[:, :60])
        first = torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()], create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), x))

    stock = run()
    with edgeweave.pyg.accelerated():
        ours = run()
    only_fused("PNAConv", 1)
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b)


def test_many_gradients_at_once(edge_index):
    x = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
    layer = make(3, 2)

    def jacobian() -> Tensor:
        out = layer(x, edge_index)[3]
        eye = torch.eye(2, dtype=torch.float64)
        return torch.autograd.grad(out, x, eye, is_grads_batched=True)[0]

    stock = jacobian()
    with edgeweave.pyg.accelerated():
        ours = jacobian()
    torch.testing.assert_close(ours, stock)


def test_no_memory_for_messages(edge_index):
    """The pass over the edges is the native one: messages exist nowhere to be counted."""
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    layer = make(6, 8)
    seen: list[torch.Size] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: (seen.append(t.shape), t)[1], lambda t: t
    )
    with edgeweave.pyg.accelerated(), hooks:
        layer(x, edge_index)
    assert seen
    assert all(edge_index.size(1) not in shape for shape in seen)


def _with_hook(layer: PNAConv) -> PNAConv:
    layer.register_message_forward_hook(lambda *args: None)
    return layer


def _with_hook_inside(layer: PNAConv) -> PNAConv:
    layer.pre_nns[0].register_forward_hook(lambda *args: None)
    return layer


def _with_parametrization(layer: PNAConv) -> PNAConv:
    torch.nn.utils.parametrizations.weight_norm(layer.post_nns[0][0], "weight")
    return layer


def _semi_grad(layer: PNAConv) -> PNAConv:
    layer.aggr_module.aggr.aggrs[3].var_aggr.semi_grad = True
    return layer


ONE_PASS = "its aggregations are not those that run in one pass"
PRE = "its pre_nns are not one plain linear layer each, in the dtype of x"
POST = "its post_nns do not begin with a plain linear layer, in the dtype of x"


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (_with_hook, {}, "a message-passing hook is registered"),
        (_with_hook_inside, {}, PRE),
        (_with_parametrization, {}, POST),
        (_semi_grad, {}, ONE_PASS),
        (lambda layer: layer, {"aggregators": ["mean", "median"]}, ONE_PASS),
        (lambda layer: layer, {"aggregators": ["mul"]}, ONE_PASS),
        (lambda layer: layer, {"pre_layers": 2}, PRE),
    ],
)
def test_falls_back(change, options, reason, edge_index, same_as_stock):
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    layer = change(make(6, 8, **options))
    same_as_stock(lambda: layer(x, edge_index), [x, *layer.parameters()])
    assert reason in edgeweave.pyg.report()["PNAConv"].reasons


def test_halves_keep_the_one_rounding_of_stock(edge_index):
    x = torch.randn(40, 6, dtype=torch.bfloat16)
    layer = make(6, 8).to(torch.bfloat16)
    with edgeweave.pyg.accelerated():
        assert layer(x, edge_index).dtype is torch.bfloat16
    assert "x has dtype torch.bfloat16" in edgeweave.pyg.report()["PNAConv"].reasons


def test_edge_features_run_the_reductions_at_least(edge_index, same_as_stock):
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    attr = torch.randn(200, 3, dtype=torch.float64, requires_grad=True)
    layer = make(6, 8, edge_dim=3)
    same_as_stock(lambda: layer(x, edge_index, attr), [x, attr, *layer.parameters()])
    report = edgeweave.pyg.report()
    assert report["PNAConv"].reasons["edge_attr is given"] == 1
    assert report["MaxAggregation"].fused == 1


def test_wrong_edges_raise_as_stock(edge_index):
    x = torch.randn(40, 6, dtype=torch.float64)
    layer = make(6, 8)
    edge_index[1, 3] = 40
    with pytest.raises(IndexError) as stock:
        layer(x, edge_index)
    with edgeweave.pyg.accelerated(), pytest.raises(IndexError) as ours:
        layer(x, edge_index)
    assert str(ours.value) == str(stock.value)


def test_a_copy_and_a_pickle_are_fused_too(edge_index, only_fused):
    x = torch.randn(40, 6, dtype=torch.float64)
    layer = make(6, 8)
    stock = layer(x, edge_index)
    with edgeweave.pyg.accelerated():
        for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            torch.testing.assert_close(again(x, edge_index), stock)
    only_fused("PNAConv", 2)


# ---- lists of aggregations -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [["mean", "max", "std"], ["sum", "min", "var", "std"], ["var"], ["std", "median", "mean"]],
)
@pytest.mark.parametrize("mode", ["cat", "sum", "max"])
def test_multi_aggregation(names, mode, same_as_stock, only_fused):
    x = torch.randn(90, 5, dtype=torch.float64, requires_grad=True)
    index = torch.randint(0, 12, (90,))
    module = MultiAggregation(names, mode=mode)
    same_as_stock(lambda: module(x, index, dim_size=14), [x])
    only_fused("FusedAggregation", 1)


@pytest.mark.parametrize("given", ["dim_size", "ptr", "nothing"])
def test_number_of_groups(given, only_fused):
    x = torch.randn(9, 2, dtype=torch.float64)
    index = torch.tensor([0, 0, 1, 1, 1, 3, 3, 3, 3])
    options = {
        "dim_size": {"dim_size": 6},
        "ptr": {"ptr": torch.tensor([0, 2, 5, 5, 9])},
        "nothing": {},
    }[given]
    module = FusedAggregation(["sum", "max"])
    stock = module(x, index, **options)
    with edgeweave.pyg.accelerated():
        ours = module(x, index, **options)
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b)
    only_fused("FusedAggregation", 1)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (FusedAggregation(["mean", "mul"]), "a product, or a variance of semi_grad"),
        (FusedAggregation([VarAggregation(True)]), "a product, or a variance of semi_grad"),
        (FusedAggregation([StdAggregation()]), "x is on meta"),
    ],
)
def test_aggregations_that_fall_back(module, reason):
    device = "meta" if reason == "x is on meta" else "cpu"
    x = torch.rand(9, 2, device=device)
    index = torch.tensor([0, 0, 1, 1, 1, 3, 3, 3, 3], device=device)
    with edgeweave.pyg.accelerated():
        out = module(x, index, dim_size=4)
    assert [o.shape for o in out] == [(4, 2)] * len(out)
    assert reason in edgeweave.pyg.report()["FusedAggregation"].reasons


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("aggr", [["mean", "max", "std"], ["sum"], "std", "var"])
@pytest.mark.parametrize("cls", [SAGEConv, SimpleConv])
def test_a_layer_with_several_aggregations(cls, aggr, flow, edge_index, same_as_stock, only_fused):
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    options = {"aggr": aggr, "flow": flow}
    layer = (SAGEConv(6, 5, **options) if cls is SAGEConv else SimpleConv(**options)).double()
    same_as_stock(lambda: layer(x, edge_index), [x, *layer.parameters()])
    only_fused(cls.__name__, 1)


def test_several_aggregations_of_more_than_matrices(edge_index, same_as_stock):
    x = torch.randn(3, 40, 6, dtype=torch.float64, requires_grad=True)
    layer = SimpleConv(aggr=["mean", "max"])
    same_as_stock(lambda: layer(x, edge_index), [x])
    reason = "several aggregations of features that are not [N, F]"
    assert reason in edgeweave.pyg.report()["SimpleConv"].reasons


def test_an_index_out_of_range_raises_as_stock():
    x = torch.rand(3, 2)
    index = torch.tensor([0, 5, 1])
    module = FusedAggregation(["sum"])
    expected = r"Encountered invalid 'dim_size' \(got '4' but expected >= '6'\)"
    with pytest.raises(ValueError, match=expected):
        module(x, index, dim_size=4)
    with edgeweave.pyg.accelerated(), pytest.raises(ValueError, match=expected):
        module(x, index, dim_size=4)
