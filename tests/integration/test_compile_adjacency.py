"""Graphs built outside of the model, as `EdgeIndex`, matrix or plan: none breaks the capture."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from _compiled_layers import LAYERS, F, Net, breaks, gradients, ops_of
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import GCNConv, MessagePassing, RGCNConv, SAGEConv

import edgeweave
from edgeweave import EdgeweaveWarning
from edgeweave.compile._record import recording

# torch's notices on sparse tensors: that they are in beta, and checked by no one.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]
NODES = 20
# Issue 7 names these; the weighted and the turned ones are other layers' code.
NAMES = ("GCN", "GAT", "GATv2", "SAGE", "GIN", "PNA", "EdgeConv", "Transformer")


@pytest.fixture(autouse=True)
def _sage_that_takes_matrices(monkeypatch):
    # PyG writes the code of a class for its first instance: where another test's had an aggregation
    # that rules products out, stock layers refuse matrices from then on, in the whole process.
    for name in ("propagate", "collect", "_orig_propagate", "_jinja_propagate"):
        # Only what is noted here is put back afterwards.
        monkeypatch.setattr(SAGEConv, name, getattr(SAGEConv, name, None), raising=False)
    monkeypatch.setattr(SAGEConv, "propagate", MessagePassing.propagate)
    written = f"{SAGEConv.__module__}_SAGEConv_propagate"
    monkeypatch.setitem(sys.modules, written, sys)
    monkeypatch.delitem(sys.modules, written)


def plain_edges(nodes: int = NODES, edges: int = 90) -> Tensor:
    """Return edges without self-loops and repetitions, in no order: `[2, E]`."""
    index = torch.unique(torch.randint(0, nodes, (2, edges)), dim=1)
    index = index[:, index[0] != index[1]]
    return index[:, torch.randperm(index.size(1))]


def matrix_of(index: Tensor, nodes: int = NODES) -> Tensor:
    """Return the transposed adjacency: rows are destinations."""
    ones = torch.ones(index.size(1))
    return torch.sparse_coo_tensor(index.flip(0), ones, (nodes, nodes)).coalesce()


def as_given(kind: str, index: Tensor, nodes: int = NODES) -> Tensor:
    size = (nodes, nodes)
    if kind == "EdgeIndex":
        return EdgeIndex(index, sparse_size=size)
    if kind == "EdgeIndex by column":
        return EdgeIndex(index, sparse_size=size).sort_by("col").values
    if kind == "EdgeIndex by row, caches filled":
        return EdgeIndex(index, sparse_size=size).sort_by("row").values.fill_cache_()
    matrix = matrix_of(index, nodes)
    return {"coo": matrix, "csr": matrix.to_sparse_csr(), "csc": matrix.to_sparse_csc()}[kind]


def assert_same(ours: list[Tensor], stock: list[Tensor]) -> None:
    for mine, theirs in zip(ours, stock, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


# Each layer once with sorted edges, once with a matrix; what PyG keeps with edges, for one layer.
CASES = [(name, kind) for name in NAMES for kind in ("EdgeIndex by column", "csr")]
CASES += [("SAGE", "EdgeIndex"), ("SAGE", "EdgeIndex by row, caches filled")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_one_graph(name, kind):
    net = Net(LAYERS[name][0])
    compiled = edgeweave.optimize(net, engine="eager")
    with recording() as records:
        index, x = plain_edges(), torch.randn(NODES, F)
        ours = gradients(compiled, x, as_given(kind, index))
        assert_same(ours, gradients(net, x, index))
    assert breaks() == {}
    assert len(records) == 1
    for record in records:
        # Nothing that reduces over edges or gathers along them is left to ATen.
        assert set(ops_of(record)) & {"mm", "gcn", "scatter", "multi_reduce"}


@pytest.mark.parametrize("kind", ["EdgeIndex", "EdgeIndex by column"])
def test_relations(kind):
    net = Net(lambda: RGCNConv(F, F, num_relations=3))
    compiled = edgeweave.optimize(net, engine="eager")
    adjacency, x = as_given(kind, plain_edges()), torch.randn(NODES, F)
    types = torch.randint(0, 3, (adjacency.size(1),))
    with recording() as records:
        assert_same(gradients(compiled, x, adjacency, types), gradients(net, x, adjacency, types))
    assert breaks() == {}
    assert [ops_of(record) for record in records] == [{"mm": 6}]


@pytest.mark.parametrize("kind", ["coo", "csr", "csc"])
def test_matrices_are_the_same_as_edges(kind):
    net, index, x = Net(LAYERS["SAGE"][0]), plain_edges(), torch.randn(NODES, F)
    compiled = edgeweave.optimize(net, engine="eager")
    matrix = as_given(kind, index)
    with recording() as records:
        for _ in range(2):
            assert_same(gradients(compiled, x, matrix), gradients(net, x, index))
    assert [ops_of(record) for record in records] == [{"mm": 2}]


def test_matrices_of_an_epoch_compile_twice():
    net = Net(LAYERS["SAGE"][0])
    compiled = edgeweave.optimize(net, engine="eager")
    with recording() as records, torch.no_grad():
        for nodes, edges in ((20, 90), (33, 140), (12, 61), (25, 70)):
            index, x = plain_edges(nodes, edges), torch.randn(nodes, F)
            out = compiled(x, as_given("csr", index, nodes))
            torch.testing.assert_close(out, net(x, index), rtol=1e-4, atol=1e-5)
    assert len(records) == 2
    assert breaks() == {}


def test_a_matrix_of_two_kinds_of_nodes():
    index = torch.stack([torch.randint(0, 9, (60,)), torch.randint(0, 5, (60,))])
    index = torch.unique(index[:, index[0] != index[1]], dim=1)
    matrix = torch.sparse_coo_tensor(index.flip(0), torch.ones(index.size(1)), (5, 9)).coalesce()
    net, x = SAGEConv(F, F), (torch.randn(9, F), torch.randn(5, F))
    compiled = edgeweave.optimize(net, engine="eager")
    with recording() as records:
        out = compiled(x, matrix.to_sparse_csr())
    torch.testing.assert_close(out, net(x, index), rtol=1e-4, atol=1e-5)
    assert [ops_of(record) for record in records] == [{"mm": 1}]


def test_edited_matrices_are_read_again():
    net, index, x = Net(LAYERS["SAGE"][0]), plain_edges(), torch.randn(NODES, F)
    compiled = edgeweave.optimize(net, engine="eager")
    matrix = as_given("csr", index)
    compiled(x, matrix)
    matrix.values().mul_(2.0)
    with pytest.warns(EdgeweaveWarning, match="its values are not all 1"):
        out = compiled(x, matrix)
    torch.testing.assert_close(out, net(x, matrix))


def with_loop(index: Tensor) -> Tensor:
    return torch.cat([index, torch.tensor([[3], [3]])], dim=1)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: matrix_of(plain_edges()) * 0.5, "its values are not all 1"),
        (lambda: matrix_of(with_loop(plain_edges())), "it has self-loops"),
        (lambda: matrix_of(plain_edges()).requires_grad_() * 1.0, "its values are not all 1"),
    ],
)
@pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR:UserWarning")
def test_matrices_that_are_more_than_edges_run_the_model_as_it_is(make, why):
    matrix = make()
    net, x = Net(lambda: GCNConv(F, F)), torch.randn(NODES, F)
    compiled = edgeweave.optimize(net, engine="eager")
    with pytest.warns(EdgeweaveWarning, match=why), recording() as records:
        out = compiled(x, matrix)
    torch.testing.assert_close(out, net(x, matrix))
    assert records == []
    with warnings.catch_warnings():
        warnings.simplefilter("error", EdgeweaveWarning)
        compiled(x, matrix)  # said once


def test_features_of_edges_are_not_put_beside_sorted_edges():
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv(F, F)

        def forward(self, x, adjacency, weight):
            return self.conv(x, adjacency) * weight.sum()

    net, index, x = Weighted(), plain_edges(), torch.randn(NODES, F)
    compiled = edgeweave.optimize(net, engine="eager")
    inputs = x, as_given("csr", index), torch.rand(index.size(1))
    with pytest.warns(EdgeweaveWarning, match="a row for each of its values"):
        torch.testing.assert_close(compiled(*inputs), net(*inputs))


def by_size(conv, x, matrix):
    return conv(x, matrix) * matrix.size(0)


def by_sum(conv, x, matrix):
    return conv(x, matrix) + matrix.sum()


def by_layout(conv, x, matrix):
    return conv(x, matrix) * (1 if matrix.layout == torch.strided else 2)


def by_product(conv, x, matrix):
    return conv(x, matrix) + matrix @ x


@pytest.mark.parametrize("use", [by_size, by_sum, by_layout, by_product])
@pytest.mark.filterwarnings("ignore:optimize")
def test_a_matrix_that_the_model_itself_uses_stays_one(use):
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = SAGEConv(F, F)

        def forward(self, x, matrix):
            return use(self.conv, x, matrix)

    net, x, matrix = Uses().eval(), torch.randn(NODES, F), as_given("csr", plain_edges())
    compiled = edgeweave.optimize(net, engine="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x, matrix), net(x, matrix), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:optimize")
def test_values_edited_through_what_a_matrix_was_made_of():
    rows = as_given("csr", plain_edges())
    values = torch.ones(rows.values().numel())
    matrix = torch.sparse_csr_tensor(rows.crow_indices(), rows.col_indices(), values, rows.shape)
    net, x = Net(lambda: SAGEConv(F, F, aggr="sum")).eval(), torch.randn(NODES, F)
    compiled = edgeweave.optimize(net, engine="eager")
    compiled(x, matrix)
    values.mul_(3)
    torch.testing.assert_close(compiled(x, matrix), net(x, matrix), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:optimize")
def test_matrices_of_inference_mode():
    net, x = Net(lambda: SAGEConv(F, F)).eval(), torch.randn(NODES, F)
    compiled = edgeweave.optimize(net, engine="eager")
    with torch.inference_mode():
        matrix = as_given("csr", plain_edges()).clone()
        torch.testing.assert_close(compiled(x, matrix), net(x, matrix))


class ByHand(nn.Module):
    def forward(self, x, matrix):
        return matrix @ x


def test_matrices_of_models_without_layers_of_pyg_stay_what_they_are():
    x, matrix = torch.randn(NODES, F), as_given("csr", plain_edges())
    compiled = edgeweave.optimize(ByHand(), engine="eager")
    with pytest.warns(EdgeweaveWarning, match="the model holds no layer of PyG"):
        torch.testing.assert_close(compiled(x, matrix), matrix @ x)


def test_a_matrix_by_name_and_with_examples():
    net, index, x = Net(LAYERS["SAGE"][0]).eval(), plain_edges(), torch.randn(NODES, F)
    matrix = as_given("csr", index)
    with recording() as records:
        compiled = edgeweave.optimize(net, (x, matrix), engine="eager", training=False)
        torch.testing.assert_close(compiled(x, edges=matrix), net(x, index))
    assert [ops_of(record) for record in records] == [{"mm": 2}]


def rows_of_a_matrix(x: Tensor, rowptr: Tensor, col: Tensor) -> Tensor:
    return torch.segment_reduce(x[col], "sum", offsets=rowptr)


def test_row_pointers_by_hand():
    index, x = plain_edges(), torch.randn(NODES, F)
    matrix = as_given("csr", index)
    rowptr, col = matrix.crow_indices(), matrix.col_indices()
    options = {"engine": "eager"}
    compiled = torch.compile(rows_of_a_matrix, backend="edgeweave", fullgraph=True, options=options)
    with recording() as records:
        torch.testing.assert_close(compiled(x, rowptr, col), matrix @ x, rtol=1e-4, atol=1e-5)
    assert records[0].ops["edgeweave.mm"] == 1


def test_a_graph_built_outside():
    index, x = plain_edges(), torch.randn(NODES, F)
    graph = edgeweave.Graph(index, (NODES, NODES))
    compiled = torch.compile(
        lambda x: edgeweave.sparse.mm(graph, x).relu(),
        backend="edgeweave",
        fullgraph=True,
        options={"engine": "eager"},
    )
    torch.testing.assert_close(compiled(x), (matrix_of(index) @ x).relu(), rtol=1e-4, atol=1e-5)
