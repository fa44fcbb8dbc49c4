"""`sparse.mm` on CUDA against float64 loops: dtypes, widths, heads, long rows, gradients."""

from __future__ import annotations

import _reference as ref
import numpy as np
import pytest
import torch
from _cuda_graphs import hub_edges, leaf_of, random_edges

from edgeweave import sparse

REDUCES = ("sum", "mean", "amax", "amin")
SHAPES = ((1,), (5,), (33,), (128,), (300,), (3, 5), (4, 16), (2, 130))
KINDS = ("plain", "per edge", "per head")
# Every width in two dtypes, a few in the others: each is another kernel to compile.
CASES = [
    pytest.param(dtype, kind, shape, id=f"{dtype}-{kind}-{shape}")
    for dtype in ref.FLOATS
    for kind in KINDS
    for shape in (SHAPES if dtype in (torch.float32, torch.bfloat16) else ((33,), (4, 16)))
    if kind != "per head" or len(shape) > 1
]


def weights(kind: str, edges: int, shape: tuple[int, ...], dtype: torch.dtype):
    if kind == "plain":
        return None
    return torch.randn(edges if kind == "per edge" else (edges, shape[0])).to(dtype)


def on(device, *tensors):
    return [None if t is None else t.to(device) for t in tensors]


@pytest.mark.parametrize(("dtype", "kind", "shape"), CASES)
@pytest.mark.parametrize("reduce", REDUCES)
def test_values(dtype, reduce, kind, shape, device):
    edges = random_edges(23, 19, 90)
    x, weight = torch.randn(23, *shape).to(dtype), weights(kind, 90, shape, dtype)
    edges_there, x_there, weight_there = on(device, edges, x, weight)
    graph = sparse.Graph(edges_there, size=(23, 19))
    out = sparse.mm(graph, x_there, reduce, weight=weight_there)
    assert out.dtype == dtype
    assert out.device == x_there.device
    expected = ref.mm(edges, x, 19, reduce, weight)
    if reduce in ("amax", "amin") and weight is None:
        ref.assert_exact(out.cpu(), expected.value)
        return
    terms = 0
    if reduce in ("sum", "mean"):
        terms = expected.degree.reshape(-1, *([1] * len(shape)))
    ref.assert_within(
        out.cpu(), expected.value, ref.error_bound(expected, terms, dtype, roundings=2)
    )


def check_gradients(edges, x, num_dst, reduce, weight, device, ties="even"):
    """Compare the gradients of one backward pass with the formulas, within rounding."""
    edges_there = edges.to(device)
    x_there = leaf_of(x, device)
    weight_there = None if weight is None else leaf_of(weight, device)
    leaves = [t for t in (x_there, weight_there) if t is not None]
    graph = sparse.Graph(edges_there, size=(x.shape[0], num_dst))
    out = sparse.mm(graph, x_there, reduce, weight=weight_there, ties=ties)
    upstream = torch.randn(out.shape).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, upstream.to(device))
    expected = ref.mm_grad(edges, x.detach(), upstream, reduce, weight, ties)
    src, dst = ref.to_numpy(edges)
    inner = ref.UNIT_ROUNDOFF[torch.float64 if x.dtype == torch.float64 else torch.float32]
    outer = ref.UNIT_ROUNDOFF[x.dtype]
    tiny = float(torch.finfo(x.dtype).smallest_normal)
    positive = None if weight is None else weight.abs()
    scale, _ = ref.mm_grad(edges, x.detach().abs(), upstream.abs(), "sum", positive)
    bound = 2 * (len(src) + 3) * inner * np.abs(scale) + outer * np.abs(expected[0]) + tiny
    ref.assert_within(grads[0].cpu(), expected[0], bound, "grad of x")
    if weight is not None:
        product = np.abs(ref.to_numpy(upstream)[dst] * ref.to_numpy(x.detach())[src])
        axes = tuple(range(weight.dim(), product.ndim))
        terms = int(np.prod(product.shape[weight.dim() :])) + 3
        bound = 2 * terms * inner * product.sum(axis=axes) + outer * np.abs(expected[1]) + tiny
        ref.assert_within(grads[1].cpu(), expected[1], bound, "grad of weight")


