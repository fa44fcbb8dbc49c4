"""First and second derivatives of `sparse.mm` against explicit formulas and finite differences."""

from __future__ import annotations

import _reference as ref
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from edgeweave import sparse

REDUCES = ("sum", "mean", "amax", "amin")
WIDTHS = (0, 1, 2, 3, 5, 8, 9, 16, 17, 31, 33, 64, 65, 128, 129, 300)


def random_edges(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [
            torch.randint(0, num_src - 1, (num_edges,), generator=generator),
            torch.randint(0, num_dst - 1, (num_edges,), generator=generator),
        ]
    )


def check_gradients(edges, x, num_dst, reduce, weight, what="", ties="even"):
    """Compare both gradients of one backward pass with the formulas, within rounding."""
    x = x.detach().clone().requires_grad_()
    leaves = [x]
    if weight is not None:
        weight = weight.detach().clone().requires_grad_()
        leaves.append(weight)
    graph = sparse.Graph(edges, size=(x.shape[0], num_dst))
    out = sparse.mm(graph, x, reduce, weight=weight, ties=ties)
    upstream = torch.randn(out.shape).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, upstream)
    expected_x, expected_weight = ref.mm_grad(edges, x, upstream, reduce, weight, ties)
    for grad, leaf in zip(grads, leaves, strict=True):
        assert grad.dtype == leaf.dtype
        assert grad.shape == leaf.shape
    src, dst = ref.to_numpy(edges)
    # Size of the terms that are added: the same formulas with every sign made positive.
    if reduce in ("sum", "mean"):
        positive = None if weight is None else weight.abs()
        scale_x, _ = ref.mm_grad(edges, x, upstream.abs(), reduce, positive)
    else:
        scale_x = np.full(expected_x.shape, np.abs(expected_x).max(initial=0) * 4 + 1)
    terms = len(src) + 3
    inner = ref.UNIT_ROUNDOFF[torch.float64 if x.dtype == torch.float64 else torch.float32]
    outer = ref.UNIT_ROUNDOFF[x.dtype]
    tiny = float(torch.finfo(x.dtype).smallest_normal)
    bound = 2 * terms * inner * np.abs(scale_x) + outer * np.abs(expected_x) + tiny
    ref.assert_within(grads[0], expected_x, bound, f"{what} grad of x")
    if weight is not None:
        features = ref.to_numpy(upstream)[dst] * ref.to_numpy(x)[src]
        axes = tuple(range(weight.dim(), features.ndim))
        scale = np.abs(features).sum(axis=axes)
        terms = int(np.prod(features.shape[weight.dim() :])) + 3
        bound = 2 * terms * inner * scale + outer * np.abs(expected_weight) + tiny
        ref.assert_within(grads[1], expected_weight, bound, f"{what} grad of weight")


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_every_width(weighted, dtype, reduce):
    edges = random_edges(13, 11, 70)
    weight = torch.randn(70).to(dtype) if weighted else None
    for width in WIDTHS:
        check_gradients(
            edges, torch.randn(13, width).to(dtype), 11, reduce, weight, what=f"F={width}"
        )


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(("heads", "width"), [(1, 3), (3, 5), (4, 16), (8, 1)])
def test_heads(heads, width, reduce):
    edges = random_edges(13, 11, 70)
    x = torch.randn(13, heads, width)
    for weight in (None, torch.randn(70), torch.randn(70, heads)):
        what = "no weight" if weight is None else f"weight {tuple(weight.shape)}"
        check_gradients(edges, x, 11, reduce, weight, what=what)


@pytest.mark.parametrize("reduce", REDUCES)
def test_long_rows_and_columns(reduce):
    hub = torch.zeros(9000, dtype=torch.int64)
    leaves = torch.arange(9000)
    for edges in (torch.stack([leaves, hub]), torch.stack([hub, leaves])):
        check_gradients(edges, torch.randn(9000, 2), 9000, reduce, torch.randn(9000))


@pytest.mark.parametrize("ties", ["even", "first"])
@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_ties_in_products(reduce, ties):
    """Equal products of different factors tie as well."""
    edges = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])
    x = torch.tensor([[2.0], [3.0], [6.0], [1.0]], requires_grad=True)
    weight = torch.tensor([6.0, 4.0, 2.0, 0.0], requires_grad=True)
    out = sparse.mm(sparse.Graph(edges, size=(4, 2)), x, reduce, weight=weight, ties=ties)
    assert out.tolist() == [[12.0], [0.0]]
    upstream = torch.tensor([[6.0], [1.0]])
    out.backward(upstream)
    grad_x, grad_weight = ref.mm_grad(edges, x, upstream, reduce, weight, ties)
    ref.assert_exact(x.grad, grad_x)
    ref.assert_exact(weight.grad, grad_weight)
    shares = [2.0, 2.0, 2.0] if ties == "even" else [6.0, 0.0, 0.0]
    assert x.grad[:, 0].tolist() == [
        share * w for share, w in zip(shares, [6, 4, 2], strict=True)
    ] + [0.0]


