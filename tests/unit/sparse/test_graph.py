"""`Graph`: the arrays that it holds, checked against numpy and scipy."""

from __future__ import annotations

import copy
import pickle

import _reference as ref
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.sparse
import torch

import edgeweave
from edgeweave import sparse


def check_arrays(graph: sparse.Graph, edges: torch.Tensor, num_src: int, num_dst: int) -> None:
    """Compare every array of `graph` with a stable sort by numpy."""
    src, dst = ref.to_numpy(edges)
    assert graph.size == (num_src, num_dst)
    assert (graph.num_src, graph.num_dst, graph.num_edges) == (num_src, num_dst, len(src))
    rowptr, col, perm = ref.csr_by_stable_sort(dst, src, num_dst)
    colptr, row, perm_t = ref.csr_by_stable_sort(src, dst, num_src)
    expected = {
        "rowptr": rowptr,
        "col": col,
        "perm": perm,
        "colptr": colptr,
        "row": row,
        "perm_t": perm_t,
        "in_degree": np.bincount(dst, minlength=num_dst),
        "out_degree": np.bincount(src, minlength=num_src),
    }
    for name, array in expected.items():
        assert getattr(graph, name).tolist() == array.tolist(), name
    assert graph.is_sorted is bool((np.diff(dst) >= 0).all())
    assert torch.equal(graph.edge_index.long(), edges.long())


def random_edges(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [
            torch.randint(0, num_src, (num_edges,), generator=generator),
            torch.randint(0, num_dst, (num_edges,), generator=generator),
        ]
    )


def test_public_names():
    assert edgeweave.Graph is sparse.Graph
    for name in ("Graph", "mm", "cache_info", "cache_clear", "set_cache_limit"):
        assert name in sparse.__all__


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [(30, 30), (30, 7), (7, 30), (1, 30), (30, 1)], ids=str)
def test_arrays(size, index_dtype):
    edges = random_edges(*size, 400).to(index_dtype)
    check_arrays(sparse.Graph(edges, size=size), edges, *size)


def test_arrays_agree_with_scipy():
    """Without duplicates (scipy adds them up), and with columns sorted as scipy leaves them."""
    dense = scipy.sparse.random(40, 25, density=0.2, format="coo", random_state=3)
    edges = torch.from_numpy(np.stack([dense.col, dense.row]))
    graph = sparse.Graph(edges, size=(25, 40))
    csr, csc = dense.tocsr(), dense.tocsc()
    assert graph.rowptr.tolist() == csr.indptr.tolist()
    assert graph.colptr.tolist() == csc.indptr.tolist()
    values = torch.from_numpy(dense.data)
    ours = scipy.sparse.csr_array(
        (values[graph.perm.long()].numpy(), graph.col.numpy(), graph.rowptr.numpy()),
        shape=(40, 25),
    )
    assert (ours != csr).nnz == 0
    ours = scipy.sparse.csc_array(
        (values[graph.perm_t.long()].numpy(), graph.row.numpy(), graph.colptr.numpy()),
        shape=(40, 25),
    )
    assert (ours != csc).nnz == 0


def test_order_within_a_row_is_that_of_the_input():
    edges = torch.tensor([[5, 1, 5, 0, 1], [2, 2, 2, 0, 2]])
    graph = sparse.Graph(edges, size=(6, 3))
    assert graph.col.tolist() == [0, 5, 1, 5, 1]
    assert graph.perm.tolist() == [3, 0, 1, 2, 4]
    assert graph.row.tolist() == [0, 2, 2, 2, 2]
    assert graph.perm_t.tolist() == [3, 1, 4, 0, 2]


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["random", "few rows", "sorted", "reversed", "by source"])
def test_large_enough_for_many_threads(kind, num_threads):
    torch.set_num_threads(num_threads)
    num_nodes = 3 if kind == "few rows" else 5_000
    edges = random_edges(num_nodes, num_nodes, 300_000)
    if kind == "sorted":
        edges[1] = edges[1].sort().values
    elif kind == "reversed":
        edges[1] = edges[1].sort(descending=True).values
    elif kind == "by source":
        edges[0] = edges[0].sort().values
    check_arrays(sparse.Graph(edges, size=(num_nodes, num_nodes)), edges, num_nodes, num_nodes)


