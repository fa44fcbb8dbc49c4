"""Pass `fuse_mm`: which spellings become `edgeweave::mm`, and what is left as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

N, E, F = 9, 60, 5
_READS = {"index_select", "gather", "getitem_rows", "scatter_add_", "scatter_reduce_", "index_add_"}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, F)


@pytest.fixture
def edges() -> Tensor:
    edges = torch.randint(0, N - 1, (2, E))  # the last node has no edges
    edges[:, 0] = 0
    return edges


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(E)


def expanded(index: Tensor, like: Tensor) -> Tensor:
    return index.view(-1, *[1] * (like.dim() - 1)).expand_as(like)


def index_add(x, edges):
    return torch.zeros_like(x).index_add_(0, edges[1], x.index_select(0, edges[0]))


def index_add_of_brackets(x, edges):
    out = torch.zeros(*x.shape)
    out.index_add_(0, edges[1], x[edges[0]])
    return out


def out_of_place(x, edges):
    return torch.index_add(x.new_zeros(*x.shape), 0, edges[1], torch.index_select(x, 0, edges[0]))


def scatter_add(x, edges):
    rows = x.index_select(-2, edges[0])
    return x.new_zeros(*x.shape).scatter_add_(0, expanded(edges[1], rows), rows)


def gather_and_scatter(x, edges):
    source, target = edges.unbind(0)
    rows = torch.gather(x, 0, source.unsqueeze(-1).expand(-1, x.shape[1]))
    return torch.scatter_add(torch.zeros(*x.shape), 0, target[:, None].expand(-1, x.shape[1]), rows)


def select_rows(x, edges):
    source, target = edges.select(0, 0), edges[1, :]
    return torch.zeros(*x.shape).index_add(0, target, x[source])


def against_the_edges(x, edges):
    return torch.zeros_like(x).index_add_(0, edges[0], x.index_select(0, edges[1]))


def full_of_zeros(x, edges):
    return torch.full(x.shape, 0.0).index_add_(0, edges[1], x[edges[0]])


def largest(x, edges):
    rows = x[edges[0]]
    out = rows.new_zeros(*x.shape)
    return out.scatter_reduce_(0, expanded(edges[1], rows), rows, "amax", include_self=False)


def smallest(x, edges):
    rows = x[edges[0]]
    index = expanded(edges[1], rows)
    return torch.scatter_reduce(torch.zeros(*x.shape), 0, index, rows, "amin", include_self=False)


def mean(x, edges):
    rows = x[edges[0]]
    index = expanded(edges[1], rows)
    return torch.zeros(*x.shape).scatter_reduce(0, index, rows, reduce="mean", include_self=False)


def mean_by_counts(x, edges):
    total = torch.zeros(*x.shape).index_add_(0, edges[1], x[edges[0]])
    counts = torch.zeros(x.shape[0]).scatter_add_(0, edges[1], torch.ones(edges.shape[1]))
    return total / counts.clamp(min=1).unsqueeze(-1)


def two_reductions_of_one_gather(x, edges):
    rows = x.index_select(0, edges[0])
    index = expanded(edges[1], rows)
    total = rows.new_zeros(*x.shape).scatter_add_(0, index, rows)
    top = rows.new_zeros(*x.shape).scatter_reduce_(0, index, rows, "amax", include_self=False)
    return total + top


PLAIN = {
    f.__name__: (f, ops)
    for f, ops in (
        (index_add, 1),
        (index_add_of_brackets, 1),
        (out_of_place, 1),
        (scatter_add, 1),
        (gather_and_scatter, 1),
        (select_rows, 1),
        (against_the_edges, 1),
        (full_of_zeros, 1),
        (largest, 1),
        (smallest, 1),
        (mean, 1),
        (mean_by_counts, 1),
        (two_reductions_of_one_gather, 2),
    )
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", PLAIN)
def test_fires(rewrite, x, edges, name, dynamic):
    function, ops = PLAIN[name]
    found = rewrite(function, x, edges, dynamic=dynamic)
    assert found.after["edgeweave.mm"] == ops
    assert not set(found.after) & _READS
    assert [r.name for r in found.rewrites] == ["fuse_mm"] * ops
    assert all(__file__ in r.source for r in found.rewrites)
    assert not [node for node in found.module.graph.nodes if node.target is torch.stack]


FACTORS = {
    "view": lambda w: w.view(-1, 1),
    "unsqueeze": lambda w: w.unsqueeze(-1),
    "None": lambda w: w[:, None],
    "reshape": lambda w: w.sigmoid().reshape(-1, 1),
}


@pytest.mark.parametrize("form", FACTORS)
@pytest.mark.parametrize("first", [True, False], ids=["weight first", "weight last"])
def test_fires_with_a_weight_per_edge(rewrite, x, edges, weight, form, first):
    def function(x, edges, weight):
        factor, rows = FACTORS[form](weight), x[edges[0]]
        rows = factor * rows if first else rows * factor
        return torch.zeros_like(x).index_add_(0, edges[1], rows)

    found = rewrite(function, x, edges, weight)
    assert found.after["edgeweave.mm"] == 1
    assert not set(found.after) & (_READS | {"mul"})


def test_fires_with_a_weight_per_head(rewrite, edges):
    def function(x, edges, weight):
        rows = x.index_select(0, edges[0]) * weight.unsqueeze(-1)
        return rows.new_zeros(N, 2, 3).scatter_add_(0, expanded(edges[1], rows), rows)

    found = rewrite(function, torch.randn(N, 2, 3), edges, torch.randn(E, 2))
    (node,) = [n for n in found.module.graph.nodes if "edgeweave.mm" in str(n.target)]
    assert node.args[3] == 2  # heads
    assert not set(found.after) & (_READS | {"mul"})


def test_fires_on_features_without_a_second_dimension(rewrite, edges, weight):
    def function(x, edges, weight):
        return torch.zeros(N).scatter_add_(0, edges[1], x[edges[0]] * weight)

    found = rewrite(function, torch.randn(N), edges, weight)
    assert found.after["edgeweave.mm"] == 1


def test_fires_on_another_number_of_destinations(rewrite, x, edges):
    def function(x, edges):
        return torch.zeros(N + 30, F).index_add_(0, edges[1] + 30, x[edges[0]])

    found = rewrite(function, x, edges)
    assert found.after["edgeweave.mm"] == 1


def test_indices_that_are_no_rows_of_one_tensor_are_stacked_once(rewrite, x, edges):
    def function(x, source, target):
        for _ in range(3):
            x = torch.zeros_like(x).index_add_(0, target, x[source])
        return x

    found = rewrite(function, x, edges[0].clone(), edges[1].clone())
    assert found.after["edgeweave.mm"] == 3
    assert found.after["stack"] == 1


def test_metadata_is_kept(rewrite, x, edges):
    class Layer(torch.nn.Module):
        def forward(self, x, edges):
            return index_add(x, edges)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Layer()

        def forward(self, x, edges):
            return self.inner(x, edges)

    found = rewrite(Model(), x, edges)
    (node,) = [n for n in found.module.graph.nodes if "edgeweave.mm" in str(n.target)]
    assert "index_add_(0, edges[1]" in node.meta["stack_trace"]
    assert node.meta["example_value"].shape == (N, F)
    (done,) = found.rewrites
    assert done.layer == "inner: Layer"
    assert "index_add_(0, edges[1]" in done.source


# ---- what is left as it is -----------------------------------------------------------------------


def _unchanged(found) -> None:
    assert found.after["edgeweave.mm"] == 0


def test_refuses_messages_that_are_returned(rewrite, x, edges):
    def function(x, edges):
        rows = x[edges[0]]
        return torch.zeros_like(x).index_add_(0, edges[1], rows), rows

    _unchanged(rewrite(function, x, edges))


def test_refuses_weighted_messages_with_another_user(rewrite, x, edges, weight):
    def function(x, edges, weight):
        rows = x[edges[0]] * weight[:, None]
        return torch.zeros_like(x).index_add_(0, edges[1], rows), rows.sum()

    _unchanged(rewrite(function, x, edges, weight))


def test_refuses_another_dimension(rewrite, x):
    edges = torch.randint(0, F, (2, 20))

    def function(x, edges):
        return torch.zeros_like(x).index_add_(1, edges[1], x.index_select(1, edges[0]))

    found = rewrite(function, x, edges)
    _unchanged(found)
    assert found.rewrites == []


def test_refuses_integers(rewrite, edges):
    def function(x, edges):
        return torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])

    found = rewrite(function, torch.arange(N * F).view(N, F), edges, exact=False)
    assert found.rewrites == []


@pytest.mark.parametrize("reduce", ["amax", "mean", "sum"])
def test_refuses_what_is_reduced_into_other_values(rewrite, x, edges, reduce):
    def function(x, edges):
        rows = x[edges[0]]
        index = expanded(edges[1], rows)
        return torch.scatter_reduce(torch.ones(N, F), 0, index, rows, reduce, include_self=True)

    found = rewrite(function, x, edges)
    assert not [name for name in found.after if name in ("edgeweave.mm", "edgeweave.scatter")]


@pytest.mark.parametrize("reduce", ["amax", "amin", "mean"])
def test_refuses_include_self(rewrite, x, edges, reduce):
    def function(x, edges):
        rows = x[edges[0]]
        index = expanded(edges[1], rows)
        return torch.zeros(N, F).scatter_reduce(0, index, rows, reduce)

    found = rewrite(function, x, edges)
    assert not [name for name in found.after if name in ("edgeweave.mm", "edgeweave.scatter")]


def test_refuses_a_target_that_came_from_outside(rewrite, x, edges):
    def function(x, edges, start):
        return start.index_add(0, edges[1], x[edges[0]])

    _unchanged(rewrite(function, x, edges, torch.randn(N, F)))


def test_refuses_a_target_that_somebody_else_sees(rewrite, x, edges):
    def function(x, edges):
        out = torch.zeros(N, F)
        view = out[:3]
        out.index_add_(0, edges[1], x[edges[0]])
        return view * 2

    _unchanged(rewrite(function, x, edges))


def test_refuses_alpha(rewrite, x, edges):
    def function(x, edges):
        return torch.zeros(N, F).index_add(0, edges[1], x[edges[0]], alpha=2)

    _unchanged(rewrite(function, x, edges))


def test_refuses_an_index_of_full_rank(rewrite, x):
    def function(x, source, target):
        rows = torch.gather(x, 0, source)
        return torch.zeros(N, F).scatter_add_(0, target, rows)

    found = rewrite(function, x, torch.randint(0, N, (E, F)), torch.randint(0, N, (E, F)))
    assert found.rewrites == []


def test_refuses_an_index_whose_rows_are_moved(rewrite, x, edges):
    def function(x, edges, order):
        rows = x[edges[0]]
        index = edges[1].view(-1, 1)[order].expand(-1, F)
        return torch.zeros(N, F).scatter_add_(0, index, rows)

    found = rewrite(function, x, edges, torch.randperm(E))
    _unchanged(found)
    assert found.after["edgeweave.scatter"] == 0


def test_refuses_an_index_shorter_than_the_messages(rewrite, x, edges):
    def function(x, edges):
        rows = x.detach()[edges[0]]  # torch's own backward pass does not take this
        return torch.zeros(N, F).scatter_add_(0, edges[1, :20].view(-1, 1).expand(-1, F), rows)

    found = rewrite(function, x, edges)
    assert not [name for name in found.after if name in ("edgeweave.mm", "edgeweave.scatter")]


def test_refuses_counts_over_another_index(rewrite, x, edges):
    def function(x, edges):
        total = torch.zeros(N, F).index_add_(0, edges[1], x[edges[0]])
        counts = torch.zeros(N).scatter_add_(0, edges[0], torch.ones(edges.shape[1]))
        return total / counts.clamp(min=1).unsqueeze(-1)

    found = rewrite(function, x, edges)
    (node,) = [n for n in found.module.graph.nodes if "edgeweave.mm" in str(n.target)]
    assert node.args[6] == "sum"


def test_refuses_counts_along_the_features(rewrite):
    """`[N, N] / [N]` divides columns, not rows."""

    def function(x, edges):
        total = torch.zeros(N, N).index_add_(0, edges[1], x[edges[0]])
        counts = torch.zeros(N).scatter_add_(0, edges[1], torch.ones(edges.shape[1]))
        return total / counts.clamp(min=1)

    found = rewrite(function, torch.randn(N, N), torch.randint(0, N, (2, E)))
    (node,) = [n for n in found.module.graph.nodes if "edgeweave.mm" in str(n.target)]
    assert node.args[6] == "sum"


def test_refuses_features_written_in_between(rewrite, x, edges):
    def function(x, edges):
        x = x * 1
        with torch.no_grad():
            rows = x[edges[0]]
            x.add_(1)
        return torch.zeros(N, F).index_add_(0, edges[1], rows) + x

    _unchanged(rewrite(function, x, edges))


def test_refuses_edges_written_in_between(rewrite, x, edges):
    def function(x, edges):
        edges = edges * 1
        rows = x.detach()[edges[0]]
        edges[0].fill_(0)
        return torch.zeros(N, F).index_add_(0, edges[1], rows)

    _unchanged(rewrite(function, x, edges))


def test_refuses_a_change_of_grad_mode_in_between(rewrite, x, edges):
    def function(x, edges):
        with torch.no_grad():
            rows = x[edges[0]]
        return torch.zeros(N, F).index_add_(0, edges[1], rows) + x

    _unchanged(rewrite(function, x, edges))


def test_refuses_a_weight_per_feature(rewrite, x, edges):
    def function(x, edges, weight):
        return torch.zeros(N, F).index_add_(0, edges[1], x[edges[0]] * weight)

    _unchanged(rewrite(function, x, edges, torch.randn(E, F)))


@pytest.mark.parametrize("narrow", ["features", "weight"])
def test_a_product_of_two_dtypes_is_in_the_wider_one(rewrite, x, edges, weight, narrow):
    """GCN under autocast: features in bfloat16, weights in float32."""

    def function(x, edges, weight):
        rows = x[edges[0]] * weight[:, None]
        return torch.zeros(N, F).index_add_(0, edges[1], rows)

    x, weight = (x.bfloat16(), weight) if narrow == "features" else (x, weight.bfloat16())
    found = rewrite(function, x, edges, weight, exact=False)
    assert found.after["edgeweave.mm"] == 1
    torch.testing.assert_close(found.module(*found.inputs)[0], function(x, edges, weight))


def test_no_edges(rewrite, x):
    found = rewrite(index_add, x, torch.zeros(2, 0, dtype=torch.int64))
    assert found.after["edgeweave.mm"] == 1
