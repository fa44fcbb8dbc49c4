"""Pass `fuse_multi`: several reductions of the same entries."""

from __future__ import annotations

import pytest
import torch

N, E, F = 9, 60, 5


@pytest.fixture
def index():
    return torch.randint(0, N - 1, (E,))


def reduced(src, index, reduce, slots=N):
    full = index.view(-1, *[1] * (src.dim() - 1)).expand_as(src)
    out = torch.zeros(slots, *src.shape[1:])
    return out.scatter_reduce(0, full, src, reduce, include_self=reduce == "sum")


@pytest.mark.parametrize("shape", [(E,), (E, F), (E, 1, F)])
def test_fires(rewrite, index, shape):
    def function(src, index):
        src = src.sin()
        return torch.cat([reduced(src, index, r) for r in ("mean", "amin", "amax", "sum")], -1)

    found = rewrite(function, torch.randn(shape), index)
    assert found.after["edgeweave.multi_reduce"] == 1
    assert found.after["edgeweave.scatter"] == 0
    (node,) = [n for n in found.module.graph.nodes if "multi_reduce" in str(n.target)]
    assert node.args[3] == ["mean", "amin", "amax", "sum"]
    assert found.rewrites[-1].what.startswith("4 reductions of one tensor => edgeweave::multi")


def test_the_same_twice_is_once(rewrite, index):
    def function(src, index):
        src = src.sin()
        return reduced(src, index, "mean") * reduced(src, index, "mean").exp()

    found = rewrite(function, torch.randn(E, F), index)
    assert found.after["edgeweave.scatter"] == 1


def test_the_same_twice_returned_stays_two_tensors(rewrite, index):
    def function(src, index):
        src = src.sin()
        return reduced(src, index, "mean"), reduced(src, index, "mean")

    found = rewrite(function, torch.randn(E, F), index)
    assert found.after["edgeweave.scatter"] == 2


def test_the_same_twice_stays_two_tensors(rewrite, index):
    def function(src, index):
        src = src.sin()
        first = torch.zeros(N, F).index_add(0, index, src)
        again = torch.zeros(N, F).index_add(0, index, src)
        largest = reduced(src, index, "amax")
        first.mul_(2)
        return first + 0, again + 0, largest

    found = rewrite(function, torch.randn(E, F), index)
    assert found.after["edgeweave.scatter"] == 1
    assert found.after["edgeweave.multi_reduce"] == 1


@pytest.mark.parametrize("other", ["tensor", "index", "slots", "product"])
def test_refuses_what_differs(rewrite, index, other):
    def function(src, index):
        src = src.sin() + 2
        first = reduced(src, index, "mean")
        if other == "product":
            full = index.view(-1, 1).expand_as(src)
            return first + torch.ones(N, F).scatter_reduce(0, full, src, "prod")
        second = reduced(
            src * 2 if other == "tensor" else src,
            index.flip(0) if other == "index" else index,
            "amax",
            N + 1 if other == "slots" else N,
        )
        return first + second[:N]

    found = rewrite(function, torch.randn(E, F), index)
    assert found.after["edgeweave.multi_reduce"] == 0
    assert found.after["edgeweave.scatter"] == 2


def test_refuses_entries_written_in_between(rewrite, index):
    def function(src, index):
        src = src.detach() * 1
        first = reduced(src, index, "sum")
        src.mul_(2)
        return first + reduced(src, index, "amax")

    found = rewrite(function, torch.randn(E, F), index)
    assert found.after["edgeweave.multi_reduce"] == 0


@pytest.mark.parametrize("reduce", ["sum", "amax"])
def test_refuses_foldings_of_other_times(rewrite, index, reduce):
    """Rows that lie apart are folded to a copy, which does not see what is written behind it."""

    def function(src, index):
        rows = (src.detach() * 1).transpose(1, 2)
        first = reduced(rows, index, "sum")
        rows[3] = 2.0
        return first + reduced(rows, index, reduce) + src.sum()

    found = rewrite(function, torch.randn(E, 3, F), index)
    assert found.after["edgeweave.multi_reduce"] == 0
