"""Pass `replace_segment`: `torch.segment_reduce` over rows."""

from __future__ import annotations

import pytest
import torch

from edgeweave.compile import run_passes

E, G = 40, 7
SHAPES = [(E,), (E, 5), (E, 2, 3)]


@pytest.fixture
def lengths():
    found = torch.randint(1, 6, (G,))
    found[3] = 0  # an empty one in the middle
    found[-1] = E - int(found[:-1].sum())
    return found


@pytest.fixture
def offsets(lengths):
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def known(out):
    """Numbers for what is none, so that eager can be compared."""
    return out.nan_to_num(5.0, posinf=7.0, neginf=-7.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
def test_offsets(rewrite, offsets, shape, reduce):
    def function(data, offsets):
        return known(torch.segment_reduce(data.sin(), reduce, offsets=offsets))

    found = rewrite(function, torch.rand(shape) + 0.5, offsets)
    assert found.after["edgeweave.scatter"] == 1
    assert found.after["edgeweave.segment_index"] == 1
    assert found.after["segment_reduce"] == 0
    (rewritten,) = found.rewrites
    assert rewritten.name == "replace_segment"
    spelt = {"max": "amax", "min": "amin"}.get(reduce, reduce)
    assert rewritten.what == f"segment_reduce => edgeweave::scatter({spelt})"


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths(rewrite, lengths, reduce, dtype):
    def function(data, lengths):
        out = torch.segment_reduce(data.sin(), reduce, lengths=lengths, unsafe=True, axis=0)
        return known(out)

    found = rewrite(function, torch.randn(E, 5), lengths.to(dtype))
    assert found.after["edgeweave.scatter"] == 1


@pytest.mark.parametrize("reduce", ["mean", "max", "min"])
def test_empty_segments_are_as_in_torch(rewrite, offsets, reduce):
    data = torch.randn(E, 2)
    found = rewrite(
        lambda d, o: known(torch.segment_reduce(d.sin(), reduce, offsets=o)), data, offsets
    )
    assert found.after["masked_fill"] == 1
    (out,) = [n for n in found.module.graph.nodes if n.target == "masked_fill"]
    eager = torch.segment_reduce(data, reduce, offsets=offsets)[3, 0].item()
    assert str(out.args[2]) == str(eager)


@pytest.mark.parametrize(("reduce", "initial"), [("sum", 0), ("mean", 0), ("prod", 1.0)])
def test_a_beginning_that_changes_nothing(rewrite, offsets, reduce, initial):
    def function(data, offsets):
        return torch.segment_reduce(data.sin(), reduce, offsets=offsets, initial=initial)

    found = rewrite(function, torch.rand(E, 5) + 0.5, offsets)
    assert found.after["edgeweave.scatter"] == 1
    assert found.after["masked_fill"] == 0


def test_what_it_reduces_may_have_been_gathered(rewrite, offsets):
    def function(x, index, offsets):
        return torch.segment_reduce(x.sin()[index], "sum", offsets=offsets)

    found = rewrite(function, torch.randn(9, 5), torch.randint(0, 9, (E,)), offsets)
    assert found.after["edgeweave.mm"] == 1
    assert found.after["edgeweave.scatter"] == 0
    assert [r.name for r in found.rewrites] == ["replace_segment", "fuse_mm"]


def test_pyg_segments(rewrite, offsets):
    from torch_geometric.utils import segment

    def function(data, offsets):
        return segment(data.sin(), offsets, "max") + segment(data.cos(), offsets, "mean")

    found = rewrite(function, torch.randn(E, 5), offsets)
    assert found.after["edgeweave.scatter"] == 2


@pytest.mark.parametrize(("reduce", "initial"), [("sum", 1), ("max", 0), ("mean", 2.0)])
def test_refuses_another_beginning(rewrite, offsets, reduce, initial):
    def function(data, offsets):
        return torch.segment_reduce(data.sin(), reduce, offsets=offsets, initial=initial)

    assert rewrite(function, torch.randn(E, 5), offsets).rewrites == []


def test_refuses_another_axis(rewrite, offsets):
    def function(data, offsets):
        return torch.segment_reduce(data.sin(), "sum", offsets=offsets.expand(2, -1), axis=1)

    assert rewrite(function, torch.randn(2, E), offsets).rewrites == []


@pytest.mark.parametrize("by_lengths", [False, True])
def test_open_sizes(rewrite, offsets, lengths, by_lengths):
    def function(data, given):
        by = {"lengths": given} if by_lengths else {"offsets": given}
        return known(torch.segment_reduce(data.sin(), "mean", **by))

    given = lengths if by_lengths else offsets
    found = rewrite(function, torch.randn(E, 5), given, dynamic=True)
    assert found.after["edgeweave.scatter"] == 1


def test_offsets_that_are_wrong_raise(offsets):
    def backend(module, example):
        assert run_passes(module)
        return module

    compiled = torch.compile(
        lambda d, o: torch.segment_reduce(d, "sum", offsets=o), backend=backend, fullgraph=True
    )
    compiled(torch.randn(E, 5), offsets)
    with pytest.raises(ValueError, match="segment_reduce: ptr must not decrease"):
        compiled(torch.randn(E, 5), offsets.flip(0))
    with pytest.raises(ValueError, match="ptr must run from 0 to the number of entries, 40"):
        compiled(torch.randn(E, 5), offsets.clamp(max=E - 1))