@pytest.mark.parametrize("shape", [(1,), (33,), (300,), (3, 5), (4, 32)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "per edge", "per head"])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradients(dtype, reduce, kind, shape, device):
    if kind == "per head" and len(shape) == 1:
        pytest.skip("one head")
    edges = random_edges(13, 11, 70)
    x, weight = torch.randn(13, *shape).to(dtype), weights(kind, 70, shape, dtype)
    check_gradients(edges, x, 11, reduce, weight, device)


@pytest.mark.parametrize("ties", ["even", "first"])
@pytest.mark.parametrize("kind", ["plain", "per edge"])
@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ties(dtype, reduce, kind, ties, device):
    edges = random_edges(13, 11, 70)
    x = torch.randint(-1, 2, (13, 6)).to(dtype)
    weight = None if kind == "plain" else torch.randint(0, 2, (70,)).to(dtype)
    check_gradients(edges, x, 11, reduce, weight, device, ties)


@pytest.mark.parametrize("kind", ["plain", "per head"])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_in_chunks(dtype, reduce, kind, device):
    edges = hub_edges()
    x = torch.randn(12, 2, 3).to(dtype)
    weight = weights(kind, edges.shape[1], (2, 3), dtype)
    out = sparse.mm(*on(device, edges, x), reduce, weight=on(device, weight)[0])
    expected = ref.mm(edges, x, 12, reduce, weight)
    terms = expected.degree.reshape(-1, 1, 1) if reduce in ("sum", "mean") else 0
    bound = ref.error_bound(expected, terms, dtype, roundings=2)
    ref.assert_within(out.cpu(), expected.value, bound)
    check_gradients(edges, x, 12, reduce, weight, device)
    if reduce == "amax":
        check_gradients(edges, x, 12, reduce, weight, device, "first")


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_integers(dtype, reduce, device):
    edges = random_edges(23, 19, 90)
    x = torch.randint(-9 if dtype.is_signed else 0, 9, (23, 5), dtype=dtype)
    graph = sparse.Graph(edges.to(device), size=(23, 19))
    out = sparse.mm(graph, x.to(device), reduce)
    assert out.dtype == dtype
    expected = ref.mm(edges, x, 19, "sum" if reduce == "mean" else reduce)
    value = expected.value
    if reduce == "mean":
        value = value // np.maximum(expected.degree, 1)[:, None]
    ref.assert_exact(out.cpu(), value)


def test_int64_features_keep_all_64_bits(device):
    edges = torch.tensor([[0, 1, 2], [0, 0, 1]], device=device)
    x = torch.tensor([[2**62 + 1], [-3], [-(2**53) - 1]], device=device)
    graph = sparse.Graph(edges, size=(3, 2))
    assert sparse.mm(graph, x).tolist() == [[2**62 - 2], [-(2**53) - 1]]
    assert sparse.mm(graph, x, "amax").tolist() == [[2**62 + 1], [-(2**53) - 1]]


@pytest.mark.parametrize("reduce", REDUCES)
def test_nan_and_infinities(reduce, device):
    edges = random_edges(9, 8, 60)
    x = torch.randn(9, 4)
    x[1, 0], x[2, 1], x[3, 2], x[4, 2] = float("nan"), float("inf"), float("inf"), -float("inf")
    graph = sparse.Graph(edges.to(device), size=(9, 8))
    leaf = leaf_of(x, device)
    out = sparse.mm(graph, leaf, reduce)
    expected = ref.mm(edges, x, 8, reduce)
    ref.assert_within(out.cpu(), expected.value, np.full(expected.value.shape, 1e-4))
    if reduce in ("amax", "amin"):
        out.sum().backward()
        exact, _ = ref.mm_grad(edges, x, torch.ones(8, 4), reduce)
        ref.assert_within(leaf.grad.cpu(), exact, np.full(exact.shape, 1e-4))


