"""Every refusal of `scatter_reduce` and `gather`."""

from __future__ import annotations

import pytest
import torch

from edgeweave.scatter import gather, scatter_reduce

SRC = torch.ones(6, 3)
INDEX = torch.tensor([0, 1, 2, 0, 1, 2])


def naming(*words: object) -> str:
    """Return a pattern that needs all of `words` in any order, numbers as whole numbers."""
    return "".join(rf"(?=[\s\S]*(?<![\w-]){word}(?!\w))" for word in words)


def shown(shape: tuple[int, ...]) -> str:
    return r"[\[(]" + ", ?".join(str(size) for size in shape) + r",?[\])]"


def index_with(value: int, position: int = 13, num_edges: int = 30) -> torch.Tensor:
    index = torch.zeros(num_edges, dtype=torch.int64)
    index[position] = value
    return index


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("value", [977, 59, -4, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("width", [None, 1, 16])
def test_index_out_of_range_names_value_position_and_bound(width, value, index_dtype):
    index = index_with(value).to(index_dtype)
    shape = (30,) if width is None else (30, width)
    with pytest.raises(IndexError, match=naming(value, 13, 59)):
        scatter_reduce(torch.ones(shape), index, dim_size=59)
    x = torch.ones((59, *shape[1:]))
    with pytest.raises(IndexError, match=naming(value, 13, 59)):
        gather(x, index)


def test_index_errors_begin_with_the_op_like_all_others():
    with pytest.raises(IndexError, match=r"^scatter_reduce: index must .*977"):
        scatter_reduce(torch.ones(30), index_with(977), dim_size=59)
    with pytest.raises(IndexError, match=r"^gather: index must .*977"):
        gather(torch.ones(59), index_with(977))


@pytest.mark.parametrize("value", [2**31, 2**32 + 1, 2**62, -(2**32), -(2**63)])
def test_large_int64_values_are_not_cut_to_32_bits(value):
    index = index_with(value)
    with pytest.raises(IndexError, match=naming(value, 13, 59)):
        scatter_reduce(torch.ones(30, 2), index, dim_size=59)
    with pytest.raises(IndexError, match=naming(value, 13, 59)):
        gather(torch.ones(59, 2), index)


@pytest.mark.parametrize("value", [977, -4, 2**32 + 1])
def test_full_rank_gather_index_out_of_range(value):
    with pytest.raises(IndexError, match="^gather: index must .*" + naming(value, 59)):
        gather(torch.ones(59, 2), index_with(value)[:, None].repeat(1, 2))


def test_negative_index_without_dim_size():
    with pytest.raises(IndexError, match=naming(-4, 13)):
        scatter_reduce(torch.ones(30), index_with(-4))


@pytest.mark.parametrize("layout", [(30, 2), (2, 30)], ids=str)
def test_position_counts_along_dim(layout):
    dim = layout.index(30)
    index = index_with(977)
    ones = [1, 1]
    ones[dim] = 30
    for form in (index, index.view(ones), index.view(ones).expand(layout)):
        with pytest.raises(IndexError, match=naming(977, 13, 59)):
            scatter_reduce(torch.ones(layout), form, dim, 59)


def test_the_first_of_several_bad_entries_is_named():
    index = torch.zeros(400_000, dtype=torch.int64)
    index[[150_001, 150_002, 399_999]] = torch.tensor([977, 978, 979])
    for _ in range(3):
        with pytest.raises(IndexError, match=naming(977, 150001, 59)):
            scatter_reduce(torch.ones(400_000), index, dim_size=59)
        with pytest.raises(IndexError, match=naming(977, 150001, 59)):
            gather(torch.ones(59, 1), index)


def test_out_bounds_the_index_too():
    out = torch.zeros(59)
    with pytest.raises(IndexError, match=naming(977, 13, 59)):
        scatter_reduce(torch.ones(30), index_with(977), include_self=True, out=out)
    assert bool((out == 0).all())


@pytest.mark.parametrize(
    "shape",
    [(6, 2), (2, 6), (6, 3, 1), (3, 6), (1, 3), (), (6, 1, 1), (1, 6)],
    ids=str,
)
def test_index_shape(shape):
    index = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match="scatter_reduce: index must .*" + shown(shape)):
        scatter_reduce(SRC, index, 0, 3)


@pytest.mark.parametrize("length", [0, 1, 5, 7])
def test_index_length(length):
    index = torch.zeros(length, dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"scatter_reduce: index must .*\b6\b.*\b{length}\b"):
        scatter_reduce(SRC, index, 0, 3)


def test_one_column_of_index_is_not_one_column_of_the_result():
    """torch reduces only column 0 for an [E, 1] index."""
    out = scatter_reduce(SRC, INDEX[:, None], 0, 3)
    assert out.tolist() == [[2.0] * 3] * 3


@pytest.mark.parametrize("shape", [(6, 4), (6, 3, 1), (), (4, 6)], ids=str)
def test_gather_index_shape(shape):
    index = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match="gather: index must .*" + shown(shape)):
        gather(SRC, index)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bool, torch.uint8, torch.int16, torch.complex64], ids=str
)
def test_index_dtype(dtype):
    for name, function in (("scatter_reduce", scatter_reduce), ("gather", gather)):
        with pytest.raises(TypeError, match=rf"{name}: index must .*int32.*int64.*{dtype}"):
            function(SRC, INDEX.to(dtype))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool], ids=str)
