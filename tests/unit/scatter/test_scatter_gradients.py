"""First and second derivatives of `scatter_reduce` and `gather`."""

from __future__ import annotations

import _reference as ref
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from edgeweave.scatter import gather, scatter_reduce

REDUCES = ("sum", "mean", "amax", "amin")
LAYOUTS = (
    ((60,), 0), ((60, 5), 0), ((5, 60), 1), ((60, 3, 5), 0), ((2, 60, 5), 1), ((2, 3, 60), -1),
    ((2, 60, 3, 4), 1), ((2, 3, 60, 4), -2),
)  # fmt: skip


def random_index(num_edges: int = 60, num_groups: int = 17, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_groups - 1, (num_edges,), generator=generator)


def distinct(*shape: int) -> torch.Tensor:
    """Return float64 values far enough apart that finite differences cross no tie."""
    count = int(np.prod(shape))
    return (torch.randperm(count).double() / count + 0.5).reshape(shape)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
@pytest.mark.parametrize(("shape", "dim"), LAYOUTS, ids=str)
def test_gradient(shape, dim, dtype, reduce):
    src, index = torch.randn(shape).to(dtype).requires_grad_(), random_index()
    out = scatter_reduce(src, index, dim, 17, reduce)
    upstream = torch.randn(out.shape).to(dtype)
    out.backward(upstream)
    assert src.grad.dtype == dtype
    expected, _ = ref.scatter_grad(src, index, dim, upstream, reduce)
    inner = ref.UNIT_ROUNDOFF[torch.float64 if dtype == torch.float64 else torch.float32]
    tiny = float(torch.finfo(dtype).smallest_normal)
    bound = (4 * inner + ref.UNIT_ROUNDOFF[dtype]) * np.abs(expected) + tiny
    ref.assert_within(src.grad, expected, bound)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(("shape", "dim"), LAYOUTS, ids=str)
def test_gradient_with_include_self(shape, dim, reduce):
    src = torch.randint(-2, 3, shape).double().requires_grad_()
    out_shape = list(shape)
    out_shape[dim] = 17
    start = torch.randint(-2, 3, out_shape).double().requires_grad_()
    index = random_index()
    out = scatter_reduce(src, index, dim, reduce=reduce, include_self=True, out=start * 1)
    upstream = torch.randint(-3, 4, out.shape).double()
    grad_src, grad_start = torch.autograd.grad(out, [src, start], upstream)
    expected = ref.scatter_grad(src, index, dim, upstream, reduce, initial=start)
    for grad, formula in zip((grad_src, grad_start), expected, strict=True):
        ref.assert_within(grad, formula, 200 * 2.0**-53 * np.abs(formula))


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(("shape", "dim"), [((8,), 0), ((8, 3), 0), ((2, 8, 3), 1), ((3, 8), -1)])
def test_gradcheck_and_gradgradcheck(shape, dim, reduce):
    index = random_index(8, 4)
    src = distinct(*shape).requires_grad_()

    def function(src):
        return scatter_reduce(src, index, dim, 4, reduce)

    assert torch.autograd.gradcheck(function, (src,))
    assert torch.autograd.gradgradcheck(function, (src,))


@pytest.mark.parametrize("reduce", REDUCES)
def test_gradcheck_with_include_self(reduce):
    index = random_index(8, 4)
    both = distinct(12, 3)
    src, start = both[:8].clone().requires_grad_(), both[8:].clone().requires_grad_()

    def function(src, start):
        return scatter_reduce(src, index, 0, reduce=reduce, include_self=True, out=start.clone())

    assert torch.autograd.gradcheck(function, (src, start))
    assert torch.autograd.gradgradcheck(function, (src, start))


@pytest.mark.parametrize("reduce", REDUCES)
def test_layout_of_the_incoming_gradient(reduce):
    src, index = torch.randn(60, 6, requires_grad=True), random_index()
    layouts = {
        "scalar expanded": torch.tensor(2.0).expand(17, 6),
        "row expanded": torch.randn(1, 6).expand(17, 6),
        "transposed": torch.randn(6, 17).t(),
        "every other": torch.randn(34, 12)[::2, ::2],
    }
    for name, upstream in layouts.items():
        out = scatter_reduce(src, index, 0, 17, reduce)
        (strided,) = torch.autograd.grad(out, src, upstream, retain_graph=True)
        (plain,) = torch.autograd.grad(out, src, upstream.contiguous())
        assert torch.equal(strided, plain), name


@pytest.mark.parametrize("reduce", REDUCES)
def test_non_contiguous_src(reduce):
    index, upstream = random_index(), torch.randn(17, 6)
    strided = torch.randn(6, 60).t().requires_grad_()
    plain = strided.detach().contiguous().requires_grad_()
    for src in (strided, plain):
        scatter_reduce(src, index, 0, 17, reduce).backward(upstream)
    assert torch.equal(strided.grad, plain.grad)


@pytest.mark.parametrize("ties", ["even", "first"])
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((0,), 0), ((0, 3), 0), ((5, 0), 0), ((2, 0), 1), ((2, 0, 3), 1), ((0, 5), 1)],
)
def test_gradients_of_nothing_are_empty(shape, dim, reduce, ties):
    src = torch.randn(shape, requires_grad=True)
    index = torch.zeros(shape[dim], dtype=torch.int64)
    scatter_reduce(src, index, dim, 3, reduce, ties=ties).sum().backward()
    assert src.grad.shape == shape
    x = torch.ones(shape, requires_grad=True)
    gather(x, index[:0], dim).sum().backward()
    assert torch.equal(x.grad, torch.zeros(shape))


