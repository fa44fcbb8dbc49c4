"""`sddmm` against dense indexing, for every operand, operation and derivative."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric import EdgeIndex

from edgeweave import sparse
from edgeweave.sparse import sddmm

OPS = ("dot", "add", "sub", "mul")
NUM_DST, NUM_SRC = 7, 9


def random_edges(num_edges: int = 50) -> torch.Tensor:
    return torch.stack(
        [torch.randint(0, NUM_SRC, (num_edges,)), torch.randint(0, NUM_DST, (num_edges,))]
    )


def dense(edges: torch.Tensor, a: torch.Tensor, b: torch.Tensor, op: str) -> torch.Tensor:
    left, right = a[edges[1]], b[edges[0]]
    if op == "dot":
        return (left * right).sum(-1) if a.dim() > 1 else left * right
    return {"add": left + right, "sub": left - right, "mul": left * right}[op]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (8,), (33,), (4, 5), (2, 3, 2), (0,), (0, 3)])
def test_value(shape, dtype, op):
    """Small integers: exact in every dtype."""
    edges = random_edges()
    a = torch.randint(-2, 3, (NUM_DST, *shape)).to(dtype)
    b = torch.randint(-2, 3, (NUM_SRC, *shape)).to(dtype)
    out = sddmm(edges, a, b, op)
    assert out.dtype == dtype
    assert torch.equal(out, dense(edges, a, b, op))
    turned = [t.mT.contiguous().mT if t.dim() > 1 else t for t in (a, b)]
    assert torch.equal(sddmm(edges, *turned, op), out)


@pytest.mark.parametrize("op", OPS)
def test_integers_and_mixed_dtypes(op):
    edges = random_edges()
    a, b = torch.randint(-9, 9, (NUM_DST, 3)), torch.randint(-9, 9, (NUM_SRC, 3))
    assert torch.equal(sddmm(edges, a, b, op), dense(edges, a, b, op))
    out = sddmm(edges, a.bfloat16(), b.double(), op)
    assert out.dtype == torch.float64
    assert torch.equal(out, dense(edges, a.double(), b.double(), op))


def test_bf16_dot_is_summed_in_float32():
    ones = torch.ones(1, 1000, dtype=torch.bfloat16)
    assert sddmm(torch.zeros(2, 1, dtype=torch.int64), ones, ones).item() == 1000


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")
@pytest.mark.parametrize("op", OPS)
def test_operands(op):
    """Graph, EdgeIndex and matrices: one value per edge or stored value, in their order."""
    matrix = scipy.sparse.random(NUM_DST, NUM_SRC, 0.5, "coo", np.float32, random_state=0)
    a, b = torch.randn(NUM_DST, 4), torch.randn(NUM_SRC, 4)
    rows = torch.from_numpy(matrix.row.astype(np.int64))
    cols = torch.from_numpy(matrix.col.astype(np.int64))
    edges = torch.stack([cols, rows])
    expected = dense(edges, a, b, op)
    close = torch.testing.assert_close
    close(sddmm(edges, a, b, op), expected)
    close(sddmm(edges.int(), a, b, op), expected)
    close(sddmm(edges.t().contiguous().t(), a, b, op), expected)
    close(sddmm(sparse.Graph(edges, size=(NUM_SRC, NUM_DST)), a, b, op), expected)
    close(sddmm(EdgeIndex(edges, sparse_size=(NUM_SRC, NUM_DST)), a, b, op), expected)
    close(sddmm(matrix, a, b, op), expected)
    for stored in (matrix.tocsr(), matrix.tocsc()):
        coo = stored.tocoo()
        order = torch.stack([torch.from_numpy(coo.col), torch.from_numpy(coo.row)]).long()
        close(sddmm(stored, a, b, op), dense(order, a, b, op))
    stored = torch.stack([rows, cols]), torch.rand(len(rows)), (NUM_DST, NUM_SRC)
    csr = torch.sparse_coo_tensor(*stored, check_invariants=True).to_sparse_csr()
    coo = csr.to_sparse_coo().indices()
    close(sddmm(csr, a, b, op), dense(coo.flip(0), a, b, op))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_is_torchs_sampled_product():
    pattern = (torch.rand(NUM_DST, NUM_SRC) < 0.5).float().to_sparse_csr()
    a, b = torch.randn(NUM_DST, 16), torch.randn(NUM_SRC, 16)
    zeros = torch.sparse_csr_tensor(pattern.crow_indices(), pattern.col_indices(),
                                    torch.zeros_like(pattern.values()), pattern.shape,
                                    check_invariants=True)  # fmt: skip
    expected = torch.sparse.sampled_addmm(zeros, a, b.t())
    torch.testing.assert_close(sddmm(pattern, a, b), expected.values())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_gradcheck_and_gradgradcheck(shape, op):
    edges = random_edges(20)
    a = torch.randn(NUM_DST, *shape, dtype=torch.float64, requires_grad=True)
    b = torch.randn(NUM_SRC, *shape, dtype=torch.float64, requires_grad=True)

    def function(a, b):
        return sddmm(edges, a, b, op)

    assert torch.autograd.gradcheck(function, (a, b), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (a, b))


@pytest.mark.parametrize("op", OPS)
def test_gradient_with_one_side_only(op):
    edges = random_edges()
    a, b = torch.randn(NUM_DST, 5), torch.randn(NUM_SRC, 5, requires_grad=True)
    upstream = torch.randn(dense(edges, a, b, op).shape)
    (grad,) = torch.autograd.grad(sddmm(edges, a, b, op), b, upstream)
    (expected,) = torch.autograd.grad(dense(edges, a, b, op), b, upstream)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("op", OPS)
def test_vmap(op):
    edges, a, b = random_edges(), torch.randn(3, NUM_DST, 5), torch.randn(3, NUM_SRC, 5)
    out = torch.vmap(lambda a, b: sddmm(edges, a, b, op))(a, b)
    for i in range(3):
        torch.testing.assert_close(out[i], dense(edges, a[i], b[i], op))


@pytest.mark.parametrize("op", OPS)
def test_any_number_of_threads_gives_the_same_bits(op):
    edges = torch.randint(0, 300, (2, 30_000))
    edges[1, ::3] = 5
    a, b = torch.randn(300, 9, requires_grad=True), torch.randn(300, 9, requires_grad=True)
    first = None
    for num_threads in (1, 2, 4):
        torch.set_num_threads(num_threads)
        out = sddmm(edges, a, b, op)
        found = (out, *torch.autograd.grad(out.square().sum(), (a, b)))
        if first is not None:
            assert all(torch.equal(x, y) for x, y in zip(found, first, strict=True))
        first = found


@pytest.mark.parametrize("op", OPS)
def test_nothing(op):
    edges = torch.zeros(2, 0, dtype=torch.int64)
    a = torch.randn(0, 3, requires_grad=True)
    out = sddmm(edges, a, torch.randn(0, 3), op)
    assert out.shape == ((0,) if op == "dot" else (0, 3))
    out.sum().backward()
    assert a.grad.shape == (0, 3)


def test_errors():
    edges, a, b = random_edges(), torch.randn(NUM_DST, 3), torch.randn(NUM_SRC, 3)
    with pytest.raises(ValueError, match=r"sddmm: op must be one of dot, add, sub, mul, got 'div'"):
        sddmm(edges, a, b, "div")
    with pytest.raises(ValueError, match=r"sddmm: b_src must have a_dst's shape.*\[3\], got \[4\]"):
        sddmm(edges, a, torch.randn(NUM_SRC, 4))
    with pytest.raises(TypeError, match=r"sddmm: A must be an edge list of int32 or int64"):
        sddmm(edges.float(), a, b)
    with pytest.raises(ValueError, match=r"sddmm: an edge list must have shape \[2, E\]"):
        sddmm(edges[0], a, b)
    edges[0, 0] = 8
    with pytest.raises(IndexError, match=r"must be in \[0, 8\), got 8 at position"):
        sddmm(edges, a, b[:8])
    with pytest.raises(
        ValueError, match=r"sddmm: a_dst and b_src must have one row per.*7 and 9, got 7 and 5"
    ):
        sddmm(sparse.Graph(edges, size=(NUM_SRC, NUM_DST)), a, b[:5])
    with pytest.raises(TypeError, match=r"sddmm: a_dst must be a tensor"):
        sddmm(edges, 1.0, b)
    with pytest.raises(TypeError, match=r"sddmm: A must be an edge list"):
        sddmm("edges", a, b)


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")
def test_mm_of_two_sparse_matrices_is_refused():
    """And says who multiplies those."""
    A = torch.eye(3).to_sparse_csr()
    edges = torch.tensor([[0, 1, 2], [0, 1, 2]])
    for B in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), scipy.sparse.eye(3)):
        for left in (A, edges, sparse.Graph(edges), scipy.sparse.eye(3)):
            with pytest.raises(TypeError, match=r"mm: x must be dense.*torch.sparse.mm.*scipy"):
                sparse.mm(left, B)
