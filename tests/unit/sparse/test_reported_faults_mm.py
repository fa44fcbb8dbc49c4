"""Faults that people reported of other libraries: their inputs through `mm` and its kin.

As in `tests/unit/scatter/test_reported_faults.py`: ids and docstrings name the report, values are
exact where no tolerance is given.
"""

from __future__ import annotations

import itertools
import math
import warnings

import _reference as ref
import numpy as np
import pytest
import torch

from edgeweave import sparse

INF = math.inf
HALVES = (torch.bfloat16, torch.float16)
REDUCES = ("sum", "mean", "amax", "amin")
PAIRS = ("dot", "add", "sub", "mul")


def into_one_node(num_edges: int) -> sparse.Graph:
    """Return the graph in which sources 0..num_edges-1 all point to the one destination."""
    edges = torch.stack([torch.arange(num_edges), torch.zeros(num_edges, dtype=torch.int64)])
    return sparse.Graph(edges, size=(num_edges, 1))


def small_integers(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape).double()


def check_mm(edges, x, reduce, weight=None) -> None:
    """Compare values and gradients with the reference; small integers in float64.

    A mean or a shared gradient divides once per term: 1e-12 is a thousand roundings.
    """
    leaves = [t.clone().requires_grad_() for t in (x, weight) if t is not None]
    out = sparse.mm(edges, leaves[0], reduce, weight=leaves[1] if len(leaves) > 1 else None)
    expected = ref.mm(edges, x, len(x), reduce, weight).value
    np.testing.assert_allclose(out.detach().numpy(), expected, rtol=1e-12, atol=0)
    upstream = small_integers(*out.shape)
    grads = torch.autograd.grad(out, leaves, upstream)
    formulas = ref.mm_grad(edges, x, upstream, reduce, weight)
    for grad, formula in zip(grads, formulas, strict=False):
        np.testing.assert_allclose(grad.numpy(), formula, rtol=1e-12, atol=1e-12)


# Low precision


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_torch_segment_reduce_a_thousand_ones_with_heads_and_back(weighted, dtype):
    """Into one node with weights `[E, H]`; and out of one: the gradient is a sum of a thousand."""
    weight = torch.ones(1000, 4, dtype=dtype) if weighted else None
    x = torch.ones(1000, 4, 5, dtype=dtype)
    assert sparse.mm(into_one_node(1000), x, weight=weight).eq(1000).all()
    x = torch.ones(1, 4, 5, dtype=dtype, requires_grad=True)
    out = sparse.Graph(into_one_node(1000).edge_index.flip(0), size=(1, 1000))
    sparse.mm(out, x, weight=weight).backward(torch.ones(1000, 4, 5, dtype=dtype))
    assert x.grad.eq(1000).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("op", PAIRS)
def test_torch_segment_reduce_a_thousand_ones_back_through_sddmm(op, dtype):
    a = torch.ones(1, 3, dtype=dtype, requires_grad=True)
    b = torch.ones(1000, 3, dtype=dtype)
    out = sparse.sddmm(into_one_node(1000), a, b, op)
    out.backward(torch.ones_like(out))
    assert a.grad.tolist() == [[1000.0] * 3]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("ptr", [[0, 1000], [0, 0, 1000, 1000], [0, 500, 1000]], ids=str)
def test_torch_segment_reduce_a_thousand_ones_through_segment_matmul(ptr, dtype):
    """Along K forward, along the rows of a segment in the gradient of its matrix."""
    x = torch.ones(1000, 1000, dtype=dtype, requires_grad=True)
    weight = torch.ones(len(ptr) - 1, 1000, 2, dtype=dtype, requires_grad=True)
    out = sparse.segment_matmul(x, torch.tensor(ptr), weight)
    assert out.eq(1000).all()
    out.backward(torch.ones_like(out))
    assert x.grad.eq(2).all()
    assert weight.grad[:, 0, 0].tolist() == torch.tensor(ptr).diff().tolist()


@pytest.mark.parametrize("reduce", REDUCES)
def test_scatter_269_a_million_fp16_values_into_one_node(reduce):
    """And pyg's mean: 31250 = 2^-5 a million times is within fp16, a count of 1e6 is not."""
    x = torch.full((1_000_000, 1), 2.0**-5, dtype=torch.float16, requires_grad=True)
    out = sparse.mm(into_one_node(1_000_000), x, reduce)
    expected = torch.tensor(31250.0 if reduce == "sum" else 2.0**-5).half()
    assert out.item() == expected.item()
    (grad,) = torch.autograd.grad(out, x, torch.full_like(out, 1024.0))
    assert grad.eq(torch.tensor(1024.0 if reduce == "sum" else 1024e-6).half()).all()


