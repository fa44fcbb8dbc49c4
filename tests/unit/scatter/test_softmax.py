"""`softmax` and `logsumexp` against float64 loops, their derivatives, contract and hazards."""

from __future__ import annotations

import _group_reference as groups
import _reference as ref
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from edgeweave import sparse
from edgeweave.scatter import logsumexp, softmax

LAYOUTS = (
    ((60,), 0), ((60, 1), 0), ((60, 4), 0), ((60, 5), 0), ((5, 60), 1), ((60, 3, 5), 0),
    ((2, 60, 9), 1), ((2, 3, 60), -1), ((2, 60, 3, 4), 1),
)  # fmt: skip


def random_index(entries: int = 60, num_groups: int = 17, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_groups - 1, (entries,), generator=generator)


def rows(tensor: torch.Tensor, dim: int) -> np.ndarray:
    """Return `tensor` as a float64 matrix `[size along dim, rest]`."""
    moved = tensor.movedim(dim, 0)
    return ref.to_numpy(moved.reshape(len(moved), moved[:1].numel() if len(moved) else 1))


# Values


@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
@pytest.mark.parametrize(("shape", "dim"), LAYOUTS, ids=str)
def test_softmax(shape, dim, dtype):
    src, index = (4 * torch.randn(shape)).to(dtype), random_index()
    out = softmax(src, index, dim_size=17, dim=dim)
    assert out.dtype == dtype
    assert out.shape == src.shape
    x = rows(src, dim)
    expected = groups.softmax(x, index.numpy(), 17)
    bound = groups.softmax_bound(x, index.numpy(), 17, dtype)
    assert (np.abs(rows(out, dim) - expected) <= bound).all()


@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
@pytest.mark.parametrize(("shape", "dim"), LAYOUTS, ids=str)
def test_softmax_gradient(shape, dim, dtype):
    src, index = torch.randn(shape).to(dtype).requires_grad_(), random_index()
    out = softmax(src, index, dim_size=17, dim=dim)
    upstream = torch.randn(shape).to(dtype)
    (grad,) = torch.autograd.grad(out, src, upstream)
    expected = groups.softmax_grad(rows(src, dim), index.numpy(), 17, rows(upstream, dim))
    # y enters rounded to the dtype, twice; the terms y and g are at most 1 and about 4, and a
    # group has about 4, at most 12 entries.
    bound = (3 * ref.UNIT_ROUNDOFF[dtype] + 40 * groups.inner_unit(dtype)) * 12
    assert np.abs(rows(grad, dim) - expected).max() <= bound


@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
@pytest.mark.parametrize(("shape", "dim"), LAYOUTS, ids=str)
def test_logsumexp(shape, dim, dtype):
    src, index = (4 * torch.randn(shape)).to(dtype).requires_grad_(), random_index()
    out = logsumexp(src, index, dim_size=17, dim=dim)
    assert out.dtype == dtype
    x = rows(src, dim)
    expected = groups.logsumexp(x, index.numpy(), 17)
    actual = rows(out, dim)
    filled = np.isfinite(expected)
    assert np.array_equal(actual[~filled], expected[~filled])  # -inf of the empty groups
    # exp and sum: 16 units of a sum that is at least 1; the logarithm and the shift add one each
    # of values up to 20.
    bound = 40 * groups.inner_unit(dtype) + ref.UNIT_ROUNDOFF[dtype] * np.abs(expected[filled])
    assert (np.abs(actual[filled] - expected[filled]) <= bound).all()
    upstream = torch.randn(out.shape).to(dtype)
    (grad,) = torch.autograd.grad(out, src, upstream)
    share = groups.softmax(x, index.numpy(), 17) * rows(upstream, dim)[index.numpy()]
    bound = (100 * groups.inner_unit(dtype) + ref.UNIT_ROUNDOFF[dtype]) * np.abs(share)
    tiny = float(torch.finfo(dtype).smallest_normal)
    assert (np.abs(rows(grad, dim) - share) <= bound + tiny).all()


@pytest.mark.parametrize("function", [softmax, logsumexp])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_index_forms(function, index_dtype):
    """Strided and expanded indices, and the same groups as a ptr."""
    src, index = torch.randn(60, 4), random_index().sort().values.to(index_dtype)
    expected = function(src, index, dim_size=17)
    strided = torch.stack([index, index], 1)[:, 0]
    assert torch.equal(function(src, strided, dim_size=17), expected)
    assert torch.equal(function(src, index.view(-1, 1).expand_as(src), dim_size=17), expected)
    ptr = torch.zeros(18, dtype=index_dtype)
    ptr[1:] = torch.bincount(index, minlength=17).cumsum(0)
    assert torch.equal(function(src, ptr=ptr), expected)
    assert torch.equal(function(src.t(), ptr=ptr, dim=1).reshape(4, -1), expected.t())
    assert torch.equal(function(src, index), function(src, index, dim_size=int(index.max()) + 1))


