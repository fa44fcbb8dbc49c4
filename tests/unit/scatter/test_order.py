"""`argmax`, `argmin` and `index_sort`."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from edgeweave import sparse
from edgeweave.scatter import argmax, argmin, index_sort, scatter_reduce

NAN = float("nan")


@pytest.mark.parametrize(("function", "reduce"), [(argmax, "amax"), (argmin, "amin")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("shape", "dim"), [((40,), 0), ((40, 5), 0), ((3, 40), 1), ((2, 40, 9), 1)]
)
def test_arg(shape, dim, dtype, function, reduce):
    src, index = torch.randint(-3, 4, shape).to(dtype), torch.randint(0, 6, (40,))
    out = function(src, index, dim, 8)
    _, expected = scatter_reduce(src, index, dim, 8, reduce, return_arg=True)
    assert out.dtype == torch.int64
    assert torch.equal(out, expected)
    best = scatter_reduce(src, index, dim, 8, reduce)
    filled = out < 40
    assert torch.equal(src.gather(dim, out.clamp(max=39))[filled], best[filled])


def test_first_winner_empty_groups_and_nan():
    src = torch.tensor([1.0, 5.0, 5.0, NAN, 7.0, NAN])
    index = torch.tensor([0, 0, 0, 2, 2, 2])
    assert argmax(src, index, dim_size=4).tolist() == [1, 6, 3, 6]
    assert argmin(src, index, dim_size=4).tolist() == [0, 6, 3, 6]


def test_arg_takes_tensors_that_need_gradients_and_vmap():
    src, index = torch.randn(3, 8, 2, requires_grad=True), torch.tensor([0, 1, 1, 2, 0, 3, 3, 3])
    assert not argmax(src[0], index).requires_grad
    out = torch.vmap(lambda x: argmax(x, index, dim_size=4))(src.detach())
    assert torch.equal(out, torch.stack([argmax(x, index, dim_size=4) for x in src]))


def test_arg_errors():
    with pytest.raises(IndexError, match=r"argmax: index must be in \[0, 1\), got 1 at position 0"):
        argmax(torch.randn(1), torch.tensor([1]), dim_size=1)
    with pytest.raises(TypeError, match=r"argmin: src must be a tensor"):
        argmin(None, torch.tensor([1]))


@hypothesis.given(values=st.lists(st.integers(0, 30), max_size=60), wide=st.booleans(),
                  bound=st.sampled_from([None, 30, 31, 10**9]))  # fmt: skip
def test_index_sort_is_torchs_stable_sort(values, wide, bound):
    index = torch.tensor(values, dtype=torch.int64 if wide else torch.int32)
    ordered, order = index_sort(index, bound)
    expected = torch.sort(index, stable=True)
    assert ordered.dtype == index.dtype
    assert order.dtype == torch.int64
    assert torch.equal(ordered, expected.values)
    assert torch.equal(order, expected.indices)


def test_index_sort_of_other_values():
    for values in ([-5, 3, -5, 0], [10**12, 0, 10**12], [2**62, 1]):
        index = torch.tensor(values)
        assert torch.equal(index_sort(index)[1], torch.sort(index, stable=True).indices)
    strided = torch.randint(0, 9, (50, 2))[:, 1]
    assert torch.equal(index_sort(strided)[1], torch.sort(strided, stable=True).indices)


def test_index_sort_shares_its_plan(empty_cache):
    index = torch.randint(0, 9, (50,))
    index[0] = 8
    index_sort(index)
    scatter_reduce(torch.randn(50, 2), index)
    assert sparse.cache_info().misses == 1


def test_index_sort_result_is_the_callers():
    """Writing into it must not reach the cached plan."""
    index = torch.randint(0, 9, (50,))
    ordered, order = index_sort(index)
    kept = order.clone()
    ordered.zero_(), order.zero_()
    assert torch.equal(index_sort(index)[1], kept)


def test_index_sort_errors():
    for bound in (3, 10**9):
        with pytest.raises(
            IndexError, match=rf"index_sort: index must be in \[0, {bound + 1}\), got -1"
        ):
            index_sort(torch.tensor([2, -1]), bound)
    with pytest.raises(
        IndexError, match=r"index_sort: index must be in \[0, 3\), got 7 at position 1"
    ):
        index_sort(torch.tensor([2, 7]), 2)
    with pytest.raises(ValueError, match=r"index_sort: index must be one-dimensional"):
        index_sort(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"index_sort: index must be int32 or int64"):
        index_sort(torch.zeros(2))
    with pytest.raises(ValueError, match=r"index_sort: max_value must not be negative, got -1"):
        index_sort(torch.zeros(2, dtype=torch.int64), -1)
    with pytest.raises(TypeError, match=r"index_sort: max_value must be an integer"):
        index_sort(torch.zeros(2, dtype=torch.int64), 2.5)