# Extrema


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("values", "best", "shares"),
    [
        pytest.param([0.0, -4.0, -1.0], 0.0, [1, 0, 0], id="torch-168358-maximum-is-0"),
        pytest.param([-4.0, -1.0, -2.0], -1.0, [0, 1, 0], id="scatter-472-all-negative"),
        pytest.param([4.0, 4.0, 4.0], 4.0, [1 / 3] * 3, id="three-share"),
        pytest.param([INF, 1.0], INF, [1, 0], id="pyg-infinity-survives"),
        pytest.param([-INF, -INF], -INF, [1 / 2, 1 / 2], id="pyg-only-infinities-of-no-use"),
        pytest.param([-INF, 3.0], 3.0, [0, 1], id="pyg-infinity-loses"),
    ],
)
def test_extremum_and_its_gradient(values, best, shares, sign, weighted):
    """For a minimum of the values negated; an incoming gradient of either sign."""
    graph, reduce = into_one_node(len(values)), "amax" if sign > 0 else "amin"
    for dtype, upstream in itertools.product(ref.FLOATS, (1.0, -1.0)):
        x = (sign * torch.tensor(values, dtype=torch.float64)).to(dtype)[:, None].requires_grad_()
        weight = torch.ones(len(values), dtype=dtype) if weighted else None
        out = sparse.mm(graph, x, reduce, weight=weight)
        assert out.item() == sign * best
        (grad,) = torch.autograd.grad(out, x, torch.full_like(out, upstream))
        expected = (upstream * torch.tensor(shares, dtype=torch.float64)).to(dtype)
        assert torch.equal(grad[:, 0], expected)


# Crashes: pyg 723, EdgeIndex without values, torch 144040, hardly any graph


@pytest.mark.parametrize("row", [0, 1], ids=["source", "destination"])
@pytest.mark.parametrize("value", [59, 977, -1, -59, 2**31 - 1, -(2**31)])
def test_pyg_723_index_beyond_the_nodes_and_negative(value, row):
    """In every operator, reduction and direction, in both widths; twice, with plans or without."""
    edges = torch.randint(0, 59, (2, 30))
    edges[row, 13] = value
    x = torch.ones(59, 4, requires_grad=True)
    weight, heads = torch.ones(30), torch.ones(30, 4)
    calls = []
    for e in (edges, edges.int(), edges.t().contiguous().t()):
        for r, w in itertools.product(REDUCES, (None, weight, heads)):
            calls.append(lambda e=e, r=r, w=w: sparse.mm(e, x, r, weight=w))
        calls.append(lambda e=e: sparse.mm(e, x, flow="target_to_source"))
        calls += [lambda e=e, op=op: sparse.sddmm(e, x, x, op) for op in PAIRS]
        calls.append(lambda e=e: sparse.Graph(e, size=(59, 59)))
    for call in calls * 2:
        with pytest.raises(IndexError, match=rf"\[0, 59\), got {value} at position 13"):
            call()


@pytest.mark.parametrize("row", [0, 1], ids=["source", "destination"])
def test_pyg_723_examples_with_edges_each(row):
    edges, x = torch.randint(0, 5, (3, 2, 7)), torch.ones(5, 2)
    edges[2, row, 4] = -1
    for run in (*(lambda e, r=r: sparse.mm(e, x, r) for r in REDUCES),
                *(lambda e, op=op: sparse.sddmm(e, x, x, op) for op in PAIRS)):  # fmt: skip
        with pytest.raises(IndexError, match=r"index must be in \[0, 5\), got -1 at position 4"):
            torch.vmap(run)(edges)


@pytest.mark.parametrize("engine", ["eager", "inductor"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_pyg_723_in_a_compiled_sddmm(engine):
    """Inductor takes a negative index to count from the end."""
    torch._dynamo.reset()
    edges, x = torch.tensor([[0, 1, 2, 3], [1, 4, 2, 0]]), torch.ones(5, 2)
    compiled = torch.compile(
        lambda e, x: sparse.sddmm(e, x, x, "add"), backend=engine, fullgraph=True
    )
    assert compiled(edges, x).eq(2).all()
    for value in (5, 977, -1, -5):
        edges[1, 1] = value
        with pytest.raises(IndexError, match=rf"sddmm: dest.*\[0, 5\), got {value} at position 1"):
            compiled(edges, x)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float64, *HALVES], ids=str)