def test_exponential_is_accurate_everywhere():
    """Within 2 ulp of the float64 value from the largest result down to the smallest denormal.

    The gradient of a logsumexp is `g * exp(x - lse)`: with g = 1 and lse = 0 the bare function.
    """
    from edgeweave._native import ops
    from edgeweave._plan import plan_for_index

    for dtype, low, high in ((torch.float32, -104, 89), (torch.float64, -746, 710)):
        for width in (1, 2, 3, 4, 7, 8, 16, 33):
            x = torch.linspace(low, high, 20_000 * width, dtype=torch.float64).to(dtype)
            x = x.view(-1, width)
            plan = plan_for_index(torch.zeros(len(x), dtype=torch.int64), 1)
            zero, one = torch.zeros(1, width, dtype=dtype), torch.ones(1, width, dtype=dtype)
            out = ops.plan_logsumexp_grad(plan.handle, x, zero, one)
            with np.errstate(over="ignore", under="ignore"):
                exact = np.exp(x.numpy().astype(np.longdouble))
                ulp = np.spacing(exact.astype(x.numpy().dtype))
                distance = np.abs(out.numpy().astype(np.longdouble) - exact)
            finite = np.isfinite(ulp)
            assert (distance[finite] <= 2 * ulp[finite]).all(), (dtype, width)
            assert np.isinf(out.numpy()[~finite]).all()


# Hazards


def test_large_scores_do_not_overflow():
    src = torch.tensor([1e4, 1e4 + 1, -1e4, 3e38, -3e38])
    out = softmax(src, torch.tensor([0, 0, 1, 2, 2]))
    assert torch.allclose(
        out[:2], torch.tensor([1.0, 1.0]).div(torch.tensor([1 + np.e, 1 + 1 / np.e]))
    )
    assert out[2:].tolist() == [1, 1, 0]
    assert logsumexp(src, torch.tensor([0, 0, 1, 2, 2]))[1:].tolist() == src[2:4].tolist()


@pytest.mark.parametrize("width", [1, 3, 8, 20])
@pytest.mark.parametrize("entries", [3, 9000])
def test_not_a_number_and_infinities_are_as_in_torch(width, entries):
    inf, nan = float("inf"), float("nan")
    for special in ([nan, 1.0], [inf, 1.0], [inf, -inf], [-inf, 1.0], [-inf, -inf], [inf, inf]):
        src = torch.randn(entries, width)
        src[:2, -1] = torch.tensor(special)
        if special == [-inf, -inf]:
            src[:, -1] = -inf
        index = torch.zeros(entries, dtype=torch.int64)
        out, expected = softmax(src, index), torch.softmax(src, 0)
        # 9,000 entries: sums in other orders differ by fewer units than entries.
        assert torch.allclose(out, expected, rtol=1e-3, atol=0, equal_nan=True), special
        out, expected = logsumexp(src, index)[0], torch.logsumexp(src, 0)
        assert torch.allclose(out, expected, rtol=1e-5, atol=0, equal_nan=True), special


def test_infinities_stay_in_their_group():
    src = torch.tensor([float("inf"), 1.0, 2.0, 2.0])
    assert softmax(src, torch.tensor([0, 0, 1, 1]))[2:].tolist() == [0.5, 0.5]


def test_part_of_negative_infinities_in_a_long_group():
    """Whole chunks of a long row may be -inf while others are not: masked attention."""
    src = torch.full((12_000, 2), -float("inf"))
    src[5000:5002] = 0.0
    out = softmax(src, torch.zeros(12_000, dtype=torch.int64))
    assert out[5000:5002].eq(0.5).all()
    assert out.sum() == 2
    assert logsumexp(src, torch.zeros(12_000, dtype=torch.int64)).allclose(torch.tensor(2.0).log())


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0), (0, 0)])
def test_nothing(shape):
    src = torch.randn(shape, requires_grad=True)
    index = torch.zeros(shape[0], dtype=torch.int64)
    out = softmax(src, index, dim_size=3)
    out.sum().backward()
    assert out.shape == src.grad.shape == src.shape
    lse = logsumexp(src, index, dim_size=3)
    assert lse.shape == (3, *shape[1:])
    lse.sum().backward()
    if shape[0] == 0:
        assert lse.eq(-float("inf")).all()