@pytest.mark.parametrize("reduce", REDUCES)
def test_backward_twice(reduce):
    src, index = torch.randn(60, 3, requires_grad=True), random_index()
    out = scatter_reduce(src, index, 0, 17, reduce).sum()
    out.backward(retain_graph=True)
    once = src.grad.clone()
    out.backward()
    assert torch.equal(src.grad, 2 * once)


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_src_changed_before_backward_is_noticed(reduce):
    src, index = torch.randn(60, 3, requires_grad=True), random_index()
    out = scatter_reduce(src, index, 0, 17, reduce).sum()
    with torch.no_grad():
        src += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_result_changed_before_backward_is_noticed(reduce):
    """Backward seeks the winners by the result; `relu_` on it must not change who won."""
    src, index = torch.randn(60, 3, requires_grad=True), random_index()
    changed = torch.relu_(scatter_reduce(src, index, 0, 17, reduce)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed.backward()


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_return_arg_is_not_differentiable_but_the_result_is(reduce):
    src, index = distinct(60, 3).requires_grad_(), random_index()
    out, arg = scatter_reduce(src, index, 0, 17, reduce, return_arg=True)
    assert out.requires_grad
    assert not arg.requires_grad
    out.sum().backward()
    full = arg[:16].flatten()
    won = torch.zeros(60, 3, dtype=torch.float64)
    won[full, torch.arange(3).repeat(16)] = 1
    assert torch.equal(src.grad[(won == 1)], won[won == 1])
    assert src.grad.sum() == won.sum()


@hypothesis.given(st.data())
def test_random_groups_with_many_ties(data):
    num_edges = data.draw(st.integers(0, 30), label="num_edges")
    num_groups = data.draw(st.integers(1, 8), label="num_groups")
    width = data.draw(st.integers(1, 20), label="width")
    reduce = data.draw(st.sampled_from(REDUCES), label="reduce")
    ties = data.draw(st.sampled_from(["even", "first"]), label="ties")
    with_self = data.draw(st.booleans(), label="include_self")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    src = torch.randint(-1, 2, (num_edges, width), generator=generator).float().requires_grad_()
    index = torch.randint(0, num_groups, (num_edges,), generator=generator)
    upstream = torch.randint(-3, 4, (num_groups, width), generator=generator).float()
    if with_self:
        start = torch.randint(-1, 2, (num_groups, width), generator=generator).float()
        start.requires_grad_()
        out = scatter_reduce(
            src, index, 0, reduce=reduce, include_self=True, out=start.clone(), ties=ties
        )
        grads = torch.autograd.grad(out, [src, start], upstream)
        expected = ref.scatter_grad(src, index, 0, upstream, reduce, ties, initial=start)
    else:
        out = scatter_reduce(src, index, 0, num_groups, reduce, ties=ties)
        grads = torch.autograd.grad(out, [src], upstream)
        expected = ref.scatter_grad(src, index, 0, upstream, reduce, ties)
    for grad, formula in zip(grads, expected, strict=False):
        ref.assert_within(grad, formula, 2 * 2.0**-24 * np.abs(formula))


# gather


@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
@pytest.mark.parametrize(
    ("shape", "dim"), [((9,), 0), ((9, 5), 0), ((5, 9), 1), ((2, 9, 33), 1), ((9, 3, 5), 0)]
)
def test_gather_gradient_is_a_sum(shape, dim, dtype):
    """Small integers add up exactly, so that any lost or doubled edge shows."""
    x, index = torch.randn(shape).to(dtype).requires_grad_(), random_index(60, 9)
    out = gather(x, index, dim)
    upstream = torch.randint(-2, 3, out.shape).to(dtype)
    out.backward(upstream)
    assert x.grad.dtype == dtype
    ref.assert_exact(x.grad, ref.scatter(upstream, index, dim, 9, "sum").value)


def test_gather_gradient_accumulates_in_fp32():
    x = torch.randn(2, 3).bfloat16().requires_grad_()
    gather(x, torch.zeros(1000, dtype=torch.int64)).sum().backward()
    assert x.grad.tolist() == [[1000.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("kind", ["one-dimensional", "expanded", "full rank"])
def test_gather_gradcheck_and_gradgradcheck(kind):
    x = distinct(5, 3).requires_grad_()
    index = random_index(8, 5)
    if kind == "expanded":
        index = index[:, None].expand(8, 3)
    elif kind == "full rank":
        index = torch.randint(0, 5, (8, 3))
    assert torch.autograd.gradcheck(lambda x: gather(x, index), (x,))
    assert torch.autograd.gradgradcheck(lambda x: gather(x, index).square(), (x,))


def test_gather_gradient_of_full_rank_index_is_that_of_torch():
    index = torch.randint(0, 9, (60, 4))
    upstream = torch.randint(-3, 4, (60, 4)).float()
    grads = []
    for function in (gather, lambda x, index: torch.gather(x, 0, index)):
        x = torch.zeros(9, 4, requires_grad=True)
        function(x, index).backward(upstream)
        grads.append(x.grad)
    assert torch.equal(*grads)
