"""Passes `replace_scatter` and `replace_gather`: reductions and gathers that stand alone."""

from __future__ import annotations

import pytest
import torch

N, E = 9, 60


@pytest.fixture
def index():
    return torch.randint(0, N - 1, (E,))


def expanded(index, like):
    return index.view(-1, *[1] * (like.dim() - 1)).expand_as(like)


VIEWS = {1: lambda t: t.view(-1), 2: lambda t: t.view(-1, 5), 3: lambda t: t.view(-1, 2, 3)}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("reduce", ["sum", "amax", "amin", "mean"])
@pytest.mark.parametrize("shape", [(E,), (E, 5), (E, 2, 3)])
def test_reductions(rewrite, index, shape, reduce, dynamic):
    def function(src, index):
        # With dynamic=True the sizes of inputs are symbols, as those of layers' parameters are not.
        src = VIEWS[len(shape)](src.sin())
        out = torch.zeros(N, *src.shape[1:])
        return out.scatter_reduce(
            0, expanded(index, src), src, reduce, include_self=reduce == "sum"
        )

    found = rewrite(function, torch.randn(shape), index, dynamic=dynamic)
    assert found.after["edgeweave.scatter"] == 1
    assert not [name for name in found.after if name.startswith("scatter")]
    assert [r.name for r in found.rewrites] == ["replace_scatter"]


def test_products_start_at_one(rewrite, index):
    def function(src, index):
        return torch.ones(N, 5).scatter_reduce_(0, expanded(index, src), src, "prod")

    found = rewrite(function, torch.rand(E, 5) + 0.5, index)
    assert found.after["edgeweave.scatter"] == 1


def test_refuses_products_that_start_at_zero(rewrite, index):
    def function(src, index):
        out = torch.zeros(N, 5)
        return out.scatter_reduce_(0, expanded(index, src), src, "prod", include_self=False)

    # torch's derivative of a product is not differentiable in fp64 at the empty slots: no numbers.
    found = rewrite(function, torch.rand(E, 5) + 0.5, index, exact=False)
    assert found.rewrites == []


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("reduce", ["amax", "amin", "mean"])
def test_index_reduce(rewrite, index, reduce):
    def function(src, index):
        return torch.zeros(N, 5).index_reduce_(0, index, src, reduce, include_self=False)

    found = rewrite(function, torch.randn(E, 5), index)
    assert found.after["edgeweave.scatter"] == 1


def test_mean_by_counts(rewrite, index):
    def function(src, index):
        total = torch.zeros(N, 5).index_add_(0, index, src.sin())
        counts = torch.zeros(N).index_add_(0, index, torch.ones(E)).clamp_(min=1)
        return total / counts[:, None]

    found = rewrite(function, torch.randn(E, 5), index)
    assert found.after["edgeweave.scatter"] == 1
    (node,) = [n for n in found.module.graph.nodes if "edgeweave.scatter" in str(n.target)]
    assert node.args[3] == "mean"


@pytest.mark.parametrize("least", [2, 0.5])
def test_refuses_means_over_other_counts(rewrite, index, least):
    def function(src, index):
        total = torch.zeros(N, 5).index_add_(0, index, src.sin())
        counts = torch.zeros(N).index_add_(0, index, torch.ones(E)).clamp(min=least)
        return total / counts[:, None]

    found = rewrite(function, torch.randn(E, 5), index)
    assert "div" in found.after


@pytest.mark.parametrize("clamped", [False, True])
def test_refuses_means_over_counts_that_are_written_to(rewrite, index, clamped):
    def function(src, index):
        src = src.sin()
        total = torch.zeros(N, 5).index_add(0, index, src)
        count = torch.zeros(N).index_add(0, index, torch.ones(E))
        if clamped:
            count = count.clamp(min=1)
        count[2] = 5
        if not clamped:
            count = count.clamp(min=1)
        return total / count.view(-1, 1)

    found = rewrite(function, torch.randn(E, 5), index)
    kinds = {n.args[3] for n in found.module.graph.nodes if "scatter" in str(n.target)}
    assert kinds == {"sum"}


def test_refuses_another_dimension(rewrite, index):
    def function(src, index):
        return torch.zeros(5, N).index_add_(1, index, src)

    assert rewrite(function, torch.randn(5, E), index).rewrites == []


def test_a_result_that_is_edited_is_still_right(rewrite, index):
    def function(src, index):
        degree = torch.zeros(N).scatter_add_(0, index, src.exp())
        root = degree.pow_(-0.5)
        return root.masked_fill_(root == float("inf"), 0)

    found = rewrite(function, torch.randn(E), index)
    assert found.after["edgeweave.scatter"] == 1


def test_an_unused_write_into_somebody_elses_tensor_stays(rewrite, index):
    def function(src, index, target):
        target = target * 1
        target.index_add_(0, index, src)
        return target.sum()

    found = rewrite(function, torch.randn(E, 5), index, torch.randn(N, 5))
    assert found.after["index_add_"] == 1


@pytest.mark.parametrize("shape", [(N,), (N, 5), (N, 2, 3)])
def test_gathers_that_record_gradients(rewrite, index, shape):
    found = rewrite(lambda x, i: x.cos().index_select(0, i).exp(), torch.randn(shape), index)
    assert found.after["edgeweave.gather"] == 1
    assert [r.name for r in found.rewrites] == ["replace_gather"]


def test_gathers_without_gradients_are_left_to_inductor(rewrite, index):
    found = rewrite(lambda x, i: x.detach()[i].exp() + x[0], torch.randn(N, 5), index)
    assert found.after["edgeweave.gather"] == 0


def test_gathers_along_another_dimension_are_left(rewrite, index):
    found = rewrite(lambda x, i: x.index_select(1, i), torch.randn(5, N), index)
    assert found.rewrites == []