@pytest.mark.parametrize("ties", ["even", "first"])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("heads", [(), (2,)], ids=["plain", "heads"])
@pytest.mark.parametrize(
    ("num_src", "num_dst", "num_edges", "width"),
    [(4, 3, 0, 2), (0, 3, 0, 2), (4, 0, 0, 2), (0, 0, 0, 0), (4, 3, 5, 0), (4, 3, 0, 0)],
)
def test_gradients_of_nothing_are_zero(num_src, num_dst, num_edges, width, heads, reduce, ties):
    edges = torch.zeros(2, num_edges, dtype=torch.int64)
    graph = sparse.Graph(edges, size=(num_src, num_dst))
    for weighted in (False, True):
        x = torch.randn(num_src, *heads, width, requires_grad=True)
        weight = torch.randn(num_edges, *heads, requires_grad=True) if weighted else None
        out = sparse.mm(graph, x, reduce, weight=weight, ties=ties)
        assert out.shape == (num_dst, *heads, width)
        out.sum().backward()
        assert torch.equal(x.grad, torch.zeros_like(x))
        if weight is not None:
            assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("reduce", REDUCES)
def test_only_features_require_grad(reduce):
    edges = random_edges(6, 6, 20)
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(20)
    sparse.mm(edges, x, reduce, weight=weight).sum().backward()
    expected, _ = ref.mm_grad(edges, x, torch.ones(6, 4), reduce, weight)
    ref.assert_within(x.grad, expected, np.full((6, 4), 40 * 2.0**-24 * 20))
    assert weight.grad is None


@pytest.mark.parametrize("reduce", REDUCES)
def test_only_weights_require_grad(reduce):
    edges = random_edges(6, 6, 20)
    x, weight = torch.randn(6, 4), torch.randn(20, requires_grad=True)
    sparse.mm(edges, x, reduce, weight=weight).sum().backward()
    _, expected = ref.mm_grad(edges, x, torch.ones(6, 4), reduce, weight)
    ref.assert_within(weight.grad, expected, np.full(20, 8 * 2.0**-24 * 10))
    assert x.grad is None


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float64), (torch.float64, torch.half)],
    ids=str,
)
def test_gradients_of_mixed_dtypes_have_their_own(x_dtype, weight_dtype, reduce):
    edges = random_edges(6, 6, 20)
    x = torch.randint(-3, 4, (6, 4)).to(x_dtype).requires_grad_()
    weight = torch.randint(1, 4, (20,)).to(weight_dtype).requires_grad_()
    out = sparse.mm(edges, x, reduce, weight=weight)
    upstream = torch.randint(-3, 4, (6, 4)).to(out.dtype)
    out.backward(upstream)
    assert (x.grad.dtype, weight.grad.dtype) == (x_dtype, weight_dtype)
    expected = ref.mm_grad(edges, x, upstream, reduce, weight)
    for grad, formula in zip((x.grad, weight.grad), expected, strict=True):
        # Even shares and means divide once; at most 20 terms below 10 are added.
        limit = 400 * 2.0**-24 + ref.UNIT_ROUNDOFF[grad.dtype] * np.abs(formula)
        ref.assert_within(grad, formula, limit)


def test_low_precision_gradients_accumulate_in_fp32():
    """A source of 1000 edges, and an edge of 1000 features: sums of a thousand ones in bf16."""
    edges = torch.stack([torch.zeros(1000, dtype=torch.int64), torch.arange(1000)])
    graph = sparse.Graph(edges, size=(1, 1000))
    for reduce in REDUCES:
        x = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
        sparse.mm(graph, x, reduce).sum().backward()
        assert x.grad.tolist() == [[1000.0, 1000.0]], reduce
        x = torch.ones(1, 1000, dtype=torch.bfloat16)
        weight = torch.ones(1000, dtype=torch.bfloat16, requires_grad=True)
        sparse.mm(graph, x, reduce, weight=weight).sum().backward()
        assert weight.grad.tolist() == [1000.0] * 1000, reduce


