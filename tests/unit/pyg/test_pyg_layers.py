"""Each covered layer computes what stock PyG computes, and runs fused."""

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import (
    APPNP,
    ARMAConv,
    ChebConv,
    ClusterGCNConv,
    GATConv,
    GatedGraphConv,
    GATv2Conv,
    GCN2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    LabelPropagation,
    LGConv,
    MessagePassing,
    MFConv,
    MixHopConv,
    PDNConv,
    SAGEConv,
    SGConv,
    SignedConv,
    SimpleConv,
    SSGConv,
    TAGConv,
    WLConvContinuous,
)
from torch_geometric.nn.models.linkx import SparseLinear

import edgeweave.pyg

N, E, F = 40, 200, 6
AGGRS = ["sum", "mean", "max", "min"]
FLOWS = ["source_to_target", "target_to_source"]


def features(n: int = N, f: int = F) -> Tensor:
    # Halves of odd numbers: maxima have ties, so the sharing of gradients is tested, but not at 0,
    # where torch counts the zero that its result starts from as one more tie.
    return ((torch.randn(n, f, dtype=torch.float64) * 2).round() + 0.5).requires_grad_()


def weights(e: int = E) -> Tensor:
    return (torch.rand(e, dtype=torch.float64) + 0.1).requires_grad_()


def leaves_of(layer: nn.Module, *tensors: Tensor) -> list[Tensor]:
    return [*tensors, *layer.parameters()]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("aggr", AGGRS)
@pytest.mark.parametrize("options", [{}, {"project": True}, {"normalize": True}, {"bias": False}])
def test_sage(aggr, flow, options, edge_index, same_as_stock, only_fused):
    layer = SAGEConv(F, 5, aggr=aggr, flow=flow, **options).double()
    if "project" in options:
        # Everything positive behind the ReLU, for the reason given in `features`.
        nn.init.constant_(layer.lin.bias, 50.0)
    x = features()
    same_as_stock(lambda: layer(x, edge_index), leaves_of(layer, x))
    only_fused("SAGEConv", 1)


@pytest.mark.parametrize("aggr", ["max", "min"])
def test_ties_at_zero_share_evenly(aggr):
    """The documented exception: torch sends only 2/3 of the gradient to two tied zeros."""
    x = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
    with edgeweave.pyg.accelerated():
        OwnLayer(aggr)(x, torch.tensor([[0, 1], [0, 0]])).sum().backward()
    assert x.grad.tolist() == [[0.5], [0.5]]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("aggr", AGGRS)
def test_gin(aggr, flow, edge_index, same_as_stock, only_fused):
    mlp = nn.Sequential(nn.Linear(F, 8), nn.ReLU(), nn.Linear(8, 5))
    layer = GINConv(mlp, train_eps=True, aggr=aggr, flow=flow).double()
    x = features()
    same_as_stock(lambda: layer(x, edge_index), leaves_of(layer, x))
    only_fused("GINConv", 1)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("aggr", AGGRS)
@pytest.mark.parametrize("shape", [None, (E,), (E, 1)])
def test_graph_conv(aggr, flow, shape, edge_index, same_as_stock, only_fused):
    layer = GraphConv(F, 5, aggr=aggr, flow=flow).double()
    x = features()
    w = None if shape is None else weights().detach().view(shape).requires_grad_()
    tensors = [x] if w is None else [x, w]
    same_as_stock(lambda: layer(x, edge_index, w), leaves_of(layer, *tensors))
    only_fused("GraphConv", 1)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"improved": True},
        {"add_self_loops": False},
        {"normalize": False},
        {"cached": True},
        {"aggr": "mean"},
        {"aggr": "max"},
    ],
)
def test_gcn(flow, weighted, options, edge_index, same_as_stock, only_fused):
    layer = GCNConv(F, 5, flow=flow, **options).double()
    # Where no self-loop is added, nodes without incoming edges have degree 0, and stock's gradient
    # of a weight into degree^-1/2 is NaN there; the others must still agree.
    x, w = features(), weights() if weighted else None

    def call() -> Tensor:
        layer._cached_edge_index = None
        return layer(x, edge_index, w)

    tensors = [x] if w is None else [x, w]
    same_as_stock(call, leaves_of(layer, *tensors))
    only_fused("GCNConv", 1)


def test_gcn_twice_in_training_steps(edge_index, same_as_stock, only_fused):
    """The second step takes the normalisation from the cache and must give the same."""
    first, second = GCNConv(F, 7).double(), GCNConv(7, 5).double()
    x = features()

    def call() -> Tensor:
        out = second(first(x, edge_index).relu(), edge_index)
        return out + second(first(x, edge_index.clone()).relu(), edge_index)

    same_as_stock(call, [x, *first.parameters(), *second.parameters()])
    only_fused("GCNConv", 4)
    only_fused("gcn_norm", 4)


