"""Sums of narrow entries in random order: in input order by one thread, by rows with many."""

import pytest
import torch

from edgeweave.scatter import scatter_reduce


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("features", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_the_bits_do_not_depend_on_the_way(threads, reduce, dtype, features):
    generator = torch.Generator().manual_seed(features)
    # Slot 0 is longer than a chunk of 4,096 edges, slot 5 empty.
    index = torch.cat(
        [torch.zeros(9000, dtype=torch.int64), torch.randint(6, 400, (7000,), generator=generator)]
    )[torch.randperm(16000, generator=generator)]
    src = torch.randn(16000, features, dtype=dtype, generator=generator)
    threads(1)
    one = scatter_reduce(src, index, dim_size=400, reduce=reduce)
    threads(4)
    four = scatter_reduce(src, index, dim_size=400, reduce=reduce)
    assert torch.equal(one, four)
    exact = torch.zeros(400, features, dtype=torch.float64).index_add_(0, index, src.double())
    if reduce == "mean":
        exact /= index.bincount(minlength=400).clamp(min=1).unsqueeze(-1)
    # 9,000 values of about 1 in chunks of 4,096: a sum of up to 200 is rounded 4,096 times, to 1e-5
    # each in the mean of their signs.
    torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=5e-4)
    assert one[5].eq(0).all()


def test_a_single_feature_without_a_dimension(threads):
    threads(1)
    index = torch.tensor([2, 0, 2, 1, 2])
    src = torch.tensor([1.0, float("inf"), 2.0, float("nan"), 4.0])
    out = scatter_reduce(src, index, dim_size=5)
    expected = torch.tensor([float("inf"), float("nan"), 7.0, 0.0, 0.0])
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
