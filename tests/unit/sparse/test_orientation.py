"""Which way edges point, for every form of the first argument, and conversions back to each.

One fixed bipartite graph tells all directions apart: 4 sources, 3 destinations, and weights that
are powers of two, so that each sum shows which edges are in it.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.sparse
import torch

from edgeweave import sparse

# Edges 3->0, 0->2, 1->0, 2->2, 0->0 in this order; destination 1 is isolated.
EDGES = torch.tensor([[3, 0, 1, 2, 0], [0, 2, 0, 2, 0]])
WEIGHT = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
X = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
INCOMING = torch.tensor([[1000.0 + 10 + 1], [0.0], [1.0 + 100]])
WEIGHTED = torch.tensor([[1000.0 + 40 + 16], [0.0], [2.0 + 800]])
Y = torch.tensor([[1.0], [10.0], [100.0]])
OUTGOING = torch.tensor([[100.0 + 1], [1.0], [100.0], [1.0]])

# The same as a matrix [destination, source].
DENSE = torch.zeros(3, 4)
DENSE[EDGES[1], EDGES[0]] = WEIGHT
CSR_ORDER = [4, 2, 0, 1, 3]  # positions of DENSE's entries, row by row, in EDGES
CSC_ORDER = [4, 1, 2, 3, 0]  # column by column

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")


def matrices() -> dict[str, object]:
    """Return DENSE in every matrix format."""
    result: dict[str, object] = {
        "torch coo": DENSE.to_sparse_coo().coalesce(),
        "torch csr": DENSE.to_sparse_csr(),
        "torch csc": DENSE.to_sparse_csc(),
    }
    for name in ("coo", "csr", "csc"):
        result[f"scipy {name}_matrix"] = getattr(scipy.sparse, f"{name}_matrix")(DENSE.numpy())
        result[f"scipy {name}_array"] = getattr(scipy.sparse, f"{name}_array")(DENSE.numpy())
    return result


MATRICES = (
    "torch coo", "torch csr", "torch csc", "scipy coo_matrix", "scipy coo_array",
    "scipy csr_matrix", "scipy csr_array", "scipy csc_matrix", "scipy csc_array",
)  # fmt: skip


@pytest.fixture(params=MATRICES)
def matrix(request):
    return matrices()[request.param]


def stored_order(matrix) -> list[int]:
    """Return the positions in EDGES of the entries of `matrix`, in the order it stores them."""
    layout = getattr(matrix, "layout", None)
    is_csc = layout == torch.sparse_csc or getattr(matrix, "format", "") == "csc"
    return CSC_ORDER if is_csc else CSR_ORDER


def bipartite() -> sparse.Graph:
    return sparse.Graph(EDGES, size=(4, 3))


def test_graph_sums_over_incoming_edges():
    assert torch.equal(sparse.mm(bipartite(), X), INCOMING)
    assert torch.equal(sparse.mm(bipartite(), X, weight=WEIGHT), WEIGHTED)


def test_turned_round_sums_over_outgoing_edges():
    assert torch.equal(sparse.mm(bipartite(), Y, flow="target_to_source"), OUTGOING)
    weighted = sparse.mm(bipartite(), Y, weight=WEIGHT, flow="target_to_source")
    assert torch.equal(weighted, DENSE.t() @ Y)


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_turned_round_equals_flipped_edges(reduce):
    x = torch.randn(3, 2, requires_grad=True)
    weight = WEIGHT.clone().requires_grad_()
    turned = sparse.mm(bipartite(), x, reduce, weight=weight, flow="target_to_source")
    flipped = sparse.mm(sparse.Graph(EDGES.flip(0), size=(3, 4)), x, reduce, weight=weight)
    assert torch.equal(turned, flipped)
    upstream = torch.randn(4, 2)
    ours = torch.autograd.grad(turned, [x, weight], upstream)
    theirs = torch.autograd.grad(flipped, [x, weight], upstream)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_plain_edges_are_square():
    out = sparse.mm(EDGES, X)
    assert torch.equal(out, torch.cat([INCOMING, torch.zeros(1, 1)]))
    turned = sparse.mm(EDGES, torch.cat([Y, Y.new_zeros(1, 1)]), flow="target_to_source")
    assert torch.equal(turned, OUTGOING)


def test_matrix_multiplies(matrix):
    assert torch.equal(sparse.mm(matrix, X), DENSE @ X)
    assert torch.equal(sparse.mm(matrix, X), WEIGHTED)


@pytest.mark.parametrize("reduce", ["mean", "amax", "amin"])
def test_matrix_values_take_part_in_each_reduce(matrix, reduce):
    expected = sparse.mm(bipartite(), X, reduce, weight=WEIGHT)
    assert torch.equal(sparse.mm(matrix, X, reduce), expected)


def test_weight_replaces_the_values_of_a_matrix_in_its_order(matrix):
    """The order of CSR for CSR, of CSC for CSC, of the coalesced entries for COO."""
    weight = WEIGHT[stored_order(matrix)] * 2
    assert torch.equal(sparse.mm(matrix, X, weight=weight), 2 * WEIGHTED)


def test_gradients_reach_the_weight_in_the_order_of_the_matrix(matrix):
    weight = torch.ones(5, requires_grad=True)
    sparse.mm(matrix, X, weight=weight).backward(Y)
    per_edge = (X[EDGES[0]] * Y[EDGES[1]])[:, 0]
    assert torch.equal(weight.grad, per_edge[stored_order(matrix)])


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_gradients_reach_the_values_of_a_torch_matrix(layout):
    values = WEIGHT[CSC_ORDER if layout == "csc" else CSR_ORDER].clone().requires_grad_()
    order = torch.tensor(CSC_ORDER if layout == "csc" else CSR_ORDER)
    src, dst = EDGES[:, order]
    if layout == "coo":
        matrix = torch.sparse_coo_tensor(
            torch.stack([dst, src]), values, (3, 4), is_coalesced=True, check_invariants=True
        )
    elif layout == "csr":
        pointer = torch.tensor([0, 3, 3, 5])
        matrix = torch.sparse_csr_tensor(pointer, src, values, (3, 4), check_invariants=True)
    else:
        pointer = torch.tensor([0, 2, 3, 4, 5])
        matrix = torch.sparse_csc_tensor(pointer, dst, values, (3, 4), check_invariants=True)
    x = X.clone().requires_grad_()
    sparse.mm(matrix, x).backward(Y)
    assert torch.equal(x.grad, DENSE.t() @ Y)
    assert torch.equal(values.grad, (X[src] * Y[dst])[:, 0])


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_matrix_in_other_precisions_trains(layout, dtype):
    """Known from elsewhere: the backward of a CSR product has no fp16."""
    matrix = getattr(DENSE.to(dtype), f"to_sparse_{layout}")()
    x = X.to(dtype).requires_grad_()
    out = sparse.mm(matrix, x)
    assert torch.equal(out, WEIGHTED.to(dtype))
    out.backward(Y.to(dtype))
    assert torch.equal(x.grad, (DENSE.t() @ Y).to(dtype))


def test_matrix_is_turned_round_by_transposing_it(matrix):
    with pytest.raises(ValueError, match=r"mm: flow must .*matrix.*transpose"):
        sparse.mm(matrix, Y, flow="target_to_source")


def test_uncoalesced_coo_is_refused():
    matrix = torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2), check_invariants=True)
    for call in (
        lambda: sparse.mm(matrix, torch.ones(2, 1)),
        lambda: sparse.Graph.from_matrix(matrix, rows="dst"),
    ):
        with pytest.raises(ValueError, match="coalesce"):
            call()


def test_matrix_of_the_wrong_width():
    with pytest.raises(ValueError, match=r"x must .*\b4\b.*\b3\b"):
        sparse.mm(DENSE.to_sparse_csr(), Y)


def test_rows_has_no_default(matrix):
    with pytest.raises(TypeError, match="rows"):
        sparse.Graph.from_matrix(matrix)
    with pytest.raises(ValueError, match=r"rows must .*dst.*src.*destination"):
        sparse.Graph.from_matrix(matrix, rows="destination")


def test_from_matrix_with_destinations_as_rows(matrix):
    graph = sparse.Graph.from_matrix(matrix, rows="dst")
    assert graph.size == (4, 3)
    assert torch.equal(graph.edge_index.long(), EDGES[:, stored_order(matrix)])
    assert torch.equal(sparse.mm(graph, X), INCOMING)


def test_from_matrix_with_sources_as_rows(matrix):
    graph = sparse.Graph.from_matrix(matrix, rows="src")
    assert graph.size == (3, 4)
    assert torch.equal(graph.edge_index.long(), EDGES[:, stored_order(matrix)].flip(0))
    assert torch.equal(sparse.mm(graph, Y), OUTGOING)


def test_from_matrix_refuses_what_is_no_matrix():
    for bad in (torch.ones(2, 2), [[1]], None, EDGES):
        with pytest.raises(TypeError, match=r"from_matrix: A must"):
            sparse.Graph.from_matrix(bad, rows="dst")


def test_scipy_int64_indices_and_unsorted_columns():
    csr = scipy.sparse.csr_array(
        (np.array([1.0, 2.0], dtype=np.float32), np.array([3, 0]), np.array([0, 2, 2, 2])),
        shape=(3, 4),
    )
    csr.indices, csr.indptr = csr.indices.astype(np.int64), csr.indptr.astype(np.int64)
    assert sparse.mm(csr, X)[0].item() == 1000.0 + 2.0
    assert sparse.Graph.from_matrix(csr, rows="dst").edge_index.tolist() == [[3, 0], [0, 0]]


def test_integer_valued_matrix_promotes_like_torch():
    csr = scipy.sparse.csr_array(DENSE.numpy().astype(np.int64))
    out = sparse.mm(csr, X)
    assert out.dtype == torch.float32
    assert torch.equal(out, WEIGHTED)


# Back to each form. A graph without values gives ones; values are in input order.


@pytest.fixture
def edge_index_class() -> type:
    """Return PyG's `EdgeIndex`, or skip."""
    with warnings.catch_warnings():
        # PyG scripts some of its own classes on import, which torch calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        return pytest.importorskip("torch_geometric", reason="needs PyG").EdgeIndex


