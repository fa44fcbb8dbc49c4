"""`multi_reduce`, `var` and `std`."""

from __future__ import annotations

import _group_reference as groups
import _reference as ref
import numpy as np
import pytest
import torch

from edgeweave import scatter
from edgeweave.scatter import multi_reduce, scatter_reduce, std, var

SIMPLE = ("sum", "mean", "amax", "amin")
ALL = ("std", "sum", "amax", "mean", "var", "amin")


def random_index(entries: int = 60, num_groups: int = 17, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_groups - 1, (entries,), generator=generator)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0))


@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 9, 16, 17, 33, 64])
def test_each_is_what_it_is_alone(width, dtype):
    """The one pass gives the very bits of the separate reductions."""
    src, index = torch.randn(60, width).to(dtype), random_index()
    made = multi_reduce(src, index, ALL, dim_size=17)
    assert len(made) == len(ALL)
    for name, out in zip(ALL, made, strict=True):
        assert out.dtype == dtype
        if name in SIMPLE:
            assert torch.equal(out, scatter_reduce(src, index, 0, 17, name)), name
        else:
            assert torch.equal(out, getattr(scatter, name)(src, index, 0, 17)), name


@pytest.mark.parametrize("correction", [0, 1, 2])
@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
@pytest.mark.parametrize(
    ("shape", "dim"), [((60,), 0), ((60, 5), 0), ((2, 60, 3), 1), ((5, 60), -1)]
)
def test_var_and_std(shape, dim, dtype, correction):
    src, index = (3 + torch.randn(shape)).to(dtype), random_index()
    x = ref.to_numpy(src.movedim(dim, 0).reshape(60, -1))
    expected = groups.var(x, index.numpy(), 17, correction)
    # The mean is wrong by n u |x|, with n <= 12 and |x| <= 8, and enters squared or times the sum
    # of the deviations, which is near 0; sums add 12 u of the result.
    unit = groups.inner_unit(dtype)
    bound = (40 * unit + ref.UNIT_ROUNDOFF[dtype]) * expected + (12 * 8 * unit) ** 2 * 12 + 1e-30
    out = var(src, index, dim, 17, correction)
    actual = ref.to_numpy(out.movedim(dim, 0).reshape(17, -1))
    assert (np.abs(actual - expected) <= bound).all()
    root = ref.to_numpy(std(src, index, dim, 17, correction).movedim(dim, 0).reshape(17, -1))
    bound = np.sqrt(bound) * 0.05 + (40 * unit + ref.UNIT_ROUNDOFF[dtype]) * np.sqrt(expected)
    assert (np.abs(root - np.sqrt(expected)) <= bound + 1e-6).all()


def test_variance_beside_a_large_mean():
    """A difference of two sums would lose it all: float32 has 7 digits, the squares need 12."""
    src = 1e6 + torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert var(src, torch.zeros(4, dtype=torch.int64)).tolist() == [pytest.approx(5 / 3)]
    many = 1e4 + torch.arange(12_000).remainder(5).float()
    out = var(many, torch.zeros(12_000, dtype=torch.int64), correction=0)
    assert out.tolist() == [pytest.approx(2.0, rel=1e-3)]


