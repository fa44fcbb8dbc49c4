"""Inputs that once crashed, corrupted the cache or gave the wrong error."""

import gc

import numpy as np
import pytest
import scipy.sparse
import torch

from edgeweave import Graph, sparse
from edgeweave.scatter import gather, scatter_reduce


@pytest.mark.parametrize("ptr", [[0, 3_000_000, 5], [1, 2, 5], [0, 2, 4], [0, 8, 5], [0, -1, 5]])
@pytest.mark.parametrize("kind", ["scipy", "csr", "csc"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support is in beta")
def test_pointers_that_do_not_rise_to_the_entries(ptr, kind):
    other = [0, 1, 0, 1, 0]
    if kind == "scipy":
        A = scipy.sparse.csr_array((2, 2), dtype=np.float32)
        A.data, A.indices, A.indptr = np.ones(5, "f4"), np.array(other, "i4"), np.array(ptr, "i4")
    else:
        make = torch.sparse_csr_tensor if kind == "csr" else torch.sparse_csc_tensor
        args = (torch.tensor(ptr), torch.tensor(other), torch.ones(5), (2, 2))
        A = make(*args, check_invariants=False)
    with pytest.raises(ValueError, match="pointers of a compressed matrix must rise from 0"):
        sparse.mm(A, torch.ones(2, 4))
    with pytest.raises(ValueError, match="pointers of a compressed matrix must rise from 0"):
        Graph.from_matrix(A, rows="src")


def test_a_graph_of_a_matrix_is_the_callers_own():
    A = scipy.sparse.csr_array(np.array([[0, 2.0], [0, 3.0]], dtype="f4"))
    x = torch.tensor([[1.0], [10.0]])
    first = sparse.mm(A, x)
    graph, other = (Graph.from_matrix(A, rows="dst") for _ in range(2))
    graph.edge_index[0, 0] = 0
    assert torch.equal(sparse.mm(A, x), first)
    assert other.edge_index.tolist() == [[1, 1], [0, 1]]


@pytest.mark.parametrize("name", ["edge_index", "num_src", "num_dst"])
def test_a_graph_cannot_be_reassigned(name):
    graph = Graph(torch.tensor([[0], [1]]))
    with pytest.raises(AttributeError):
        setattr(graph, name, getattr(graph, name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_of_a_batch_in_half_precision_with_create_graph(dtype):
    x = torch.ones(2, 3000, 16, dtype=dtype, requires_grad=True)
    index = torch.zeros(3000, dtype=torch.long)
    out = scatter_reduce(x, index, dim=1, dim_size=1, reduce="amax")
    for create_graph in (False, True):
        (grad,) = torch.autograd.grad(
            out, x, torch.ones_like(out), create_graph=create_graph, retain_graph=True
        )
        # 3,000 shares of 1/3000, each rounded once: half an ulp, 2^-9 for bfloat16.
        assert abs(grad.double().sum(1) - 1).max() <= 2**-9


def test_eviction_while_tensors_die_in_a_collection():
    sparse.cache_clear()
    sparse.set_cache_limit(200_000)
    try:
        for step in range(3000):
            edges = torch.randint(10, (2, 30))
            edges.itself = edges  # only a collection frees it
            sparse.mm(edges, torch.ones(10, 1))
            if step % 500 == 0:
                gc.collect()
    finally:
        sparse.set_cache_limit(2 << 30)
        sparse.cache_clear()


def test_vmap_over_the_index():
    src, index = torch.randn(3, 5, 2), torch.randint(0, 4, (3, 5))
    for reduce in ("sum", "mean", "amax", "amin"):
        out = torch.vmap(lambda s, i, r=reduce: scatter_reduce(s, i, dim_size=4, reduce=r))(
            src, index
        )
        for b in range(3):
            expected = scatter_reduce(src[b], index[b], dim_size=4, reduce=reduce)
            torch.testing.assert_close(out[b], expected)
    edges = torch.randint(0, 4, (3, 2, 9))
    x = torch.randn(4, 2)
    out = torch.vmap(lambda e: sparse.mm(e, x))(edges)
    for b in range(3):
        torch.testing.assert_close(out[b], sparse.mm(edges[b], x))


def test_vmap_of_the_winners():
    src, index = torch.randn(6, 4, 3).movedim(1, 0), torch.tensor([0, 0, 2, 1, 2, 0])

    def winners(s):
        return scatter_reduce(s, index, dim_size=3, reduce="amax", return_arg=True)

    out, arg = torch.vmap(winners)(src)
    for b in range(4):
        expected, expected_arg = winners(src[b].contiguous())
        assert torch.equal(out[b], expected)
        assert torch.equal(arg[b], expected_arg)


def test_forward_mode_jacobian_of_a_weighted_maximum():
    edges, weight = torch.randint(0, 5, (2, 12)), torch.rand(12, dtype=torch.float64)
    x = torch.randn(5, 2, dtype=torch.float64)

    def run(x):
        return sparse.mm(edges, x, "amax", weight=weight)

    forward = torch.autograd.functional.jacobian(run, x, vectorize=True, strategy="forward-mode")
    torch.testing.assert_close(forward, torch.autograd.functional.jacobian(run, x))


def test_a_default_device_does_not_move_matrices():
    graph = Graph(torch.tensor([[0, 1], [1, 0]]))
    with torch.device("meta"):
        assert graph.to_torch_coo("dst").device.type == "cpu"


def test_negative_indices_without_a_size_are_index_errors():
    with pytest.raises(IndexError, match=r"got -5 at position 0"):
        scatter_reduce(torch.ones(2, 3), torch.tensor([-5, -7]))
    with pytest.raises(IndexError, match=r"got -4 at position 0"):
        Graph(torch.tensor([[-5, -3], [-4, -4]]))


@pytest.mark.parametrize("out", [[1.0], np.zeros(3)])
def test_out_must_be_a_tensor(out):
    with pytest.raises(TypeError, match="scatter_reduce: out must be a tensor"):
        scatter_reduce(torch.ones(3), torch.tensor([0, 1, 2]), out=out)


def test_sparse_index_is_a_type_error():
    with pytest.raises(TypeError, match="edge_index must be a dense tensor"):
        Graph(torch.eye(2, dtype=torch.int64).to_sparse())


def test_scipy_data_with_a_negative_step():
    A = scipy.sparse.csr_array(np.diag([1.0, 2.0]))
    A.data = A.data[::-1]
    x = torch.eye(2, dtype=torch.float64)
    assert sparse.mm(A, x).diagonal().tolist() == [2.0, 1.0]


def off_by_one_byte(values: torch.Tensor) -> torch.Tensor:
    raw = bytearray(1 + values.nbytes)
    raw[1:] = values.contiguous().view(torch.uint8).numpy().tobytes()
    return torch.frombuffer(raw, dtype=values.dtype, offset=1).view(values.shape)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int16])
@pytest.mark.parametrize("width", [1, 5, 16])
def test_tensors_at_addresses_that_their_type_does_not_divide(width, dtype, index_dtype):
    edges = torch.randint(0, 30, (2, 500)).to(index_dtype)
    x = torch.randint(-3, 4, (30, width)).to(dtype)
    odd_edges, odd_x = off_by_one_byte(edges), off_by_one_byte(x)
    assert odd_edges.data_ptr() % edges.element_size() != 0
    assert odd_x.data_ptr() % x.element_size() != 0
    assert torch.equal(sparse.mm(odd_edges, odd_x), sparse.mm(edges, x))
    rows = gather(odd_x, odd_edges[0])
    assert torch.equal(rows, x[edges[0].long()])
    reduced = scatter_reduce(rows, odd_edges[1], dim_size=30, reduce="amax")
    assert torch.equal(reduced, scatter_reduce(rows, edges[1], dim_size=30, reduce="amax"))


@pytest.mark.parametrize("position", [None, 3])
def test_rows_without_features_still_have_their_index_checked(position):
    index = torch.zeros(5, dtype=torch.long)
    if position is None:
        assert gather(torch.empty(2, 0), index).shape == (5, 0)
        return
    index[position] = 2
    with pytest.raises(IndexError, match=r"\[0, 2\), got 2 at position 3"):
        gather(torch.empty(2, 0), index)
