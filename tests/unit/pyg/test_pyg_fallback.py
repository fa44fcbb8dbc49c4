"""What is not covered runs PyG's own code, says why, and fails as PyG does."""

from types import MethodType

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric.nn import (
    GCNConv,
    GMMConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    SumAggregation,
)

import edgeweave.pyg

N, E, F = 40, 200, 6
# torch 2.13 deprecates TorchScript, which PyG and parts of torch still use.
DEPRECATED_JIT = "ignore:`torch.jit.[a-z_]+` is deprecated:DeprecationWarning"


def features(n: int = N) -> Tensor:
    return torch.randn(n, F, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def falls_back(same_as_stock):
    """Check that a call equals stock and that its site fell back for a reason, once."""

    def check(site: str, reason: str, call, leaves=None) -> None:
        same_as_stock(call, leaves)
        entry = edgeweave.pyg.report()[site]
        assert entry.fused == 0
        assert len(entry.reasons) == 1, entry.reasons
        ((found, count),) = entry.reasons.items()
        assert reason in found
        assert count == entry.fell_back == 1

    return check


class OwnMessage(SAGEConv):
    def message(self, x_j: Tensor) -> Tensor:
        return 2 * x_j


class OwnAggregate(SAGEConv):
    # No annotation: PyG's inspector cannot read `int | None`.
    def aggregate(self, inputs: Tensor, index: Tensor, dim_size=None) -> Tensor:
        return super().aggregate(3 * inputs, index, dim_size=dim_size)


class OwnUpdate(SAGEConv):
    def update(self, inputs: Tensor) -> Tensor:
        return inputs + 1


class OwnMessageAndAggregate(SAGEConv):
    def message_and_aggregate(self, adj_t: Tensor, x: Tensor) -> Tensor:
        raise AssertionError("a plain edge_index never gets here")


class OwnPropagate(SAGEConv):
    def propagate(self, edge_index: Tensor, x: tuple[Tensor, Tensor], size: object = None):
        return 2 * super().propagate(edge_index, x=x, size=size)


class OwnLift(SAGEConv):
    def _index_select(self, src: Tensor, index: Tensor) -> Tensor:
        return 5 * super()._index_select(src, index)


class OwnSum(SumAggregation):
    def forward(self, *args: object, **kwargs: object) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (OwnMessage, "message is not one that edgeweave knows"),
        (OwnAggregate, "aggregate is overridden"),
        (OwnUpdate, "update is overridden"),
        (OwnMessageAndAggregate, "message_and_aggregate is overridden"),
        (OwnPropagate, "propagate is overridden"),
        (OwnLift, "_index_select is overridden"),
    ],
)
def test_subclass_that_overrides(layer, reason, edge_index, falls_back):
    conv, x = layer(F, 5).double(), features()
    falls_back(f"{__name__}.{layer.__name__}", reason, lambda: conv(x, edge_index), [x])


def test_layer_with_another_message(edge_index, falls_back):
    conv, x = GMMConv(F, 4, dim=3, kernel_size=2).double(), features()
    attr = torch.randn(E, 3, dtype=torch.float64, requires_grad=True)
    falls_back("GMMConv", "message is not one", lambda: conv(x, edge_index, attr), [x, attr])


@pytest.mark.parametrize("aggr", ["mul", ["sum", "mul"], "median", OwnSum()])
def test_other_aggregations(aggr, edge_index, falls_back):
    conv, x = SAGEConv(F, 5, aggr=aggr).double(), features()
    falls_back("SAGEConv", "is not a plain sum, mean, max or min", lambda: conv(x, edge_index), [x])


def test_hook_on_the_aggregation_module(edge_index, falls_back):
    conv, x = SAGEConv(F, 5).double(), features()
    conv.aggr_module.register_forward_hook(lambda module, args, out: 2 * out)
    falls_back("SAGEConv", "is not a plain", lambda: conv(x, edge_index), [x])