def test_more_nodes_than_edges():
    edges = torch.tensor([[999_999, 0, 500_000], [0, 999_999, 0]])
    graph = sparse.Graph(edges, size=(1_000_000, 1_000_000))
    assert graph.col.tolist() == [999_999, 500_000, 0]
    assert int(graph.rowptr[1]) == 2
    assert int(graph.rowptr[-2]) == 2
    assert int(graph.rowptr[-1]) == 3
    assert int(graph.in_degree.sum()) == 3


@pytest.mark.parametrize(
    ("destinations", "expected"),
    [([], True), ([4], True), ([0, 0, 3, 4], True), ([0, 3, 2, 4], False), ([4, 3], False)],
)
def test_sorted_input_is_detected(destinations, expected):
    edges = torch.stack([torch.arange(len(destinations)), torch.tensor(destinations).long()])
    assert sparse.Graph(edges, size=(5, 5)).is_sorted is expected


def test_sorted_by_a_single_late_exception():
    edges = torch.stack([torch.zeros(200_000, dtype=torch.int64), torch.arange(200_000)])
    assert sparse.Graph(edges, size=(1, 200_000)).is_sorted
    edges[1, 199_999] = 0
    assert not sparse.Graph(edges, size=(1, 200_000)).is_sorted


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_arrays_are_int32_where_they_fit(index_dtype):
    graph = sparse.Graph(random_edges(30, 30, 400).to(index_dtype), size=(30, 30))
    for name in ("rowptr", "col", "perm", "colptr", "row", "perm_t"):
        assert getattr(graph, name).dtype == torch.int32, name


def test_more_than_int32_many_nodes_need_int64():
    """2^31 + 1 sources: only `colptr` would be large, and it is made when first needed."""
    edges = torch.tensor([[2**31, 0, 5], [1, 0, 1]])
    graph = sparse.Graph(edges, size=(2**31 + 1, 2))
    assert graph.col.tolist() == [0, 2**31, 5]
    assert graph.col.dtype == torch.int64


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_strided_input(index_dtype):
    edges = random_edges(30, 20, 400).to(index_dtype)
    pairs = edges.t().contiguous()
    padded = torch.full((4, 800), -1, dtype=index_dtype)
    padded[::2, ::2] = edges
    overlapping = torch.arange(11, dtype=index_dtype).as_strided((2, 10), (1, 1))
    for strided, size in (
        (pairs.t(), (30, 20)),
        (padded[::2, ::2], (30, 20)),
        (edges.flip(0)[[1, 0]], (30, 20)),
        (overlapping, (10, 11)),
        (edges[:, :1].expand(2, 50), (30, 20)),
    ):
        check_arrays(sparse.Graph(strided, size=size), strided, *size)


def test_size_is_inferred_as_a_square():
    edges = torch.tensor([[0, 6, 2], [3, 1, 1]])
    graph = sparse.Graph(edges)
    assert graph.size == (7, 7)
    assert sparse.Graph(torch.empty(2, 0, dtype=torch.int64)).size == (0, 0)


@pytest.mark.parametrize("size", [(0, 0), (3, 0), (0, 3), (4, 4)], ids=str)
def test_no_edges(size):
    edges = torch.empty(2, 0, dtype=torch.int64)
    check_arrays(sparse.Graph(edges, size=size), edges, *size)


def test_duplicates_self_loops_and_isolated_nodes():
    edges = torch.tensor([[1, 1, 1, 3, 3, 0], [1, 1, 4, 3, 1, 0]])
    check_arrays(sparse.Graph(edges, size=(6, 6)), edges, 6, 6)


@pytest.mark.parametrize("leaves", [4096, 20_000])
def test_star(leaves):
    edges = torch.stack([torch.arange(leaves), torch.zeros(leaves, dtype=torch.int64)])
    for ends in (edges, edges.flip(0), edges.flip(1)):
        check_arrays(sparse.Graph(ends, size=(leaves, leaves)), ends, leaves, leaves)


def test_csc_is_lazy():
    graph = sparse.Graph(random_edges(50, 50, 2000), size=(50, 50))
    before = graph.nbytes
    assert before >= graph.col.nbytes + graph.rowptr.nbytes
    assert graph.row.numel() == 2000
    assert graph.nbytes >= before + graph.row.nbytes + graph.colptr.nbytes


