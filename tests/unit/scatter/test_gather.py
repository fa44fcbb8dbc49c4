"""`gather`: an exact copy of rows, for every dtype, rank and kind of index."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from edgeweave.scatter import gather

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64,
)  # fmt: skip
WIDTHS = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 128, 129, 256, 300)
LAYOUTS = (
    ((9,), 0), ((9,), -1), ((9, 5), 0), ((9, 5), -2), ((5, 9), 1), ((5, 9), -1), ((9, 3, 5), 0),
    ((2, 9, 5), 1), ((2, 3, 9), -1), ((2, 9, 3, 4), 1), ((2, 3, 9, 4), -2),
)  # fmt: skip


def values(shape, dtype):
    """Return distinct bit patterns, NaN and infinities among the floats."""
    x = torch.randint(-100, 100, shape).to(dtype)
    if dtype.is_floating_point and x.numel() > 2:
        x.view(-1)[0], x.view(-1)[1] = float("nan"), float("-inf")
    return x


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bool(((a == b) | (a.isnan() & b.isnan())).all())
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_every_width(index_dtype, dtype):
    index = torch.randint(0, 9, (40,), dtype=index_dtype)
    for width in WIDTHS:
        x = values((9, width), dtype)
        assert same(gather(x, index), x[index.long()]), f"F={width}"


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("shape", "dim"), LAYOUTS, ids=str)
def test_every_layout_and_expanded_index(shape, dim, index_dtype):
    x, index = values(shape, torch.float32), torch.randint(0, 9, (40,), dtype=index_dtype)
    expected = torch.index_select(x, dim, index.long())
    assert same(gather(x, index, dim), expected)
    ones = [1] * len(shape)
    ones[dim] = 40
    full = list(shape)
    full[dim] = 40
    assert same(gather(x, index.view(ones).expand(full), dim), expected)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("shape", "dim"), LAYOUTS, ids=str)
def test_full_rank_index_is_torch_gather(shape, dim, index_dtype):
    x = values(shape, torch.float32)
    full = list(shape)
    full[dim] = 40
    index = torch.randint(0, 9, full, dtype=index_dtype)
    assert same(gather(x, index, dim), torch.gather(x, dim, index.long()))


def test_one_column_of_index_counts_for_all_columns():
    """torch.gather would read one column of x only."""
    x, index = torch.randn(9, 5), torch.randint(0, 9, (40, 1))
    assert same(gather(x, index), x[index[:, 0]])


def test_non_contiguous_features_and_index():
    index = torch.randint(0, 9, (40,))
    wide = torch.randn(18, 20)
    pairs = torch.stack([index, index + 50], 1)
    for name, x in {
        "columns": wide[:9, ::2],
        "rows": wide[::2],
        "transposed": torch.randn(5, 9).t(),
        "expanded": torch.randn(1, 5).expand(9, 5),
        "heads last": torch.randn(9, 4, 3).transpose(1, 2),
    }.items():
        assert same(gather(x, index), x[index]), name
        assert same(gather(x, pairs[:, 0]), x[index]), name
        # Stride 1 on an inner dimension of size > 1 (torch.gather once read the wrong entries).
        shape = (40, *x.shape[1:])
        distinct = torch.randint(0, 9, shape)
        assert same(gather(x, distinct), torch.gather(x, 0, distinct)), name
        turned = distinct.movedim(0, -1).contiguous().movedim(-1, 0)
        assert same(gather(x, turned), torch.gather(x, 0, distinct)), name


def test_nothing_to_gather():
    empty = torch.empty(0, dtype=torch.int64)
    assert gather(torch.randn(9, 3), empty).shape == (0, 3)
    assert gather(torch.randn(0, 3), empty).shape == (0, 3)
    assert gather(torch.randn(0), empty).shape == (0,)
    assert gather(torch.randn(9, 0), torch.tensor([3, 4])).shape == (2, 0)
    assert gather(torch.randn(2, 9, 0), torch.tensor([3, 4]), 1).shape == (2, 2, 0)
    assert gather(torch.randn(2, 0), empty, 1).shape == (2, 0)
    assert gather(torch.randn(2, 9), empty, 1).shape == (2, 0)


def test_large_rows():
    """More than one thread's share of work, with a width that no vector divides."""
    x, index = torch.randn(1000, 77), torch.randint(0, 1000, (30_000,))
    assert torch.equal(gather(x, index), x[index])


def test_result_is_fresh():
    x = torch.randn(9, 3)
    kept = x.clone()
    gather(x, torch.arange(9)).zero_()
    assert torch.equal(x, kept)


@hypothesis.given(st.data())
def test_random_shapes(data):
    before = data.draw(st.lists(st.integers(0, 3), max_size=2), label="dims before")
    after = data.draw(st.lists(st.integers(0, 20), max_size=2), label="dims after")
    num_edges = data.draw(st.integers(0, 30), label="num_edges")
    num_nodes = data.draw(st.integers(1, 10), label="num_nodes")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    shape = (*before, num_nodes, *after)
    x = torch.randint(-99, 100, shape, generator=generator).to(dtype)
    index = torch.randint(0, num_nodes, (num_edges,), generator=generator)
    dim = len(before)
    assert same(gather(x, index, dim), x.index_select(dim, index))