@pytest.mark.parametrize("ties", ["even", "first"])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_backward_is_linear_in_the_gradient_also_at_ties(weighted, reduce, ties):
    """Derivative of <backward(u), v> by u must be the linear map's transpose applied to v."""
    edges = random_edges(6, 6, 30)
    graph = sparse.Graph(edges, size=(6, 6))
    x = torch.randint(-1, 2, (6, 3)).double().requires_grad_()
    weight = torch.randint(1, 3, (30,)).double().requires_grad_() if weighted else None
    u, v = torch.randn(6, 3).double().requires_grad_(), torch.randn(6, 3).double()
    out = sparse.mm(graph, x, reduce, weight=weight, ties=ties)
    (grad,) = torch.autograd.grad(out, x, u, create_graph=True)
    (transposed,) = torch.autograd.grad(grad, u, v)
    columns = []
    for k in range(18):
        unit = torch.zeros(18).double()
        unit[k] = 1
        columns.append(ref.mm_grad(edges, x, unit.view(6, 3), reduce, weight, ties)[0].ravel())
    expected = (np.stack(columns) @ ref.to_numpy(v).ravel()).reshape(6, 3)
    ref.assert_within(transposed, expected, np.full((6, 3), 1000 * 2.0**-53))


def test_nothing_requires_grad():
    out = sparse.mm(random_edges(6, 6, 20), torch.randn(6, 4), weight=torch.randn(20))
    assert not out.requires_grad
    with torch.no_grad():
        out = sparse.mm(random_edges(6, 6, 20), torch.randn(6, 4, requires_grad=True))
    assert not out.requires_grad


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_layout_of_the_incoming_gradient(weighted, reduce):
    edges = random_edges(13, 11, 70)
    graph = sparse.Graph(edges, size=(13, 11))
    x = torch.randn(13, 6, requires_grad=True)
    weight = torch.randn(70, requires_grad=True) if weighted else None
    leaves = [x] if weight is None else [x, weight]
    layouts = {
        "scalar expanded": torch.tensor(2.0).expand(11, 6),
        "row expanded": torch.randn(1, 6).expand(11, 6),
        "column expanded": torch.randn(11, 1).expand(11, 6),
        "transposed": torch.randn(6, 11).t(),
        "every other": torch.randn(22, 12)[::2, ::2],
    }
    for name, upstream in layouts.items():
        out = sparse.mm(graph, x, reduce, weight=weight)
        strided = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
        plain = torch.autograd.grad(out, leaves, upstream.contiguous())
        for a, b in zip(strided, plain, strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("reduce", REDUCES)
def test_non_contiguous_leaves(reduce):
    edges = random_edges(13, 11, 70)
    graph = sparse.Graph(edges, size=(13, 11))
    upstream = torch.randn(11, 6)
    base, weights = torch.randn(26, 12), torch.randn(140)
    strided = [base.clone()[::2, ::2].requires_grad_(), weights.clone()[::2].requires_grad_()]
    plain = [leaf.detach().contiguous().requires_grad_() for leaf in strided]
    grads = [
        torch.autograd.grad(sparse.mm(graph, x, reduce, weight=w), [x, w], upstream)
        for x, w in (strided, plain)
    ]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reduce", REDUCES)
def test_backward_twice(reduce):
    edges = random_edges(6, 6, 20)
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(20, requires_grad=True)
    out = sparse.mm(edges, x, reduce, weight=weight).sum()
    out.backward(retain_graph=True)
    once = [x.grad.clone(), weight.grad.clone()]
    out.backward()
    assert torch.equal(x.grad, 2 * once[0])
    assert torch.equal(weight.grad, 2 * once[1])
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


@pytest.mark.parametrize("reduce", REDUCES)
def test_leaf_changed_before_backward_is_noticed(reduce):
    edges = random_edges(6, 6, 20)
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(20, requires_grad=True)
    out = sparse.mm(edges, x, reduce, weight=weight).sum()
    with torch.no_grad():
        x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_index_changed_before_backward_does_not_matter():
    """The plan is the library's own copy: backward follows the edges that forward saw."""
    edges = random_edges(6, 6, 20)
    before = edges.clone()
    x = torch.randn(6, 4, requires_grad=True)
    out = sparse.mm(edges, x)
    edges.zero_()
    out.backward(torch.ones(6, 4))
    expected, _ = ref.mm_grad(before, x, torch.ones(6, 4))
    ref.assert_exact(x.grad, expected)


def distinct(*shape: int) -> torch.Tensor:
    """Return float64 values far enough apart that finite differences cross no tie."""
    count = int(np.prod(shape))
    return (torch.randperm(count).double() / count + 0.5).reshape(shape)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(
    ("features", "weight_shape"),
    [((3,), None), ((3,), (12,)), ((2, 2), None), ((2, 2), (12,)), ((2, 2), (12, 2)), ((), (12,))],
    ids=str,
)
def test_gradcheck_and_gradgradcheck(features, weight_shape, reduce):
    graph = sparse.Graph(random_edges(5, 4, 12), size=(5, 4))
    x = distinct(5, *features).requires_grad_()
    if weight_shape is None:
        inputs = (x,)
    else:
        inputs = (x, (distinct(*weight_shape) * 0.37 + 0.61).requires_grad_())
    if reduce in ("amax", "amin") and weight_shape is not None:
        _assert_no_near_ties(graph, *inputs)

    def function(x, weight=None):
        return sparse.mm(graph, x, reduce, weight=weight)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def _assert_no_near_ties(graph: sparse.Graph, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Finite differences (step 1e-6) may not change which edge wins, or the check is void."""
    src, dst = graph.edge_index.long()
    wide = weight.detach().reshape(weight.shape + (1,) * (x.dim() - weight.dim()))
    messages = (x.detach()[src] * wide).reshape(len(src), -1)
    for row in dst.unique():
        best = messages[dst == row].sort(0).values
        # Duplicate edges (same source, same weight) cannot occur: all weights differ.
        assert bool((best.diff(dim=0) > 1e-5).all())


@pytest.mark.parametrize("reduce", REDUCES)
def test_second_derivative_of_a_penalty(reduce):
    """A gradient penalty: differentiate |d(out^2)/dx|^2, as WGAN-GP and force fields do."""
    edges = random_edges(6, 6, 20)
    graph = sparse.Graph(edges, size=(6, 6))
    src, dst = edges
    start_x, start_weight = distinct(6, 3), distinct(20) * 0.3 + 0.77
    results = []
    for ours in (True, False):
        x, weight = start_x.clone().requires_grad_(), start_weight.clone().requires_grad_()
        if ours:
            out = sparse.mm(graph, x, reduce, weight=weight)
        else:
            messages = x[src] * weight[:, None]
            out = torch.zeros(6, 3, dtype=torch.float64).scatter_reduce(
                0, dst[:, None].expand(-1, 3), messages, reduce, include_self=False
            )
        (inner,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        inner.square().sum().backward()
        results.append((x.grad, weight.grad))
    for mine, stock in zip(*results, strict=True):
        # 20 edges, four multiplications deep: far below 1000 roundings of numbers of this size.
        limit = 1000 * 2.0**-53 * float(stock.abs().max())
        torch.testing.assert_close(mine, stock, rtol=0, atol=limit)


@hypothesis.given(st.data())
def test_random_graphs_with_many_ties(data):
    num_src = data.draw(st.integers(1, 8), label="num_src")
    num_dst = data.draw(st.integers(1, 8), label="num_dst")
    num_edges = data.draw(st.integers(0, 40), label="num_edges")
    width = data.draw(st.integers(1, 40), label="width")
    reduce = data.draw(st.sampled_from(REDUCES), label="reduce")
    ties = data.draw(st.sampled_from(["even", "first"]), label="ties")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    edges = torch.stack(
        [
            torch.randint(0, num_src, (num_edges,), generator=generator),
            torch.randint(0, num_dst, (num_edges,), generator=generator),
        ]
    )
    x = torch.randint(-1, 2, (num_src, width), generator=generator).float().requires_grad_()
    weight = None
    if data.draw(st.booleans(), label="weighted"):
        weight = torch.randint(-1, 2, (num_edges,), generator=generator).float().requires_grad_()
    graph = sparse.Graph(edges, size=(num_src, num_dst))
    out = sparse.mm(graph, x, reduce, weight=weight, ties=ties)
    upstream = torch.randint(-3, 4, (num_dst, width), generator=generator).float()
    out.backward(upstream)
    grad_x, grad_weight = ref.mm_grad(edges, x, upstream, reduce, weight, ties)
    # Every term is at most 3, there are at most 40 * 40 of them, each divided once.
    limit = 3 * 1600 * 4 * 2.0**-24
    ref.assert_within(x.grad, grad_x, np.full(grad_x.shape, limit))
    if weight is not None:
        ref.assert_within(weight.grad, grad_weight, np.full(grad_weight.shape, limit))
