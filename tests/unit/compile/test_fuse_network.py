"""Pass `fuse_network`: what it takes, what it leaves alone, the numbers, and its op."""

from __future__ import annotations

import json

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn
from torch.nn import functional

from edgeweave._plan import _edge_network
from edgeweave._plan._edge_program import load_program
from edgeweave._plan._edge_program_steps import STEPS, UNARY
from edgeweave.compile._record import recording

N, E, F, H = 9, 60, 5, 4
RELU_LINEAR = json.dumps([["relu", [["v", 0]], {}], ["linear", [["v", 1], ["t", 0], ["t", 1]], {}]])


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    # Five tiles and more.
    monkeypatch.setattr(_edge_network, "_MOST_EDGES", 12)


@pytest.fixture
def edges():
    # The last node has no edge.
    return torch.randint(0, N - 1, (2, E))


@pytest.fixture
def weights():
    return torch.randn(H, F), torch.randn(H)


def scatter(src, index, reduce, slots=N):
    full = index.view(-1, 1).expand_as(src)
    out = src.new_zeros(slots, src.shape[1])
    return out.scatter_reduce(0, full, src, reduce, include_self=reduce == "sum")


def ends(a, b, edges):
    return a.index_select(0, edges[1]) + b.index_select(0, edges[0])


def fused(found):
    return [r for r in found.rewrites if r.name == "fuse_network"]


def program_of(found):
    (node,) = [n for n in found.module.graph.nodes if "edge_network" in str(n.target)]
    return [name for name, _, _ in json.loads(node.args[9])]


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_fires(rewrite, edges, weights, reduce, dynamic):
    def function(a, b, edges, weight, bias):
        a, b = a.view(-1, F), b.view(-1, F)
        values = functional.linear(ends(a, b, edges).relu(), weight.view(H, F), bias.view(H))
        return scatter(values, edges[1], reduce, a.shape[0])

    found = rewrite(
        function, torch.randn(N, F), torch.randn(N, F), edges, *weights, dynamic=dynamic
    )
    (one,) = fused(found)
    assert one.what == f"relu -> linear -> {reduce} => edgeweave::edge_network"
    assert "test_fuse_network.py" in one.source
    # The last product commutes with sum and mean.
    assert program_of(found) == (["relu"] if reduce in ("sum", "mean") else ["relu", "linear"])
    assert found.after["edgeweave.gather"] == found.after["edgeweave.scatter"] == 0


def test_against_the_edges_and_other_lengths(rewrite):
    edges = torch.stack([torch.randint(0, 4, (E,)), torch.randint(0, 7, (E,))])

    def function(a, b, edges):
        return scatter(torch.tanh(b[edges[0]] + a[edges[1]]) ** 1, edges[0], "amax", 4)

    def plain(a, b, edges):
        return scatter(torch.tanh(b[edges[0]] + a[edges[1]]), edges[0], "amax", 4)

    assert fused(rewrite(function, torch.randn(7, F), torch.randn(4, F), edges)) == []
    found = rewrite(plain, torch.randn(7, F), torch.randn(4, F), edges)
    (node,) = [n for n in found.module.graph.nodes if "edge_network" in str(n.target)]
    assert node.args[7] is True  # flipped


def values_of_edges(a, b, values, edges, weight, bias):
    return scatter((ends(a, b, edges) + values).relu(), edges[1], "sum")


def values_first(a, b, values, edges, weight, bias):
    return scatter(torch.sigmoid(values + b[edges[0]]), edges[1], "amax")


def values_multiplied(a, b, values, edges, weight, bias):
    rows = ends(a, b, edges) + functional.linear(values, weight.repeat(2, 1)[:F])
    return scatter(functional.elu(rows), edges[1], "mean")


@pytest.mark.parametrize(
    ("function", "weighted"),
    [(values_of_edges, False), (values_first, False), (values_multiplied, True)],
)
def test_values_of_edges(rewrite, edges, weights, function, weighted):
    inputs = torch.randn(N, F), torch.randn(N, F), torch.randn(E, F), edges, *weights
    found = rewrite(function, *inputs)
    assert len(fused(found)) == 1
    (node,) = [n for n in found.module.graph.nodes if "edge_network" in str(n.target)]
    assert node.args[3] is not None
    assert (node.args[4] is not None) == weighted
    assert (node.args[1] is None) == (function is values_first)