HOOKS = {
    "propagate_forward_pre": lambda layer, inputs: None,
    "propagate_forward": lambda layer, inputs, out: 2 * out,
    "message_forward_pre": lambda layer, inputs: ({"x_j": 3 * inputs[0]["x_j"]},),
    "message_forward": lambda layer, inputs, out: 2 * out,
    "aggregate_forward_pre": lambda layer, inputs: inputs,
    "aggregate_forward": lambda layer, inputs, out: 2 * out,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks(hook, edge_index, falls_back):
    conv, x = SAGEConv(F, 5).double(), features()
    handle = getattr(conv, f"register_{hook}_hook")(HOOKS[hook])
    falls_back("SAGEConv", "a message-passing hook", lambda: conv(x, edge_index), [x])
    handle.remove()
    with edgeweave.pyg.accelerated():
        conv(x, edge_index)
    assert edgeweave.pyg.report()["SAGEConv"].fused == 1


def test_explain_falls_back_and_fuses_again_afterwards(edge_index, falls_back):
    conv, x = SAGEConv(F, 5).double(), features()
    mask = torch.rand(E, dtype=torch.float64)

    def explained() -> Tensor:
        conv.explain = True
        conv._edge_mask = mask
        out = conv(x, edge_index)
        conv.explain = False
        return out

    falls_back("SAGEConv", "explain is on", explained, [x])
    with edgeweave.pyg.accelerated():
        explained()
        conv(x, edge_index)
    assert edgeweave.pyg.report()["SAGEConv"].fused == 1


def test_decomposed_layers(edge_index, same_as_stock):
    conv, x = SAGEConv(F, 5, decomposed_layers=2, root_weight=False).double(), features()
    # The pair of SAGEConv cannot be chunked by PyG; its propagate is given the tensor itself.
    same_as_stock(lambda: conv.propagate(edge_index, x=x), [x])
    (reason,) = edgeweave.pyg.report()["SAGEConv"].reasons
    assert reason.startswith("decomposed_layers > 1")


def test_message_set_on_the_instance(edge_index, falls_back):
    conv, x = SAGEConv(F, 5).double(), features()
    conv.message = MethodType(lambda self, x_j: 2 * x_j, conv)
    falls_back("SAGEConv", "set on the layer", lambda: conv(x, edge_index), [x])


def test_message_replaced_on_the_class_after_the_first_call(edge_index, monkeypatch):
    class Late(SAGEConv):
        pass

    conv, x = Late(F, 5, root_weight=False, bias=False).double(), features()
    with edgeweave.pyg.accelerated():
        first = conv(x, edge_index)
        monkeypatch.setattr(Late, "message", lambda self, x_j: 2 * x_j)
        torch.testing.assert_close(conv(x, edge_index), 2 * first)
    (entry,) = (site for site in edgeweave.pyg.report().sites if site.site.endswith("Late"))
    assert entry.fused == 1
    assert entry.reasons == {"message, aggregate or update was replaced on the class": 1}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_sparse_adjacency_goes_through_spmm(edge_index, falls_back):
    adj_t = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(E).double(), (N, N))
    adj_t = adj_t.coalesce().to_sparse_csr()

    # A class of its own: PyG generates a class's `propagate` without the product if the first
    # instance of all has another aggregation than a sum or mean.
    class Sage(SAGEConv):
        pass

    conv, x = Sage(F, 5).double(), features()
    site = f"{__name__}.test_sparse_adjacency_goes_through_spmm.<locals>.Sage"
    falls_back(site, "PyG calls utils.spmm", lambda: conv(x, adj_t), [x])
    assert edgeweave.pyg.report()["utils.spmm"].fused == 1


