"""`sparse.mm` against float64 loops: every dtype, width, rank, reduce and layout."""

from __future__ import annotations

import _reference as ref
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

import edgeweave
from edgeweave import sparse

REDUCES = ("sum", "mean", "amax", "amin")
# Around each vector width (4 to 16 fp32 lanes, 8 to 32 bf16 lanes), its multiples, and strips.
WIDTHS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 256, 300)


def random_edges(num_src: int, num_dst: int, num_edges: int, seed: int = 0) -> torch.Tensor:
    """Return unsorted edges with duplicates whose last destination and last source are isolated."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack(
        [
            torch.randint(0, max(num_src - 1, 1), (num_edges,), generator=generator),
            torch.randint(0, max(num_dst - 1, 1), (num_edges,), generator=generator),
        ]
    )


def check(edge_index, x, num_dst, reduce, weight, out, what):
    """Compare `out` with the reference, within the rounding error that it may have."""
    expected = ref.mm(edge_index, x, num_dst, reduce, weight)
    if reduce in ("amax", "amin") and weight is None:
        ref.assert_exact(out, expected.value, what)
        return
    terms = expected.degree.reshape(-1, *([1] * (out.dim() - 1)))
    if reduce in ("amax", "amin"):
        terms = 0
    bound = ref.error_bound(expected, terms, out.dtype, roundings=2)
    ref.assert_within(out, expected.value, bound, what)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
def test_every_width_unweighted(dtype, reduce):
    edges = random_edges(23, 19, 150)
    for width in WIDTHS:
        x = torch.randn(23, width).to(dtype)
        graph = sparse.Graph(edges, size=(23, 19))
        out = sparse.mm(graph, x, reduce)
        assert out.dtype == dtype
        check(edges, x, 19, reduce, None, out, f"F={width}")


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
def test_every_width_weighted(dtype, reduce):
    edges = random_edges(23, 19, 150)
    weight = torch.randn(150).to(dtype)
    graph = sparse.Graph(edges, size=(23, 19))
    for width in WIDTHS:
        x = torch.randn(23, width).to(dtype)
        out = sparse.mm(graph, x, reduce, weight=weight)
        check(edges, x, 19, reduce, weight, out, f"F={width}")


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "width"), [(1, 8), (2, 1), (3, 5), (4, 16), (8, 17), (2, 0)])
def test_heads(heads, width, dtype, reduce):
    edges = random_edges(23, 19, 150)
    graph = sparse.Graph(edges, size=(23, 19))
    x = torch.randn(23, heads, width).to(dtype)
    for weight in (None, torch.randn(150).to(dtype), torch.randn(150, heads).to(dtype)):
        out = sparse.mm(graph, x, reduce, weight=weight)
        assert out.shape == (19, heads, width)
        what = "no weight" if weight is None else f"weight {tuple(weight.shape)}"
        check(edges, x, 19, reduce, weight, out, what)


@pytest.mark.parametrize("reduce", REDUCES)
def test_heads_without_features(reduce):
    """`[N, H]` with weights `[E, H]`: one value for each head."""
    edges = random_edges(9, 9, 40)
    x, weight = torch.randn(9, 3), torch.randn(40, 3)
    out = sparse.mm(edges, x, reduce, weight=weight)
    check(edges, x, 9, reduce, weight, out, "[N, H]")


@pytest.mark.parametrize("reduce", REDUCES)
def test_one_dimensional_features(reduce):
    edges = random_edges(9, 9, 40)
    x, weight = torch.randn(9), torch.randn(40)
    for w in (None, weight):
        out = sparse.mm(edges, x, reduce, weight=w)
        assert out.shape == (9,)
        check(edges, x, 9, reduce, w, out, "[N]")


@pytest.mark.parametrize("reduce", ["sum", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integer_features(dtype, reduce):
    edges = random_edges(23, 19, 150)
    x = torch.randint(-1000, 1000, (23, 9), dtype=dtype)
    out = sparse.mm(sparse.Graph(edges, size=(23, 19)), x, reduce)
    assert out.dtype == dtype
    ref.assert_exact(out, ref.mm(edges, x, 19, reduce).value)


def test_int64_features_keep_all_64_bits():
    edges = torch.tensor([[0, 1, 2], [0, 0, 1]])
    x = torch.tensor([[2**62 + 1], [-3], [-(2**53) - 1]])
    graph = sparse.Graph(edges, size=(3, 2))
    assert sparse.mm(graph, x).tolist() == [[2**62 - 2], [-(2**53) - 1]]
    assert sparse.mm(graph, x, "amax").tolist() == [[2**62 + 1], [-(2**53) - 1]]


@pytest.mark.parametrize(
    ("spelling", "canonical"), [("add", "sum"), ("max", "amax"), ("min", "amin")]
)
def test_spellings_of_other_libraries(spelling, canonical):
    edges, x = random_edges(9, 9, 40), torch.randn(9, 5)
    assert torch.equal(sparse.mm(edges, x, spelling), sparse.mm(edges, x, canonical))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("width", [1, 15, 16, 33])
def test_index_dtype_and_stride(index_dtype, width):
    edges = random_edges(23, 23, 150).to(index_dtype)
    x = torch.randn(23, width)
    expected = sparse.mm(edges, x)
    check(edges, x, 23, "sum", None, expected, "contiguous")
    pairs = edges.t().contiguous()  # [E, 2]
    padded = torch.full((2, 300), 22, dtype=index_dtype)
    padded[:, ::2] = edges
    for layout, strided in {"transposed": pairs.t(), "every other": padded[:, ::2]}.items():
        assert not strided.is_contiguous()
        assert torch.equal(sparse.mm(strided, x), expected), layout


@pytest.mark.parametrize("reduce", REDUCES)
def test_non_contiguous_features_and_weights(reduce):
    edges = random_edges(23, 19, 150)
    graph = sparse.Graph(edges, size=(23, 19))
    wide = torch.randn(46, 20)
    layouts = {
        "columns": wide[:23, ::2],
        "rows": wide[::2, :10],
        "transposed": torch.randn(10, 23).t(),
        "expanded rows": torch.randn(1, 10).expand(23, 10),
        "expanded columns": torch.randn(23, 1).expand(23, 10),
        "heads last": torch.randn(23, 5, 2).transpose(1, 2),
        "offset by one": torch.randn(23 * 10 + 1)[1:].view(23, 10),
    }
    weight = torch.randn(300)[::2]
    for name, x in layouts.items():
        for w in (None, weight):
            out = sparse.mm(graph, x, reduce, weight=w)
            assert torch.equal(
                out,
                sparse.mm(
                    graph, x.contiguous().clone(), reduce, weight=None if w is None else w.clone()
                ),
            ), name
            check(edges, x, 19, reduce, w, out, name)


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"),
    [
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.int64, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("reduce", REDUCES)
def test_result_type_is_that_of_torch(x_dtype, weight_dtype, reduce):
    edges = random_edges(9, 9, 40)
    x = torch.randint(-4, 5, (9, 6)).to(x_dtype)
    weight = torch.randint(-4, 5, (40,)).to(weight_dtype)
    out = sparse.mm(edges, x, reduce, weight=weight)
    assert out.dtype == torch.result_type(x, weight)
    check(edges, x, 9, reduce, weight, out, f"{x_dtype} {weight_dtype}")


def test_autocast_does_not_change_the_result():
    edges, x, weight = random_edges(9, 9, 40), torch.randn(9, 6), torch.randn(40)
    expected = sparse.mm(edges, x, "sum", weight=weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = sparse.mm(edges, x, "sum", weight=weight)
        mixed = sparse.mm(edges, x.bfloat16(), "sum", weight=weight)
    assert out.dtype == torch.float32
    assert torch.equal(out, expected)
    assert mixed.dtype == torch.float32


@pytest.mark.parametrize("reduce", REDUCES)
def test_nothing_to_reduce(reduce):
    no_edges = torch.empty(2, 0, dtype=torch.int64)
    assert sparse.mm(no_edges, torch.randn(4, 3), reduce).tolist() == [[0.0] * 3] * 4
    assert sparse.mm(no_edges, torch.randn(0, 3), reduce).shape == (0, 3)
    assert sparse.mm(no_edges, torch.randn(4, 0), reduce).shape == (4, 0)
    assert sparse.mm(no_edges, torch.randn(0, 0), reduce).shape == (0, 0)
    edges = torch.tensor([[0, 1], [1, 0]])
    assert sparse.mm(edges, torch.randn(2, 0), reduce).shape == (2, 0)
    only_sources = sparse.Graph(no_edges, size=(5, 0))
    assert sparse.mm(only_sources, torch.randn(5, 3), reduce).shape == (0, 3)
    only_targets = sparse.Graph(no_edges, size=(0, 2))
    assert sparse.mm(only_targets, torch.randn(0, 3), reduce).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("reduce", REDUCES)
def test_one_node_self_loops_and_duplicates(reduce):
    x = torch.tensor([[2.0, -3.0]])
    once = sparse.mm(torch.tensor([[0], [0]]), x, reduce)
    assert once.tolist() == [[2.0, -3.0]]
    thrice = sparse.mm(torch.zeros(2, 3, dtype=torch.int64), x, reduce)
    factor = 3 if reduce == "sum" else 1
    assert thrice.tolist() == [[2.0 * factor, -3.0 * factor]]


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("leaves", [4095, 4096, 4097, 8192, 20_001])
def test_star(leaves, reduce):
    """A hub whose row is cut every 4,096 edges, also right at a cut."""
    edges = torch.stack([torch.arange(1, leaves + 1), torch.zeros(leaves, dtype=torch.int64)])
    edges = edges[:, torch.randperm(leaves)]
    x, weight = torch.randn(leaves + 1, 3), torch.randn(leaves)
    x[0] = 100  # not a leaf: must not enter
    for w in (None, weight):
        out = sparse.mm(edges, x, reduce, weight=w)
        check(edges, x, leaves + 1, reduce, w, out, f"{leaves} leaves")


def test_reversed_star_has_long_columns_not_rows():
    leaves = 9000
    edges = torch.stack([torch.zeros(leaves, dtype=torch.int64), torch.arange(1, leaves + 1)])
    x = torch.randn(leaves + 1, 4)
    expected = x[0].repeat(leaves + 1, 1)
    expected[0] = 0
    assert torch.equal(sparse.mm(edges, x), expected)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
def test_as_close_to_float64_as_torch(dtype, reduce):
    """The worst entry is no further from float64 than twice that of scatter_reduce."""
    edges = random_edges(400, 40, 20_000)
    x = torch.randn(400, 17).to(dtype)
    graph = sparse.Graph(edges, size=(400, 40))
    expected = ref.mm(edges, x, 40, reduce).value
    ours = np.abs(ref.to_numpy(sparse.mm(graph, x, reduce)) - expected).max()
    index = edges[1][:, None].expand(-1, 17)
    stock = x.new_zeros(40, 17).scatter_reduce(0, index, x[edges[0]], reduce, include_self=False)
    theirs = np.abs(ref.to_numpy(stock) - expected).max()
    assert ours <= 2 * theirs


@hypothesis.given(st.data())
def test_random_graphs(data):
    """Small integers: exact in every dtype, full of ties, and of any shape."""
    num_src = data.draw(st.integers(1, 12), label="num_src")
    num_dst = data.draw(st.integers(1, 12), label="num_dst")
    num_edges = data.draw(st.integers(0, 40), label="num_edges")
    width = data.draw(st.integers(0, 40), label="width")
    reduce = data.draw(st.sampled_from(REDUCES), label="reduce")
    dtype = data.draw(st.sampled_from(ref.FLOATS), label="dtype")
    index_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]), label="index dtype")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    edges = torch.stack(
        [
            torch.randint(0, num_src, (num_edges,), generator=generator, dtype=index_dtype),
            torch.randint(0, num_dst, (num_edges,), generator=generator, dtype=index_dtype),
        ]
    )
    x = torch.randint(-3, 4, (num_src, width), generator=generator).to(dtype)
    weight = None
    if data.draw(st.booleans(), label="weighted"):
        weight = torch.randint(-2, 3, (num_edges,), generator=generator).to(dtype)
    out = sparse.mm(edgeweave.Graph(edges, size=(num_src, num_dst)), x, reduce, weight=weight)
    expected = ref.mm(edges, x, num_dst, reduce, weight)
    if reduce == "mean":
        bound = ref.error_bound(expected, 1, dtype)
        ref.assert_within(out, expected.value, bound)
    else:
        ref.assert_exact(out, expected.value)