def test_to_edge_index(edge_index_class):
    back = bipartite().to_edge_index()
    assert isinstance(back, edge_index_class)
    assert torch.equal(back.as_tensor().long(), EDGES)
    assert back.sparse_size() == (4, 3)


@pytest.mark.parametrize("rows", ["dst", "src"])
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_to_torch(layout, rows):
    expected = DENSE if rows == "dst" else DENSE.t()
    graph = bipartite()
    back = getattr(graph, f"to_torch_{layout}")(rows, WEIGHT)
    assert back.layout == getattr(torch, f"sparse_{layout}")
    assert torch.equal(back.to_dense(), expected)
    ones = getattr(graph, f"to_torch_{layout}")(rows)
    assert torch.equal(ones.to_dense(), (expected != 0).float())


@pytest.mark.parametrize("rows", ["dst", "src"])
def test_to_scipy(rows):
    expected = DENSE if rows == "dst" else DENSE.t()
    back = bipartite().to_scipy(rows, WEIGHT)
    assert back.format == "csr"
    assert np.array_equal(back.toarray(), expected.numpy())


@pytest.mark.parametrize("rows", ["dst", "src"])
def test_sparse_tensor_there_and_back(rows):
    torch_sparse = pytest.importorskip(
        "torch_sparse", reason="torch_sparse has no wheel for this torch; it is an optional peer"
    )
    expected = DENSE if rows == "dst" else DENSE.t()
    back = bipartite().to_sparse_tensor(rows, WEIGHT)
    assert isinstance(back, torch_sparse.SparseTensor)
    assert torch.equal(back.to_dense(), expected)
    features = X if rows == "dst" else Y
    assert torch.equal(sparse.mm(back, features), expected @ features)
    again = sparse.Graph.from_matrix(back, rows=rows)
    assert again.size == (4, 3)
    assert torch.equal(sparse.mm(again, X), INCOMING)