@pytest.mark.parametrize("reduce", REDUCES)
def test_no_edges_and_no_features(reduce, device):
    none = torch.zeros(2, 0, dtype=torch.int64, device=device)
    x = torch.randn(4, 3, device=device, requires_grad=True)
    out = sparse.mm(sparse.Graph(none, size=(4, 5)), x, reduce)
    assert out.tolist() == [[0.0] * 3] * 5
    out.sum().backward()
    assert x.grad.tolist() == [[0.0] * 3] * 4
    edges = random_edges(4, 4, 9).to(device)
    assert sparse.mm(edges, torch.randn(4, 0, device=device), reduce).shape == (4, 0)


@pytest.mark.parametrize(("row", "what"), [(0, "source index"), (1, "destination index")])
def test_an_index_out_of_range(row, what, device):
    edges = random_edges(5, 5, 9)
    edges[row, 7] = 5
    with pytest.raises(IndexError, match=rf"mm: {what} must be in \[0, 5\), got 5 at position 7"):
        sparse.mm(edges.to(device), torch.randn(5, 2, device=device))


@pytest.mark.parametrize("reduce", REDUCES)
def test_bits_repeat_and_depend_on_the_row_alone(reduce, device):
    edges = hub_edges()
    x = torch.randn(12, 37, device=device)
    weight = torch.randn(edges.shape[1], device=device)
    there = edges.to(device)
    first = sparse.mm(there, x, reduce, weight=weight)
    again = sparse.mm(there.clone(), x, reduce, weight=weight.clone())
    assert torch.equal(first, again)
    row = edges[1] == 3
    alone = sparse.mm(there[:, row.to(device)], x, reduce, weight=weight[row.to(device)])
    assert torch.equal(alone[3], first[3])


def test_second_derivatives(device):
    edges = random_edges(5, 4, 12).to(device)
    graph = sparse.Graph(edges, size=(5, 4))
    x = torch.randn(5, 2, 2, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(12, 2, dtype=torch.float64, device=device, requires_grad=True)
    for reduce in REDUCES:

        def run(x, weight, reduce=reduce):
            return sparse.mm(graph, x, reduce, weight=weight)

        assert torch.autograd.gradcheck(run, (x, weight), nondet_tol=0.0)
        assert torch.autograd.gradgradcheck(run, (x, weight))


def test_int32_edges_strides_and_flow(device):
    edges = random_edges(9, 9, 40)
    x = torch.randn(9, 4)
    expected = sparse.mm(edges.to(device), x.to(device))
    turned = edges.flip(0).t().contiguous().to(device, torch.int32).t()
    got = sparse.mm(turned, x.to(device), flow="target_to_source")
    assert torch.equal(got, expected)
    strided = torch.stack([x, x], dim=-1).to(device)[..., 0]
    assert not strided.is_contiguous()
    assert torch.equal(sparse.mm(edges.to(device), strided), expected)


def test_matrices(device):
    dense = torch.randn(6, 5) * (torch.rand(6, 5) < 0.5)
    x = torch.randn(5, 3)
    for layout in ("coo", "csr", "csc"):
        sparse_dense = {
            "coo": dense.to_sparse(),
            "csr": dense.to_sparse_csr(),
            "csc": dense.to_sparse_csc(),
        }[layout]
        out = sparse.mm(sparse_dense.to(device), x.to(device))
        torch.testing.assert_close(out.cpu(), dense @ x)


def test_graph_arrays(device):
    edges = hub_edges()
    graph = sparse.Graph(edges.to(device), size=(12, 12))
    for transpose, names in (
        (False, ("rowptr", "col", "perm")),
        (True, ("colptr", "row", "perm_t")),
    ):
        key, other = (edges[0], edges[1]) if transpose else (edges[1], edges[0])
        pointer, column, order = ref.csr_by_stable_sort(key.numpy(), other.numpy(), 12)
        for name, expected in zip(names, (pointer, column, order), strict=True):
            found = getattr(graph, name)
            assert found.device.type == device
            np.testing.assert_array_equal(found.cpu().numpy(), expected)
    assert torch.equal(graph.in_degree.cpu(), torch.bincount(edges[1], minlength=12))
    assert graph.nbytes > 0