@pytest.mark.parametrize("op", PAIRS)
def test_edge_index_without_values_in_other_precisions(op, dtype):
    """PyG's EdgeIndex in fp64 and bf16: forward and backward, `mm` and `sddmm`."""
    with warnings.catch_warnings():
        # PyG scripts some of its own classes on import, which torch calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        edge_index = pytest.importorskip("torch_geometric", reason="needs PyG").EdgeIndex
    plain = torch.tensor([[0, 1, 2, 2], [1, 1, 0, 1]])
    index = edge_index(plain, sparse_size=(3, 3))
    x = small_integers(3, 4).to(dtype).requires_grad_()
    for run in (lambda e: sparse.mm(e, x), lambda e: sparse.sddmm(e, x, x, op)):
        out, expected = run(index), run(plain)
        assert out.dtype == dtype
        assert torch.equal(out, expected)
        grads = [torch.autograd.grad(o, x, torch.ones_like(o))[0] for o in (out, expected)]
        assert torch.equal(*grads)


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")
@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
@pytest.mark.parametrize("layout", ["csr", "csc"])
@pytest.mark.parametrize("reduce", REDUCES)
def test_torch_144040_backward_of_csr_in_every_precision(reduce, layout, dtype):
    """torch has no fp16 there. Gradients of the features and of the matrix' values."""
    dense = torch.tensor([[0, 2, 1], [0, 0, 0], [3, 0, 0]], dtype=dtype)
    x = torch.tensor([[1.0, -2.0], [3.0, 1.0], [-1.0, 4.0]], dtype=dtype)
    for form in (dense, dense.double()):
        values = getattr(form, f"to_sparse_{layout}")()
        matrix, leaf = values.requires_grad_(), x.to(form.dtype).requires_grad_()
        out = sparse.mm(matrix, leaf, reduce)
        grads = torch.autograd.grad(out, (leaf, matrix), torch.ones_like(out))
        if form is dense:
            first = out, grads[0], grads[1].values()
    # Products and sums of these are exact in bfloat16.
    for made, exact in zip(first, (out, grads[0], grads[1].values()), strict=True):
        assert made.dtype == dtype
        assert torch.equal(made, exact.to(dtype))


