"""GATConv, GATv2Conv and TransformerConv without `[E, H, C]`: as stock, fused, and when not."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv
from torch_geometric.utils import softmax

import edgeweave.pyg
from edgeweave._plan import _edge_network

FLOWS = ["source_to_target", "target_to_source"]
# (layer, options): heads alone and side by side, sums and means over heads, widths round 4 and 8.
LAYERS = [
    (GATConv, {}),
    (GATConv, {"heads": 3}),
    (GATConv, {"heads": 2, "concat": False, "bias": False}),
    (GATConv, {"heads": 2, "residual": True}),
    (GATConv, {"heads": 2, "add_self_loops": False}),
    (GATConv, {"heads": 4, "dropout": 0.5, "negative_slope": 0.1}),
    (GATv2Conv, {}),
    (GATv2Conv, {"heads": 3}),
    (GATv2Conv, {"heads": 2, "concat": False, "bias": False}),
    (GATv2Conv, {"heads": 2, "residual": True, "share_weights": True}),
    (GATv2Conv, {"heads": 2, "add_self_loops": False}),
    (GATv2Conv, {"heads": 4, "dropout": 0.5, "negative_slope": 0.1}),
    (TransformerConv, {}),
    (TransformerConv, {"heads": 3, "beta": True}),
    (TransformerConv, {"heads": 2, "concat": False, "bias": False}),
    (TransformerConv, {"heads": 2, "root_weight": False}),
    (TransformerConv, {"heads": 4, "dropout": 0.5}),
]
KINDS = [GATConv, GATv2Conv, TransformerConv]


def parameters(layer: nn.Module) -> list[Tensor]:
    return list(layer.parameters())


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("width", [1, 5, 8])
@pytest.mark.parametrize(("cls", "options"), LAYERS)
def test_as_stock(cls, options, width, flow, edge_index, same_as_stock, only_fused):
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    layer = cls(6, width, flow=flow, **options).double()
    same_as_stock(lambda: layer(x, edge_index), [x, *parameters(layer)])
    only_fused(cls.__name__, 1)


@pytest.mark.parametrize("cls", KINDS)
def test_float32_is_as_close_to_float64_as_stock(cls, edge_index):
    x = torch.randn(40, 16)
    layer = cls(16, 12, heads=3)

    def run(layer: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        out = layer(x, edge_index)
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])]

    exact = run(copy.deepcopy(layer).double(), x.double())
    stock = run(layer, x)
    with edgeweave.pyg.accelerated():
        ours = run(layer, x)
    assert edgeweave.pyg.report()[cls.__name__].fused == 1
    for a, s, e in zip(ours, stock, exact, strict=True):
        # Other orders of the same sums: a few roundings of the largest entry.
        floor = 16 * torch.finfo(torch.float32).eps * e.abs().max()
        assert (a - e).abs().max() <= 4 * (s - e).abs().max() + floor


@pytest.mark.parametrize("cls", KINDS)
def test_two_sides(cls, same_as_stock, only_fused):
    edges = torch.stack([torch.randint(0, 30, (90,)), torch.randint(0, 12, (90,))])
    x = torch.randn(30, 6, dtype=torch.float64, requires_grad=True)
    y = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    layer = cls((6, 4), 5, heads=2).double()
    same_as_stock(lambda: layer((x, y), edges), [x, y, *parameters(layer)])
    only_fused(cls.__name__, 1)


@pytest.mark.parametrize("cls", [GATConv, GATv2Conv])
def test_the_same_weights_for_two_sides(cls, same_as_stock, only_fused):
    edges = torch.stack([torch.randint(0, 30, (90,)), torch.randint(0, 12, (90,))])
    x = torch.randn(30, 6, dtype=torch.float64, requires_grad=True)
    y = x[:12]
    layer = cls(6, 5, heads=2).double()
    same_as_stock(lambda: layer((x, y), edges), [x, *parameters(layer)])
    only_fused(cls.__name__, 1)


@pytest.mark.parametrize("cls", KINDS)
def test_attention_weights_are_handed_out(cls, edge_index, only_fused):
    x = torch.randn(40, 6, dtype=torch.float64)
    layer = cls(6, 5, heads=2).double()
    out, (edges, alpha) = layer(x, edge_index, return_attention_weights=True)
    with edgeweave.pyg.accelerated():
        ours, (our_edges, ours_alpha) = layer(x, edge_index, return_attention_weights=True)
        our_edges.zero_()  # the caller's own: the next call must not see it
        again = layer(x, edge_index.clone() if cls is TransformerConv else edge_index)
    only_fused(cls.__name__, 2)
    torch.testing.assert_close(ours, out)
    torch.testing.assert_close(ours_alpha, alpha)
    assert our_edges.shape == edges.shape
    if cls is not TransformerConv:  # which hands the caller's own edges back, as stock does
        torch.testing.assert_close(again, out)


@pytest.mark.parametrize("cls", KINDS)
def test_edges_edited_in_place_are_noticed(cls, edge_index):
    x = torch.randn(40, 6, dtype=torch.float64)
    layer = cls(6, 5, heads=2).double()
    with edgeweave.pyg.accelerated():
        layer(x, edge_index)
        edge_index[0] = edge_index[0].flip(0)
        ours = layer(x, edge_index)
    torch.testing.assert_close(ours, layer(x, edge_index))


@pytest.mark.parametrize("cls", KINDS)
@pytest.mark.parametrize("shape", [(0, 0), (7, 0), (1, 1)])
def test_hardly_any_graph(cls, shape, same_as_stock):
    nodes, edges = shape
    x = torch.randn(nodes, 6, dtype=torch.float64, requires_grad=True)
    layer = cls(6, 5, heads=2).double()
    index = torch.zeros(2, edges, dtype=torch.long)
    same_as_stock(lambda: layer(x, index), [x, *parameters(layer)])


@pytest.mark.parametrize("cls", KINDS)
def test_second_derivatives(cls, edge_index, only_fused):
    x = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
    layer = cls(3, 2, heads=2).double()

    def run() -> list[Tensor]:
        out = layer(x, edge_index[:, :60])
        first = torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()], create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), x))

    stock = run()
    with edgeweave.pyg.accelerated():
        ours = run()
    only_fused(cls.__name__, 1)
    torch.testing.assert_close(ours, stock, rtol=1e-9, atol=1e-9)


def _hook(layer: nn.Module) -> nn.Module:
    layer.register_message_forward_hook(lambda *args: None)
    return layer


def _edge_hook(layer: nn.Module) -> nn.Module:
    layer.register_edge_update_forward_hook(lambda *args: None)
    return layer


def _explained(layer: nn.Module) -> nn.Module:
    layer.explain = False  # what an Explainer leaves behind
    layer.message = layer.message
    return layer


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_hook, "a message-passing hook is registered"), (_explained, "a method is set on the layer")],
)
@pytest.mark.parametrize("cls", KINDS)
def test_a_changed_layer_keeps_stock_code(cls, change, reason, edge_index, same_as_stock):
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    layer = change(cls(6, 5, heads=2).double())
    same_as_stock(lambda: layer(x, edge_index), [x, *parameters(layer)])
    entry = edgeweave.pyg.report()[cls.__name__]
    assert entry.fused == 0
    assert reason in entry.reasons


def test_an_edge_update_hook_is_called(edge_index):
    called = []
    layer = GATConv(6, 5)
    layer.register_edge_update_forward_hook(lambda *args: called.append(1))
    with edgeweave.pyg.accelerated():
        layer(torch.randn(40, 6), edge_index)
    assert called == [1]


class Sharper(GATv2Conv):
    def edge_update(self, x_j, x_i, edge_attr, index, ptr, dim_size):
        return softmax((x_j - x_i).sum(-1), index, ptr, dim_size)


def test_a_subclass_with_its_own_scores_is_not_replaced(edge_index, same_as_stock):
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    layer = Sharper(6, 5, heads=2).double()
    same_as_stock(lambda: layer(x, edge_index), [x, *parameters(layer)])


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("fill", ["mean", "max", 0.5])
@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("cls", [GATConv, GATv2Conv])
def test_edge_features(cls, dim, fill, loops, edge_index, same_as_stock, only_fused):
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    shape = (edge_index.size(1),) if dim == 1 else (edge_index.size(1), dim)
    attr = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    options = {"edge_dim": dim, "fill_value": fill, "add_self_loops": loops}
    layer = cls(6, 5, heads=2, **options).double()
    same_as_stock(lambda: layer(x, edge_index, edge_attr=attr), [x, attr, *parameters(layer)])
    only_fused(cls.__name__, 1)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("options", [{}, {"heads": 3}, {"heads": 2, "concat": False, "beta": True}])
def test_edge_features_of_transformers(options, flow, edge_index, same_as_stock, only_fused):
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    attr = torch.randn(edge_index.size(1), 3, dtype=torch.float64, requires_grad=True)
    layer = TransformerConv(6, 5, edge_dim=3, dropout=0.3, flow=flow, **options).double()
    same_as_stock(lambda: layer(x, edge_index, edge_attr=attr), [x, attr, *parameters(layer)])
    only_fused("TransformerConv", 1)


@pytest.mark.parametrize("cls", [GATv2Conv, TransformerConv])
def test_edge_features_in_tiles_twice_differentiated(cls, edge_index, only_fused, monkeypatch):
    monkeypatch.setattr(_edge_network, "_MOST_EDGES", 12)
    x = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
    attr = torch.randn(edge_index.size(1), 2, dtype=torch.float64, requires_grad=True)
    layer = cls(3, 2, heads=2, edge_dim=2).double()

    def run() -> list[Tensor]:
        out = layer(x, edge_index, edge_attr=attr)
        leaves = [x, attr, *layer.parameters()]
        first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), [x, attr])]

    stock = run()
    with edgeweave.pyg.accelerated():
        ours = run()
    only_fused(cls.__name__, 1)
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("cls", [GATv2Conv, TransformerConv])
def test_nothing_of_a_head_is_kept_per_edge(cls, monkeypatch):
    monkeypatch.setattr(_edge_network, "_MOST_EDGES", 100)
    nodes, edges, heads, width = 50, 1000, 4, 16
    layer = cls(8, width, heads=heads, edge_dim=3)
    seen: list[int] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: (seen.append(t.numel()), t)[1], lambda t: t
    )
    x, attr = torch.randn(nodes, 8), torch.randn(edges, 3)
    with edgeweave.pyg.accelerated(), hooks:
        layer(x, torch.randint(0, nodes, (2, edges)), edge_attr=attr)
    assert seen
    assert max(seen) < edges * heads * width // 4


def _wide(layer: nn.Module) -> None:
    """Nothing: the layer was made with more edge features than a head has."""


def _hooked(layer: nn.Module) -> None:
    layer.lin_edge.register_forward_hook(lambda *args: None)


@pytest.mark.parametrize(
    ("cls", "change", "dim", "reason"),
    [
        (GATConv, _hooked, 3, "edge_attr is not [E, D], or its linear layer is changed"),
        (GATv2Conv, _hooked, 3, "edge_attr is not [E, D], or its linear layer is changed"),
        (TransformerConv, _hooked, 3, "edge_attr is not [E, D], or its linear layer is changed"),
        (TransformerConv, _wide, 7, "edge_attr is wider than a head"),
    ],
)
def test_edge_features_that_go_to_stock_code(cls, change, dim, reason, edge_index, same_as_stock):
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    attr = torch.randn(edge_index.size(1), dim, dtype=torch.float64)
    layer = cls(6, 5, heads=2, edge_dim=dim).double()
    change(layer)
    same_as_stock(lambda: layer(x, edge_index, edge_attr=attr), [x, *parameters(layer)])
    assert reason in edgeweave.pyg.report()[cls.__name__].reasons


@pytest.mark.parametrize("cls", KINDS)
def test_a_bad_index_raises_what_stock_raises(cls):
    layer = cls(6, 5)
    edges = torch.tensor([[0, 9], [1, 2]])
    with pytest.raises((IndexError, RuntimeError)) as stock:
        layer(torch.randn(4, 6), edges)
    with edgeweave.pyg.accelerated(), pytest.raises(type(stock.value)):
        layer(torch.randn(4, 6), edges)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("cls", KINDS)
def test_heads_keep_to_themselves(cls, value, edge_index):
    layer = cls(2, 2, heads=2, add_self_loops=False) if cls is not TransformerConv else cls(2, 2, 2)
    layer = layer.double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("lin") and name.endswith("weight"):
                parameter.copy_(torch.eye(2, dtype=torch.float64).repeat_interleave(2, 0))
    x = torch.randn(40, 2, dtype=torch.float64)
    x[3, 0] = value  # the first head's
    out = layer(x, edge_index)
    with edgeweave.pyg.accelerated():
        ours = layer(x, edge_index)
    assert out.isnan().any()
    torch.testing.assert_close(ours.isnan(), out.isnan())
    torch.testing.assert_close(ours, out, equal_nan=True)


def test_edge_features_without_edges_have_no_gradient(edge_index):
    layer = GATConv(6, 5, edge_dim=3, add_self_loops=False)
    attr = torch.randn(0, 3, requires_grad=True)
    with edgeweave.pyg.accelerated():
        layer(torch.randn(4, 6), edge_index[:, :0], edge_attr=attr).sum().backward()
    assert attr.grad is None
    assert layer.att_edge.grad is None


@pytest.mark.parametrize("cls", [GATConv, GATv2Conv])
def test_int32_edges_come_back_as_from_stock(cls, edge_index):
    layer = cls(6, 5)
    x, edges = torch.randn(40, 6), edge_index.int()
    _, (expected, _) = layer(x, edge_index, return_attention_weights=True)
    with edgeweave.pyg.accelerated():
        _, (ours, _) = layer(x, edges, return_attention_weights=True)
    assert torch.equal(ours, expected)
    assert ours.dtype == torch.int64


class Cast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).float()


def _wide_attention(layer: nn.Module) -> None:
    for name in ("att_src", "att_dst", "att"):
        if hasattr(layer, name):
            setattr(layer, name, nn.Parameter(getattr(layer, name).float()))


def _shared_attention(layer: nn.Module) -> None:
    for name in ("att_src", "att_dst", "att"):
        if hasattr(layer, name):
            setattr(layer, name, nn.Parameter(getattr(layer, name)[:, :1]))


def _other_linear(layer: nn.Module) -> None:
    name = next(
        n for n in ("lin", "lin_r", "lin_query") if isinstance(getattr(layer, n, 0), nn.Module)
    )
    setattr(layer, name, Cast(getattr(layer, name)))


@pytest.mark.parametrize(
    ("cls", "change", "reason"),
    [
        (GATConv, _wide_attention, "att_src is not in the dtype of x"),
        (GATv2Conv, _wide_attention, "att is not in the dtype of x"),
        (GATConv, _shared_attention, "att_src is not [1, H, C]"),
        (GATv2Conv, _shared_attention, "att is not [1, H, C]"),
        (GATConv, _other_linear, "lin is not a plain linear layer in the dtype of x"),
        (GATv2Conv, _other_linear, "lin_r is not a plain linear layer in the dtype of x"),
        (TransformerConv, _other_linear, "lin_query is not a plain linear layer in the dtype of x"),
    ],
)
def test_parameters_of_another_kind_go_to_stock_code(cls, change, reason, edge_index):
    layer = cls(6, 5, heads=2).bfloat16()
    change(layer)
    x = torch.randn(40, 6).bfloat16()
    expected = layer(x, edge_index)
    with edgeweave.pyg.accelerated():
        ours = layer(x, edge_index)
    assert ours.dtype is expected.dtype
    torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)
    assert reason in edgeweave.pyg.report()[cls.__name__].reasons


@pytest.mark.parametrize("cls", KINDS)
def test_the_default_device_does_not_matter(cls, edge_index):
    layer, x = cls(6, 5, heads=2), torch.randn(40, 6)
    expected = layer(x, edge_index)
    with edgeweave.pyg.accelerated(), torch.device("meta"):
        ours = layer(x, edge_index)
    torch.testing.assert_close(ours, expected)


def test_a_pair_of_one_tensor_is_projected_twice(edge_index, same_as_stock):
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    layer = GATConv(6, 5, heads=2).double()
    calls = []
    layer.lin.register_forward_hook(lambda *args: calls.append(1))
    same_as_stock(lambda: layer((x, x), edge_index), [x, *layer.parameters()])
    assert len(calls) == 4  # two by stock, two by us


def test_unused_edge_features_of_a_wrong_length_are_an_error(edge_index):
    layer, x, attr = GATConv(6, 5), torch.randn(40, 6), torch.randn(3, 2)
    with pytest.raises(IndexError):
        layer(x, edge_index, attr)
    with edgeweave.pyg.accelerated(), pytest.raises(IndexError):
        layer(x, edge_index, attr)


def test_gradients_of_the_attention_vectors_are_summed_as_well_as_by_stock():
    nodes = 30_000
    x, edges = torch.randn(nodes, 8), torch.randint(0, nodes, (2, 60_000))
    attr = torch.randn(60_000, 4)
    layer = GATConv(8, 16, heads=4, edge_dim=4)
    names = ("att_src", "att_dst", "att_edge")

    def run(layer: nn.Module, x: Tensor, attr: Tensor) -> list[Tensor]:
        out = layer(x, edges, edge_attr=attr)
        return list(torch.autograd.grad(out.sin().sum(), [getattr(layer, n) for n in names]))

    exact = run(copy.deepcopy(layer).double(), x.double(), attr.double())
    stock = run(layer, x, attr)
    with edgeweave.pyg.accelerated():
        ours = run(layer, x, attr)
    assert edgeweave.pyg.report()["GATConv"].fused == 1
    for name, a, s, e in zip(names, ours, stock, exact, strict=True):
        # A product of matrices over all nodes is ten times as far off as stock.
        floor = torch.finfo(torch.float32).eps * e.abs().max()
        assert (a - e).abs().max() <= 4 * (s - e).abs().max() + floor, name


@pytest.mark.parametrize("cls", KINDS)
def test_copies_and_pickles(cls, edge_index):
    x = torch.randn(40, 6)
    layer = cls(6, 5, heads=2)
    with edgeweave.pyg.accelerated():
        out = layer(x, edge_index)
        assert torch.equal(copy.deepcopy(layer)(x, edge_index), out)
        assert torch.equal(pickle.loads(pickle.dumps(layer))(x, edge_index), out)


@pytest.mark.parametrize("cls", KINDS)
def test_bitwise_the_same_for_any_number_of_threads(cls, threads_restored):
    edges = torch.randint(0, 300, (2, 9000))
    edges[1, :5000] = 7  # a row that is cut in chunks
    x = torch.randn(300, 16, requires_grad=True)
    layer = cls(16, 8, heads=2)
    results = []
    with edgeweave.pyg.accelerated():
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            out = layer(x, edges)
            grad = torch.autograd.grad(out.sum(), x)[0]
            results.append((out.detach(), grad))
    # The products of dense matrices are torch's, which promises no such thing: compared are the
    # sums over edges, through a layer whose linear parts do not depend on the threads here.
    for out, grad in results[1:]:
        torch.testing.assert_close(out, results[0][0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grad, results[0][1], rtol=1e-4, atol=1e-4)


@pytest.fixture
def threads_restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class TestSoftmax:
    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_as_stock(self, dim, same_as_stock, only_fused):
        src = torch.randn(20, 20, dtype=torch.float64, requires_grad=True)
        index = torch.randint(0, 6, (20,))
        function = __import__("torch_geometric").utils
        same_as_stock(lambda: function.softmax(src, index, num_nodes=8, dim=dim), [src])
        only_fused("utils.softmax", 1)

    def test_where_it_was_imported_by_name(self, edge_index, same_as_stock, only_fused):
        from torch_geometric.nn import AttentionalAggregation

        x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
        pool = AttentionalAggregation(nn.Linear(6, 1)).double()
        index = torch.arange(40) // 10
        same_as_stock(lambda: pool(x, index), [x, *pool.parameters()])
        only_fused("utils.softmax", 1)

    def test_pointers_go_to_stock_code(self, same_as_stock):
        from torch_geometric import utils

        src = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
        same_as_stock(lambda: utils.softmax(src, ptr=torch.tensor([0, 2, 6])), [src])
        assert "ptr is given" in edgeweave.pyg.report()["utils.softmax"].reasons
