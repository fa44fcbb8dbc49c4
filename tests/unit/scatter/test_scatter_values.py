"""`scatter_reduce` against float64 loops: dtypes, ranks, dims, index layouts, `out`."""

from __future__ import annotations

import _reference as ref
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from edgeweave import scatter
from edgeweave.scatter import scatter_reduce

REDUCES = ("sum", "mean", "amax", "amin")
WIDTHS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 256, 300)
# Shape of src and the dimension that holds the 60 edges.
LAYOUTS = (
    ((60,), 0), ((60,), -1), ((60, 5), 0), ((60, 5), -2), ((5, 60), 1), ((5, 60), -1),
    ((60, 3, 5), 0), ((2, 60, 5), 1), ((2, 60, 5), -2), ((2, 3, 60), 2), ((2, 3, 60), -1),
    ((2, 60, 3, 4), 1), ((2, 3, 60, 4), -2), ((60, 2, 3, 4), 0), ((2, 2, 3, 60), -1),
)  # fmt: skip


def random_index(num_edges: int = 60, num_groups: int = 17, seed: int = 0) -> torch.Tensor:
    """Return an unsorted index whose last group is empty."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_groups - 1, (num_edges,), generator=generator)


def check(src, index, dim, dim_size, reduce, out, what="", initial=None):
    """Compare with the reference, within the rounding error that the result may have."""
    assert out.dtype == src.dtype
    expected = ref.scatter(src, index, dim, dim_size, reduce, initial)
    if reduce in ("amax", "amin"):
        ref.assert_exact(out, expected.value, what)
        return
    shape = [1] * src.dim()
    shape[dim] = dim_size
    bound = ref.error_bound(expected, expected.degree.reshape(shape) + 1, out.dtype)
    ref.assert_within(out, expected.value, bound, what)


def test_public_names():
    assert {"scatter_reduce", "gather"} <= set(scatter.__all__)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
def test_every_width(dtype, reduce):
    index = random_index()
    for width in WIDTHS:
        src = torch.randn(60, width).to(dtype)
        check(src, index, 0, 17, reduce, scatter_reduce(src, index, 0, 17, reduce), f"F={width}")


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(("shape", "dim"), LAYOUTS, ids=str)
def test_every_layout(shape, dim, reduce):
    index = random_index()
    for dtype in (torch.float32, torch.bfloat16):
        src = torch.randn(shape).to(dtype)
        check(src, index, dim, 17, reduce, scatter_reduce(src, index, dim, 17, reduce), f"{dtype}")


@pytest.mark.parametrize("reduce", ["sum", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integers(dtype, reduce):
    src = torch.randint(-3, 4, (60, 9), dtype=dtype)
    out = scatter_reduce(src, random_index(), 0, 17, reduce)
    assert out.dtype == dtype
    ref.assert_exact(out, ref.scatter(src, random_index(), 0, 17, reduce).value)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str
)
def test_integers_are_those_of_torch(dtype, reduce):
    """Also where sums overflow, and how a mean of integers is rounded."""
    src, index = torch.randint(-128, 256, (60, 3)).to(dtype), random_index()
    stock = torch.zeros(17, 3, dtype=dtype).scatter_reduce(
        0, index[:, None].expand(60, 3), src, reduce, include_self=False
    )
    assert torch.equal(scatter_reduce(src, index, 0, 17, reduce), stock)


def test_int64_keeps_all_64_bits():
    src = torch.tensor([2**62 + 1, -3, -(2**53) - 1])
    index = torch.tensor([0, 0, 1])
    assert scatter_reduce(src, index).tolist() == [2**62 - 2, -(2**53) - 1]
    assert scatter_reduce(src, index, reduce="amin").tolist() == [-3, -(2**53) - 1]


@pytest.mark.parametrize(
    ("spelling", "canonical"), [("add", "sum"), ("max", "amax"), ("min", "amin")]
)
def test_spellings_of_other_libraries(spelling, canonical):
    src, index = torch.randn(60, 3), random_index()
    assert torch.equal(
        scatter_reduce(src, index, reduce=spelling), scatter_reduce(src, index, reduce=canonical)
    )


def test_dim_size_is_inferred():
    src = torch.ones(4, 2)
    assert scatter_reduce(src, torch.tensor([0, 6, 2, 2])).shape == (7, 2)
    assert scatter_reduce(src.t(), torch.tensor([0, 6, 2, 2]), dim=1).shape == (2, 7)
    assert scatter_reduce(src[:0], torch.empty(0, dtype=torch.int64)).shape == (0, 2)
    assert scatter_reduce(src, torch.tensor([0, 6, 2, 2]), dim_size=9).shape == (9, 2)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("shape", "dim"), LAYOUTS, ids=str)
def test_index_that_expands_to_src(shape, dim, index_dtype, reduce):
    src, index = torch.randn(shape), random_index().to(index_dtype)
    expected = scatter_reduce(src, index, dim, 17, reduce)
    ones = [1] * len(shape)
    ones[dim] = 60
    assert torch.equal(scatter_reduce(src, index.view(ones), dim, 17, reduce), expected)
    expanded = index.view(ones).expand(shape)
    assert torch.equal(scatter_reduce(src, expanded, dim, 17, reduce), expected)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("width", [1, 7, 16, 40])
def test_strided_index(width, index_dtype):
    src, index = torch.randn(60, width), random_index().to(index_dtype)
    expected = scatter_reduce(src, index, 0, 17)
    check(src, index, 0, 17, "sum", expected)
    strided = torch.stack([index, index + 1000], 1)[:, 0]
    assert strided.stride() == (2,)
    assert torch.equal(scatter_reduce(src, strided, 0, 17), expected)
    from_edges = torch.stack([index + 1000, index])[1]
    assert torch.equal(scatter_reduce(src, from_edges, 0, 17), expected)
    constant = torch.tensor([3], dtype=index_dtype).expand(60)
    check(src, constant, 0, 17, "sum", scatter_reduce(src, constant, 0, 17), "stride 0")


@pytest.mark.parametrize("reduce", REDUCES)
def test_non_contiguous_src(reduce):
    index, wide = random_index(), torch.randn(120, 20)
    layouts = {
        "columns": (wide[:60, ::2], 0),
        "rows": (wide[::2, :10], 0),
        "transposed": (torch.randn(10, 60).t(), 0),
        "edges last": (torch.randn(60, 10).t(), 1),
        "expanded rows": (torch.randn(1, 10).expand(60, 10), 0),
        "expanded columns": (torch.randn(60, 1).expand(60, 10), 0),
        "middle": (torch.randn(60, 3, 4).transpose(0, 1), 1),
        "channels last": (torch.randn(2, 60, 4).transpose(1, 2), 2),
        "offset by one": (torch.randn(601)[1:].view(60, 10), 0),
    }
    for name, (src, dim) in layouts.items():
        out = scatter_reduce(src, index, dim, 17, reduce)
        assert torch.equal(out, scatter_reduce(src.contiguous().clone(), index, dim, 17, reduce)), (
            name
        )
        check(src, index, dim, 17, reduce, out, name)


@pytest.mark.parametrize("reduce", REDUCES)
def test_nothing_to_reduce(reduce):
    empty = torch.empty(0, dtype=torch.int64)
    assert scatter_reduce(torch.randn(0, 3), empty, 0, 2, reduce).tolist() == [[0.0] * 3] * 2
    assert scatter_reduce(torch.randn(0), empty, 0, 2, reduce).tolist() == [0.0] * 2
    assert scatter_reduce(torch.randn(0, 3), empty, 0, 0, reduce).shape == (0, 3)
    assert scatter_reduce(torch.randn(2, 0), empty, 1, 3, reduce).tolist() == [[0.0] * 3] * 2
    assert scatter_reduce(torch.randn(2, 0, 3), empty, 1, 1, reduce).tolist() == [[[0.0] * 3]] * 2
    assert scatter_reduce(torch.randn(4, 0), torch.zeros(4).long(), 0, 2, reduce).shape == (2, 0)
    assert scatter_reduce(torch.randn(0, 4, 3), torch.zeros(4).long(), 1, 2, reduce).shape == (
        0,
        2,
        3,
    )


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("num_edges", [4095, 4096, 4097, 20_001])
def test_one_long_group(num_edges, reduce):
    src = torch.randn(num_edges, 2)
    index = torch.zeros(num_edges, dtype=torch.int64)
    index[::7] = 1
    check(src, index, 0, 3, reduce, scatter_reduce(src, index, 0, 3, reduce))


def test_result_is_fresh():
    """Nothing that is given out may be the library's own memory, or that of the input."""
    src, index = torch.randn(60, 3), random_index()
    first = scatter_reduce(src, index, 0, 17)
    kept = first.clone()
    first.zero_()
    assert torch.equal(scatter_reduce(src, index, 0, 17), kept)
    one_each = torch.arange(60)
    copy = scatter_reduce(src, one_each, 0, 60)
    copy.zero_()
    assert bool((src != 0).any())


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_close_to_float64_as_torch(dtype, reduce):
    src = torch.randn(20_000, 9).to(dtype)
    index = random_index(20_000, 40)
    expected = ref.scatter(src, index, 0, 40, reduce).value
    ours = np.abs(ref.to_numpy(scatter_reduce(src, index, 0, 40, reduce)) - expected).max()
    stock = src.new_zeros(40, 9).scatter_reduce(
        0, index[:, None].expand(-1, 9), src, reduce, include_self=False
    )
    theirs = np.abs(ref.to_numpy(stock) - expected)[:39].max()
    assert ours <= 2 * theirs


