"""The operators over groups, edges and ends on CUDA against plain torch in float64 on the CPU."""

from __future__ import annotations

import pytest
import torch
from _cuda_graphs import close, hub_edges, leaf_of, random_edges, tolerance
from torch import Tensor

from edgeweave import scatter, sparse
from edgeweave._plan._attention import plan_scores, scores_messages
from edgeweave._plan._composite import first_winner, reduce_messages
from edgeweave._plan._multi import multi_messages
from edgeweave._plan._softmax import logsumexp_messages, softmax_messages

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MULTI = ("std", "sum", "amax", "mean", "var", "amin")
GROUPS = 9


def _entries(width: int, dtype: torch.dtype, long: bool) -> tuple[Tensor, Tensor]:
    """Values `[E, F]` with ties, and their groups, of which the last is empty."""
    index = random_edges(GROUPS, GROUPS, 70)[1]
    if long:
        index = torch.cat([index, torch.full((2300,), 4)])[torch.randperm(2370)]
    src = torch.randn(index.shape[0], width).to(dtype)
    src[::7] = src[0]
    return src, index


# Each as `(ours, plain torch)` of the same arguments.
OPERATORS = {
    **{
        reduce: (
            lambda s, i, r=reduce: scatter.scatter_reduce(s, i, 0, GROUPS, r),
            lambda s, i, r=reduce: reduce_messages(s, i, GROUPS, r, "even"),
        )
        for reduce in ("sum", "mean", "amax", "amin", "prod")
    },
    "softmax": (
        lambda s, i: scatter.softmax(s, i, dim_size=GROUPS),
        lambda s, i: softmax_messages(s, i, GROUPS),
    ),
    "logsumexp": (
        lambda s, i: scatter.logsumexp(s, i, dim_size=GROUPS),
        lambda s, i: logsumexp_messages(s, i, GROUPS),
    ),
    "multi": (
        lambda s, i: torch.cat(scatter.multi_reduce(s, i, MULTI, 0, GROUPS)),
        lambda s, i: torch.cat(multi_messages(s, i, GROUPS, MULTI, 1)),
    ),
}


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("width", [1, 4, 33])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", list(OPERATORS))
def test_values_and_gradients(name, dtype, width, long, device):
    if name == "prod" and long:
        pytest.skip("products of thousands overflow")
    ours, plain = OPERATORS[name]
    src, index = _entries(width, dtype, long)
    leaf = leaf_of(src, device)
    exact_leaf = src.double().requires_grad_()
    out, exact = ours(leaf, index.to(device)), plain(exact_leaf, index)
    assert out.dtype == dtype
    finite = exact.detach().masked_fill(exact.isinf(), 0)
    got = out.detach().masked_fill(out.isinf(), 0)
    assert torch.equal(out.isinf().cpu(), exact.isinf())
    units = tolerance(dtype) * (8 if long or name == "multi" else 2)
    close(got, finite, units)
    upstream = torch.randn(exact.shape).to(dtype)
    out.backward(upstream.to(device))
    exact.backward(upstream.double())
    close(leaf.grad, exact_leaf.grad, units * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_arguments_of_extremes(dtype, device):
    index = random_edges(GROUPS, GROUPS, 70)[1]
    src = torch.randint(-3, 4, (70, 5)).to(dtype)
    for name, reduce in (("argmax", "amax"), ("argmin", "amin")):
        got = getattr(scatter, name)(src.to(device), index.to(device), dim_size=GROUPS)
        best = reduce_messages(src, index, GROUPS, reduce, "even")
        assert torch.equal(got.cpu(), first_winner(src, best, index))


def test_products_with_zeros_and_infinities(device):
    src = torch.tensor([2.0, 3.0, 0.0, 5.0, 1e30, 1e30, 0.0, float("inf"), 0.0, -float("inf"), 2.0])
    index = torch.tensor([0, 0, 2, 2, 3, 3, 3, 4, 4, 5, 5])
    exact_leaf = src.clone().requires_grad_()
    exact = reduce_messages(exact_leaf.unsqueeze(-1), index, 7, "prod", "even").squeeze(-1)
    leaf = leaf_of(src, device)
    out = scatter.scatter_reduce(leaf, index.to(device), dim_size=7, reduce="prod")
    torch.testing.assert_close(out.detach().cpu(), exact.detach(), equal_nan=True)
    out.sum().backward()
    exact.sum().backward()
    torch.testing.assert_close(leaf.grad.cpu(), exact_leaf.grad, equal_nan=True)


def test_softmax_of_special_values(device):
    inf, nan = float("inf"), float("nan")
    src = torch.tensor([1.0, nan, 2.0, inf, -inf, -inf, 3.0, -inf, 1e4, -1e4])
    index = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    got = scatter.softmax(src.to(device), index.to(device), dim_size=6).cpu()
    expected = torch.tensor([nan, nan, nan, nan, nan, nan, 1.0, 0.0, 1.0, 0.0])
    torch.testing.assert_close(got, expected, equal_nan=True)
    got = scatter.logsumexp(src.to(device), index.to(device), dim_size=6).cpu()
    expected = torch.tensor([nan, inf, -inf, 3.0, 1e4, -inf])
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "prod"])
def test_other_dimensions(reduce, dim, device):
    shape = [3, 4, 5]
    shape[dim] = 40
    src = torch.randn(shape)
    index = random_edges(GROUPS, GROUPS, 40)[1]
    got = scatter.scatter_reduce(src.to(device), index.to(device), dim, GROUPS, reduce)
    moved = src.double().movedim(dim, 0)
    exact = reduce_messages(moved.flatten(1), index, GROUPS, reduce, "even")
    exact = exact.view(GROUPS, *moved.shape[1:]).movedim(0, dim)
    close(got, exact, 1e-5)