def test_an_edge_conv_of_hand(rewrite, edges):
    def function(x, edges, first, second):
        own, other = x[edges[1]], x[edges[0]]
        rows = functional.linear(torch.cat([own, other - own], -1), first)
        values = functional.linear(functional.relu(rows, inplace=True), second)
        return scatter(values, edges[1], "amax")

    inputs = torch.randn(N, F), edges, torch.randn(H, 2 * F), torch.randn(3, H)
    found = rewrite(function, *inputs)
    assert [r.name for r in found.rewrites] == ["move_linear", "replace_scatter", "fuse_network"]
    assert found.after["relu"] == found.after["cat"] == 0


def gated(a, b, edges, weight, bias):
    rows = ends(a, b, edges)
    return scatter(rows * rows.sigmoid() - 2, edges[1], "mean")


def normed(a, b, edges, weight, bias):
    rows = functional.layer_norm(ends(a, b, edges), (F,), weight[0], weight[1])
    return scatter(functional.gelu(rows, approximate="tanh"), edges[1], "amax")


def in_place(a, b, edges, weight, bias):
    rows = functional.linear(ends(a, b, edges).relu_(), weight, bias)
    return scatter(functional.leaky_relu(rows, 0.2, inplace=True), edges[1], "amax")


def deep(a, b, edges, weight, bias):
    rows = functional.linear(ends(a, b, edges).relu(), weight, bias)
    rows = functional.linear(functional.silu(rows), weight.t())
    return scatter(functional.linear(rows.relu(), weight, bias), edges[1], "amin")


def eval_dropout(a, b, edges, weight, bias):
    rows = functional.dropout(ends(a, b, edges), 0.5, training=False)
    return scatter(rows.relu(), edges[1], "sum")


def a_row_for_all(a, b, edges, weight, bias):
    return scatter((ends(a, b, edges) * weight[:1] + weight[0]).tanh(), edges[1], "mean")


@pytest.mark.parametrize("function", [gated, normed, in_place, deep, eval_dropout, a_row_for_all])
def test_networks(rewrite, edges, weights, function):
    inputs = torch.randn(N, F), torch.randn(N, F), edges, *weights
    assert len(fused(rewrite(function, *inputs))) == 1


def messages_kept(a, b, edges, weight, bias):
    values = ends(a, b, edges).relu()
    return scatter(values, edges[1], "amax") + values.mean()


def sum_kept(a, b, edges, weight, bias):
    rows = ends(a, b, edges)
    return scatter(rows.relu(), edges[1], "amax") + rows.mean()


def rows_kept(a, b, edges, weight, bias):
    own = a[edges[1]]
    return scatter((own + b[edges[0]]).relu(), edges[1], "amax") + own.mean()


def over_edges(a, b, edges, weight, bias):
    return scatter(ends(a, b, edges).softmax(0), edges[1], "sum")


def over_features(a, b, edges, weight, bias):
    return scatter(ends(a, b, edges).relu().cumsum(-1), edges[1], "sum")


def a_factor_per_edge(a, b, edges, weight, bias):
    return scatter(ends(a, b, edges).relu() * edges[0].view(-1, 1), edges[1], "sum")


def a_second_beginning(a, b, edges, weight, bias):
    return scatter(ends(a, b, edges).relu() * b[edges[0]], edges[1], "sum")


def dropout(a, b, edges, weight, bias):
    rows = functional.dropout(ends(a, b, edges), 0.5, training=True)
    return scatter(rows.relu() * 0, edges[1], "sum")


def product(a, b, edges, weight, bias):
    return scatter(ends(a, b, edges).relu() + 1, edges[1], "prod")


def third_index(a, b, edges, weight, bias):
    return scatter(ends(a, b, edges).relu(), edges[0] % 5, "amax")


def one_end(a, b, edges, weight, bias):
    return scatter(b[edges[0]].relu(), edges[1], "amax")