@pytest.mark.parametrize("make", [SAGEConv, GraphConv])
@pytest.mark.parametrize("aggr", AGGRS)
@pytest.mark.parametrize("given", ["both", "source only", "size", "list"])
def test_bipartite(make, aggr, given, edge_index, same_as_stock, only_fused):
    layer = make((F, 4), 5, aggr=aggr).double()
    source, target = features(50), features(N, 4)
    if given == "source only":
        layer = make((F, F), 5, aggr=aggr).double()
        pair, size, leaves = (source, None), (50, N), [source]
    elif given == "size":
        pair, size, leaves = (source, target), (50, N), [source, target]
    else:
        pair, size, leaves = (source, target), None, [source, target]
        pair = list(pair) if given == "list" else pair
    out = same_as_stock(lambda: layer(pair, edge_index, size=size), leaves_of(layer, *leaves))
    assert out.shape == (N, 5)
    only_fused(make.__name__, 1)


@pytest.mark.parametrize("aggr", AGGRS)
def test_source_only_without_size(aggr, edge_index, same_as_stock, only_fused):
    layer = SAGEConv((F, F), 5, aggr=aggr).double()
    source = features()
    same_as_stock(lambda: layer((source, None), edge_index), leaves_of(layer, source))
    only_fused("SAGEConv", 1)


class OwnLayer(MessagePassing):
    """A user's layer with PyG's default message."""

    def __init__(self, aggr: str) -> None:
        super().__init__(aggr=aggr)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)


OTHER_LAYERS = {
    "LGConv": (lambda: LGConv(), 1),
    "SGConv": (lambda: SGConv(F, 5, K=2), 2),
    "SSGConv": (lambda: SSGConv(F, 5, alpha=0.2, K=2), 2),
    "APPNP": (lambda: APPNP(K=2, alpha=0.1), 2),
    "TAGConv": (lambda: TAGConv(F, 5, K=2), 2),
    "MixHopConv": (lambda: MixHopConv(F, 5), 2),
    "ClusterGCNConv": (lambda: ClusterGCNConv(F, 5), 1),
    "ARMAConv": (lambda: ARMAConv(F, 5, num_stacks=2, num_layers=2), 2),
    "ChebConv": (lambda: ChebConv(F, 5, K=3), 2),
    "GatedGraphConv": (lambda: GatedGraphConv(F, num_layers=2), 2),
    "SimpleConv": (lambda: SimpleConv(aggr="mean", combine_root="self_loop"), 1),
    "MFConv": (lambda: MFConv(F, 5, max_degree=4), 1),
    "WLConvContinuous": (lambda: WLConvContinuous(), 1),
    "GATConv": (lambda: GATConv(F, 5, heads=3), 1),
    "GATv2Conv": (lambda: GATv2Conv(F, 5, heads=3), 1),
}


@pytest.mark.parametrize("name", OTHER_LAYERS)
def test_other_layers(name, edge_index, same_as_stock, only_fused):
    make, times = OTHER_LAYERS[name]
    layer = make().double()
    x = features()
    same_as_stock(lambda: layer(x, edge_index), leaves_of(layer, x))
    only_fused(name, times)


@pytest.mark.parametrize("heads", [1, 4])
def test_attention_heads_and_dropout(heads, edge_index, same_as_stock, only_fused):
    layer = GATConv(F, 5, heads=heads, concat=False, dropout=0.5).double()
    x = features()
    same_as_stock(lambda: layer(x, edge_index), leaves_of(layer, x))
    only_fused("GATConv", 1)


def test_gcn2(edge_index, same_as_stock, only_fused):
    layer = GCN2Conv(F, alpha=0.1).double()
    x = features()
    same_as_stock(lambda: layer(x, x, edge_index), leaves_of(layer, x))
    only_fused("GCN2Conv", 1)


def test_pdn(edge_index, same_as_stock, only_fused):
    layer = PDNConv(F, 5, edge_dim=3, hidden_channels=4).double()
    x, attr = features(), torch.randn(E, 3, dtype=torch.float64, requires_grad=True)
    same_as_stock(lambda: layer(x, edge_index, attr), leaves_of(layer, x, attr))
    only_fused("PDNConv", 1)


def test_signed(edge_index, same_as_stock, only_fused):
    layer = SignedConv(F, 5, first_aggr=True).double()
    x = features()
    same_as_stock(lambda: layer(x, edge_index[:, :90], edge_index[:, 90:]), leaves_of(layer, x))
    only_fused("SignedConv", 2)


def test_linkx_sparse_linear(edge_index, same_as_stock, only_fused):
    layer = SparseLinear(N, 5).double()
    same_as_stock(lambda: layer(edge_index), leaves_of(layer))
    only_fused("SparseLinear", 1)


def test_label_propagation(edge_index, same_as_stock, only_fused):
    layer = LabelPropagation(num_layers=2, alpha=0.5)
    labels = torch.rand(N, 3, dtype=torch.float64)
    same_as_stock(lambda: layer(labels, edge_index))
    only_fused("LabelPropagation", 2)


@pytest.mark.parametrize("aggr", AGGRS)
def test_own_layer_with_default_message(aggr, edge_index, same_as_stock, only_fused):
    layer = OwnLayer(aggr)
    x = features()
    same_as_stock(lambda: layer(x, edge_index), [x])
    only_fused(f"{__name__}.OwnLayer", 1)


