"""`prod` (also spelled mul) of `scatter_reduce` and `segment_reduce`."""

from __future__ import annotations

import _group_reference as groups
import _reference as ref
import numpy as np
import pytest
import torch

from edgeweave import sparse
from edgeweave.scatter import scatter_reduce, segment_reduce

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
NAN, INF = float("nan"), float("inf")


def random_index(entries: int = 60, num_groups: int = 17, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_groups - 1, (entries,), generator=generator)


@pytest.mark.parametrize("spelling", ["prod", "mul"])
@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 9, 16, 33])
def test_value_and_gradient(width, dtype, spelling):
    src, index = torch.randn(60, width).to(dtype).requires_grad_(), random_index()
    out = scatter_reduce(src, index, 0, 17, spelling)
    assert out.dtype == dtype
    x = ref.to_numpy(src)
    expected = groups.prod(x, index.numpy(), 17)
    # At most 12 factors, each product rounded once, and the result once more.
    inner = 12 * groups.inner_unit(dtype)
    tiny = float(torch.finfo(dtype).smallest_normal)
    bound = (inner + ref.UNIT_ROUNDOFF[dtype]) * np.abs(expected) + tiny
    assert (np.abs(ref.to_numpy(out) - expected) <= bound).all()
    upstream = torch.randn(17, width).to(dtype)
    (grad,) = torch.autograd.grad(out, src, upstream)
    expected = groups.prod_grad(x, index.numpy(), 17, ref.to_numpy(upstream))
    bound = (2 * inner + ref.UNIT_ROUNDOFF[dtype]) * np.abs(expected) + tiny
    assert (np.abs(ref.to_numpy(grad) - expected) <= bound).all()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("width", [1, 3, 4, 9])
def test_integers_wrap_round_as_in_torch(width, dtype):
    src = torch.randint(0 if dtype == torch.uint8 else -9, 9, (300, width)).to(dtype)
    index = random_index(300, 5)
    expected = torch.ones(5, width, dtype=dtype)
    for entry in range(300):
        expected[index[entry]] *= src[entry]
    assert torch.equal(scatter_reduce(src, index, 0, 5, "prod"), expected)


def test_empty_groups_are_one():
    out = scatter_reduce(torch.randn(0, 3), torch.zeros(0, dtype=torch.int64), 0, 2, "prod")
    assert out.eq(1).all()
    start = torch.full((3,), 5.0)
    out = scatter_reduce(torch.tensor([2.0]), torch.tensor([1]), reduce="prod", out=start)
    assert out.tolist() == [5, 2, 5]
    start = torch.full((3,), 5.0)
    out = scatter_reduce(
        torch.tensor([2.0]), torch.tensor([1]), reduce="prod", out=start, include_self=True
    )
    assert out.tolist() == [5, 10, 5]


@pytest.mark.parametrize("entries", [4, 9000])
def test_zeros(entries):
    """The gradient of a zero is the product of the others; two zeros leave none."""
    src = torch.ones(entries, 3, dtype=torch.float64)
    src[:4] = torch.tensor([[2.0, 0.0, 0.0], [3.0, 3.0, 3.0], [-5.0, -5.0, 0.0], [1.0, 1.0, 1.0]])
    src.requires_grad_()
    out = scatter_reduce(src, torch.zeros(entries, dtype=torch.int64), reduce="prod")
    assert out.tolist() == [[-30, 0, 0]]
    (grad,) = torch.autograd.grad(out.sum(), src)
    assert grad[:3, 0].tolist() == [-15, -10, 6]
    assert grad[:3, 1].tolist() == [-15, 0, 0]
    assert grad[:, 2].tolist() == [0] * entries


def test_zeros_among_values_whose_product_overflows():
    src = torch.tensor([1e30, 1e30, 0.0, 1e30], requires_grad=True)
    index = torch.zeros(4, dtype=torch.int64)
    for order in ([0, 1, 2, 3], [2, 0, 1, 3], [0, 1, 3, 2]):
        out = scatter_reduce(src[order], index, reduce="prod")
        assert out.tolist() == [0]
    (grad,) = torch.autograd.grad(out.sum(), src)
    assert grad.tolist() == [0, 0, INF, 0]