def test_long_group():
    """A star: one group of 100,000 entries among small ones."""
    index = torch.cat([torch.zeros(100_000, dtype=torch.int64), torch.arange(1, 500)])
    index = index[torch.randperm(len(index))]
    src = torch.randn(len(index), 3, requires_grad=True)
    out = softmax(src, index)
    x = rows(src, 0)
    assert (np.abs(rows(out, 0) - groups.softmax(x, index.numpy(), 500)) <= 1e-6).all()
    upstream = torch.randn(out.shape)
    (grad,) = torch.autograd.grad(out, src, upstream)
    expected = groups.softmax_grad(x, index.numpy(), 500, rows(upstream, 0))
    # y is at most 1 and correct to 1e-5 of itself, the dot product of 1e5 terms to about 1e-3.
    assert np.abs(rows(grad, 0) - expected).max() <= 1e-5


@pytest.mark.parametrize("function", [softmax, logsumexp])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 3, 4, 17])
def test_bits_depend_on_neither_threads_nor_other_groups(function, dtype, width):
    index = torch.randint(0, 300, (30_000,))
    index[::3] = 5  # 10,000 entries, cut every 4,096
    both = torch.cat([torch.randint(300, 500, (9001,)), index])
    src = torch.randn(39_001, width).to(dtype).requires_grad_()
    upstream = torch.randn_like(src)
    first = None
    for num_threads in (1, 2, 4):
        torch.set_num_threads(num_threads)
        out = function(src, both, dim_size=500)
        grad = torch.autograd.grad(out, src, upstream[: len(out)])[0]
        alone = function(src[9001:], index, dim_size=300)
        mine = out[9001:] if function is softmax else out[:300]
        assert torch.equal(mine, alone)
        if first is not None:
            assert torch.equal(out, first[0])
            assert torch.equal(grad, first[1])
        first = (out, grad)


@pytest.mark.parametrize("function", [softmax, logsumexp])
@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 9, 16, 33, 600])
def test_bits_do_not_depend_on_the_order_of_the_entries(function, dtype, width):
    """Scattered narrow entries are written in the order of the input, ordered ones by groups."""
    index = torch.randint(0, 40, (6000 if width == 1 else 400,))
    index[::2] = 7  # with one feature 3,000 entries: beyond what is laid out end to end
    order = index.argsort(stable=True)
    src = torch.randn(len(index), width).to(dtype).requires_grad_()
    out = function(src, index, dim_size=41)
    upstream = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, src, upstream)
    leaf = src.detach()[order].requires_grad_()
    sorted_out = function(leaf, index[order], dim_size=41)
    per_entry = function is softmax
    sorted_upstream = upstream[order] if per_entry else upstream
    (sorted_grad,) = torch.autograd.grad(sorted_out, leaf, sorted_upstream)
    assert torch.equal(sorted_out, out[order] if per_entry else out)
    assert torch.equal(sorted_grad, grad[order])


