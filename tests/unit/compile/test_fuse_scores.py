"""Pass `fuse_scores`: what it takes, what it leaves alone, and the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import edgeweave.compile
from edgeweave.compile._record import recording

N, E, H, C = 9, 40, 2, 3


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    edges = torch.randint(0, N, (2, E))
    return torch.randn(N, H, C), torch.randn(N, H, C), torch.randn(1, H, C), edges


def dots(a, b, att, edges):
    return (a.index_select(0, edges[1]) * b[edges[0]]).sum(-1) / 2


def dots_turned(a, b, att, edges):
    return (b.index_select(0, edges[0]) * a.index_select(0, edges[1])).sum(dim=2)


def dots_of_two_indices(a, b, att, edges):
    return (a[edges[1] % 5] * b[edges[0]]).sum(-1)


def scores(a, b, att, edges):
    return (functional.leaky_relu(a[edges[1]] + b[edges[0]], 0.2) * att).sum(dim=-1)


def scores_turned(a, b, att, edges):
    return (att * functional.leaky_relu(b[edges[0]] + a[edges[1]])).sum(-1)


def dots_kept(a, b, att, edges):
    product = a[edges[1]] * b[edges[0]]
    return product.sum(-1) + product.amax(-1)


def dots_over_heads(a, b, att, edges):
    return (a[edges[1]] * b[edges[0]]).sum(1)


def dots_with_kept_dimension(a, b, att, edges):
    return (a[edges[1]] * b[edges[0]]).sum(-1, keepdim=True)


def scores_in_place(a, b, att, edges):
    return (functional.leaky_relu(a[edges[1]] + b[edges[0]], 0.2, True) * att).sum(-1)


def scores_with_a_factor(a, b, att, edges):
    return (functional.leaky_relu(torch.add(a[edges[1]], b[edges[0]], alpha=2)) * att).sum(-1)


def scores_edited(a, b, att, edges):
    rows = a[edges[1]] + b[edges[0]]
    b.detach().add_(1)
    return (functional.leaky_relu(rows) * att).sum(-1)


def _run(function, dtype=torch.float32):
    *floats, edges = _inputs()
    leaves = [t.to(dtype).requires_grad_() for t in floats]
    out = function(*leaves, edges)
    torch.manual_seed(1)
    grads = torch.autograd.grad(out, leaves, torch.randn(out.shape).to(dtype), allow_unused=True)
    return out, *grads


def _compiled(function):
    torch._dynamo.reset()
    options = {"engine": "eager"}
    compiled = torch.compile(function, backend="edgeweave", options=options, fullgraph=True)
    with recording() as records:
        results = _run(compiled)
    (record,) = records
    return results, record.ops


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (dots, "edgeweave.edge_dots"),
        (dots_turned, "edgeweave.edge_dots"),
        (dots_of_two_indices, "edgeweave.edge_dots"),
        (scores, "edgeweave.edge_scores"),
        (scores_turned, "edgeweave.edge_scores"),
    ],
)
def test_it_fires(function, op):
    results, ops = _compiled(function)
    assert ops == {op: 1}
    for ours, exact in zip(results, _run(function, torch.float64), strict=True):
        assert (ours is None) == (exact is None)
        if exact is not None:
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        dots_kept,
        dots_over_heads,
        dots_with_kept_dimension,
        scores_in_place,
        scores_with_a_factor,
        scores_edited,
    ],
)
def test_it_leaves_alone(function):
    results, ops = _compiled(function)
    assert not {"edgeweave.edge_dots", "edgeweave.edge_scores"} & set(ops)
    for ours, exact in zip(results, _run(function), strict=True):
        if exact is not None:
            torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)


def test_ops_pass_torchs_own_checks():
    a, b, att, edges = _inputs()
    rows = [t.flatten(1).contiguous().requires_grad_() for t in (a, b)]
    torch.library.opcheck(torch.ops.edgeweave.edge_dots.default, (edges, *rows, H, False))
    args = (edges, *rows, att.flatten().clone().requires_grad_(), H, 0.2, False)
    torch.library.opcheck(torch.ops.edgeweave.edge_scores.default, args)


def test_importing_the_backend_is_enough():
    assert "fuse_scores" in [each.name for each in edgeweave.compile.PASSES]
