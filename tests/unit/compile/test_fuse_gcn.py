"""Passes over self-loops and GCN's normalisation, on PyG's own functions and by hand."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GCNConv
from torch_geometric.utils import add_self_loops, remove_self_loops

from edgeweave.compile import (
    _ops,  # noqa: F401 - registers the ops
    run_passes,
)

N, E, F = 9, 60, 5


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, F)


@pytest.fixture
def edges() -> Tensor:
    edges = torch.randint(0, N - 1, (2, E))
    edges[:, 0] = 3  # twice the same self-loop
    edges[:, 1] = 3
    return edges


def exact_gcn(x: Tensor, edges: Tensor, *, loops: bool = True) -> Tensor:
    """Dense, in float64."""
    matrix = torch.zeros(N, N, dtype=torch.float64)
    for source, target in edges.t().tolist():
        if not loops or source != target:
            matrix[target, source] += 1
    if loops:
        matrix += torch.eye(N, dtype=torch.float64)
    root = matrix.sum(1).pow(-0.5)
    root[root == float("inf")] = 0
    return root[:, None] * matrix * root[None, :] @ x.double()


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("loops", [True, False], ids=["self-loops", "without"])
def test_a_gcn_is_one_op(rewrite, x, edges, flow, loops, dynamic):
    conv = GCNConv(F, F, bias=False, flow=flow, add_self_loops=loops)
    found = rewrite(conv, x, edges, dynamic=dynamic, exact=False)
    assert found.after["edgeweave.gcn"] == 1
    graph_ops = {name for name in found.after if name.startswith("edgeweave.")}
    assert graph_ops == {"edgeweave.gcn"}
    assert not {"cat", "ones", "pow_", "index_select"} & set(found.after)
    with torch.no_grad():
        conv.lin.weight.copy_(torch.eye(F))
        ours = found.module(*found.inputs)[0]
    turned = edges if flow == "source_to_target" else edges.flip(0)
    exact = exact_gcn(x, turned, loops=loops)
    # Some ten terms of size 1.
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("self_loops", [True, False])
@pytest.mark.parametrize("flip", [True, False])
def test_gradients_of_the_op(edges, self_loops, flip):
    x = torch.randn(N, F, dtype=torch.float64, requires_grad=True)

    def op(x):
        return torch.ops.edgeweave.gcn(edges, x, N, self_loops, flip, False)

    exact = exact_gcn(x, edges.flip(0) if flip else edges, loops=self_loops)
    torch.testing.assert_close(op(x), exact, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(op, (x,))
    assert torch.autograd.gradgradcheck(op, (x,))


def test_opcheck(edges):
    x = torch.randn(N, F, requires_grad=True)
    torch.library.opcheck(torch.ops.edgeweave.gcn.default, (edges, x, N, True, False, False))
    torch.library.opcheck(torch.ops.edgeweave.add_self_loops.default, (edges, N))


def test_off_the_cpu_the_op_has_the_same_shape(edges):
    x = torch.empty(N, F, device="meta")
    out = torch.ops.edgeweave.gcn(edges.to("meta"), x, N, True, False, False)
    assert (out.shape, out.device.type) == ((N, F), "meta")


def test_the_graph_is_normalised_once(empty_cache, edges):
    import edgeweave

    x = torch.randn(N, F)
    for _ in range(3):
        torch.ops.edgeweave.gcn(edges, x, N, True, False, False)
    info = edgeweave.sparse.cache_info()
    assert info.misses == 2  # the edges, and those with self-loops
    assert info.hits == 4


def test_an_edit_of_the_edges_is_seen(edges):
    x = torch.randn(N, F)
    torch.ops.edgeweave.gcn(edges, x, N, True, False, False)
    edges[1, 5:] = 0
    out = torch.ops.edgeweave.gcn(edges, x, N, True, False, False)
    torch.testing.assert_close(out.double(), exact_gcn(x, edges), rtol=0, atol=1e-5)


def by_hand(x, edges, *, power=-0.5, side=1, fill=1.0, twice=False):
    source, target = edges[0], edges[1]
    ones = torch.full((edges.shape[1],), fill)
    degree = torch.zeros(x.shape[0]).scatter_add_(0, edges[side], ones)
    root = degree.pow(power)
    root = root.masked_fill(root == float("inf"), 0)
    weight = root[source] * root[source if twice else target]
    rows = weight.view(-1, 1) * x[source]
    return torch.zeros_like(x).index_add_(0, target, rows)


def test_a_gcn_by_hand(rewrite, x, edges):
    assert rewrite(lambda x, e: by_hand(x, e), x, edges).after["edgeweave.gcn"] == 1


@pytest.mark.parametrize(
    "options",
    [{"power": -1.0}, {"side": 0}, {"fill": 2.0}, {"twice": True}],
    ids=["another power", "out-degrees", "other weights", "one factor twice"],
)
def test_refuses_other_normalisations(rewrite, x, edges, options):
    found = rewrite(lambda x, e: by_hand(x, e, **options), x, edges)
    assert found.after["edgeweave.gcn"] == 0
    assert found.after["edgeweave.mm"] == 1


def test_refuses_edge_weights(rewrite, x, edges):
    conv = GCNConv(F, F, add_self_loops=False)
    found = rewrite(conv, x, edges, torch.rand(E), exact=False)
    assert found.after["edgeweave.gcn"] == 0
    assert found.after["edgeweave.mm"] == 1


# ---- self-loops ----------------------------------------------------------------------------------


def with_loops(x, edges):
    kept, _ = remove_self_loops(edges)
    full, _ = add_self_loops(kept, num_nodes=x.shape[0])
    return torch.zeros_like(x).index_add_(0, full[1], x[full[0]].sin())


@pytest.mark.parametrize("dynamic", [None, True])
def test_self_loops_are_one_op(rewrite, x, edges, dynamic):
    found = rewrite(with_loops, x, edges, dynamic=dynamic)
    assert found.after["edgeweave.add_self_loops"] == 1
    assert not {"cat", "ne"} & set(found.after)
    assert found.rewrites[0].name == "fuse_self_loops"


def test_the_op_gives_the_edges_of_pyg(edges):
    ours = torch.ops.edgeweave.add_self_loops(edges, N)
    stock, _ = add_self_loops(remove_self_loops(edges)[0], num_nodes=N)
    assert torch.equal(ours, stock)


def test_refuses_edges_without_loops_that_somebody_else_reads(rewrite, x, edges):
    def function(x, edges):
        kept, _ = remove_self_loops(edges)
        full, _ = add_self_loops(kept, num_nodes=x.shape[0])
        return torch.zeros_like(x).index_add_(0, full[1], x[full[0]].sin()), kept * 2

    assert rewrite(function, x, edges).after["edgeweave.add_self_loops"] == 0


@pytest.mark.parametrize("kind", ["another mask", "another start", "other edges"])
def test_refuses_what_only_looks_like_self_loops(rewrite, x, edges, kind):
    def function(x, edges):
        mask = edges[0] != (edges[0] + 1 if kind == "another mask" else edges[1])
        if kind == "other edges":
            mask = (edges + 0)[0] != edges[1]
        start = 1 if kind == "another start" else 0
        loops = torch.arange(start, x.shape[0]).view(1, -1).repeat(2, 1)
        full = torch.cat([edges[:, mask], loops], 1)
        return torch.zeros_like(x).index_add_(0, full[1], x[full[0]].sin())

    assert rewrite(function, x, edges).after["edgeweave.add_self_loops"] == 0


def test_layers_share_their_self_loops(rewrite, x, edges):
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(GATConv(F, F) for _ in range(3))

        def forward(self, x, edges):
            for layer in self.layers:
                x = layer(x, edges).relu()
            return x

    found = rewrite(Net(), x, edges, exact=False)
    assert found.after["edgeweave.add_self_loops"] == 1
    assert found.after["edgeweave.softmax"] == 3
    assert [r.name for r in found.rewrites].count("share_self_loops") == 2


@pytest.mark.parametrize("where", ["written to", "returned"])
def test_self_loops_that_somebody_may_edit_are_not_shared(rewrite, x, edges, where):
    def function(x, edges):
        first, _ = add_self_loops(remove_self_loops(edges)[0], num_nodes=N)
        again, _ = add_self_loops(remove_self_loops(edges)[0], num_nodes=N)
        if where == "written to":
            first.add_(1)
            return x + first.sum(), x + again.sum()
        return x * 2, first, again

    found = rewrite(function, x, edges, exact=False)
    assert found.after["edgeweave.add_self_loops"] == 2
    made = found.module(*found.inputs)
    for ours, stock in zip(made, function(x, edges), strict=True):
        torch.testing.assert_close(ours, stock)


def test_a_comparison_that_is_a_method_call_is_read_all_the_same(x, edges):
    # Dynamo of torch 2.11 captures `==` so, that of 2.13 as a function.
    passed = []

    def backend(module, inputs):
        for node in list(module.graph.nodes):
            if node.target is operator.eq:
                with module.graph.inserting_before(node):
                    method = module.graph.call_method("__eq__", node.args)
                method.meta = node.meta
                node.replace_all_uses_with(method)
                module.graph.erase_node(node)
        methods = [node.target for node in module.graph.nodes if node.op == "call_method"]
        assert "__eq__" in methods
        passed.extend(rewrite.name for rewrite in run_passes(module))
        return module.forward

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch._dynamo.reset()
        torch.compile(GCNConv(F, F), backend=backend, fullgraph=True)(x, edges)
    assert "fuse_gcn" in passed