def test_src_dtype(dtype):
    with pytest.raises(TypeError, match=rf"scatter_reduce: src must .*{dtype}"):
        scatter_reduce(SRC.to(dtype), INDEX)


@pytest.mark.parametrize("bad", [None, [1.0], 3.0])
def test_argument_types(bad):
    kind = type(bad).__name__
    with pytest.raises(TypeError, match=rf"scatter_reduce: src must .*{kind}"):
        scatter_reduce(bad, INDEX)
    with pytest.raises(TypeError, match=rf"scatter_reduce: index must .*{kind}"):
        scatter_reduce(SRC, bad)
    with pytest.raises(TypeError, match=rf"gather: x must .*{kind}"):
        gather(bad, INDEX)
    with pytest.raises(TypeError, match=rf"gather: index must .*{kind}"):
        gather(SRC, bad)


def test_scalars_have_no_dimension_to_reduce():
    with pytest.raises(ValueError, match=r"scatter_reduce: src must .*dim"):
        scatter_reduce(torch.tensor(1.0), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"gather: x must .*dim"):
        gather(torch.tensor(1.0), torch.tensor([0]))


@pytest.mark.parametrize("dim", [2, -3, 100])
def test_dim(dim):
    with pytest.raises((IndexError, ValueError), match=rf"scatter_reduce: dim must .*{dim}"):
        scatter_reduce(SRC, INDEX, dim)
    with pytest.raises((IndexError, ValueError), match=rf"gather: dim must .*{dim}"):
        gather(SRC, INDEX, dim)


def test_dim_size():
    with pytest.raises(ValueError, match=r"scatter_reduce: dim_size must .*-1"):
        scatter_reduce(SRC, INDEX, dim_size=-1)
    with pytest.raises(TypeError, match=r"scatter_reduce: dim_size must .*float"):
        scatter_reduce(SRC, INDEX, dim_size=3.0)


@pytest.mark.parametrize("bad", ["summ", "", "SUM", None])
def test_reduce_name(bad):
    names = "sum.*mean.*amax.*amin"
    with pytest.raises((ValueError, TypeError), match=f"scatter_reduce: reduce must .*{names}"):
        scatter_reduce(SRC, INDEX, reduce=bad)


def test_ties_name():
    with pytest.raises(ValueError, match=r"scatter_reduce: ties must .*even.*first.*last"):
        scatter_reduce(SRC, INDEX, reduce="amax", ties="last")


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_return_arg_needs_a_winner(reduce):
    with pytest.raises(ValueError, match=f"scatter_reduce: return_arg .*amax.*amin.*{reduce}"):
        scatter_reduce(SRC, INDEX, reduce=reduce, return_arg=True)


def test_devices_must_agree():
    meta = INDEX.to("meta")
    with pytest.raises(ValueError, match=r"scatter_reduce: index .*device.*(cpu.*meta|meta.*cpu)"):
        scatter_reduce(SRC, meta, dim_size=3)
    with pytest.raises(ValueError, match=r"gather: index .*device.*(cpu.*meta|meta.*cpu)"):
        gather(SRC, meta)


def test_include_self_needs_out():
    with pytest.raises(ValueError, match=r"scatter_reduce: include_self .*out"):
        scatter_reduce(SRC, INDEX, include_self=True)


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 3, 1), (3, 4)], ids=str)
def test_out_shape(shape):
    with pytest.raises(ValueError, match="scatter_reduce: out must .*" + shown(shape)):
        scatter_reduce(SRC, INDEX, include_self=True, out=torch.zeros(shape))


def test_out_and_dim_size_must_agree():
    with pytest.raises(ValueError, match=r"scatter_reduce: .*\b5\b"):
        scatter_reduce(SRC, INDEX, dim_size=5, include_self=True, out=torch.zeros(3, 3))


def test_out_dtype():
    out = torch.zeros(3, 3, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"scatter_reduce: out must .*float32.*float64"):
        scatter_reduce(SRC, INDEX, include_self=True, out=out)


def test_out_that_cannot_be_written():
    leaf = torch.zeros(3, 3, requires_grad=True)
    with pytest.raises(ValueError, match=r"^scatter_reduce: out must not be a leaf that requires"):
        scatter_reduce(SRC, INDEX, out=leaf)
    with torch.no_grad():
        assert scatter_reduce(SRC, INDEX, out=leaf).tolist() == [[2.0] * 3] * 3
    with pytest.raises(ValueError, match=r"^scatter_reduce: out must have memory of its own"):
        scatter_reduce(SRC, INDEX, out=torch.zeros(1, 3).expand(3, 3))