@pytest.mark.parametrize(
    ("values", "product"),
    [
        ([INF, 2.0], INF), ([INF, -2.0], -INF), ([-INF, -INF], INF), ([INF, 0.0], NAN),
        ([NAN, 2.0], NAN), ([NAN, 0.0], NAN), ([-0.0, 2.0], -0.0), ([1e30, 1e30], INF),
    ],
)  # fmt: skip
def test_not_a_number_infinities_and_signs(values, product):
    out = scatter_reduce(torch.tensor(values), torch.tensor([0, 0]), reduce="prod")
    assert torch.equal(out.signbit(), torch.tensor([product]).signbit()) or product != product
    assert torch.allclose(out, torch.tensor([product]), equal_nan=True)


def test_gradient_of_an_infinity():
    src = torch.tensor([INF, -2.0, 3.0], requires_grad=True)
    out = scatter_reduce(src, torch.zeros(3, dtype=torch.int64), reduce="prod")
    assert torch.autograd.grad(out, src)[0].tolist() == [-6, INF, -INF]


@pytest.mark.parametrize(("shape", "dim"), [((8,), 0), ((8, 3), 0), ((2, 8, 3), 1), ((3, 8), -1)])
def test_gradcheck_and_gradgradcheck(shape, dim):
    index = random_index(8, 4)
    src = torch.rand(shape, dtype=torch.float64) + 0.5
    src.requires_grad_()

    def function(src):
        return scatter_reduce(src, index, dim, 4, "prod")

    assert torch.autograd.gradcheck(function, (src,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (src,), check_fwd_over_rev=True)


def test_second_derivative_with_a_zero_is_refused():
    src = torch.tensor([1.0, 0.0, 3.0], requires_grad=True)
    out = scatter_reduce(src, torch.zeros(3, dtype=torch.int64), reduce="prod")
    (grad,) = torch.autograd.grad(out, src, create_graph=True)
    assert grad.tolist() == [0, 3, 0]
    with pytest.raises(RuntimeError, match=r"second derivatives of prod must be taken where no"):
        torch.autograd.grad(grad.sum(), src)


def test_functorch():
    index, src = random_index(8, 4), torch.rand(5, 8, 3, dtype=torch.float64) + 0.5

    def ours(x):
        return scatter_reduce(x, index, 0, 4, "prod")

    def theirs(x):
        ones = torch.ones(4, 3, dtype=x.dtype)
        return ones.scatter_reduce(0, index.view(-1, 1).expand(-1, 3), x, "prod")

    close = torch.testing.assert_close
    close(torch.vmap(ours)(src), torch.stack([theirs(x) for x in src]))
    close(torch.func.jacrev(ours)(src[0]), torch.func.jacrev(theirs)(src[0]))
    close(torch.func.jacfwd(ours)(src[0]), torch.func.jacrev(theirs)(src[0]))


def test_bits_depend_on_neither_threads_nor_other_groups():
    index = torch.randint(0, 300, (30_000,))
    index[::3] = 5
    both = torch.cat([torch.randint(300, 500, (9001,)), index])
    src = (1 + 0.01 * torch.randn(39_001, 5)).requires_grad_()
    first = None
    for num_threads in (1, 2, 4):
        torch.set_num_threads(num_threads)
        out = scatter_reduce(src, both, 0, 500, "prod")
        grad = torch.autograd.grad(out.sum(), src)[0]
        assert torch.equal(out[:300], scatter_reduce(src[9001:], index, 0, 300, "prod"))
        if first is not None:
            assert torch.equal(out, first[0])
            assert torch.equal(grad, first[1])
        first = (out, grad)


def test_segments():
    src, ptr = torch.randn(40, 5), torch.tensor([0, 3, 3, 10, 40])
    index = torch.repeat_interleave(torch.arange(4), ptr.diff())
    assert torch.equal(segment_reduce(src, ptr, "mul"), scatter_reduce(src, index, 0, 4, "prod"))


def test_mm_does_not_take_it():
    with pytest.raises(ValueError, match=r"mm: reduce must be one of sum, mean, amax, amin"):
        sparse.mm(torch.tensor([[0], [0]]), torch.randn(1, 1), reduce="prod")
