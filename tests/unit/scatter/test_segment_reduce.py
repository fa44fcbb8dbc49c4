"""`segment_reduce`: the same as `scatter_reduce` over the groups that a ptr cuts."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from edgeweave import sparse
from edgeweave.scatter import scatter_reduce, segment_reduce

REDUCES = ("sum", "mean", "amax", "amin", "prod")


def groups_of(ptr: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(ptr) - 1), ptr.diff().long())


@pytest.mark.parametrize("reduce", [*REDUCES, "add", "max", "min", "mul"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("shape", "dim"), [((40,), 0), ((40, 5), 0), ((3, 40), 1), ((2, 40, 9), -2)]
)
@pytest.mark.parametrize("ptr_dtype", [torch.int32, torch.int64], ids=str)
def test_same_as_scatter(ptr_dtype, shape, dim, dtype, reduce):
    src = (3 * torch.randn(shape)).to(dtype)
    ptr = torch.tensor([0, 0, 3, 10, 10, 40], dtype=ptr_dtype)
    out = segment_reduce(src, ptr, reduce, dim)
    assert torch.equal(out, scatter_reduce(src, groups_of(ptr), dim, 5, reduce))


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_torch_agrees(reduce):
    """torch's own segment_reduce on segments that are not empty (those it fills otherwise)."""
    src, ptr = torch.randn(40, 5), torch.tensor([0, 3, 10, 11, 40])
    expected = torch.segment_reduce(src, reduce.removeprefix("a"), offsets=ptr)
    # 29 terms at most, summed in other orders.
    torch.testing.assert_close(segment_reduce(src, ptr, reduce), expected, rtol=2e-6, atol=2e-6)


def test_bf16_sums_do_not_stop_at_256():
    ones = torch.ones(1000, 1, dtype=torch.bfloat16)
    assert segment_reduce(ones, torch.tensor([0, 1000])).item() == 1000
    ones = torch.ones(70_000, dtype=torch.float16)
    assert segment_reduce(ones, torch.tensor([0, 70_000]), "mean").item() == 1


@hypothesis.given(lengths=st.lists(st.integers(0, 9), max_size=12), width=st.integers(0, 20),
                  reduce=st.sampled_from(REDUCES))  # fmt: skip
def test_any_lengths(lengths, width, reduce):
    ptr = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
    src = torch.randint(-3, 4, (int(ptr[-1]), width)).float()
    out = segment_reduce(src, ptr, reduce)
    assert torch.equal(out, scatter_reduce(src, groups_of(ptr), 0, len(lengths), reduce))


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("ties", ["even", "first"])
def test_gradcheck_and_gradgradcheck(ties, reduce):
    ptr = torch.tensor([0, 3, 3, 7, 8])
    src = (1 + torch.randperm(24).double() / 24).reshape(8, 3).requires_grad_()

    def function(src):
        return segment_reduce(src, ptr, reduce, ties=ties)

    assert torch.autograd.gradcheck(function, (src,))
    assert torch.autograd.gradgradcheck(function, (src,))


def test_ties():
    src = torch.tensor([2.0, 2.0, 1.0], requires_grad=True)
    ptr = torch.tensor([0, 3])
    even = torch.autograd.grad(segment_reduce(src, ptr, "max"), src)[0]
    first = torch.autograd.grad(segment_reduce(src, ptr, "max", ties="first"), src)[0]
    assert even.tolist() == [0.5, 0.5, 0]
    assert first.tolist() == [1, 0, 0]


def test_edits_of_ptr_are_seen(empty_cache):
    src, ptr = torch.arange(6.0), torch.tensor([0, 2, 6])
    assert segment_reduce(src, ptr).tolist() == [1, 14]
    ptr[1] = 3
    assert segment_reduce(src, ptr).tolist() == [3, 12]
    ptr.numpy()[1] = 5  # unseen by torch's version counter
    assert segment_reduce(src, ptr).tolist() == [10, 5]


def test_equal_ptr_finds_the_plan(empty_cache):
    src = torch.randn(40, 3)
    for _ in range(3):
        segment_reduce(src, torch.tensor([0, 10, 40]))
    assert sparse.cache_info().misses == 1


def test_plan_made_in_inference_mode_serves_training(empty_cache):
    src, ptr = torch.randn(40, 3), torch.tensor([0, 10, 40])
    with torch.inference_mode():
        segment_reduce(src, ptr, "amax")
        segment_reduce(src, torch.tensor([0, 10, 40]), "amax")
    leaf = src.requires_grad_()
    segment_reduce(leaf, ptr, "amax").sum().backward()
    assert leaf.grad.sum() == 6


def test_vmap():
    src, ptr = torch.randn(4, 8, 3), torch.tensor([0, 3, 3, 8])
    out = torch.vmap(lambda x: segment_reduce(x, ptr, "mean"))(src)
    assert torch.equal(out, segment_reduce(src, ptr, "mean", dim=1))
    ptrs = torch.tensor([[0, 3, 8], [0, 1, 8]])
    out = torch.vmap(lambda x, p: segment_reduce(x, p, "sum"))(src[:2], ptrs)
    torch.testing.assert_close(out[1], segment_reduce(src[1], ptrs[1]))


def test_errors():
    src = torch.randn(4, 2)
    with pytest.raises(ValueError, match=r"segment_reduce: ptr must run from 0 to .*4, got 0 to 5"):
        segment_reduce(src, torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"ptr must not decrease, got 3 and then 2 at position 2"):
        segment_reduce(src, torch.tensor([0, 3, 2, 4]))
    with pytest.raises(ValueError, match=r"ptr must not decrease, got 0 and then -1 at position 1"):
        segment_reduce(src, torch.tensor([0, -1, 4]))
    with pytest.raises(ValueError, match=r"segment_reduce: ptr must be one-dimensional"):
        segment_reduce(src, torch.zeros(0, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"segment_reduce: ptr must be int32 or int64.*float32"):
        segment_reduce(src, torch.tensor([0.0, 4.0]))
    with pytest.raises(ValueError, match=r"segment_reduce: reduce must be one of .*prod.*'median'"):
        segment_reduce(src, torch.tensor([0, 4]), "median")
    with pytest.raises(ValueError, match=r"segment_reduce: ties must be"):
        segment_reduce(src, torch.tensor([0, 4]), "max", ties="last")
