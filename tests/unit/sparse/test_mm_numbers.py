"""Numbers that other libraries get wrong: low precision, NaN, infinities, ties and zeros."""

from __future__ import annotations

import math

import _reference as ref
import pytest
import torch

from edgeweave import sparse

NAN, INF = math.nan, math.inf


def into_one_node(num_edges: int) -> sparse.Graph:
    """Return the graph in which sources 0..num_edges-1 all point to the one destination."""
    edges = torch.stack([torch.arange(num_edges), torch.zeros(num_edges, dtype=torch.int64)])
    return sparse.Graph(edges, size=(num_edges, 1))


def column(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


@pytest.mark.parametrize("width", [1, 8, 16, 33])
def test_bf16_sum_of_a_thousand_ones(width):
    out = sparse.mm(into_one_node(1000), torch.ones(1000, width, dtype=torch.bfloat16))
    assert out.tolist() == [[1000.0] * width]


@pytest.mark.parametrize("width", [1, 16])
def test_fp16_mean_of_seventy_thousand_ones(width):
    x = torch.ones(70_000, width, dtype=torch.float16)
    assert sparse.mm(into_one_node(70_000), x, "mean").tolist() == [[1.0] * width]


def test_a_million_fp16_values_in_one_bucket():
    """2^-5 a million times is exactly 31250 in fp32, and rounds once."""
    x = torch.full((1_000_000, 1), 2.0**-5, dtype=torch.float16)
    expected = torch.tensor([[31250.0]]).half()
    assert torch.equal(sparse.mm(into_one_node(1_000_000), x), expected)


def test_low_precision_rounds_once():
    """256 + 1 + 1 = 258: after each addition in bf16 it would stay at 256."""
    x = column([256.0, 1.0, 1.0], torch.bfloat16)
    assert sparse.mm(into_one_node(3), x).item() == 258.0
    # fp16: 60000 + 60000 overflows; the mean does not.
    x = column([60000.0, 60000.0], torch.float16)
    assert sparse.mm(into_one_node(2), x, "mean").item() == 60000.0
    assert sparse.mm(into_one_node(2), x).item() == INF


def test_weighted_product_is_not_rounded_to_bf16():
    """(1 + 2^-7)^2 - 1 in bf16 products would be 2^-6; with fp32 products the 2^-14 stays."""
    step = 1 + 2.0**-7
    x = column([step, -1.0], torch.bfloat16)
    weight = torch.tensor([step, 1.0], dtype=torch.bfloat16)
    expected = torch.tensor(2.0**-6 + 2.0**-14).bfloat16().item()
    assert sparse.mm(into_one_node(2), x, weight=weight).item() == expected


@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("width", [1, 3, 16, 17, 40])
def test_nan_propagates_wherever_it_stands(width, reduce, dtype):
    for position in range(5):
        x = torch.randn(5, width).to(dtype)
        x[position, width // 2] = NAN
        out = sparse.mm(into_one_node(5), x, reduce)
        expected = ref.mm(into_one_node(5).edge_index, x, 1, reduce)
        assert out.isnan().nonzero().tolist() == [[0, width // 2]]
        ref.assert_within(out, expected.value, ref.error_bound(expected, 5, dtype))


@pytest.mark.parametrize("dtype", ref.FLOATS, ids=str)
def test_infinities_are_values(dtype):
    graph = into_one_node(3)
    assert sparse.mm(graph, column([1.0, INF, 2.0], dtype), "amax").item() == INF
    assert sparse.mm(graph, column([1.0, -INF, 2.0], dtype), "amin").item() == -INF
    assert sparse.mm(graph, column([-INF] * 3, dtype), "amax").item() == -INF
    assert sparse.mm(graph, column([INF] * 3, dtype), "amin").item() == INF
    assert sparse.mm(graph, column([1.0, INF, 2.0], dtype)).item() == INF
    assert math.isnan(sparse.mm(graph, column([1.0, INF, -INF], dtype)).item())
    assert math.isnan(sparse.mm(graph, column([NAN, INF, -INF], dtype), "amax").item())


def test_zero_weight_times_infinity_is_nan_as_in_ieee():
    weight = torch.tensor([0.0, 1.0])
    for reduce in ("sum", "mean", "amax", "amin"):
        out = sparse.mm(into_one_node(2), column([INF, 1.0]), reduce, weight=weight)
        assert math.isnan(out.item()), reduce


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_extremum_of_one_sign_does_not_meet_the_empty_value(reduce):
    sign = -1.0 if reduce == "amax" else 1.0
    x = column([3.0 * sign, 2.0 * sign, 5.0 * sign])
    assert sparse.mm(into_one_node(3), x, reduce).item() == 2.0 * sign


def gradient(x: torch.Tensor, reduce: str, upstream: float = 1.0, **options) -> list[float]:
    x = x.clone().requires_grad_()
    out = sparse.mm(into_one_node(len(x)), x, reduce, **options)
    out.backward(torch.full_like(out, upstream))
    return x.grad[:, 0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("tied", [0.0, 7.0, -7.0, INF, -INF])
def test_ties_share_evenly(tied, reduce, dtype):
    loser = {"amax": -100.0, "amin": 100.0}[reduce]
    values = [tied, loser, tied]
    if (reduce == "amax" and tied == -INF) or (reduce == "amin" and tied == INF):
        values = [tied, tied]
    expected = [0.5 if value == tied else 0.0 for value in values]
    assert gradient(column(values, dtype), reduce) == expected


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_negative_zero_ties_with_zero(reduce):
    assert gradient(column([0.0, -0.0]), reduce) == [0.5, 0.5]


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_negative_gradient_is_shared_too(reduce):
    third = torch.tensor(-1.0).div(3).item()
    assert gradient(column([4.0, 4.0, 4.0]), reduce, upstream=-1.0) == [third] * 3


@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_ties_first_gives_all_to_the_first_edge(reduce):
    loser = {"amax": -9.0, "amin": 9.0}[reduce]
    values = column([loser, 2.0, 2.0, loser, 2.0])
    assert gradient(values, reduce, ties="first") == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert gradient(column([loser, NAN, 2.0, NAN]), reduce, ties="first") == [0.0, 1.0, 0.0, 0.0]


def test_ties_first_means_first_in_input_order():
    """Edges into node 0 come in the order of the input, whatever their sources are."""
    edges = torch.tensor([[3, 1, 2, 0], [0, 0, 0, 0]])
    x = torch.ones(4, 1, requires_grad=True)
    sparse.mm(edges, x, "amax", ties="first")[0].backward()
    assert x.grad[:, 0].tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("reduce", ["amax", "amin"])
def test_ties_first_is_what_torch_sparse_mm_does(reduce):
    torch.manual_seed(1)
    dense = (torch.rand(20, 20) < 0.3).float()
    x = torch.randint(0, 3, (20, 6)).float()
    grad = torch.randn(20, 6)
    stock, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    matrix = dense.to_sparse_csr()
    has_edges = dense.sum(1) > 0
    assert bool(has_edges.all())
    torch.sparse.mm(matrix, stock, reduce).backward(grad)
    sparse.mm(matrix, ours, reduce, ties="first").backward(grad)
    torch.testing.assert_close(ours.grad, stock.grad, rtol=20 * 2.0**-24, atol=20 * 2.0**-24)


@pytest.mark.parametrize("reduce", ["amax", "amin"])
@pytest.mark.parametrize("width", [1, 8, 17])
def test_nan_takes_the_whole_gradient(width, reduce):
    x = torch.tensor([1.0, NAN, 5.0, NAN, -5.0])[:, None].repeat(1, width).requires_grad_()
    sparse.mm(into_one_node(5), x, reduce).sum().backward()
    assert x.grad.tolist() == [[0.0] * width, [0.5] * width] * 2 + [[0.0] * width]


def test_empty_groups_have_no_gradient_and_give_none():
    graph = sparse.Graph(torch.tensor([[0, 0], [2, 2]]), size=(3, 4))
    for reduce in ("sum", "mean", "amax", "amin"):
        x = torch.tensor([[-4.0], [5.0], [6.0]], requires_grad=True)
        out = sparse.mm(graph, x, reduce)
        assert out[[0, 1, 3]].tolist() == [[0.0]] * 3, reduce
        out[[0, 1, 3]].sum().backward()
        assert x.grad.tolist() == [[0.0]] * 3, reduce
