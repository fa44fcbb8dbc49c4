"""The float64 reference, against sums written out by hand and torch's autograd."""

from __future__ import annotations

import pytest
import torch

from edgeweave.bench.op_graph import distinct_features
from edgeweave.bench.reference import EdgeReference, sample_columns

# Node 2 has no incoming edge; the edge 0 -> 1 occurs twice.
SRC = torch.tensor([0, 3, 0, 1, 2])
DST = torch.tensor([1, 1, 1, 0, 3])
X = torch.tensor([[1.0, -1.0], [2.0, 5.0], [4.0, 0.0], [8.0, -3.0]])


@pytest.fixture
def edges() -> EdgeReference:
    return EdgeReference(SRC, DST, 4, 4)


@pytest.mark.parametrize(
    ("reduce", "rows"),
    [
        ("sum", [[2.0, 5.0], [10.0, -5.0], [0.0, 0.0], [4.0, 0.0]]),
        ("mean", [[2.0, 5.0], [10 / 3, -5 / 3], [0.0, 0.0], [4.0, 0.0]]),
        ("amax", [[2.0, 5.0], [8.0, -1.0], [0.0, 0.0], [4.0, 0.0]]),
        ("amin", [[2.0, 5.0], [1.0, -3.0], [0.0, 0.0], [4.0, 0.0]]),
    ],
)
def test_forward(edges: EdgeReference, reduce: str, rows: list[list[float]]) -> None:
    expected = torch.tensor(rows, dtype=torch.float64)
    assert torch.allclose(edges.forward(X, reduce), expected, atol=1e-15)


def test_weighted_sum(edges: EdgeReference) -> None:
    weight = torch.tensor([1.0, 10.0, 100.0, 1000.0, 0.5])
    out = edges.forward(X, "sum", weight)
    assert out[:, 0].tolist() == [2000.0, 181.0, 0.0, 2.0]


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_gradient_is_autograds(reduce: str) -> None:
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(50, (400,), generator=generator)
    dst = torch.randint(60, (400,), generator=generator)
    x = distinct_features(50, 3).double().requires_grad_()
    grad = torch.randn(60, 3, dtype=torch.float64, generator=generator)
    start = torch.zeros(60, 3, dtype=torch.float64)
    index = dst.view(-1, 1).expand(-1, 3)
    out = start.scatter_reduce(0, index, x[src], reduce, include_self=False)
    (expected,) = torch.autograd.grad(out, x, grad)
    edges = EdgeReference(src, dst, 50, 60)
    assert torch.allclose(edges.forward(x, reduce), out, atol=1e-13)
    assert torch.allclose(edges.grad_x(x, grad, reduce), expected, atol=1e-13)


def test_unknown_reduction(edges: EdgeReference) -> None:
    with pytest.raises(ValueError, match="reduce must be 'sum', 'mean', 'amax' or 'amin'"):
        edges.forward(X, "median")


def test_sampled_columns_include_both_ends() -> None:
    for width in (1, 2, 15, 16, 17, 256):
        columns = sample_columns(width).tolist()
        assert columns[0] == 0
        assert columns[-1] == width - 1
        assert len(set(columns)) == len(columns) == min(width, 16)


def test_features_hold_no_value_twice_and_no_zero() -> None:
    features = distinct_features(70_000, 4)
    for column in features.t():
        assert column.unique().numel() == 70_000
    assert not bool((features == 0).any())
    assert features.abs().max() < 1


def test_features_refuse_more_rows_than_fp32_keeps_apart() -> None:
    with pytest.raises(ValueError, match="rows must be at most 4194304"):
        distinct_features((1 << 22) + 1, 1)
