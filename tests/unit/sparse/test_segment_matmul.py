"""`segment_matmul` against a product per row, whatever way it chooses."""

from __future__ import annotations

import pytest
import torch

from edgeweave.sparse import segment_matmul
from edgeweave.sparse._segment_matmul import choose_strategy

# Segments and what they are to run as, with K = 3 and N = 2.
SEGMENTS = {
    "batched": [0, 10, 20, 30, 40],
    "padded": [0, *range(1, 200, 3), 200],
    "loop": [0, 1, 2, 20_000],
}


def per_row(x: torch.Tensor, ptr: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    group = torch.repeat_interleave(torch.arange(len(ptr) - 1), ptr.diff().long())
    return torch.einsum("ek,ekn->en", x, weight[group])


@pytest.mark.parametrize("strategy", SEGMENTS)
def test_each_strategy_is_reached(strategy):
    assert choose_strategy(SEGMENTS[strategy], 3, 2) == strategy


@pytest.mark.parametrize("strategy", SEGMENTS)
@pytest.mark.parametrize("ptr_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_value_and_gradient(dtype, ptr_dtype, strategy):
    """Small integers: exact in every dtype, as long as the sums of the weights' gradient are."""
    ptr = torch.tensor(SEGMENTS[strategy], dtype=ptr_dtype)
    x = torch.randint(-2, 3, (int(ptr[-1]), 3)).to(dtype).requires_grad_()
    weight = torch.randint(-2, 3, (len(ptr) - 1, 3, 2)).to(dtype).requires_grad_()
    out = segment_matmul(x, ptr, weight)
    assert out.dtype == dtype
    wide, wide_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    expected = per_row(wide, ptr, wide_weight)
    assert torch.equal(out.double(), expected)
    upstream = torch.randint(-2, 3, out.shape).to(dtype)
    grads = torch.autograd.grad(out, (x, weight), upstream)
    formulas = torch.autograd.grad(expected, (wide, wide_weight), upstream.double())
    for grad, formula in zip(grads, formulas, strict=True):
        assert torch.equal(grad, formula.to(dtype))


@pytest.mark.parametrize("segments", [[0, 3, 3, 5, 8], [0, 4, 8], [0, 0, 8], [0] + [8] * 12])
def test_gradcheck_and_gradgradcheck(segments):
    ptr = torch.tensor(segments)
    x = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(ptr) - 1, 3, 2, dtype=torch.float64, requires_grad=True)

    def function(x, weight):
        return segment_matmul(x, ptr, weight)

    assert torch.autograd.gradcheck(function, (x, weight), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (x, weight))


def test_strided_operands():
    ptr = torch.tensor([0, 2, 6])
    x, weight = torch.randn(3, 6).t(), torch.randn(2, 4, 3).mT
    torch.testing.assert_close(segment_matmul(x, ptr, weight), per_row(x, ptr, weight))


@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 0, 2), (4, 3, 0)])
def test_nothing(shape):
    rows, columns, out_columns = shape
    ptr = torch.tensor([0, 0, rows])
    x = torch.randn(rows, columns, requires_grad=True)
    weight = torch.randn(2, columns, out_columns, requires_grad=True)
    out = segment_matmul(x, ptr, weight)
    assert out.shape == (rows, out_columns)
    assert out.eq(0).all()
    out.sum().backward()
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)
    assert rows > 0 or weight.grad.eq(0).all()
    none = segment_matmul(torch.randn(0, 3), torch.tensor([0]), torch.randn(0, 3, 2))
    assert none.shape == (0, 2)


def test_inference_mode_then_training():
    ptr = torch.tensor([0, 2, 6])
    x, weight = torch.randn(6, 3), torch.randn(2, 3, 4)
    with torch.inference_mode():
        before = segment_matmul(x, ptr, weight)
    weight.requires_grad_()
    out = segment_matmul(x, ptr, weight)
    assert torch.equal(before, out)
    out.sum().backward()
    assert weight.grad is not None


def test_errors():
    ptr, x, weight = torch.tensor([0, 2, 6]), torch.randn(6, 3), torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match=r"segment_matmul: x must have shape \[E, K\]"):
        segment_matmul(x[0], ptr, weight)
    with pytest.raises(
        ValueError, match=r"weight must have shape .* = \[2, 3, N\], got \[2, 4, 4\]"
    ):
        segment_matmul(x, ptr, torch.randn(2, 4, 4))
    with pytest.raises(
        ValueError, match=r"weight must have shape .* = \[2, 3, N\], got \[3, 3, 4\]"
    ):
        segment_matmul(x, ptr, torch.randn(3, 3, 4))
    with pytest.raises(
        TypeError, match=r"weight must have x's dtype torch.float32, got torch.float64"
    ):
        segment_matmul(x, ptr, weight.double())
    with pytest.raises(TypeError, match=r"segment_matmul: x must be floating point"):
        segment_matmul(x.long(), ptr, weight.long())
    with pytest.raises(ValueError, match=r"segment_matmul: ptr must run from 0 to .*6, got 0 to 7"):
        segment_matmul(x, torch.tensor([0, 2, 7]), weight)
    with pytest.raises(ValueError, match=r"segment_matmul: ptr must not decrease"):
        segment_matmul(x, torch.tensor([0, 7, 6]), weight)
    with pytest.raises(TypeError, match=r"segment_matmul: ptr must be int32 or int64"):
        segment_matmul(x, ptr.float(), weight)