# include_self and out


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
def test_include_self(dtype, reduce):
    src, index = torch.randn(60, 9).to(dtype), random_index()
    start = torch.randn(17, 9).to(dtype)
    out = start.clone()
    result = scatter_reduce(src, index, 0, reduce=reduce, include_self=True, out=out)
    check(src, index, 0, 17, reduce, result, initial=start)
    assert torch.equal(result[16], start[16])  # an empty group keeps its value, bit by bit


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(("shape", "dim"), LAYOUTS, ids=str)
def test_include_self_in_every_layout(shape, dim, reduce):
    src, index = torch.randn(shape), random_index()
    out_shape = list(shape)
    out_shape[dim] = 17
    start = torch.randn(out_shape)
    result = scatter_reduce(src, index, dim, reduce=reduce, include_self=True, out=start.clone())
    check(src, index, dim, 17, reduce, result, initial=start)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(("shape", "dim"), LAYOUTS, ids=str)
def test_out_without_self(shape, dim, reduce):
    """The entries replace what `out` held; slots that no entry names keep it."""
    src, index = torch.randn(shape), random_index()
    out_shape = list(shape)
    out_shape[dim] = 17
    out = torch.randn(out_shape)
    start = out.clone()
    result = scatter_reduce(src, index, dim, reduce=reduce, out=out)
    assert result is out
    expected = scatter_reduce(src, index, dim, 17, reduce)
    hit = torch.bincount(index, minlength=17) > 0
    rows = [slice(None)] * len(shape)
    for mask, kept in ((hit, expected), (~hit, start)):
        rows[dim] = mask
        assert torch.equal(out[tuple(rows)], kept[tuple(rows)])


