"""Pass `move_linear`: what it moves, what it leaves alone, and the numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from edgeweave.compile import run_passes
from edgeweave.compile._record import recording

N, E, F, D, H = 9, 60, 5, 3, 4


@pytest.fixture
def edges():
    return torch.randint(0, N - 1, (2, E))


def both(x, edges, weight, bias):
    rows = torch.cat([x[edges[1]], x[edges[0]]], dim=-1)
    return functional.linear(rows, weight, bias)


def differences(x, edges, weight, bias):
    own, other = x.index_select(0, edges[1]), x.index_select(0, edges[0])
    return functional.linear(torch.cat([own, other - own], 1), weight, bias)


def differences_first(x, edges, weight, bias):
    own, other = x[edges[1]], x[edges[0]]
    return functional.linear(torch.cat([other - own, own], -1), weight, bias)


def two_tensors(x, edges, weight, bias):
    rows = torch.cat([x[edges[1]], x.cos()[edges[0]]], dim=-1)
    return functional.linear(rows, weight, bias)


def one_end(x, edges, weight, bias):
    rows = torch.cat([x[edges[1]], x.cos()[edges[1]]], dim=-1)
    return functional.linear(rows, weight, bias)


def matmul(x, edges, weight, bias):
    return torch.cat([x[edges[1]], x[edges[0]]], dim=-1) @ weight.t()


def nested(x, edges, weight, bias):
    rows = torch.cat([x[edges[1]], x[edges[0]]], dim=-1)
    return functional.linear(rows[edges[0] + edges[1]], weight, bias)


def without_bias(x, edges, weight, bias):
    return functional.linear(torch.cat([x[edges[1]], x[edges[0]]], 1), weight)


def moved(found):
    return [r for r in found.rewrites if r.name == "move_linear"]


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (both, 1),
        (differences, 1),
        (differences_first, 1),
        (two_tensors, 1),
        (one_end, 1),
        (matmul, 1),
        (nested, 2),
        (without_bias, 1),
    ],
)
def test_fires(rewrite, edges, function, count):
    found = rewrite(function, torch.randn(N, F), edges, torch.randn(H, 2 * F), torch.randn(H))
    assert len(moved(found)) == count
    assert "test_move_linear.py" in moved(found)[0].source
    made = [n for n in found.module.graph.nodes if n.op == "call_function"]
    products = [n for n in made if n.target is torch._C._nn.linear]
    shapes = [n.meta["example_value"].shape for n in products]
    assert {shape[0] for shape in shapes if len(shape) == 2} == {N}
    assert all("test_move_linear.py" in n.meta["stack_trace"] for n in products)
    assert found.after["cat"] == 0


def test_a_plain_product_is_fused_with_the_reduction_behind_it(rewrite, edges):
    def function(x, edges, weight, bias):
        messages = functional.linear(x[edges[0]], weight, bias)
        return torch.zeros(N, H).index_add(0, edges[1], messages)

    found = rewrite(function, torch.randn(N, F), edges, torch.randn(H, F), torch.randn(H))
    assert [r.name for r in found.rewrites] == ["move_linear", "fuse_mm"]
    assert found.after["index_select"] == found.after["getitem"] == 0


def test_values_of_edges_keep_their_part_of_the_product(rewrite, edges):
    def function(x, edges, values, weight, bias):
        rows = torch.cat([x[edges[1]], x[edges[0]], values], -1)
        return functional.linear(rows, weight, bias)

    inputs = torch.randn(N, F), edges, torch.randn(E, D), torch.randn(H, 2 * F + D)
    found = rewrite(function, *inputs, torch.randn(H))
    assert len(moved(found)) == 1
    assert found.after["cat"] == 0
    assert found.after["linear"] == 3


@pytest.mark.parametrize("towers", [1, 3])
def test_towers_are_stacked_by_node(rewrite, edges, towers):
    def function(x, edges, weight, bias):
        x = x.view(-1, 1, F).repeat(1, towers, 1)
        rows = torch.cat([x.index_select(0, edges[1]), x.index_select(0, edges[0])], dim=-1)
        made = [functional.linear(rows[:, t], weight[t], bias[t]) for t in range(towers)]
        return torch.stack(made, dim=1)

    found = rewrite(
        function, torch.randn(N, F), edges, torch.randn(towers, F, 2 * F), torch.randn(towers, F)
    )
    assert len(moved(found)) == towers + 1
    stacks = [n for n in found.module.graph.nodes if getattr(n.target, "__name__", "") == "stack"]
    assert [n.meta["example_value"].shape for n in stacks] == [(N, towers, F)] * 2


def test_a_common_offset_does_not_cancel(rewrite, edges):
    """Differences of coordinates far from the origin: as close to float64 as differences are."""
    x = 1e4 + torch.randn(N, F)
    inputs = x, edges, torch.randn(H, 2 * F), torch.randn(H)
    found = rewrite(differences, *inputs, exact=False)
    assert len(moved(found)) == 1
    exact = differences(x.double(), edges, inputs[2].double(), inputs[3].double())
    off = (differences(*inputs) - exact).abs().max()
    ours = torch.compile(differences, backend="edgeweave", options={"engine": "eager"})(*inputs)
    assert (ours - exact).abs().max() <= 4 * off


@pytest.mark.parametrize("nodes", [N, 200])
def test_a_node_far_away_leaves_the_others_exact(rewrite, nodes):
    edges = torch.randint(0, nodes - 1, (2, 3 * nodes))
    weight, bias = torch.randn(H, 2 * F), torch.randn(H)

    def function(x, weight, bias):
        x = torch.cat([x, torch.full_like(x[:1], 1e6)])  # no edge reads it
        return differences(x, edges, weight, bias)

    assert len(moved(rewrite(function, torch.randn(nodes - 1, F), weight, bias))) == 1
    # And with open sizes.
    compiled = torch.compile(differences, backend="edgeweave", options={"engine": "eager"})
    with recording() as records:
        for more in (0, 7, 500):
            x = torch.randn(nodes + more, F)
            x[-1] = 1e6
            if more == 0:
                torch._dynamo.mark_dynamic(x, 0)
                torch._dynamo.mark_dynamic(edges, 1)
            edges = torch.randint(0, nodes + more - 1, (2, 3 * (nodes + more)))
            ours = compiled(x, edges, weight, bias)
            torch.testing.assert_close(ours, differences(x, edges, weight, bias))
    assert all(r.name == "move_linear" for record in records for r in record.rewrites)


def test_infinities_are_no_centre(edges):
    x = torch.randn(N, F)
    x[N - 1] = torch.inf  # no edge reads it
    inputs = x, edges, torch.randn(H, 2 * F), torch.randn(H)
    ours = torch.compile(differences, backend="edgeweave", options={"engine": "eager"})(*inputs)
    torch.testing.assert_close(ours, differences(*inputs))


@pytest.mark.parametrize(
    ("nodes", "num_edges"), [(0, 0), (4, 0), (1, 1), (1, 2), (3, 5), (30, 60), (31, 60), (200, 60)]
)
def test_few_edges_per_node_stay(rewrite, nodes, num_edges):
    """Two products over nodes must be no more than one over edges."""
    edges = torch.randint(0, max(nodes, 1), (2, num_edges))
    found = rewrite(both, torch.randn(nodes, F), edges, torch.randn(H, 2 * F), torch.randn(H))
    assert len(moved(found)) == (num_edges >= 2 * nodes)


@pytest.mark.parametrize(("nodes", "taken"), [(60, True), (61, False)])
def test_one_end_is_one_product(rewrite, nodes, taken):
    def function(x, index, weight):
        return functional.linear(x[index], weight)

    index = torch.randint(0, nodes, (60,))
    found = rewrite(function, torch.randn(nodes, F), index, torch.randn(H, F))
    assert len(moved(found)) == taken


def test_open_sizes_are_decided_at_each_call():
    """A graph for many edges is not used for few."""
    compilations = []

    def backend(module, example):
        compilations.append(len([r for r in run_passes(module) if r.name == "move_linear"]))
        return module

    def function(x, edges, weight, bias):
        return both(x, edges, weight, bias)

    weight, bias = torch.randn(H, 2 * F), torch.randn(H)
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for nodes, num_edges in ((9, 60), (12, 70), (90, 40), (80, 30), (7, 30)):
        x, edges = torch.randn(nodes, F), torch.randint(0, nodes, (2, num_edges))
        torch._dynamo.mark_static(x, 1)
        torch._dynamo.mark_static(weight)
        torch.testing.assert_close(compiled(x, edges, weight, bias), both(x, edges, weight, bias))
    assert compilations == [1, 0]


def wide(x, edges, weight, bias):
    return functional.linear(x[edges[0]][:, :1], weight[:, :1].repeat(20, 1))


def far_apart(x, edges, weight, bias):
    # Only the difference: neighbours may be close to each other and far from the origin.
    rows = torch.cat([x[edges[1]] - x[edges[0]], x[edges[1]] - x[edges[0]]], -1)
    return functional.linear(rows, weight, bias)


def three_indices(x, edges, weight, bias):
    rows = x[edges[1]] + x[edges[0]]
    return functional.linear(torch.cat([rows, x[edges[0] % 3]], -1), weight, bias)


def edited(x, edges, weight, bias):
    rows = torch.cat([x[edges[1]], x[edges[0]]], -1)
    x.detach().mul_(2)
    return functional.linear(rows, weight, bias)


def rows_written(x, edges, weight, bias):
    rows = torch.cat([x[edges[1]], x[edges[0]]], -1)
    rows[:, 0] = 0
    return functional.linear(rows, weight, bias)


def view_written(x, edges, weight, bias):
    rows = torch.cat([x[edges[1]], x[edges[0]]], -1)
    rows.view(-1)[3] = 7.0
    return functional.linear(rows, weight, bias)


def activated_in_place(x, edges, weight, bias):
    rows = torch.cat([x[edges[1]], x[edges[0]]], -1)
    functional.relu(rows, inplace=True)
    return functional.linear(rows, weight, bias)


def end_written(x, edges, weight, bias):
    own = x[edges[1]]
    own[edges[0] == edges[1]] = 0
    return functional.linear(own + x[edges[0]], weight[:, :F], bias)


def difference_of_written(x, edges, weight, bias):
    other = x[edges[0]]
    other[:, 1] = 3
    own = x[edges[1]]
    return functional.linear(torch.cat([own, other - own], -1), weight, bias)


def other_mode(x, edges, weight, bias):
    with torch.no_grad():
        rows = torch.cat([x[edges[1]], x[edges[0]]], -1)
    return functional.linear(rows, weight, bias)


def other_dimension(x, edges, weight, bias):
    rows = torch.cat([x[edges[1]], x[edges[0]]], 0)
    return functional.linear(rows, weight[:, :F], bias)


def half(x, edges, weight, bias):
    rows = torch.cat([x[edges[1]], x[edges[0]]], -1)
    return functional.linear(rows.bfloat16(), weight.bfloat16(), bias.bfloat16()).float()


def under_autocast(x, edges, weight, bias):
    with torch.autocast("cpu", torch.bfloat16):
        return functional.linear(torch.cat([x[edges[1]], x[edges[0]]], -1), weight, bias).float()


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (wide, True),
        (far_apart, True),
        (three_indices, True),
        (edited, False),
        (rows_written, True),
        (view_written, True),
        (activated_in_place, True),
        (end_written, True),
        (difference_of_written, True),
        (other_mode, True),
        (other_dimension, True),
        (half, False),
        (under_autocast, False),
    ],
)
def test_leaves_alone(rewrite, edges, function, exact):
    inputs = torch.randn(N, F), edges, torch.randn(H, 2 * F), torch.randn(H)
    assert moved(rewrite(function, *inputs, exact=exact)) == []


@pytest.mark.parametrize("what", ["end", "sum"])
def test_towers_that_are_written_to_stay(rewrite, edges, what):
    def function(x, y, edges):
        made = []
        for rows in (x, y):
            own = rows[edges[1]]
            if what == "end":
                own[:, 0] = 0
            both = own + rows[edges[0]]
            if what == "sum":
                both[:, 0] = 0
            made.append(both)
        return torch.stack(made, 1)

    assert moved(rewrite(function, torch.randn(N, F), torch.randn(N, F), edges)) == []


def test_sizes_that_depend_on_values_are_left_alone(rewrite, edges):
    def function(x, edges, weight, bias):
        return both(x, edges[:, edges[0] != edges[1]], weight, bias)

    inputs = torch.randn(N, F), edges, torch.randn(H, 2 * F), torch.randn(H)
    assert moved(rewrite(function, *inputs)) == []


@pytest.mark.parametrize("needed", [(0,), (2,), (3,), (0, 2), ()])
def test_what_needs_gradients(edges, needed):
    inputs = [torch.randn(N, F), edges, torch.randn(H, 2 * F), torch.randn(H)]
    for k in needed:
        inputs[k].requires_grad_()
    ours = torch.compile(differences, backend="edgeweave", options={"engine": "eager"})(*inputs)
    theirs = differences(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert ours.requires_grad == theirs.requires_grad == bool(needed)
    if needed:
        wanted = [inputs[k] for k in needed]
        mine = torch.autograd.grad(ours.sin().sum(), wanted)
        for a, b in zip(mine, torch.autograd.grad(theirs.sin().sum(), wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
