"""RGCNConv and FastRGCNConv in one pass: as stock, fused, and when not."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch_geometric
from torch import Tensor, nn
from torch_geometric.nn import FastRGCNConv, RGCNConv

import edgeweave.pyg
from edgeweave._plan import _relations, plan_for_edges
from edgeweave._plan._relations import relational_sum, relations_of

FLOWS = ["source_to_target", "target_to_source"]
KINDS = [RGCNConv, FastRGCNConv]
R = 5
OPTIONS = [
    {},
    {"aggr": "add"},
    {"num_bases": 3},
    {"root_weight": False},
    {"bias": False},
    {"root_weight": False, "bias": False},
]


@pytest.fixture
def edge_type() -> Tensor:
    """Types of the 200 edges; type 3 does not occur."""
    types = torch.randint(0, R - 1, (200,))
    types[types == 3] = 4
    return types


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request, monkeypatch) -> None:
    """Tiles of 8 slots: those of most nodes, and some nodes with more."""
    if request.param == "many tiles":
        monkeypatch.setattr(_relations, "_MOST_SLOTS", 8)


@pytest.mark.parametrize("cls", KINDS)
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("options", OPTIONS)
def test_as_stock(cls, options, flow, edge_index, edge_type, tiles, same_as_stock, only_fused):
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    layer = cls(6, 8, R, flow=flow, **options).double()
    same_as_stock(lambda: layer(x, edge_index, edge_type), [x, *layer.parameters()])
    only_fused(cls.__name__, 1)


@pytest.mark.parametrize("cls", KINDS)
def test_two_sides(cls, same_as_stock, only_fused):
    edges = torch.stack([torch.randint(0, 30, (90,)), torch.randint(0, 12, (90,))])
    types = torch.randint(0, R, (90,), dtype=torch.int32 if cls is RGCNConv else torch.int64)
    x = torch.randn(30, 6, dtype=torch.float64, requires_grad=True)
    y = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    layer = cls((6, 4), 5, R).double()
    same_as_stock(lambda: layer((x, y), edges, types), [x, y, *layer.parameters()])
    only_fused(cls.__name__, 1)


@pytest.mark.parametrize("cls", KINDS)
def test_float32_is_as_close_to_float64_as_stock(cls, edge_index, edge_type):
    x = torch.randn(40, 16)
    layer = cls(16, 12, R)

    def run(layer: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        out = layer(x, edge_index, edge_type)
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


@pytest.mark.parametrize("shape", [(0, 0), (7, 0), (1, 1)])
def test_hardly_any_graph(shape, same_as_stock):
    nodes, edges = shape
    x = torch.randn(nodes, 6, dtype=torch.float64, requires_grad=True)
    layer = RGCNConv(6, 5, R).double()
    index, types = torch.zeros(2, edges, dtype=torch.long), torch.zeros(edges, dtype=torch.long)
    same_as_stock(lambda: layer(x, index, types), [x, *layer.parameters()])


@pytest.mark.parametrize("cls", KINDS)
def test_second_derivatives(cls, edge_index, edge_type, only_fused):
    x = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
    layer = cls(3, 2, R).double()

    def run() -> list[Tensor]:
        out = layer(x, edge_index, edge_type)
        first = torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()], create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), x))

    stock = run()
    with edgeweave.pyg.accelerated():
        ours = run()
    only_fused(cls.__name__, 1)
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b)


def test_only_some_want_gradients(edge_index, edge_type, same_as_stock, only_fused):
    x = torch.randn(40, 6, dtype=torch.float64)
    layer = RGCNConv(6, 5, R).double()
    same_as_stock(lambda: layer(x, edge_index, edge_type), list(layer.parameters()))
    layer.weight.requires_grad_(False)
    x.requires_grad_()
    same_as_stock(lambda: layer(x, edge_index, edge_type), [x, layer.root])
    only_fused("RGCNConv", 2)


def test_many_gradients_at_once(edge_index, edge_type):
    x = torch.randn(40, 3, dtype=torch.float64, requires_grad=True)
    layer = RGCNConv(3, 2, R).double()

    def jacobian() -> Tensor:
        out = layer(x, edge_index, edge_type)[3]
        eye = torch.eye(2, dtype=torch.float64)
        return torch.autograd.grad(out, x, eye, is_grads_batched=True)[0]

    stock = jacobian()
    with edgeweave.pyg.accelerated():
        ours = jacobian()
    torch.testing.assert_close(ours, stock)


def test_types_edited_in_place_are_noticed(edge_index, edge_type):
    x = torch.randn(40, 6, dtype=torch.float64)
    layer = RGCNConv(6, 5, R).double()
    with edgeweave.pyg.accelerated():
        layer(x, edge_index, edge_type)
        edge_type.copy_(edge_type.flip(0))
        ours = layer(x, edge_index, edge_type)
        edge_type.data.fill_(1)  # which leaves no trace but the contents
        again = layer(x, edge_index, edge_type)
    torch.testing.assert_close(again, layer(x, edge_index, edge_type))
    assert not torch.equal(ours, again)


def test_types_are_found_again_by_tensor_and_by_content(edge_index, edge_type, monkeypatch):
    # As with more than 100,000 edges, where not everything is compared.
    monkeypatch.setattr(_relations, "check_everything", lambda edges: False)
    plan = plan_for_edges(edge_index, 40, 40)
    first = relations_of(plan, edge_type, R)
    assert relations_of(plan, edge_type, R) is first
    assert relations_of(plan, edge_type.clone(), R) is first
    edge_type[0] = (edge_type[0] + 1) % 3
    assert relations_of(plan, edge_type, R) is not first
    found = relations_of(plan, edge_type, R)
    edge_type.numpy()[:] = (edge_type.numpy() + 1) % 3  # of which torch's version tells nothing
    assert relations_of(plan, edge_type, R) is not found
    found = relations_of(plan, edge_type, R)
    edge_type.data = (edge_type + 1) % 3
    assert relations_of(plan, edge_type, R) is not found
    for seed in range(10):  # only some are remembered
        torch.manual_seed(seed)
        relations_of(plan, torch.randint(0, R, (200,)), R)
    assert len(plan.memo(("relations", R), list)) == 4
    with torch.inference_mode():
        types = torch.ones(200, dtype=torch.long)
        made = relations_of(plan, types, R)
        assert relations_of(plan, types, R) is made
        types.fill_(2)
        assert relations_of(plan, types, R) is not made
    assert not made.edge_type.is_inference()


def test_a_plan_with_types_goes_when_the_cache_drops_it(edge_index, edge_type):
    edgeweave.sparse.cache_clear()  # other tests have the same edges, and may hold their plan
    x = torch.randn(40, 6, requires_grad=True)
    layer = RGCNConv(6, 5, R)
    with edgeweave.pyg.accelerated():
        layer(x, edge_index, edge_type).sum().backward()
    plan = weakref.ref(plan_for_edges(edge_index, 40, 40))
    gc.disable()
    try:
        edgeweave.sparse.cache_clear()
        assert plan() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("threads", [1, 3])
def test_bits_do_not_depend_on_threads(threads):
    edges = torch.randint(0, 900, (2, 30_000))
    types = torch.randint(0, R, (30_000,))
    plan = plan_for_edges(edges, 900, 900)
    x = torch.randn(900, 33)
    before = torch.get_num_threads()

    def run(count: int) -> Tensor:
        torch.set_num_threads(count)
        relations = relations_of(plan, types, R)
        # The products are torch's: only what reduces is ours, so the matrices are the identity.
        return relational_sum(plan, relations, x, torch.eye(33).expand(R, 33, 33), True)

    try:
        assert torch.equal(run(threads), run(2))
    finally:
        torch.set_num_threads(before)


def _with_hook(layer: RGCNConv) -> RGCNConv:
    layer.register_message_forward_hook(lambda *args: None)
    return layer


def _parametrized(layer: RGCNConv) -> RGCNConv:
    torch.nn.utils.parametrizations.weight_norm(layer, "root")
    return layer


def _same(layer: RGCNConv) -> RGCNConv:
    return layer


class _Subclass(RGCNConv):
    pass


@pytest.mark.parametrize(
    ("cls", "change", "options", "reason"),
    [
        (RGCNConv, _with_hook, {}, "a message-passing hook is registered"),
        (RGCNConv, _parametrized, {}, "it is a subclass"),
        (RGCNConv, _same, {"num_blocks": 2}, "num_blocks is given"),
        (RGCNConv, _same, {"aggr": "max"}, "the aggregation is not a plain sum or mean"),
        (_Subclass, _same, {}, "it is a subclass"),
    ],
)
def test_falls_back(cls, change, options, reason, edge_index, edge_type, same_as_stock):
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    layer = change(cls(6, 8, R, **options).double())
    same_as_stock(lambda: layer(x, edge_index, edge_type), [x, *layer.parameters()])
    assert reason in edgeweave.pyg.report()[type(layer).__name__].reasons


def test_types_that_are_no_relation_are_left_out_as_stock_does(
    edge_index, edge_type, same_as_stock
):
    edge_type[7] = R
    edge_type[9] = -1
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    layer = RGCNConv(6, 8, R).double()
    before = torch_geometric.backend.use_segment_matmul
    torch_geometric.backend.use_segment_matmul = False  # whose heuristic counts the types
    try:
        same_as_stock(lambda: layer(x, edge_index, edge_type), [x, *layer.parameters()])
    finally:
        torch_geometric.backend.use_segment_matmul = before
    assert "edge_type has values that are no relation's" in (
        edgeweave.pyg.report()["RGCNConv"].reasons
    )


def test_nodes_that_are_numbers(edge_index, edge_type, same_as_stock):
    layer = RGCNConv(40, 8, R).double()
    same_as_stock(lambda: layer(None, edge_index, edge_type), list(layer.parameters()))


def test_a_copy_and_a_pickle_are_fused_too(edge_index, edge_type, only_fused):
    x = torch.randn(40, 6, dtype=torch.float64)
    layer = RGCNConv(6, 8, R).double()
    stock = layer(x, edge_index, edge_type)
    with edgeweave.pyg.accelerated():
        for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            torch.testing.assert_close(again(x, edge_index, edge_type), stock)
    only_fused("RGCNConv", 2)
