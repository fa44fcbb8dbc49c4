"""Numbers that other libraries get wrong: low precision, NaN, infinities, ties and zeros."""

from __future__ import annotations

import math

import _reference as ref
import pytest
import torch

from edgeweave.scatter import scatter_reduce

NAN, INF = math.nan, math.inf


def one_group(num_edges: int) -> torch.Tensor:
    return torch.zeros(num_edges, dtype=torch.int64)


def reduced(values: list[float], reduce: str, dtype: torch.dtype = torch.float32) -> float:
    src = torch.tensor(values, dtype=dtype)
    return scatter_reduce(src, one_group(len(values)), 0, 1, reduce).item()


@pytest.mark.parametrize("shape", [(1000,), (1000, 1), (1000, 8), (1000, 33)], ids=str)
def test_bf16_sum_of_a_thousand_ones(shape):
    out = scatter_reduce(torch.ones(shape, dtype=torch.bfloat16), one_group(1000))
    assert bool((out == 1000).all())


def test_bf16_sum_along_the_last_dimension():
    out = scatter_reduce(torch.ones(3, 1000, dtype=torch.bfloat16), one_group(1000), dim=1)
    assert out.tolist() == [[1000.0]] * 3


@pytest.mark.parametrize("shape", [(70_000,), (70_000, 4)], ids=str)
def test_fp16_mean_of_seventy_thousand_ones(shape):
    out = scatter_reduce(torch.ones(shape, dtype=torch.float16), one_group(70_000), reduce="mean")
    assert bool((out == 1).all())


def test_a_million_fp16_values_in_one_bucket():
    """2^-5 a million times is exactly 31250 in fp32, and rounds once."""
    src = torch.full((1_000_000,), 2.0**-5, dtype=torch.float16)
    expected = torch.tensor([31250.0]).half()
    assert torch.equal(scatter_reduce(src, one_group(1_000_000)), expected)


def test_a_million_random_fp16_values_in_one_bucket():
    src = torch.rand(1_000_000).sub(0.48).half()
    exact = src.double().sum().item()
    bound = 1e6 * 2.0**-24 * src.double().abs().sum().item() + 2.0**-11 * abs(exact)
    got = scatter_reduce(src, one_group(1_000_000)).item()
    # 1e6 roundings at worst; with 4,096-edge pieces a thousandth of that.
    assert abs(got - exact) <= bound / 100


@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 16), (5, 40)], ids=str)
def test_nan_propagates_wherever_it_stands(shape, reduce, dtype):
    for position in range(5):
        src = torch.randn(shape).to(dtype)
        src.view(5, -1)[position, -1] = NAN
        out = scatter_reduce(src, one_group(5), 0, 1, reduce).view(-1)
        assert out.isnan().nonzero().tolist() == [[out.numel() - 1]]


def test_nan_stays_in_its_group():
    src, index = torch.tensor([1.0, NAN, 3.0, 4.0]), torch.tensor([0, 1, 0, 2])
    out = scatter_reduce(src, index, reduce="amax").tolist()
    assert out[0] == 3.0
    assert math.isnan(out[1])
    assert out[2] == 4.0


@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
def test_infinities_are_values(dtype):
    assert reduced([1.0, INF, 2.0], "amax", dtype) == INF
    assert reduced([1.0, -INF, 2.0], "amin", dtype) == -INF
    assert reduced([-INF, -INF], "amax", dtype) == -INF
    assert reduced([INF, INF], "amin", dtype) == INF
    assert reduced([1.0, INF], "sum", dtype) == INF
    assert reduced([1.0, -INF], "mean", dtype) == -INF
    assert math.isnan(reduced([INF, -INF], "sum", dtype))


def gradient(values: list[float], reduce: str, upstream: float = 1.0, **options) -> list[float]:
    src = torch.tensor(values, requires_grad=True)
    out = scatter_reduce(src, one_group(len(values)), 0, 1, reduce, **options)
    out.backward(torch.full_like(out, upstream))
    return src.grad.tolist()


@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("tied", [0.0, 7.0, -7.0, INF, -INF])
def test_ties_share_evenly(tied, reduce):
    loser = {"amax": -100.0, "amin": 100.0}[reduce]
    values = [tied, loser, tied]
    if (reduce == "amax" and tied == -INF) or (reduce == "amin" and tied == INF):
        values = [tied, tied]
    assert gradient(values, reduce) == [0.5 if value == tied else 0.0 for value in values]


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_a_single_zero_wins_alone(reduce):
    """Known from elsewhere: the excluded initial zero counts as a tie and takes one half."""
    sign = -1.0 if reduce == "amax" else 1.0
    assert gradient([0.0, 4.0 * sign], reduce) == [1.0, 0.0]


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_negative_gradient_is_shared_too(reduce):
    third = torch.tensor(-1.0).div(3).item()
    assert gradient([4.0, 4.0, 4.0], reduce, upstream=-1.0) == [third] * 3


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_ties_first(reduce):
    loser = {"amax": -9.0, "amin": 9.0}[reduce]
    values = [loser, 2.0, 2.0, loser, 2.0]
    assert gradient(values, reduce, ties="first") == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert gradient([loser, NAN, 2.0, NAN], reduce, ties="first") == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_nan_takes_the_whole_gradient(reduce):
    assert gradient([1.0, NAN, 5.0, NAN], reduce) == [0.0, 0.5, 0.0, 0.5]


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_all_entries_into_one_slot_of_many(reduce):
    src = torch.zeros(1000, 3, requires_grad=True)
    scatter_reduce(src, torch.full((1000,), 5), 0, 10, reduce).sum().backward()
    assert src.grad.tolist() == [[torch.tensor(1.0).div(1000).item()] * 3] * 1000
