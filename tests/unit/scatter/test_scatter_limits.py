"""Counts that do not fit the dtype, and sizes that do not fit the machine."""

import pytest
import torch

from edgeweave.scatter import scatter_reduce
from edgeweave.sparse import Graph


@pytest.mark.parametrize("count", [1, 127, 128, 200, 255, 256, 257, 65536])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integer_mean_of_more_entries_than_the_dtype_counts(dtype, count):
    src = torch.zeros(count, dtype=dtype)
    src[0] = 100
    index = torch.zeros(count, dtype=torch.int64)
    assert scatter_reduce(src, index, dim_size=1, reduce="mean").tolist() == [100 // count]


@pytest.mark.parametrize("size", [2**46 + 1, 2**61 - 1, 2**63 - 1])
def test_absurd_sizes_are_refused(size):
    index = torch.tensor([0])
    with pytest.raises(ValueError, match=r"number of nodes must be at most 2\^46"):
        scatter_reduce(torch.ones(1), index, dim_size=size)
    with pytest.raises(ValueError, match=r"number of nodes must be at most 2\^46"):
        Graph(torch.tensor([[0], [0]]), size=(3, size))


def test_a_garbage_index_without_dim_size_is_refused():
    with pytest.raises(ValueError, match=r"number of nodes must be at most 2\^46"):
        scatter_reduce(torch.ones(1), torch.tensor([2**61 - 2]))


def test_more_slots_than_memory_is_a_memory_error():
    with pytest.raises((MemoryError, RuntimeError), match=r"alloc|memory"):
        scatter_reduce(torch.ones(1), torch.tensor([0]), dim_size=2**45)