def test_few_entries():
    """Fewer than the correction: 0, with gradient 0, never NaN."""
    src = torch.tensor([1.0, 2.0, 2.0], requires_grad=True)
    index = torch.tensor([0, 2, 2])
    for function in (var, std):
        out = function(src, index, dim_size=4)
        assert out.tolist() == [0, 0, 0, 0]
        assert torch.autograd.grad(out.sum(), src)[0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("entries", [3, 9000])
@pytest.mark.parametrize("width", [1, 3, 8, 20])
def test_not_a_number_and_infinities(width, entries):
    index = torch.zeros(entries, dtype=torch.int64)
    for special in ([float("nan")], [float("inf")], [float("inf"), -float("inf")]):
        src = torch.randn(entries, width)
        src[-len(special):, -1] = torch.tensor(special)  # fmt: skip
        made = multi_reduce(src, index, SIMPLE)
        for name, out in zip(SIMPLE, made, strict=True):
            assert same(out, scatter_reduce(src, index, reduce=name)), (name, special)


@pytest.mark.parametrize(
    "names", [ALL, SIMPLE, ("amax",), ("var",), ("mean", "std"), ("amin", "var")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_is_the_sum_of_the_separate_ones(names, dtype):
    src, index = torch.randint(-3, 4, (60, 5)).to(dtype).requires_grad_(), random_index()
    made = multi_reduce(src, index, names, dim_size=17)
    upstream = [torch.randn(17, 5).to(dtype) for _ in names]
    (grad,) = torch.autograd.grad(made, src, upstream)
    wide = src.detach().double().requires_grad_()
    separate = [
        scatter_reduce(wide, index, 0, 17, n)
        if n in SIMPLE
        else getattr(scatter, n)(wide, index, 0, 17)
        for n in names
    ]
    (expected,) = torch.autograd.grad(separate, wide, [u.double() for u in upstream])
    # Six terms of at most 12 each, rounded once in the end.
    bound = 12 * 6 * 12 * 2.0**-24 + ref.UNIT_ROUNDOFF[dtype] * expected.abs()
    assert ((grad.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("names", [ALL, ("amax", "amin"), ("std",), ("var", "mean")])
@pytest.mark.parametrize(("shape", "dim"), [((12,), 0), ((12, 3), 0), ((2, 12, 3), 1)])
def test_gradcheck_and_gradgradcheck(shape, dim, names):
    index = torch.tensor([0, 2, 2, 0, 3, 2, 1, 3, 0, 1, 3, 2])
    src = torch.randperm(int(np.prod(shape))).double().reshape(shape) / 7
    src.requires_grad_()

    def function(src):
        return multi_reduce(src, index, names, dim, 4)

    assert torch.autograd.gradcheck(function, (src,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (src,))


def test_unused_results_need_no_gradient():
    src, index = torch.randn(60, 5, requires_grad=True), random_index()
    made = multi_reduce(src, index, ALL, dim_size=17)
    (grad,) = torch.autograd.grad(made[1].sum(), src)
    assert grad.eq(1).all()


def test_functorch():
    index = torch.tensor([0, 2, 2, 0, 3, 2, 1, 3])
    src = torch.randn(5, 8, 3, dtype=torch.float64)

    def ours(x):
        return torch.stack(multi_reduce(x, index, ALL, dim_size=4))

    close = torch.testing.assert_close
    close(torch.vmap(ours)(src), torch.stack([ours(x) for x in src]))
    close(torch.func.jacfwd(ours)(src[0]), torch.func.jacrev(ours)(src[0]))
    indices = torch.stack([index, index.flip(0)])
    both = torch.vmap(lambda x, i: torch.stack(multi_reduce(x, i, ALL, dim_size=4)))(
        src[:2], indices
    )
    close(both[1], torch.stack(multi_reduce(src[1], index.flip(0), ALL, dim_size=4)))


@pytest.mark.parametrize("width", [1, 5, 17])
def test_bits_depend_on_neither_threads_nor_other_groups(width):
    index = torch.randint(0, 300, (30_000,))
    index[::3] = 5
    both = torch.cat([torch.randint(300, 500, (9001,)), index])
    src = torch.randn(39_001, width, requires_grad=True)
    first = None
    for num_threads in (1, 2, 4):
        torch.set_num_threads(num_threads)
        out = torch.stack(multi_reduce(src, both, ALL, dim_size=500))
        grad = torch.autograd.grad(out.sum(), src)[0]
        alone = torch.stack(multi_reduce(src[9001:], index, ALL, dim_size=300))
        assert torch.equal(out[:, :300], alone)
        if first is not None:
            assert torch.equal(out, first[0])
            assert torch.equal(grad, first[1])
        first = (out, grad)


@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
def test_nothing(shape):
    src = torch.randn(shape, requires_grad=True)
    made = multi_reduce(src, torch.zeros(shape[0], dtype=torch.int64), ALL, dim_size=2)
    assert all(out.shape == (2, shape[1]) and out.eq(0).all() for out in made)
    torch.stack(made).sum().backward()
    assert src.grad.shape == shape


def test_inference_mode_then_training():
    src, index = torch.randn(60, 4), random_index()
    with torch.inference_mode():
        before = multi_reduce(src, index, ALL, dim_size=17)
    leaf = src.clone().requires_grad_()
    after = multi_reduce(leaf, index, ALL, dim_size=17)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    torch.stack(after).sum().backward()
    assert leaf.grad.isfinite().all()


def test_errors():
    src, index = torch.randn(4, 2), torch.tensor([0, 1, 1, 2])
    with pytest.raises(ValueError, match=r"multi_reduce: reduces must be a list.*'sum'"):
        multi_reduce(src, index, "sum")
    with pytest.raises(ValueError, match=r"multi_reduce: reduces must be a list"):
        multi_reduce(src, index, [])
    with pytest.raises(ValueError, match=r"multi_reduce: reduces must name .*'prod'"):
        multi_reduce(src, index, ["sum", "prod"])
    with pytest.raises(ValueError, match=r"multi_reduce: reduces must name each once"):
        multi_reduce(src, index, ["max", "amax"])
    with pytest.raises(TypeError, match=r"multi_reduce: src must be float32.*int64"):
        multi_reduce(src.long(), index, ["sum"])
    with pytest.raises(IndexError, match=r"var: index must be in \[0, 2\), got 2 at position 3"):
        var(src, index, dim_size=2)
    with pytest.raises(ValueError, match=r"std: correction must not be negative, got -1"):
        std(src, index, correction=-1)
    with pytest.raises(TypeError, match=r"std: correction must be an integer, got bool True"):
        std(src, index, correction=True)
    with pytest.raises(TypeError, match=r"var: src must be a tensor"):
        var([1.0], index)