@pytest.mark.parametrize("rows", ["dst", "src"])
def test_there_and_back_is_the_same_graph(matrix, rows):
    graph = sparse.Graph.from_matrix(matrix, rows=rows)
    back = sparse.Graph.from_matrix(graph.to_torch_csr(rows=rows), rows=rows)
    assert back.size == graph.size
    assert torch.equal(back.rowptr, graph.rowptr)
    assert sorted(zip(*back.edge_index.tolist(), strict=True)) == sorted(
        zip(*graph.edge_index.tolist(), strict=True)
    )


class TestEdgeIndex:
    """PyG's `EdgeIndex`: an edge list, whatever it has cached."""

    @pytest.fixture
    def make(self, edge_index_class):
        return lambda edges=EDGES, **options: edge_index_class(edges, sparse_size=(4, 3), **options)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    def test_sums_over_incoming_edges(self, make, dtype):
        out = sparse.mm(make(), X[:, :1].to(dtype))
        assert out.dtype == dtype
        assert torch.equal(out, sparse.mm(bipartite(), X.to(dtype)))
        assert not isinstance(out, type(make()))

    def test_weights_are_in_input_order(self, make):
        assert torch.equal(sparse.mm(make(), X, weight=WEIGHT), WEIGHTED)

    def test_turned_round(self, make):
        assert torch.equal(sparse.mm(make(), Y, flow="target_to_source"), OUTGOING)

    @pytest.mark.parametrize("sort_order", ["row", "col"])
    def test_sorted_with_and_without_filled_cache(self, make, sort_order):
        order = EDGES[0 if sort_order == "row" else 1].argsort(stable=True)
        index = make(EDGES[:, order], sort_order=sort_order)
        assert torch.equal(sparse.mm(index, X, weight=WEIGHT[order]), WEIGHTED)
        index.fill_cache_()
        assert torch.equal(sparse.mm(index, X, weight=WEIGHT[order]), WEIGHTED)

    def test_graph_from_it(self, make):
        graph = sparse.Graph(make())
        assert graph.size == (4, 3)
        assert torch.equal(sparse.mm(graph, X), INCOMING)

    def test_unknown_size_is_inferred_from_the_features(self, edge_index_class):
        out = sparse.mm(edge_index_class(EDGES), X)
        assert torch.equal(out, sparse.mm(EDGES, X))

    def test_side_without_nodes(self, edge_index_class):
        empty = torch.empty(2, 0, dtype=torch.int64)
        out = sparse.mm(edge_index_class(empty, sparse_size=(3, 0)), X[:3])
        assert out.shape == (0, 1)

    def test_index_out_of_range(self, edge_index_class):
        edges = edge_index_class(EDGES)
        with pytest.raises(IndexError, match=r"\[0, 2\).*got (3 at position 0|2 at position 1)"):
            sparse.mm(edges, X[:2])