@pytest.mark.parametrize("aggr", AGGRS)
@pytest.mark.parametrize("make", [SAGEConv, GraphConv])
@pytest.mark.parametrize("sort_order", [None, "row", "col"])
def test_pyg_edge_index(make, aggr, sort_order, edge_index, only_fused):
    """Compared with stock on the plain tensor: stock GraphConv cannot take an EdgeIndex in fp64."""
    edges = EdgeIndex(edge_index, sparse_size=(N, N))
    if sort_order is not None:
        edges = edges.sort_by(sort_order).values
    layer = make(F, 5, aggr=aggr).double()
    x = features()
    stock = layer(x, edge_index)
    (stock_grad,) = torch.autograd.grad(stock.square().sum(), x)
    with edgeweave.pyg.accelerated():
        ours = layer(x, edges)
        (our_grad,) = torch.autograd.grad(ours.square().sum(), x)
    torch.testing.assert_close(ours, stock, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(our_grad, stock_grad, rtol=1e-12, atol=1e-12)
    only_fused(make.__name__, 1)


@pytest.mark.parametrize("aggr", AGGRS)
def test_batch_dimension_before_nodes(aggr, edge_index, same_as_stock, only_fused):
    layer = GraphConv(F, 5, aggr=aggr).double()
    x, w = torch.randn(3, N, F, dtype=torch.float64, requires_grad=True), weights()
    same_as_stock(lambda: layer(x, edge_index, w), leaves_of(layer, x, w))
    only_fused("GraphConv", 1)


@pytest.mark.parametrize("aggr", AGGRS)
@pytest.mark.parametrize("make", [SAGEConv, GraphConv])
def test_no_edges(make, aggr, same_as_stock, only_fused):
    edges = torch.empty(2, 0, dtype=torch.long)
    layer = make(F, 5, aggr=aggr).double()
    x = features()
    same_as_stock(lambda: layer(x, edges), leaves_of(layer, x))
    only_fused(make.__name__, 1)


def test_gcn_no_edges(same_as_stock, only_fused):
    edges = torch.empty(2, 0, dtype=torch.long)
    layer = GCNConv(F, 5).double()
    x = features()
    same_as_stock(lambda: layer(x, edges), leaves_of(layer, x))
    only_fused("GCNConv", 1)


@pytest.mark.parametrize("aggr", AGGRS)
def test_no_nodes(aggr, same_as_stock, only_fused):
    edges = torch.empty(2, 0, dtype=torch.long)
    layer = SAGEConv(F, 5, aggr=aggr).double()
    x = features(0)
    out = same_as_stock(lambda: layer(x, edges), leaves_of(layer, x))
    assert out.shape == (0, 5)
    only_fused("SAGEConv", 1)


@pytest.mark.parametrize("aggr", AGGRS)
def test_isolated_nodes_get_zero(aggr, edge_index):
    layer = OwnLayer(aggr)
    with edgeweave.pyg.accelerated():
        out = layer(features(), edge_index)
    assert out[35:].eq(0).all()
    assert out[:35].ne(0).any()


def test_strided_edge_index(edge_index, same_as_stock, only_fused):
    edges = edge_index.t().contiguous().t()
    assert not edges.is_contiguous()
    layer = SAGEConv(F, 5).double()
    x = features()
    same_as_stock(lambda: layer(x, edges), leaves_of(layer, x))
    only_fused("SAGEConv", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [GCNConv, SAGEConv])
def test_narrow_dtypes_are_as_near_to_float64_as_stock(make, dtype, edge_index, only_fused):
    layer = make(F, 5).double()
    x = features().detach()
    exact = layer(x, edge_index)
    layer, x = layer.to(dtype), x.to(dtype)
    stock = layer(x, edge_index)
    with edgeweave.pyg.accelerated():
        ours = layer(x, edge_index)
    assert ours.dtype is dtype
    only_fused(make.__name__, 1)

    def worst(out: Tensor) -> float:
        return (out.double() - exact).abs().max().item()

    # Both round the same linear layers; a quarter more leaves room for luck in single roundings.
    assert worst(ours) <= 1.25 * worst(stock) + torch.finfo(dtype).eps


def test_weight_of_another_dtype(edge_index, only_fused):
    layer = OwnWeighted()
    x, w = features().detach().float(), weights().detach()
    stock = layer(x, edge_index, w)
    with edgeweave.pyg.accelerated():
        ours = layer(x, edge_index, w)
    assert ours.dtype is stock.dtype is torch.float64
    torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-6)


class OwnWeighted(GraphConv):
    """A subclass that changes nothing that matters for messages."""

    def __init__(self) -> None:
        super().__init__(F, 5)

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        return self.propagate(edge_index, x=(x, x), edge_weight=edge_weight, size=None)


def test_subclass_with_its_own_forward_is_fused(edge_index, same_as_stock, only_fused):
    layer = OwnWeighted()
    x, w = features(), weights()
    same_as_stock(lambda: layer(x, edge_index, w), [x, w])
    only_fused(f"{__name__}.OwnWeighted", 1)
