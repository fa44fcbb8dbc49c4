"""Passes `fuse_variance` and `fuse_pairs`: what they take, what they leave alone, the numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from edgeweave._plan._multi import MULTI_REDUCES

N, E, F = 9, 60, 5


@pytest.fixture
def edges():
    # The last node has no edge.
    return torch.randint(0, N - 1, (2, E))


def scatter(src, index, reduce, slots=N):
    full = index.view(-1, *[1] * (src.dim() - 1)).expand_as(src)
    out = src.new_zeros(slots, *src.shape[1:])
    return out.scatter_reduce(0, full, src, reduce, include_self=reduce == "sum")


def variance(src, index):
    mean = scatter(src, index, "mean")
    return scatter(src * src, index, "mean") - mean * mean


def rewrites(found, name):
    return [r for r in found.rewrites if r.name == name]


# ---- variances -----------------------------------------------------------------------------------


def by_powers(src, index):
    return scatter(src**2, index, "mean") - scatter(src, index, "mean").pow(2)


def by_squares(src, index):
    return scatter(src.square(), index, "mean") - torch.square(scatter(src, index, "mean"))


@pytest.mark.parametrize("shape", [(E, F), (E, 2, F)])
@pytest.mark.parametrize("function", [variance, by_powers, by_squares])
def test_a_variance_is_one_reduction(rewrite, edges, function, shape):
    found = rewrite(lambda src, index: function(src.sin(), index), torch.randn(shape), edges[1])
    assert len(rewrites(found, "fuse_variance")) == 1
    assert found.after["edgeweave.multi_reduce"] == 1
    assert found.after["edgeweave.scatter"] == 0


def test_a_variance_and_what_is_beside_it_are_one_pass(rewrite, edges):
    def function(src, index):
        src = src.sin()
        return scatter(src, index, "mean") + variance(src, index) * scatter(src, index, "amax")

    found = rewrite(function, torch.randn(E, F), edges[1])
    (node,) = [n for n in found.module.graph.nodes if "multi_reduce" in str(n.target)]
    assert sorted(node.args[3]) == ["amax", "mean", "var"]
    assert found.after["edgeweave.scatter"] == 0


def other_index(src, index):
    return scatter(src * src, index.flip(0), "mean") - scatter(src, index, "mean") ** 2


def other_values(src, index):
    return scatter(src * src.cos(), index, "mean") - scatter(src, index, "mean") ** 2


def sums(src, index):
    return scatter(src * src, index, "sum") - scatter(src, index, "sum") ** 2


def cubes(src, index):
    return scatter(src * src, index, "mean") - scatter(src, index, "mean") ** 3


def turned(src, index):
    return scatter(src, index, "mean") ** 2 - scatter(src * src, index, "mean")


def without_gradient(src, index):
    with torch.no_grad():
        squares = scatter(src * src, index, "mean")
    return squares - scatter(src, index, "mean") ** 2


def squares_kept(src, index):
    squares = src * src
    return scatter(squares, index, "mean") - scatter(src, index, "mean") ** 2 + squares.sum()


def edited(src, index):
    src = src.detach() * 1
    squares = scatter(src * src, index, "mean")
    src.mul_(2)
    return squares - scatter(src, index, "mean") ** 2


def square_of_the_mean_written(src, index):
    mean = scatter(src, index, "mean")
    squared = mean * mean
    squared[0] = 0
    return scatter(src * src, index, "mean") - squared


def squares_written(src, index):
    squares = src * src
    squares.view(-1)[3] = 5.0
    return scatter(squares, index, "mean") - scatter(src, index, "mean") ** 2


@pytest.mark.parametrize(
    "function",
    [
        square_of_the_mean_written,
        squares_written,
        other_index,
        other_values,
        sums,
        cubes,
        turned,
        without_gradient,
        squares_kept,
        edited,
    ],
)
def test_what_is_no_variance_stays(rewrite, edges, function):
    def program(src, index):
        return function(src.sin(), index)

    found = rewrite(program, torch.randn(E, F), edges[1])
    assert rewrites(found, "fuse_variance") == []


@pytest.mark.parametrize("which", ["mean", "squares"])
def test_means_that_are_written_to_stay(rewrite, edges, which):
    def function(src, index):
        mean, squares = scatter(src, index, "mean"), scatter(src * src, index, "mean")
        (mean if which == "mean" else squares)[0] = 0
        return squares - mean * mean

    src = torch.randn(E, F)
    with torch.no_grad():  # eager has no gradient of this
        found = torch.compile(function, backend="edgeweave", options={"engine": "eager"})
        torch.testing.assert_close(found(src, edges[1]), function(src, edges[1]))


# ---- two ends ------------------------------------------------------------------------------------


def ends(a, b, edges):
    return a.index_select(0, edges[1]) + b.index_select(0, edges[0])


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("shape", [(N, F), (N, 2, F)])
@pytest.mark.parametrize("dynamic", [None, True])
def test_one_reduction_is_a_product(rewrite, edges, reduce, shape, dynamic):
    def function(a, b, edges):
        return scatter(ends(a, b, edges), edges[1], reduce, a.shape[0])

    inputs = torch.randn(shape), torch.randn(shape), edges
    found = rewrite(function, *inputs, dynamic=dynamic)
    if dynamic and len(shape) == 3:  # sizes that Dynamo left open are not folded
        assert rewrites(found, "fuse_pairs") == []
        return
    assert len(rewrites(found, "fuse_pairs")) == 1
    assert found.after["edgeweave.mm"] == found.after["edgeweave.in_degree"] == 1
    assert found.after["edgeweave.gather"] == found.after["edgeweave.scatter"] == 0


def test_the_other_end_may_come_first_and_be_reduced_into(rewrite, edges):
    def function(a, b, edges):
        return scatter(b[edges[0]] + a[edges[1]], edges[0], "amax")

    found = rewrite(function, torch.randn(N, F), torch.randn(N, F), edges)
    (node,) = [n for n in found.module.graph.nodes if "edgeweave.mm" in str(n.target)]
    assert node.args[5] is True  # flipped
    assert len(rewrites(found, "fuse_pairs")) == 1


def test_sides_of_different_lengths(rewrite):
    edges = torch.stack([torch.randint(0, 4, (E,)), torch.randint(0, 7, (E,))])

    def function(a, b, edges):
        return scatter(ends(a, b, edges), edges[1], "mean", 7)

    found = rewrite(function, torch.randn(7, F), torch.randn(4, F), edges)
    assert len(rewrites(found, "fuse_pairs")) == 1


@pytest.mark.parametrize("num_edges", [0, 1, E])
def test_several_reductions_are_one_pass(rewrite, num_edges):
    edges = torch.randint(0, N - 1, (2, num_edges))

    def function(a, b, edges):
        rows = ends(a, b, edges)
        made = [scatter(rows, edges[1], r) for r in ("mean", "amin", "amax", "sum")]
        return torch.cat([*made, variance(rows, edges[1])], -1)

    found = rewrite(function, torch.randn(N, F), torch.randn(N, F), edges)
    assert found.after["edgeweave.edge_multi"] == 1
    assert found.after["edgeweave.multi_reduce"] == found.after["edgeweave.gather"] == 0
    assert "in one pass" in rewrites(found, "fuse_pairs")[0].what
    assert "test_fuse_pairs.py" in rewrites(found, "fuse_pairs")[0].source


def test_a_variance_alone_keeps_the_gradient_of_the_own_row(rewrite, edges):
    found = rewrite(
        lambda a, b, edges: variance(ends(a, b, edges), edges[1]),
        torch.randn(N, F),
        torch.randn(N, F),
        edges,
    )
    assert rewrites(found, "fuse_pairs") == []
    assert found.after["edgeweave.multi_reduce"] == 1


def test_infinities_of_a_node_without_edges_stay_out(rewrite, edges):
    a = torch.randn(N, F)
    a[N - 1] = torch.inf

    def function(a, b, edges):
        return scatter(ends(a, b, edges), edges[1], "sum")

    compiled = torch.compile(function, backend="edgeweave", options={"engine": "eager"})
    inputs = a, torch.randn(N, F), edges
    torch.testing.assert_close(compiled(*inputs), function(*inputs), rtol=1e-5, atol=1e-5)


def test_a_whole_layer_of_pna(rewrite, edges):
    def function(x, edges, weight, bias):
        rows = torch.cat([x[edges[1]], x[edges[0]]], -1)
        messages = functional.linear(rows, weight, bias)
        made = [scatter(messages, edges[1], r) for r in ("mean", "amin", "amax")]
        return torch.cat([*made, variance(messages, edges[1])], -1)

    inputs = torch.randn(N, F), edges, torch.randn(F, 2 * F), torch.randn(F)
    found = rewrite(function, *inputs)
    names = [r.name for r in found.rewrites]
    assert [n for n in names if n != "replace_scatter"] == [
        "move_linear",
        "fuse_variance",
        "fuse_multi",
        "fuse_pairs",
    ]


def messages_kept(a, b, edges):
    rows = ends(a, b, edges)
    return scatter(rows, edges[1], "mean") + rows.mean()


def a_product(a, b, edges):
    rows = ends(a, b, edges)
    return scatter(rows, edges[1], "mean") + scatter(rows, edges[1], "prod")


def a_factor(a, b, edges):
    rows = torch.add(a[edges[1]], b[edges[0]], alpha=2)
    return scatter(rows, edges[1], "mean")


def a_third_index(a, b, edges):
    return scatter(ends(a, b, edges), edges[0] % 5, "mean")


def more_slots(a, b, edges):
    return scatter(ends(a, b, edges), edges[1], "amax", N + 2)


def end_edited(a, b, edges):
    rows = ends(a, b, edges)
    b.detach().mul_(2)
    return scatter(rows, edges[1], "amax")


def own_end_written(a, b, edges):
    own = a[edges[1]]
    own[:, 0] = 0
    return scatter(own + b[edges[0]], edges[1], "mean")


def other_end_written(a, b, edges):
    other = b[edges[0]]
    functional.relu(other, inplace=True)
    return scatter(a[edges[1]] + other, edges[1], "amax")


def rows_edited(a, b, edges):
    rows = ends(a, b, edges)
    rows = rows.mul_(2)
    return scatter(rows, edges[1], "amax")


def repeated(a, b, edges):
    return scatter(a[edges[1]] + b[0], edges[1], "amax")


@pytest.mark.parametrize(
    "function",
    [
        messages_kept,
        a_product,
        a_factor,
        a_third_index,
        more_slots,
        end_edited,
        own_end_written,
        other_end_written,
        rows_edited,
        repeated,
    ],
)
def test_leaves_alone(rewrite, edges, function):
    inputs = torch.randn(N, F), torch.randn(N, F), edges
    found = rewrite(function, *inputs, exact=function is not end_edited)
    assert rewrites(found, "fuse_pairs") == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_left_alone(rewrite, edges, dtype):
    def function(a, b, edges):
        return scatter(ends(a.to(dtype), b.to(dtype), edges), edges[1], "amax").float()

    found = rewrite(function, torch.randn(N, F), torch.randn(N, F), edges, exact=False)
    assert rewrites(found, "fuse_pairs") == []


# ---- the ops -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduces", [["mean", "var"], ["std"], ["amax", "amin", "sum"], ["var"]])
@pytest.mark.parametrize("flip", [False, True])
def test_opcheck(edges, reduces, flip):
    x = torch.randn(N, F, requires_grad=True)
    op = torch.ops.edgeweave.edge_multi.default
    torch.library.opcheck(op, (edges, x, N, flip, reduces, 0))
    args = (edges, N, N, flip, torch.float32)
    torch.library.opcheck(torch.ops.edgeweave.in_degree.default, args)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MULTI_REDUCES)
def test_derivatives_need_no_other_result(edges, name, dtype):
    x = torch.randn(N, F, dtype=dtype, requires_grad=True)
    (out,) = torch.ops.edgeweave.edge_multi(edges, x, N, False, [name], 1)
    rows = x.double().detach().requires_grad_()
    (exact,) = torch.ops.edgeweave.multi_reduce(rows[edges[0]], edges[1], N, [name], 1)
    wide = dtype is torch.bfloat16
    torch.testing.assert_close(
        out.double(), exact, rtol=2e-2 if wide else 1e-5, atol=2e-2 if wide else 1e-5
    )
    (mine,) = torch.autograd.grad(out.sum(), x)
    (true,) = torch.autograd.grad(exact.sum(), rows)
    torch.testing.assert_close(
        mine.double(), true, rtol=5e-2 if wide else 1e-4, atol=5e-2 if wide else 1e-4
    )


def test_second_derivatives_raise(edges):
    x = torch.randn(N, F, requires_grad=True)
    (out,) = torch.ops.edgeweave.edge_multi(edges, x, N, False, ["amax"], 0)
    (dx,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        dx.sum().backward()


def test_an_index_out_of_range_is_named(edges):
    with pytest.raises(IndexError, match="index must be in"):
        torch.ops.edgeweave.edge_multi(edges + N, torch.randn(N, F), N, False, ["amax"], 0)