GRAPHS = {
    "no edges": (torch.empty(2, 0, dtype=torch.int64), 4),
    "no nodes": (torch.empty(2, 0, dtype=torch.int64), 0),
    "one node": (torch.empty(2, 0, dtype=torch.int64), 1),
    "one self loop": (torch.zeros(2, 1, dtype=torch.int64), 1),
    "a self loop thrice": (torch.zeros(2, 3, dtype=torch.int64), 1),
    "duplicates": (torch.tensor([[0, 0, 1, 0], [1, 1, 0, 1]]), 2),
    "self loops": (torch.arange(5).expand(2, 5), 5),
    "isolated": (torch.tensor([[3, 3, 5], [5, 3, 3]]), 8),
    "in order of sources": (torch.tensor([[0, 0, 1, 2, 4], [3, 1, 3, 0, 3]]), 5),
    "in order of destinations": (torch.tensor([[4, 0, 1, 0, 2], [0, 1, 3, 3, 3]]), 5),
    "in no order": (torch.tensor([[2, 0, 4, 0, 1], [3, 3, 0, 1, 3]]), 5),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_hard_graphs(name):
    """Each reduction and pair, with 0, 1, 3 and 8 features or heads `[N, H, F]`, and backward."""
    edges, nodes = GRAPHS[name]
    for features in ((), (0,), (1,), (3,), (8,), (2, 3)):
        x, weight = small_integers(nodes, *features), small_integers(edges.shape[1])
        for reduce, w in itertools.product(REDUCES, (None, weight)):
            check_mm(edges, x, reduce, w)
        for op in PAIRS:
            a, b = x.clone().requires_grad_(), small_integers(nodes, *features).requires_grad_()
            out = sparse.sddmm(edges, a, b, op)
            left, right = a[edges[1]], b[edges[0]]
            expected = {"add": left + right, "sub": left - right}.get(op, left * right)
            if op == "dot" and features:
                expected = expected.sum(-1)
            assert torch.equal(out, expected)
            grads = [torch.autograd.grad(o.sum(), (a, b)) for o in (out, expected)]
            assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_narrow_features_and_heads_with_strided_edges(index_dtype):
    """F of 1 to 8, 16 and 17, weights `[E]` and `[E, H]`; edges as the columns of `[E, 2]`."""
    edges = torch.randint(0, 9, (40, 2), dtype=index_dtype).t()
    for width, reduce in itertools.product((*range(1, 9), 16, 17), REDUCES):
        check_mm(edges, small_integers(9, width), reduce, small_integers(40))
        check_mm(edges, small_integers(9, width, 2), reduce, small_integers(40, width))


def test_graphs_that_change_at_every_step():
    """Mini-batches: edge lists die and their memory serves the next ones, of the same sizes."""
    for step in range(30):
        edges, x = torch.randint(0, 7, (2, 25)), small_integers(7, 3)
        check_mm(edges, x, REDUCES[step % 4], small_integers(25))
        assert torch.equal(sparse.sddmm(edges, x, x), (x[edges[1]] * x[edges[0]]).sum(-1))


@pytest.mark.parametrize("reduce", REDUCES)
def test_a_star_with_a_million_leaves_both_ways(reduce):
    leaves = 1_000_000
    x = torch.arange(leaves + 1).remainder(7).double()[:, None].requires_grad_()
    inwards = torch.stack([torch.arange(1, leaves + 1), torch.zeros(leaves, dtype=torch.int64)])
    hub = x[1:].sum() if reduce in ("sum", "mean") else x[1:].amax()
    hub = {"mean": hub / leaves, "amin": 0 * hub}.get(reduce, hub)
    out = sparse.mm(inwards, x, reduce)
    assert out[0].item() == hub.item()
    assert out[1:].eq(0).all()
    winners = {"amax": x[1:] == 6, "amin": x[1:] == 0}.get(reduce, x[1:] >= 0)
    (grad,) = torch.autograd.grad(out[0].sum(), x)
    share = torch.ones((), dtype=torch.float64)
    share = share / winners.sum() if reduce != "sum" else share
    assert torch.equal(grad[1:], winners * share)
    out = sparse.mm(inwards.flip(0), x + 5, reduce)
    assert out[1:].eq(5).all()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad[0].item() == leaves


@pytest.mark.parametrize(
    ("nodes", "edges", "widths"),
    [
        pytest.param(100_000, 10_000_000, (10, 20), id="pyg-8031-1e7-edges"),
        pytest.param(1_500_000, 1_000_000, (4,), id="pyg-2306-more-than-1e6-nodes"),
    ],
)
def test_large_graphs_are_right(nodes, edges, widths):
    """Exact: counts of small integers. The gradient of a sum of all is the sources' degree."""
    index = torch.randint(0, nodes, (2, edges))
    src, dst = index.numpy()
    for width in widths:
        x = torch.arange(nodes * width).remainder(7).view(nodes, width).float().requires_grad_()
        out = sparse.mm(index, x)
        for column in (0, width - 1):
            weights = x.detach()[:, column].numpy()[src]
            expected = np.bincount(dst, weights, minlength=nodes)
            assert np.array_equal(out.detach()[:, column].numpy(), expected)
        (grad,) = torch.autograd.grad(out.sum(), x)
        degree = torch.from_numpy(np.bincount(src, minlength=nodes))
        assert torch.equal(grad, degree[:, None].expand(nodes, width).float())


# Compiling


# Dynamo warns of the functions it breaks the graph at, and of its own look at `.grad` behind it.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_torch_180839_a_matrix_made_within_the_compiled_function(layout):
    """torch compiles no sparse tensors: the graph breaks there, and the numbers are right.

    So are the gradients of the matrix' values. One that is handed in breaks the graph likewise.
    """
    first, second = (torch.tensor([0, 2, 2, 3]), torch.tensor([1, 2, 0]))
    if layout == "coo":
        first, second = torch.tensor([[0, 0, 2], [1, 2, 0]]), True

    def make(values):
        if layout == "coo":
            return torch.sparse_coo_tensor(first, values, (3, 3), is_coalesced=second)
        return getattr(torch, f"sparse_{layout}_tensor")(first, second, values, (3, 3))

    for reduce in ("mean", "amax"):
        torch._dynamo.reset()
        values, x = small_integers(3).requires_grad_(), small_integers(3, 4).requires_grad_()
        runs = [lambda v, x, r=reduce: sparse.mm(make(v), x + 1, r) + 1,
                lambda v, x: sparse.sddmm(make(v), x + 1, x) * v]  # fmt: skip
        for run in runs:
            made = [f(values, x) for f in (torch.compile(run, backend="aot_eager"), run)]
            assert torch.equal(*made)
            grads = [torch.autograd.grad(out.sum(), (values, x)) for out in made]
            assert all(map(torch.equal, *grads))
        handed = torch.compile(lambda A, x, r=reduce: sparse.mm(A, x.abs(), r), backend="aot_eager")
        matrix = make(values.detach())
        assert torch.equal(handed(matrix, x), sparse.mm(matrix, x.abs(), reduce))
    torch._dynamo.reset()
