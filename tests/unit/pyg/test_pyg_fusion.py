"""Fusion is real: nothing is gathered per edge, and graph-only work is done once."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GCNConv, GraphConv, LGConv, MessagePassing, SAGEConv
from torch_geometric.nn.conv import gcn_conv

import edgeweave.pyg
from edgeweave._plan import _cache
from edgeweave.pyg import _norm, _propagate

N, E, F = 20, 3000, 16


@pytest.fixture
def dense_edges() -> Tensor:
    return torch.randint(0, N, (2, E))


LAYERS = {
    "GCNConv": lambda aggr: GCNConv(F, F, aggr=aggr),
    "SAGEConv": lambda aggr: SAGEConv(F, F, aggr=aggr),
    "GraphConv": lambda aggr: GraphConv(F, F, aggr=aggr),
}


@pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", LAYERS)
def test_no_messages_are_gathered_or_saved(name, aggr, dense_edges, monkeypatch):
    layer, x = LAYERS[name](aggr), torch.randn(N, F, requires_grad=True)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    def gather(*_: object) -> None:
        raise AssertionError("messages were gathered")

    monkeypatch.setattr(MessagePassing, "_index_select", gather)
    with (
        edgeweave.pyg.accelerated(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        layer(x, dense_edges).sum().backward()
    assert saved
    # [E, F] has 48,000 elements; index arrays have at most 2 * (E + N).
    assert max(saved) < E * F // 4


def test_the_guard_of_the_test_above_sees_stock_gathers(dense_edges, monkeypatch):
    def gather(*_: object) -> None:
        raise AssertionError("messages were gathered")

    monkeypatch.setattr(MessagePassing, "_index_select", gather)
    with pytest.raises(AssertionError, match="messages were gathered"):
        SAGEConv(F, F)(torch.randn(N, F), dense_edges)


def test_normalisation_is_computed_once_per_graph(dense_edges, monkeypatch, empty_cache):
    calls: list[int] = []
    original = _norm._build_norm

    def counting(*args: object) -> object:
        calls.append(1)
        return original(*args)

    monkeypatch.setattr(_norm, "_build_norm", counting)
    layers = [GCNConv(F, F) for _ in range(3)]
    x = torch.randn(N, F)
    with edgeweave.pyg.accelerated():
        for _ in range(2):
            for layer in layers:
                x = layer(x, dense_edges).detach()
        x = layers[0](x, dense_edges.clone())
    assert len(calls) == 1


@pytest.mark.parametrize("add_self_loops", [True, False])
def test_normalisation_goes_with_its_plan(add_self_loops, dense_edges, empty_cache):
    layer, x = GCNConv(F, F, add_self_loops=add_self_loops), torch.randn(N, F)
    with edgeweave.pyg.accelerated():
        layer(x, dense_edges)
    before = len(_norm._handed)
    edgeweave.sparse.cache_clear()
    gc.collect()
    assert len(_norm._handed) == before - 1


def test_cached_layer_holds_what_pyg_would_hold(dense_edges):
    stock, ours = GCNConv(F, F, cached=True), GCNConv(F, F, cached=True)
    x = torch.randn(N, F)
    stock(x, dense_edges)
    with edgeweave.pyg.accelerated():
        ours(x, dense_edges)
    torch.testing.assert_close(
        ours._cached_edge_index, stock._cached_edge_index, rtol=1e-6, atol=1e-7
    )


def test_cached_layer_keeps_its_first_graph(dense_edges):
    layer = GCNConv(F, F, cached=True)
    x = torch.randn(N, F)
    with edgeweave.pyg.accelerated():
        first = layer(x, dense_edges)
        second = layer(x, dense_edges[:, :10])
    assert torch.equal(first, second)


def test_cached_layer_filled_while_accelerated_works_after_restore(dense_edges):
    layer = GCNConv(F, F, cached=True)
    x = torch.randn(N, F)
    with edgeweave.pyg.accelerated():
        ours = layer(x, dense_edges)
    torch.testing.assert_close(layer(x, dense_edges), ours, rtol=1e-4, atol=1e-5)


def test_cached_layer_deepcopy_is_independent(dense_edges):
    layer = GCNConv(F, F, cached=True)
    x = torch.randn(N, F)
    with edgeweave.pyg.accelerated():
        first = layer(x, dense_edges)
        twin = copy.deepcopy(layer)
        twin._cached_edge_index[1].zero_()
        assert twin(x, dense_edges).abs().max() < 1
        assert not torch.equal(twin(x, dense_edges), first)
        assert torch.equal(layer(x, dense_edges), first)


def test_writing_into_a_handed_out_weight_does_not_reach_others(dense_edges):
    layer, victim = GCNConv(F, F, cached=True), GCNConv(F, F)
    victim.load_state_dict(layer.state_dict())
    x = torch.randn(N, F)
    with edgeweave.pyg.accelerated():
        first = layer(x, dense_edges)
        layer._cached_edge_index[1].mul_(2)
        torch.testing.assert_close(layer(x, dense_edges), 2 * first, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(victim(x, dense_edges), first, rtol=1e-5, atol=1e-5)


def test_changed_edges_are_noticed(dense_edges):
    layer = GCNConv(F, F)
    x = torch.randn(N, F)
    changed = dense_edges.clone()
    with edgeweave.pyg.accelerated():
        layer(x, changed)
        changed[:, : E // 2] = 0
        ours = layer(x, changed)
    torch.testing.assert_close(ours, layer(x, changed), rtol=1e-4, atol=1e-5)


def test_options_do_not_share_a_normalisation():
    edges = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
    x = torch.randn(4, F)
    layers = [
        GCNConv(F, F, add_self_loops=loops, flow=flow)
        for loops in (True, False)
        for flow in ("source_to_target", "target_to_source")
    ] + [LGConv()]
    stock = [layer(x, edges) for layer in layers]
    with edgeweave.pyg.accelerated():
        ours = [layer(x, edges) for layer in layers]
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_training_after_inference_mode(dense_edges):
    """What the first call kept must not be an inference tensor."""
    layer = GCNConv(F, F)
    x = torch.randn(N, F, requires_grad=True)
    weight = torch.rand(E)
    with edgeweave.pyg.accelerated():
        with torch.inference_mode():
            layer(x, dense_edges)
            layer(x, dense_edges, weight)
        layer(x, dense_edges).sum().backward()
        layer(x, dense_edges, weight).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_autocast_keeps_stock_dtypes(dense_edges):
    layer = GCNConv(F, F)
    x = torch.randn(N, F)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = layer(x, dense_edges)
        with edgeweave.pyg.accelerated():
            ours = layer(x, dense_edges)
    assert ours.dtype is stock.dtype
    # The linear layer rounds to bfloat16 in both: 2^-8 relative.
    torch.testing.assert_close(ours, stock, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("add_self_loops", [True, False])
def test_dropped_plans_are_freed_at_once(add_self_loops, dense_edges, empty_cache):
    layer, x = GCNConv(F, F, add_self_loops=add_self_loops, cached=True), torch.randn(N, F)
    with edgeweave.pyg.accelerated():
        layer(x, dense_edges)
    plans = [weakref.ref(plan) for plan in _cache._plans.values()]
    gc.collect()
    gc.disable()  # what only a collection would free stays
    try:
        edgeweave.sparse.cache_clear()
        assert [plan() for plan in plans] == [None] * len(plans)
    finally:
        gc.enable()


def test_plan_with_self_loops_does_not_outlive_its_eviction(dense_edges, empty_cache):
    layer, x = GCNConv(F, F), torch.randn(N, F)
    with edgeweave.pyg.accelerated():
        first = layer(x, dense_edges).detach()
        looped = [p for p in _cache._plans.values() if p.num_edges != E]
        assert len(looped) == 1
        gone = weakref.ref(looped[0])
        _cache.forget_plan(looped.pop())
        assert gone() is None
        assert torch.equal(layer(x, dense_edges), first)  # built again
        misses = edgeweave.sparse.cache_info().misses
        assert torch.equal(layer(x, dense_edges), first)
        assert edgeweave.sparse.cache_info().misses == misses


@pytest.mark.parametrize("add_self_loops", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
def test_index_dtypes_do_not_share_edges(add_self_loops, weighted, dense_edges, empty_cache):
    weight = torch.rand(E) if weighted else None
    with edgeweave.pyg.accelerated():
        for dtype in (torch.int32, torch.int64, torch.int32):
            edges, _ = gcn_conv.gcn_norm(
                dense_edges.to(dtype), weight, N, add_self_loops=add_self_loops
            )
            assert edges.dtype is dtype


def test_callers_of_gcn_norm_do_not_share_tensors(dense_edges):
    """As in stock: what one does to its tensors is its own affair."""
    x, weight = torch.randn(N, F), torch.rand(E)
    layer, cached = GCNConv(F, F), GCNConv(F, F, cached=True)
    with edgeweave.pyg.accelerated():
        expected, kept = layer(x, dense_edges), cached(x, dense_edges)
        pairs = [gcn_conv.gcn_norm(dense_edges, None, N) for _ in range(2)]
        pairs += [gcn_conv.gcn_norm(dense_edges, weight, N) for _ in range(2)]
        pairs.append(cached._cached_edge_index)
        addresses = [tensor.data_ptr() for pair in pairs for tensor in pair]
        assert len(set(addresses)) == len(addresses)
        for edges, values in pairs[:-1]:
            edges.data.zero_()
            values.numpy()[:] = 0
        assert torch.equal(layer(x, dense_edges), expected)
        assert torch.equal(cached(x, dense_edges), kept)
        assert torch.equal(gcn_conv.gcn_norm(dense_edges, weight, N)[0][:, :5], looped(dense_edges))


def looped(edges: Tensor) -> Tensor:
    return edges[:, edges[0] != edges[1]][:, :5]


@pytest.mark.parametrize("edit", ["numpy", "data", "edges"])
def test_edits_that_have_no_version_are_noticed(edit, dense_edges):
    layer, x = GCNConv(F, F, cached=True), torch.randn(N, F)
    with edgeweave.pyg.accelerated():
        layer(x, dense_edges)
        edges, weight = layer._cached_edge_index
        assert _norm.find_norm(edges, weight) is not None
        if edit == "numpy":
            weight.numpy()[:] *= 2
        elif edit == "data":
            weight.data.mul_(2)
        else:
            edges.numpy()[:] = 0
        assert _norm.find_norm(edges, weight) is None
        ours = layer(x, dense_edges)
    torch.testing.assert_close(ours, layer(x, dense_edges), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "make", [lambda: GCNConv(F, F), lambda: GCNConv(F, F, cached=True), LGConv]
)
def test_layers_get_factors_instead_of_weights(make, dense_edges, monkeypatch):
    found: list[object] = []

    def noting(*args: Tensor) -> object:
        found.append(_norm.find_norm(*args))
        return found[-1]

    monkeypatch.setattr(_propagate, "find_norm", noting)
    layer, x = make(), torch.randn(N, F)
    with edgeweave.pyg.accelerated():
        layer(x, dense_edges)
        layer(x, dense_edges)
        layer.propagate(
            (pair := gcn_conv.gcn_norm(dense_edges, None, N))[0], x=x, edge_weight=pair[1]
        )
    assert len(found) == 3
    assert None not in found


def test_uncached_layers_copy_nothing_per_call(dense_edges, monkeypatch):
    seen: list[Tensor] = []
    original = _propagate.find_norm

    def noting(edges: Tensor, weight: Tensor) -> object:
        seen.append(weight)
        return original(edges, weight)

    monkeypatch.setattr(_propagate, "find_norm", noting)
    x = torch.randn(N, F)
    with edgeweave.pyg.accelerated():
        for layer in (GCNConv(F, F), GCNConv(F, F), GCNConv(F, F)):
            layer(x, dense_edges)
    assert len(seen) == 3
    assert all(weight is seen[0] for weight in seen)


def test_a_hook_is_shown_tensors_of_its_own(dense_edges):
    layer, other, x = GCNConv(F, F), GCNConv(F, F), torch.randn(N, F)
    shown: list[Tensor] = []
    layer.register_propagate_forward_pre_hook(lambda _, inputs: shown.append(inputs[0]))
    with edgeweave.pyg.accelerated():
        expected = other(x, dense_edges)
        layer(x, dense_edges)
        shown[0].numpy()[:] = 0
        assert torch.equal(other(x, dense_edges), expected)


def test_normalising_without_self_loops_returns_the_edges_given(dense_edges):
    with edgeweave.pyg.accelerated():
        edges, _ = gcn_conv.gcn_norm(dense_edges, None, N, add_self_loops=False)
    assert edges is dense_edges


class _Plain(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        """Sends the neighbour."""
        return x_j


class _Weighted(MessagePassing):
    def forward(self, h, edge_index, w):
        return self.propagate(edge_index, h=h, w=w)

    def message(self, h_j: Tensor, w: Tensor) -> Tensor:
        return w.view(-1, 1) * h_j


class _WeightedLast(MessagePassing):
    def forward(self, x, edge_index, norm):
        return self.propagate(edge_index, x=x, norm=norm)

    def message(self, x_j, norm):
        return x_j * norm.view(-1, 1)


class _Doubled(_Plain):
    def message(self, x_j):
        return x_j + x_j


class _ByBoth(_Plain):
    def message(self, x_j, x_i):
        return x_i.view(-1, 1) * x_j


class _OwnUpdate(_Plain):
    def update(self, inputs):
        return inputs + 1


class _OwnIndex(MessagePassing):
    def forward(self, x, edge_index, w):
        return self.propagate(edge_index, h=x, index=w)

    def message(self, h_j, index):
        return h_j * index.view(-1, 1)


class TestMessagesThatPeopleWrite:
    @pytest.mark.parametrize("aggr", ["sum", "mean", "max"])
    @pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
    def test_the_neighbour_itself(self, aggr, flow, edge_index, same_as_stock, only_fused):
        x = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
        layer = _Plain(aggr=aggr, flow=flow)
        same_as_stock(lambda: layer(x, edge_index), [x])
        only_fused(f"{__name__}._Plain", 1)

    @pytest.mark.parametrize("cls", [_Weighted, _WeightedLast])
    def test_a_weight_times_it(self, cls, edge_index, same_as_stock, only_fused):
        x = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(200, dtype=torch.float64, requires_grad=True)
        layer = cls()
        same_as_stock(lambda: layer(x, edge_index, weight), [x, weight])
        only_fused(f"{__name__}.{cls.__name__}", 1)

    @pytest.mark.parametrize("cls", [_Doubled, _OwnUpdate])
    def test_nothing_else_is_taken_for_it(self, cls, edge_index, same_as_stock):
        x = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
        layer = cls()
        same_as_stock(lambda: layer(x, edge_index), [x])
        assert edgeweave.pyg.report()[f"{__name__}.{cls.__name__}"].fused == 0

    def test_a_weight_per_node_is_not_one_per_edge(self, edge_index, same_as_stock):
        x = torch.randn(40, 1, dtype=torch.float64, requires_grad=True)
        layer = _ByBoth()
        same_as_stock(lambda: layer(x, edge_index), [x])
        assert edgeweave.pyg.report()[f"{__name__}._ByBoth"].fused == 0

    def test_a_message_that_is_replaced_later(self, edge_index, same_as_stock, only_fused):
        class Layer(_Plain):
            def message(self, x_j):
                return x_j

        x = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
        layer = Layer()
        same_as_stock(lambda: layer(x, edge_index), [x])
        Layer.message = lambda self, x_j: x_j * 3
        same_as_stock(lambda: layer(x, edge_index), [x])
        Layer.message = _Plain.message
        layer(x, edge_index)

    def test_code_that_is_replaced_later(self, edge_index, same_as_stock):
        class Layer(_Plain):
            def message(self, x_j):
                return x_j

        x = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
        layer = Layer()
        same_as_stock(lambda: layer(x, edge_index), [x])
        Layer.message.__code__ = (lambda self, x_j: x_j * 3).__code__
        same_as_stock(lambda: layer(x, edge_index), [x])

    def test_a_method_beside_the_message(self, edge_index, same_as_stock):
        class Layer(_Plain):
            def message(self, x_j):
                return x_j

            def _index_select(self, src, index):
                return MessagePassing._index_select(self, src, index) * 5

        x = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
        layer = Layer()
        same_as_stock(lambda: layer(x, edge_index), [x])

    def test_other_constants_of_the_same_value(self, edge_index):
        class Layer(_Weighted):
            def message(self, h_j, w):
                return w.view(-1, 1.0) * h_j

        x, weight = torch.randn(40, 3), torch.randn(200)
        with edgeweave.pyg.accelerated(), pytest.raises(TypeError):
            Layer()(x, edge_index, weight)

    def test_names_that_pyg_fills_in_itself(self, edge_index, same_as_stock):
        x = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
        layer, weight = _OwnIndex(), torch.randn(200, dtype=torch.float64)
        same_as_stock(lambda: layer(x, edge_index, weight), [x])
