"""GATv2's scores: against float64 messages, derivatives, long rows, threads."""

import pytest
import torch

from edgeweave._plan import plan_for_edges
from edgeweave._plan._attention import plan_scores, scores_messages
from edgeweave._plan._plan import Plan

DTYPES = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def operands(dst: int, src: int, edges: int, features: int, dtype: torch.dtype):
    index = torch.stack([torch.randint(0, src, (edges,)), torch.randint(0, dst, (edges,))])
    left = torch.randn(dst, features).to(dtype).requires_grad_()
    right = torch.randn(src, features).to(dtype).requires_grad_()
    att = torch.randn(features).to(dtype).requires_grad_()
    return index, left, right, att


def check(index, left, right, att, heads, tolerance, wide=False):
    plan = Plan(index[1], index[0], left.shape[0], right.shape[0], force_wide=wide)
    out = plan_scores(plan, left, right, att, heads, 0.2)
    exact_leaves = [t.detach().double().requires_grad_() for t in (left, right, att)]
    exact = scores_messages(*exact_leaves, index[1], index[0], heads, 0.2)
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(exact)
    grads = torch.autograd.grad(out, [left, right, att], cotangent.to(out.dtype))
    expected = torch.autograd.grad(exact, exact_leaves, cotangent)
    for a, e in zip([out, *grads], [exact, *expected], strict=True):
        assert a.dtype is left.dtype
        scale = max(float(e.detach().abs().max()), 1e-30) if e.numel() else 1.0
        torch.testing.assert_close(a.double(), e, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 70])
def test_widths(width, heads, dtype, wide):
    check(*operands(20, 30, 150, heads * width, dtype), heads, DTYPES[dtype], wide)


@pytest.mark.parametrize("heads", [1, 2])
def test_rows_that_are_cut_in_chunks(heads):
    index, left, right, att = operands(5, 6, 20_000, 12, torch.float32)
    # The cotangent climbs from -1 to 1, so that partial sums are ten times the result's size.
    check(index, left, right, att, heads, 1e-4)


def test_threads_do_not_change_bits():
    index, left, right, att = operands(50, 60, 30_000, 24, torch.float32)
    index[1, :9000] = 3
    plan = plan_for_edges(index, 60, 50)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            out = plan_scores(plan, left, right, att, 3, 0.2)
            results.append([out, *torch.autograd.grad(out.sum(), [left, right])])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_gradcheck_and_gradgradcheck():
    index, left, right, att = operands(4, 5, 9, 6, torch.float64)
    plan = plan_for_edges(index, 5, 4)

    def run(a, b, c):
        return plan_scores(plan, a, b, c, 2, 0.2)

    assert torch.autograd.gradcheck(run, (left, right, att))
    assert torch.autograd.gradgradcheck(run, (left, right, att))


def test_not_a_number_stays():
    index = torch.tensor([[0, 1], [0, 0]])
    plan = plan_for_edges(index, 2, 1)
    right = torch.tensor([[float("nan"), 1.0], [1.0, 1.0]])
    out = plan_scores(plan, torch.zeros(1, 2), right, torch.ones(2), 2, 0.2)
    assert out.isnan().tolist() == [[True, False], [False, False]]


def test_what_does_not_fit_is_refused():
    plan = plan_for_edges(torch.tensor([[0, 1], [0, 0]]), 2, 1)
    with pytest.raises(ValueError, match="dst must be"):
        plan_scores(plan, torch.zeros(3, 2), torch.zeros(2, 2), torch.ones(2), 1, 0.2)
    with pytest.raises(ValueError, match="src must match"):
        plan_scores(plan, torch.zeros(1, 2), torch.zeros(5, 2), torch.ones(2), 1, 0.2)
    with pytest.raises(ValueError, match="att must be"):
        plan_scores(plan, torch.zeros(1, 2), torch.zeros(2, 2), torch.ones(3), 1, 0.2)
    with pytest.raises(ValueError, match="heads must divide"):
        plan_scores(plan, torch.zeros(1, 2), torch.zeros(2, 2), torch.ones(2), 3, 0.2)