def test_maximum_of_negative_values_with_out():
    """Known from elsewhere: a maximum that starts at 0 although all values are negative."""
    src, index = torch.tensor([-5.0, -2.0, -9.0]), torch.tensor([0, 0, 2])
    out = torch.tensor([-3.0, -1.0, -10.0])
    result = scatter_reduce(src, index, reduce="amax", include_self=True, out=out)
    assert result.tolist() == [-2.0, -1.0, -9.0]


def test_low_precision_self_is_accumulated_in_fp32():
    """256 + 1 + 1 + ... in bf16 would never leave 256."""
    out = torch.tensor([256.0]).bfloat16()
    src = torch.ones(100, dtype=torch.bfloat16)
    index = torch.zeros(100, dtype=torch.int64)
    assert scatter_reduce(src, index, include_self=True, out=out).item() == 356.0


# return_arg


@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("dtype", [*ref.FLOATS, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("shape", "dim"), LAYOUTS, ids=str)
def test_return_arg_gives_the_first_winner(shape, dim, dtype, reduce):
    src, index = torch.randint(-2, 3, shape).to(dtype), random_index()
    out, arg = scatter_reduce(src, index, dim, 17, reduce, return_arg=True)
    expected = ref.scatter(src, index, dim, 17, reduce)
    ref.assert_exact(out, expected.value)
    assert arg.dtype == torch.int64
    assert arg.tolist() == expected.arg.tolist()
    assert bool((arg.select(dim, 16) == 60).all())  # E for an empty group


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_arg_in_long_groups_and_with_nan(reduce):
    src = torch.randint(-2, 3, (9000, 3)).float()
    src[[5000, 7000], 1] = float("nan")
    index = torch.zeros(9000, dtype=torch.int64)
    out, arg = scatter_reduce(src, index, 0, 1, reduce, return_arg=True)
    expected = ref.scatter(src, index, 0, 1, reduce)
    assert expected.arg[0, 1] == 5000
    assert arg.tolist() == expected.arg.tolist()
    assert bool(out[0, 1].isnan())


@hypothesis.given(st.data())
def test_random_shapes(data):
    """Small integers: exact in every dtype, full of ties, and of any rank."""
    before = data.draw(st.lists(st.integers(0, 3), max_size=2), label="dims before")
    after = data.draw(st.lists(st.integers(0, 20), max_size=2), label="dims after")
    num_edges = data.draw(st.integers(0, 30), label="num_edges")
    num_groups = data.draw(st.integers(1, 10), label="num_groups")
    reduce = data.draw(st.sampled_from(REDUCES), label="reduce")
    dtype = data.draw(st.sampled_from(ref.FLOATS), label="dtype")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    shape = (*before, num_edges, *after)
    src = torch.randint(-3, 4, shape, generator=generator).to(dtype)
    index = torch.randint(0, num_groups, (num_edges,), generator=generator)
    out = scatter_reduce(src, index, len(before), num_groups, reduce)
    expected = ref.scatter(src, index, len(before), num_groups, reduce)
    if reduce == "mean":
        ref.assert_within(out, expected.value, ref.error_bound(expected, 1, dtype))
    else:
        ref.assert_exact(out, expected.value)