def test_arrays_given_out_do_not_spoil_the_graph():
    """Whoever writes into what a property returned must not change later results."""
    edges, x = random_edges(9, 9, 60), torch.randn(9, 4)
    graph = sparse.Graph(edges, size=(9, 9))
    expected = sparse.mm(graph, x)
    copies = {n: getattr(graph, n).clone() for n in ("in_degree", "out_degree")}
    for name in copies:
        try:
            getattr(graph, name).zero_()
        except RuntimeError:
            continue  # a read-only array is an answer too
    assert torch.equal(sparse.mm(graph, x), expected)


def test_graph_keeps_its_own_edges():
    edges = random_edges(9, 9, 60)
    before, x = edges.clone(), torch.randn(9, 4)
    graph = sparse.Graph(edges, size=(9, 9))
    expected = sparse.mm(graph, x)
    assert torch.equal(sparse.mm(before, x), expected)


@pytest.mark.parametrize("touch", [False, True], ids=["fresh", "with CSC"])
@pytest.mark.parametrize(
    "clone",
    [copy.copy, copy.deepcopy, lambda graph: pickle.loads(pickle.dumps(graph))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies(clone, touch):
    edges = random_edges(30, 20, 400)
    graph = sparse.Graph(edges, size=(30, 20))
    if touch:
        assert graph.row.numel() == 400
    twin = clone(graph)
    assert type(twin) is sparse.Graph
    check_arrays(twin, edges, 30, 20)
    x = torch.randn(30, 5)
    assert torch.equal(sparse.mm(twin, x, "mean"), sparse.mm(graph, x, "mean"))


def test_torch_save(tmp_path):
    edges = random_edges(30, 20, 400)
    torch.save(sparse.Graph(edges, size=(30, 20)), tmp_path / "graph.pt")
    check_arrays(torch.load(tmp_path / "graph.pt", weights_only=False), edges, 30, 20)


def test_repr_names_the_sizes():
    text = repr(sparse.Graph(random_edges(31, 17, 400), size=(31, 17)))
    assert text.startswith("Graph(")
    for number in ("31", "17", "400"):
        assert number in text


def test_edit_in_place_is_noticed():
    edges = torch.tensor([[0, 1, 2], [0, 0, 0]])
    graph = sparse.Graph(edges, size=(3, 3))
    x = torch.tensor([[1.0], [10.0], [100.0]])
    assert sparse.mm(graph, x)[:, 0].tolist() == [111.0, 0.0, 0.0]
    edges[1, 2] = 2
    assert sparse.mm(graph, x)[:, 0].tolist() == [11.0, 0.0, 100.0]
    assert graph.rowptr.tolist() == [0, 2, 2, 3]
    edges[1, 2] = 3
    with pytest.raises(IndexError, match="3"):
        sparse.mm(graph, x)


def test_edit_in_place_of_an_inference_tensor_is_noticed():
    """It has no version, so its content must be compared."""
    x = torch.tensor([[1.0], [10.0], [100.0]])
    with torch.inference_mode():
        edges = torch.tensor([[0, 1, 2], [0, 0, 0]]) + 0
        graph = sparse.Graph(edges, size=(3, 3))
        assert sparse.mm(graph, x)[:, 0].tolist() == [111.0, 0.0, 0.0]
        edges[1, 2] = 2
        assert sparse.mm(graph, x)[:, 0].tolist() == [11.0, 0.0, 100.0]


def test_invalidate_reads_the_edges_again():
    edges = torch.tensor([[0, 1, 2], [0, 0, 0]])
    graph = sparse.Graph(edges, size=(3, 3))
    x = torch.tensor([[1.0], [10.0], [100.0]])
    assert sparse.mm(graph, x)[:, 0].tolist() == [111.0, 0.0, 0.0]
    edges.data[1, 2] = 2
    graph.invalidate()
    assert sparse.mm(graph, x)[:, 0].tolist() == [11.0, 0.0, 100.0]
    assert graph.in_degree.tolist() == [2, 0, 1]
    edges.data[1, 2] = 3
    graph.invalidate()
    with pytest.raises(IndexError, match="3"):
        sparse.mm(graph, x)


@hypothesis.given(st.data())
def test_random_graphs(data):
    num_src = data.draw(st.integers(1, 40), label="num_src")
    num_dst = data.draw(st.integers(1, 40), label="num_dst")
    pairs = data.draw(
        st.lists(st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1)), max_size=80),
        label="edges",
    )
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]), label="dtype")
    edges = torch.tensor(pairs, dtype=dtype).reshape(-1, 2).t()
    check_arrays(sparse.Graph(edges, size=(num_src, num_dst)), edges, num_src, num_dst)