@hypothesis.given(
    entries=st.integers(0, 40), num_groups=st.integers(1, 9), width=st.integers(1, 20),
    seed=st.integers(0, 1000), scale=st.sampled_from([0.01, 1.0, 30.0]),
)  # fmt: skip
def test_softmax_of_any_shape(entries, num_groups, width, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    src = scale * torch.randn(entries, width, generator=generator)
    index = torch.randint(0, num_groups, (entries,), generator=generator)
    out = softmax(src, index, dim_size=num_groups)
    if entries == 0:
        assert out.shape == src.shape
        return
    x = rows(src, 0)
    expected = groups.softmax(x, index.numpy(), num_groups)
    bound = groups.softmax_bound(x, index.numpy(), num_groups, torch.float32)
    assert (np.abs(rows(out, 0) - expected) <= bound).all()


# Derivatives


@pytest.mark.parametrize("function", [softmax, logsumexp])
@pytest.mark.parametrize(("shape", "dim"), [((8,), 0), ((8, 3), 0), ((2, 8, 3), 1), ((3, 8), -1)])
def test_gradcheck_and_gradgradcheck(function, shape, dim):
    index = torch.tensor([0, 2, 2, 0, 3, 2, 1, 3])  # no empty group: -inf has no differences
    src = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def run(src):
        return function(src, index, dim_size=4, dim=dim)

    assert torch.autograd.gradcheck(run, (src,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (src,), check_fwd_over_rev=True)


@pytest.mark.parametrize("function", [softmax, logsumexp])
def test_functorch(function):
    """vmap, jvp, jacrev, jacfwd and hessian agree with plain torch operations."""
    from edgeweave._plan._softmax import logsumexp_messages, softmax_messages

    plain = softmax_messages if function is softmax else logsumexp_messages
    index = torch.tensor([0, 2, 2, 0, 3, 2, 1, 3])
    src = torch.randn(5, 8, 3, dtype=torch.float64)

    def ours(x):
        return function(x, index, dim_size=4)

    def theirs(x):
        return plain(x, index, 4)

    close = torch.testing.assert_close
    close(torch.vmap(ours)(src), torch.stack([theirs(x) for x in src]))
    close(torch.vmap(ours, in_dims=2, out_dims=1)(src.movedim(0, 2)),
          torch.stack([theirs(x) for x in src], 1))  # fmt: skip
    indices = torch.stack([index, index.flip(0)])
    close(torch.vmap(lambda x, i: function(x, i, dim_size=4))(src[:2], indices),
          torch.stack([plain(x, i, 4) for x, i in zip(src[:2], indices, strict=True)]))  # fmt: skip
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        close(transform(ours)(src[0]), transform(theirs)(src[0]))
    close(torch.func.hessian(lambda x: ours(x).pow(2).sum())(src[0]),
          torch.func.hessian(lambda x: theirs(x).pow(2).sum())(src[0]))  # fmt: skip
    mine = torch.func.jvp(ours, (src[0],), (src[1],))
    for a, b in zip(mine, torch.func.jvp(theirs, (src[0],), (src[1],)), strict=True):
        close(a, b)


@pytest.mark.parametrize("function", [softmax, logsumexp])
def test_inference_mode_then_training(function):
    src, index = torch.randn(60, 4), random_index()
    with torch.inference_mode():
        before = function(src, index, dim_size=17)
    leaf = src.clone().requires_grad_()
    out = function(leaf, index, dim_size=17)
    assert torch.equal(out, before)
    out[out.isfinite()].sum().backward()
    assert leaf.grad.isfinite().all()


def test_autocast_leaves_the_dtype():
    src, index = torch.randn(60, 4), random_index()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert softmax(src, index, dim_size=17).dtype == torch.float32
        assert softmax(src.bfloat16(), index, dim_size=17).dtype == torch.bfloat16


def test_heads_share_one_plan():
    sparse.cache_clear()
    index = random_index()
    softmax(torch.randn(60), index, dim_size=17)
    softmax(torch.randn(60, 8), index, dim_size=17)
    logsumexp(torch.randn(60, 8), index, dim_size=17)
    assert sparse.cache_info().misses == 1


# Errors


@pytest.mark.parametrize("function", [softmax, logsumexp])
def test_errors(function):
    name = function.__name__
    src, index = torch.randn(4, 2), torch.tensor([0, 1, 1, 2])
    with pytest.raises(ValueError, match=rf"{name}: index or ptr must be given.*neither"):
        function(src)
    with pytest.raises(ValueError, match=rf"{name}: index or ptr must be given.*both"):
        function(src, index, torch.tensor([0, 4]))
    with pytest.raises(
        IndexError, match=rf"{name}: index must be in \[0, 2\), got 2 at position 3"
    ):
        function(src, index, dim_size=2)
    with pytest.raises(IndexError, match=rf"{name}: index must be .* got -1 at position 0"):
        function(src, torch.tensor([-1, 0, 1, 1]))
    with pytest.raises(TypeError, match=rf"{name}: src must be float32.*int64.*float"):
        function(src.long(), index)
    with pytest.raises(TypeError, match=rf"{name}: index must be int32 or int64.*float32"):
        function(src, index.float())
    with pytest.raises(ValueError, match=rf"{name}: index must have the length.*4, got 3"):
        function(src, index[:3])
    with pytest.raises(IndexError, match=rf"{name}: dim must be in"):
        function(src, index, dim=2)
    with pytest.raises(ValueError, match=rf"{name}: dim_size must not be negative, got -3"):
        function(src, index, dim_size=-3)
    with pytest.raises(ValueError, match=rf"{name}: ptr must run from 0 to .*4, got 0 to 3"):
        function(src, ptr=torch.tensor([0, 1, 3]))
    with pytest.raises(ValueError, match=rf"{name}: ptr must run from 0 to .*4, got 1 to 4"):
        function(src, ptr=torch.tensor([1, 4]))
    with pytest.raises(ValueError, match=rf"{name}: ptr must not decrease, got 3 and then 1"):
        function(src, ptr=torch.tensor([0, 3, 1, 4]))
    with pytest.raises(ValueError, match=rf"{name}: ptr must be one-dimensional"):
        function(src, ptr=torch.tensor([[0, 4]]))
    with pytest.raises(ValueError, match=rf"{name}: dim_size must be the number of segments.*2.*7"):
        function(src, ptr=torch.tensor([0, 1, 4]), dim_size=7)