def more_slots(a, b, edges, weight, bias):
    return scatter(ends(a, b, edges).relu(), edges[1], "amax", N + 1)


def end_edited(a, b, edges, weight, bias):
    rows = ends(a, b, edges)
    b.detach().mul_(2)
    return scatter(rows.relu(), edges[1], "amax")


def bias_edited(a, b, edges, weight, bias):
    rows = functional.linear(ends(a, b, edges).relu(), weight, bias)
    bias.detach().mul_(2)
    return scatter(rows, edges[1], "amax")


def written_through_another_name(a, b, edges, weight, bias):
    rows = ends(a, b, edges) * 1
    same = rows.contiguous()
    return scatter(same.relu_() + rows, edges[1], "amax")


def mode_changed(a, b, edges, weight, bias):
    with torch.no_grad():
        rows = ends(a, b, edges).relu()
    return scatter(functional.linear(rows, weight, bias), edges[1], "amax")


def batch_norm(a, b, edges, weight, bias):
    rows = functional.batch_norm(ends(a, b, edges), None, None, training=True)
    return scatter(rows.relu(), edges[1], "amax")


EDITED = (end_edited, bias_edited)


@pytest.mark.parametrize(
    "function",
    [
        messages_kept,
        sum_kept,
        rows_kept,
        over_edges,
        over_features,
        a_factor_per_edge,
        a_second_beginning,
        dropout,
        product,
        third_index,
        one_end,
        more_slots,
        *EDITED,
        written_through_another_name,
        mode_changed,
        batch_norm,
    ],
)
def test_leaves_alone(rewrite, edges, weights, function):
    inputs = torch.randn(N, F), torch.randn(N, F), edges, *weights
    assert fused(rewrite(function, *inputs, exact=function not in EDITED)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_left_alone(rewrite, edges, dtype):
    def function(a, b, edges):
        return scatter(ends(a.to(dtype), b.to(dtype), edges).relu(), edges[1], "amax").float()

    found = rewrite(function, torch.randn(N, F), torch.randn(N, F), edges, exact=False)
    assert fused(found) == []


def test_autocast_is_left_alone(rewrite, edges, weights):
    def function(a, b, edges, weight, bias):
        with torch.autocast("cpu", torch.bfloat16):
            rows = functional.linear(ends(a, b, edges).relu(), weight, bias)
        return scatter(rows.float(), edges[1], "amax")

    inputs = torch.randn(N, F), torch.randn(N, F), edges, *weights
    assert fused(rewrite(function, *inputs, exact=False)) == []


@pytest.mark.parametrize("num_edges", [0, 1, 12])
def test_what_fits_one_tile_is_left_alone(rewrite, num_edges):
    def function(a, b, edges):
        return scatter(ends(a, b, edges).relu(), edges[1], "amax")

    edges = torch.randint(0, N, (2, num_edges))
    assert fused(rewrite(function, torch.randn(N, F), torch.randn(N, F), edges)) == []


@pytest.mark.parametrize(("nodes", "taken"), [(20, True), (21, False)])
def test_few_edges_per_node_are_left_alone(rewrite, nodes, taken):
    def function(a, b, edges):
        return scatter(ends(a, b, edges).relu(), edges[1], "amax", nodes)

    edges = torch.randint(0, nodes, (2, 60))
    found = rewrite(function, torch.randn(nodes, F), torch.randn(nodes, F), edges)
    assert len(fused(found)) == taken


def test_open_sizes_are_decided_at_each_call():
    def function(a, b, edges):
        return scatter(ends(a.view(-1, F), b.view(-1, F), edges).relu(), edges[1], "amax", len(a))

    compiled = torch.compile(
        function, backend="edgeweave", options={"engine": "eager"}, dynamic=True
    )
    with recording() as records:
        for num_edges in (60, 40, 11, 5, 80, 0):
            a, b = torch.randn(N, F), torch.randn(N, F)
            some = torch.randint(0, N, (2, num_edges))
            torch.testing.assert_close(compiled(a, b, some), function(a, b, some))
    found = ["edgeweave.edge_network" in record.ops for record in records]
    assert found[:2] == [True, False]
    assert len(found) <= 3  # torch makes one of its own for no edges


# Without those that leave the numbers of float32 where one follows the other.
TAME = sorted({*UNARY} - {"exp", "square"})
STEPS_OF_PROGRAMS = (*TAME, "linear", "layer_norm", "gate", "scale", "shift", "larger")


def step(rows, name, tensors):
    if name == "linear":
        return functional.linear(rows, tensors[0], tensors[1])
    if name == "layer_norm":
        return functional.layer_norm(rows, (F,), tensors[1], None)
    if name == "gate":
        return rows * rows.sigmoid()
    if name == "scale":
        return 0.5 * rows / (2 + tensors[1] ** 2)
    if name == "shift":
        return rows - tensors[1]
    if name == "larger":
        return torch.maximum(rows, torch.tanh(rows))
    function = getattr(functional, name, None) or getattr(torch, name)
    return function(rows)


@hypothesis.settings(max_examples=40, phases=[hypothesis.Phase.generate])
@hypothesis.given(
    names=st.lists(st.sampled_from(STEPS_OF_PROGRAMS), min_size=1, max_size=4),
    reduce=st.sampled_from(["sum", "mean", "amax", "amin"]),
    both=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_random_networks(rewrite, names, reduce, both, seed):
    torch.manual_seed(seed)
    edges = torch.randint(0, N - 1, (2, E))

    def function(a, b, values, edges, weight, bias):
        rows = ends(a, b, edges) if both else b[edges[0]] + values
        for name in names:
            rows = step(rows / 2, name, (weight, bias))
        return scatter(rows, edges[1], reduce)

    inputs = torch.randn(N, F), torch.randn(N, F), torch.randn(E, F), edges
    found = rewrite(function, *inputs, torch.randn(F, F) / 2, torch.randn(F))
    assert len(fused(found)) == 1


# ---- programs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(UNARY))
def test_derivatives_of_functions(name):
    program = load_program(json.dumps([[name, [["v", 0]], {}]]))
    rows = torch.randn(40, 3, dtype=torch.float64) * 4
    leaf = rows.clone().requires_grad_()
    function = getattr(functional, name, None) or getattr(torch, name)
    out = function(leaf)
    grad = torch.randn_like(rows)
    (exact,) = torch.autograd.grad(out, leaf, grad)
    values = program.values(rows.clone(), ())
    torch.testing.assert_close(values[-1], out.detach())
    torch.testing.assert_close(program.pull(values, (), grad, []), exact)


def test_a_program_calls_functions_of_rows_alone():
    with pytest.raises(ValueError, match="must call functions of rows"):
        load_program('[["softmax",[["v",0]],{}]]')
    assert "softmax" not in STEPS


def test_a_row_that_is_read_twice_is_not_written_over():
    text = json.dumps([["relu", [["v", 0]], {}], ["add", [["v", 1], ["v", 0]], {}]])
    rows = torch.randn(5, 3)
    kept = rows.clone()
    torch.testing.assert_close(load_program(text)(rows), kept.relu() + kept)
    torch.testing.assert_close(rows, kept)


def test_what_a_derivative_needs_is_not_written_over():
    text = json.dumps([["sigmoid", [["v", 0]], {}], ["relu", [["v", 1]], {}]])
    program = load_program(text)
    assert [line.in_place for line in program.lines] == [True, False]


# ---- the op --------------------------------------------------------------------------------------


def arguments(edges, reduce="amax", program=RELU_LINEAR, with_values=True):
    made = [torch.randn(N, F), torch.randn(N, F)]
    made += [torch.randn(E, 3), torch.randn(F, 3)] if with_values else [None, None]
    tensors = [torch.randn(H, F), torch.randn(H)]
    for t in (*made, *tensors):
        if t is not None:
            t.requires_grad_()
    return edges, *made, tensors, N, False, reduce, program, F


@pytest.mark.parametrize("reduce", ["amax", "mean"])
@pytest.mark.parametrize("with_values", [False, True])
def test_opcheck(edges, reduce, with_values):
    op = torch.ops.edgeweave.edge_network.default
    torch.library.opcheck(op, arguments(edges, reduce, with_values=with_values))


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (3,), (4,), (5,), (0, 5), (1, 2, 4)])
def test_gradients_that_are_needed(edges, needed):
    edge_index, p, q, r, w, tensors, *rest = arguments(edges)
    leaves = [p, q, r, w, *tensors]
    for k, leaf in enumerate(leaves):
        leaf.requires_grad_(k in needed)
    out = torch.ops.edgeweave.edge_network(edge_index, p, q, r, w, tensors, *rest)
    rows = functional.linear((ends(p, q, edges) + r @ w.t()).relu(), *tensors)
    exact = scatter(rows, edges[1], "amax")
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-5)
    wanted = [leaves[k] for k in needed]
    upstream = torch.randn_like(out)
    mine = torch.autograd.grad(out, wanted, upstream)
    for a, b in zip(mine, torch.autograd.grad(exact, wanted, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_ties_share_the_gradient(edges):
    """Edges that are there twice: both win."""
    edges = edges.repeat(1, 2)
    q = torch.randn(N, F, requires_grad=True)
    program = json.dumps([["relu", [["v", 0]], {}]])
    out = torch.ops.edgeweave.edge_network(
        edges, q.detach(), q, None, None, [], N, False, "amax", program, F
    )
    again = q.detach().requires_grad_()
    rows = ends(q.detach(), again, edges).relu()
    exact = torch.ops.edgeweave.scatter(rows, edges[1], N, "amax", "even")
    (mine,), (true,) = (torch.autograd.grad(o.sum(), t) for o, t in ((out, q), (exact, again)))
    torch.testing.assert_close(mine, true)


def test_second_derivatives_raise(edges):
    inputs = arguments(edges)
    out = torch.ops.edgeweave.edge_network(*inputs)
    (dq,) = torch.autograd.grad(out.square().sum(), inputs[2], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        dq.sum().backward()


def test_hooks_of_weights_are_called_once(edges):
    layer = nn.Linear(F, H)
    calls = []
    layer.weight.register_hook(lambda g: calls.append(g.shape))

    def function(a, b, edges):
        return scatter(layer(ends(a, b, edges).relu()), edges[1], "amax")

    compiled = torch.compile(function, backend="edgeweave", options={"engine": "eager"})
    compiled(torch.randn(N, F), torch.randn(N, F), edges).sum().backward()
    assert calls == [layer.weight.shape]


def test_no_nodes_and_no_edges():
    edges = torch.zeros(2, 0, dtype=torch.int64)
    q = torch.randn(0, F, requires_grad=True)
    weight = torch.randn(H, F, requires_grad=True)
    program = json.dumps([["linear", [["v", 0], ["t", 0]], {}]])
    inputs = (edges, None, q, None, None, [weight], 0, False, "sum", program, F)
    out = torch.ops.edgeweave.edge_network(*inputs)
    assert out.shape == (0, H)
    dq, dw = torch.autograd.grad(out.sum(), [q, weight])
    assert dq.shape == (0, F)
    assert torch.equal(dw, torch.zeros_like(weight))


def test_a_node_without_edges_gets_no_bias(edges, weights):
    def function(a, b, edges, weight, bias):
        rows = functional.linear(ends(a, b, edges).relu(), weight, bias)
        return scatter(rows, edges[1], "amax")

    inputs = torch.randn(N, F), torch.randn(N, F), edges, *weights
    compiled = torch.compile(function, backend="edgeweave", options={"engine": "eager"})
    assert torch.equal(compiled(*inputs)[N - 1], torch.zeros(H))


@pytest.mark.parametrize("reduce", ["max", "prod", ""])
def test_an_unknown_reduction_raises(edges, reduce):
    rows = torch.randn(N, H)
    with pytest.raises(ValueError, match="reduce must be one of sum, mean, amax, amin"):
        torch.ops.edgeweave.edge_network(
            edges, rows, rows, None, None, [], N, False, reduce, '[["relu",[["v",0]],{}]]', H
        )