def test_integer_features(edge_index, falls_back):
    class Plain(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

    conv, x = Plain(), torch.arange(N * F).view(N, F)
    site = f"{__name__}.test_integer_features.<locals>.Plain"
    falls_back(site, "dtype torch.int64", lambda: conv(x, edge_index).double())


def test_feature_subclass(edge_index, falls_back):
    class Marked(Tensor):
        pass

    conv, x = GraphConv(F, 5).double(), features().detach().as_subclass(Marked)
    falls_back("GraphConv", "x is a Marked", lambda: conv(x, edge_index).as_subclass(Tensor))


def test_positional_arguments(edge_index, falls_back):
    conv, x = SAGEConv(F, 5).double(), features()
    falls_back("SAGEConv", "positional", lambda: conv.propagate(edge_index, (x, x)), [x])


def test_one_weight_for_all_edges(edge_index, falls_back):
    conv, x = GraphConv(F, 5).double(), features()
    weight = torch.rand(1, dtype=torch.float64, requires_grad=True)
    falls_back("GraphConv", "edge_weight", lambda: conv(x, edge_index, weight), [x, weight])


def test_dispatch_mode(edge_index, falls_back):
    conv, x = SAGEConv(F, 5).double(), features()

    def counted() -> Tensor:
        with FlopCounterMode(display=False):
            return conv(x, edge_index)

    falls_back("SAGEConv", "dispatch mode", counted, [x])


@pytest.mark.filterwarnings(DEPRECATED_JIT)
def test_functional_transforms(edge_index):
    conv, x = SAGEConv(F, 5).double(), features().detach()
    vmapped = torch.vmap(lambda batch: conv(batch, edge_index))
    stacked = torch.stack([x, 2 * x])
    stock = vmapped(stacked)
    with edgeweave.pyg.accelerated():
        torch.testing.assert_close(vmapped(stacked), stock)
        _, tangent = torch.func.jvp(lambda t: conv(t, edge_index), (x,), (x,))
    torch.testing.assert_close(
        tangent, torch.func.jvp(lambda t: conv(t, edge_index), (x,), (x,))[1]
    )
    assert set(edgeweave.pyg.report()["SAGEConv"].reasons) == {"a torch.func transform is active"}


@pytest.mark.filterwarnings(DEPRECATED_JIT)
def test_forward_mode_differentiation(edge_index):
    conv, x = SAGEConv(F, 5).double(), features().detach()
    with torch.autograd.forward_ad.dual_level(), edgeweave.pyg.accelerated():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        out = torch.autograd.forward_ad.unpack_dual(conv(dual, edge_index))
    assert out.tangent is not None
    assert "forward-mode" in next(iter(edgeweave.pyg.report()["SAGEConv"].reasons))


@pytest.mark.filterwarnings(DEPRECATED_JIT)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace(edge_index):
    conv, x = SAGEConv(F, 5).double().eval(), features().detach()
    stock = conv(x, edge_index)
    with edgeweave.pyg.accelerated():
        traced = torch.jit.trace(conv, (x, edge_index), check_trace=False)
    torch.testing.assert_close(traced(x, edge_index), stock)
    assert "torch.jit.trace" in next(iter(edgeweave.pyg.report()["SAGEConv"].reasons))
    other = edge_index[:, :50]
    torch.testing.assert_close(traced(x, other), conv(x, other))


@pytest.mark.filterwarnings(DEPRECATED_JIT)
@pytest.mark.parametrize("make", [GCNConv, SAGEConv, GraphConv])
def test_jit_script(make, edge_index):
    conv, x = make(F, 5).double(), features().detach()
    stock = conv(x, edge_index)
    with edgeweave.pyg.accelerated():
        scripted = torch.jit.script(conv)
    torch.testing.assert_close(scripted(x, edge_index), stock)


def test_fx_symbolic_trace():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv(F, 5)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(x, edge_index)

    from torch_geometric.nn.fx import Transformer

    with edgeweave.pyg.accelerated():
        graph = Transformer(Net()).graph
    assert [node.op for node in graph.nodes].count("call_module") == 1


# Errors: stock's own, whatever is wrong.

BAD_INDICES = {
    "source too large": torch.tensor([[0, N], [0, 1]]),
    "source negative": torch.tensor([[0, -1], [0, 1]]),
    "target too large": torch.tensor([[0, 1], [0, N]]),
    "target negative": torch.tensor([[0, 1], [0, -1]]),
    "float": torch.zeros(2, 4),
    "bool": torch.zeros(2, 4, dtype=torch.bool),
    "int16": torch.zeros(2, 4, dtype=torch.int16),
    "one row": torch.zeros(1, 4, dtype=torch.long),
    "three dimensions": torch.zeros(2, 4, 1, dtype=torch.long),
    "not a tensor": [[0, 1], [1, 2]],
}


def outcome_of(call) -> tuple[str, str] | Tensor:
    """Return what a call gives, or type and text of what it raises."""
    try:
        out: Tensor = call()
    except Exception as error:
        return type(error).__name__, str(error)
    return out


def check_same_outcome(call, *, raises: bool = True) -> None:
    stock = outcome_of(call)
    assert isinstance(stock, tuple) or not raises
    with edgeweave.pyg.accelerated():
        ours = outcome_of(call)
    if isinstance(stock, tuple):
        assert ours == stock
    else:
        torch.testing.assert_close(ours, stock, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [SAGEConv, GCNConv, GraphConv])
@pytest.mark.parametrize("name", BAD_INDICES)
def test_bad_edge_index_raises_what_stock_raises(make, name):
    conv, x, edges = make(F, 5).double(), features(), BAD_INDICES[name]
    # Stock GCNConv takes some of these: concatenating int64 self-loops makes them valid.
    check_same_outcome(lambda: conv(x, edges), raises=make is not GCNConv)


@pytest.mark.parametrize(
    ("x", "size"),
    [
        ((features(), features(30)), (N, 31)),
        ((features(), features(30)), (41, 30)),
        (features(), (N, 30)),
        ((None, features()), None),
        ((features(), features(), features()), None),
    ],
)
def test_bad_sizes_raise_what_stock_raises(x, size):
    conv, edges = GraphConv(F, 5).double(), torch.tensor([[0, 1], [1, 2]])
    check_same_outcome(lambda: conv(x, edges, size=size))


@pytest.mark.parametrize("length", [0, 3, E + 1])
def test_bad_weight_raises_what_stock_raises(length, edge_index):
    conv, x, weight = GraphConv(F, 5).double(), features(), torch.rand(length).double()
    check_same_outcome(lambda: conv(x, edge_index, weight))


def test_edge_index_on_meta_device():
    conv = SAGEConv(F, 5).to("meta")
    x, edges = torch.empty(N, F, device="meta"), torch.empty(2, E, dtype=torch.long, device="meta")
    with edgeweave.pyg.accelerated():
        assert conv(x, edges).shape == (N, 5)
    assert edgeweave.pyg.report()["SAGEConv"].reasons == {"edge_index is on meta": 1}
