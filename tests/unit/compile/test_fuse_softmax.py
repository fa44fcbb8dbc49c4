"""Pass `fuse_softmax`: the softmax over the edges of each node."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

N, E = 9, 60


@pytest.fixture
def edges() -> Tensor:
    return torch.randint(0, N - 1, (2, E))


def expanded(index: Tensor, like: Tensor) -> Tensor:
    return index.view(-1, *[1] * (like.dim() - 1)).expand_as(like)


def softmax(scores, edges, *, eps=1e-16, reduce="amax", top=None, bottom=None, detach=True):
    """PyG's formula, with a place for each mistake."""
    index = edges[1]
    values = scores.detach() if detach else scores
    size = (N, *scores.shape[1:])
    maxima = values.new_zeros(size).scatter_reduce_(
        0, expanded(index, values), values, reduce, include_self=False
    )
    out = (scores - maxima.index_select(0, edges[top or 1])).exp()
    sums = out.new_zeros(size).scatter_add_(0, expanded(index, out), out) + eps
    return out / sums.index_select(0, edges[1 if bottom is None else bottom])


VIEWS = {1: lambda t: t.view(-1), 2: lambda t: t.view(-1, 2), 3: lambda t: t.view(-1, 2, 3)}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("shape", [(E,), (E, 2), (E, 2, 3)])
def test_fires(rewrite, edges, shape, dynamic):
    def function(scores, edges):
        # With dynamic=True the sizes of inputs are symbols, as those of layers' parameters are not.
        return softmax(VIEWS[len(shape)](scores), edges, eps=1e-16)

    found = rewrite(function, torch.randn(shape) * 20, edges, dynamic=dynamic)
    assert found.after["edgeweave.softmax"] == 1
    rest = {"reshape", "view", "getitem", "edgeweave.softmax", "size", "Size"}
    assert set(found.after) <= rest
    (done,) = found.rewrites
    assert done.name == "fuse_softmax"
    assert "return out / sums.index_select" in done.source


@pytest.mark.parametrize("options", [{"eps": 0.0}, {"detach": False}])
def test_fires_on_other_spellings(rewrite, edges, options):
    found = rewrite(lambda s, e: softmax(s, e, **options), torch.randn(E, 2), edges)
    assert found.after["edgeweave.softmax"] == 1


@pytest.mark.parametrize(
    "options",
    [{"eps": 1e-3}, {"reduce": "amin"}, {"bottom": 0}],
    ids=["an eps that counts", "minima", "another index"],
)
def test_refuses(rewrite, edges, options):
    found = rewrite(lambda s, e: softmax(s, e, **options), torch.randn(E, 2), edges)
    assert found.after["edgeweave.softmax"] == 0


def test_refuses_maxima_that_are_looked_up_by_another_index(rewrite, edges):
    def function(scores, edges):
        index = edges[1]
        maxima = scores.new_zeros(N).scatter_reduce_(0, index, scores, "amax", include_self=False)
        out = (scores - maxima[edges[0]]).exp()
        return out / (out.new_zeros(N).scatter_add_(0, index, out) + 1e-16)[index]

    assert rewrite(function, torch.randn(E), edges).after["edgeweave.softmax"] == 0


def test_refuses_exponentials_with_another_user(rewrite, edges):
    def function(scores, edges):
        index = edges[1]
        maxima = scores.new_zeros(N).scatter_reduce_(0, index, scores, "amax", include_self=False)
        out = (scores - maxima[index]).exp()
        return out / (out.new_zeros(N).scatter_add_(0, index, out) + 1e-16)[index], out

    assert rewrite(function, torch.randn(E), edges).after["edgeweave.softmax"] == 0


def test_refuses_scores_written_in_between(rewrite, edges):
    def function(scores, edges):
        scores = scores.detach() * 1
        index = edges[1]
        maxima = scores.new_zeros(N).scatter_reduce_(0, index, scores, "amax", include_self=False)
        scores.mul_(2)
        out = (scores - maxima[index]).exp()
        return out / (out.new_zeros(N).scatter_add_(0, index, out) + 1e-16)[index]

    assert rewrite(function, torch.randn(E), edges).after["edgeweave.softmax"] == 0


def test_refuses_integers(rewrite, edges):
    def function(scores, edges):
        return torch.zeros(N, dtype=torch.int64).scatter_add_(0, edges[1], scores)

    found = rewrite(function, torch.arange(E), edges, exact=False)
    assert found.rewrites == []