def test_segments_and_sorting(device):
    src, ptr = torch.randn(10, 3), torch.tensor([0, 2, 2, 7, 10])
    index = torch.tensor([0, 0, 2, 2, 2, 2, 2, 3, 3, 3])
    for reduce in ("sum", "amax"):
        got = scatter.segment_reduce(src.to(device), ptr.to(device), reduce)
        close(got, reduce_messages(src.double(), index, 4, reduce, "even"), 1e-5)
    keys = torch.randint(0, 50, (400,))
    values, order = scatter.index_sort(keys.to(device), 49)
    expected = torch.sort(keys, stable=True)
    assert torch.equal(values.cpu(), expected.values)
    assert torch.equal(order.cpu(), expected.indices)


def test_gather(device):
    x, index = torch.randn(9, 5), random_edges(9, 9, 60)[0]
    leaf = leaf_of(x, device)
    out = scatter.gather(leaf, index.to(device))
    assert torch.equal(out.detach().cpu(), x[index])
    upstream = torch.randn(60, 5)
    out.backward(upstream.to(device))
    close(leaf.grad, torch.zeros(9, 5).double().index_add(0, index, upstream.double()), 1e-5)
    index[11] = -1
    with pytest.raises(
        IndexError, match=r"gather: index must be in \[0, 9\), got -1 at position 11"
    ):
        scatter.gather(leaf, index.to(device))


@pytest.mark.parametrize("hub", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ["dot", "add", "sub", "mul"])
def test_sddmm(op, dtype, hub, device):
    edges = hub_edges() if hub else random_edges(12, 12, 50)
    a, b = torch.randn(12, 2, 3).to(dtype), torch.randn(12, 2, 3).to(dtype)
    leaves = [leaf_of(t, device) for t in (a, b)]
    exact_leaves = [t.double().requires_grad_() for t in (a, b)]
    out = sparse.sddmm(edges.to(device), *leaves, op=op)
    left, right = exact_leaves[0][edges[1]], exact_leaves[1][edges[0]]
    exact = {
        "dot": lambda: (left * right).sum(-1),
        "add": lambda: left + right,
        "sub": lambda: left - right,
        "mul": lambda: left * right,
    }[op]()
    close(out, exact.detach(), tolerance(dtype))
    upstream = torch.randn(exact.shape).to(dtype)
    out.backward(upstream.to(device))
    exact.backward(upstream.double())
    for ours, theirs in zip(leaves, exact_leaves, strict=True):
        close(ours.grad, theirs.grad, 4 * tolerance(dtype))


@pytest.mark.parametrize("hub", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("shape", [(1, 7), (4, 32), (3, 150)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_gatv2(dtype, shape, hub, device):
    edges = hub_edges() if hub else random_edges(12, 12, 50)
    heads, width = shape
    plan = sparse.Graph(edges.to(device), size=(12, 12)).plan()
    operands = [torch.randn(n, heads * width).to(dtype) for n in (12, 12)]
    operands.append(torch.randn(heads * width).to(dtype))
    leaves = [leaf_of(t, device) for t in operands]
    exact_leaves = [t.double().requires_grad_() for t in operands]
    out = plan_scores(plan, *leaves, heads, 0.2)
    exact = scores_messages(*exact_leaves, edges[1], edges[0], heads, 0.2)
    close(out, exact.detach(), 2 * tolerance(dtype))
    upstream = torch.randn(exact.shape).to(dtype)
    out.backward(upstream.to(device))
    exact.backward(upstream.double())
    for ours, theirs in zip(leaves, exact_leaves, strict=True):
        close(ours.grad, theirs.grad, 8 * tolerance(dtype))


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "prod", "multi", "sum", "amax"])
def test_second_derivatives(name, device):
    src, index = torch.rand(12, 2).double() + 0.5, random_edges(4, 4, 12)[1].to(device)
    run = OPERATORS[name][0]

    def finite(s: Tensor) -> Tensor:
        return run(s, index).nan_to_num(neginf=0.0)

    leaf = leaf_of(src, device)
    assert torch.autograd.gradcheck(finite, leaf)
    assert torch.autograd.gradgradcheck(finite, leaf)


def test_bits_repeat(device):
    src, index = _entries(8, torch.float32, True)
    for name, (ours, _) in OPERATORS.items():
        grads = []
        for _ in range(2):
            leaf = leaf_of(src, device)
            out = ours(leaf, index.clone().to(device))
            out.backward(torch.ones_like(out))
            grads.append((out.detach(), leaf.grad))
        for first, second in zip(*grads, strict=True):
            assert torch.equal(first.nan_to_num(), second.nan_to_num()), name


def test_an_index_out_of_range(device):
    src, index = torch.randn(5, 2, device=device), torch.tensor([0, 3, 1, 9, 2], device=device)
    for call in (
        lambda: scatter.scatter_reduce(src, index, dim_size=4),
        lambda: scatter.softmax(src, index, dim_size=4),
        lambda: scatter.multi_reduce(src, index, ["sum"], dim_size=4),
    ):
        with pytest.raises(IndexError, match=r"index must be in \[0, 4\), got 9 at position 3"):
            call()


def test_transforms_of_torch_func(device):
    src, index = torch.randn(3, 20, 4, device=device), random_edges(5, 5, 20)[1].to(device)

    def run(s: Tensor) -> Tensor:
        return scatter.softmax(s, index, dim_size=5)

    one_by_one = torch.stack([run(s) for s in src])
    torch.testing.assert_close(torch.func.vmap(run)(src), one_by_one)
    tangent = torch.randn_like(src[0])
    _, forward = torch.func.jvp(run, (src[0],), (tangent,))
    leaf = src[0].clone().requires_grad_()
    out = run(leaf)
    rows = [
        torch.autograd.grad(out, leaf, g, retain_graph=True)[0]
        for g in torch.eye(80).to(device).view(80, 20, 4)
    ]
    expected = torch.stack([(row * tangent).sum() for row in rows]).view(20, 4)
    torch.testing.assert_close(forward, expected, rtol=1e-4, atol=1e-5)
