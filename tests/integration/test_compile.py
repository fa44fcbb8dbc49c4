"""`torch.compile(fullgraph=True)`, export, fake and meta tensors, `torch.func`, `opcheck`."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from edgeweave import sparse
from edgeweave.scatter import gather, scatter_reduce

pytestmark = pytest.mark.usefixtures("fresh_compiler")

REDUCES = ("sum", "mean", "amax", "amin")


def edges_and_features(num_nodes: int = 30, num_edges: int = 200, width: int = 5):
    edges = torch.randint(0, num_nodes, (2, num_edges))
    edges[:, 0] = num_nodes - 1
    return edges, torch.randn(num_nodes, width), torch.randn(num_edges)


def assert_same_training(eager, compiled, *inputs) -> None:
    """Check that outputs and gradients of all floating inputs are bitwise equal."""
    results = []
    for function in (eager, compiled):
        leaves = [
            t.clone().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point()
            else t
            for t in inputs
        ]  # fmt: skip
        out = function(*leaves)
        torch.manual_seed(1)
        wanted = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        grads = torch.autograd.grad(out, wanted, torch.randn(out.shape).to(out.dtype))
        results.append((out.detach(), *grads))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


# torch.compile


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_mm_of_plain_edges(weighted, reduce):
    edges, x, weight = edges_and_features()

    def function(edges, x, weight=None):
        return sparse.mm(edges, x, reduce, weight=weight).relu()

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    inputs = (edges, x, weight) if weighted else (edges, x)
    assert_same_training(function, compiled, *inputs)
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), function(*inputs))


@pytest.mark.parametrize("reduce", REDUCES)
def test_mm_of_a_graph(reduce):
    edges, x, weight = edges_and_features()
    graph = sparse.Graph(edges, size=(30, 30))

    def closed_over(x, weight):
        return sparse.mm(graph, x, reduce, weight=weight).relu()

    def passed(graph, x, weight):
        return sparse.mm(graph, x, reduce, weight=weight).relu()

    compiled = torch.compile(closed_over, backend="aot_eager", fullgraph=True)
    assert_same_training(closed_over, compiled, x, weight)
    compiled = torch.compile(passed, backend="aot_eager", fullgraph=True)
    assert_same_training(passed, compiled, graph, x, weight)


@pytest.mark.parametrize("reduce", REDUCES)
def test_mm_forms(reduce):
    """Other dtypes of weights, heads, no feature dimension, and edges turned round."""
    edges, x, weight = edges_and_features()
    graph = sparse.Graph(edges, size=(30, 30))
    for name, features, factor, flow in (
        ("bf16 with fp32 weights", x.bfloat16(), weight, "source_to_target"),
        ("fp32 with fp64 weights", x, weight.double(), "source_to_target"),
        ("heads", torch.randn(30, 4, 3), torch.randn(200, 4), "source_to_target"),
        ("[N]", torch.randn(30), weight, "source_to_target"),
        ("turned round", x, weight, "target_to_source"),
    ):

        def function(operand, x, weight, flow=flow):
            return sparse.mm(operand, x, reduce, weight=weight, flow=flow)

        for operand in (edges, graph):
            torch._dynamo.reset()
            compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
            try:
                assert_same_training(function, compiled, operand, features, factor)
            except torch._dynamo.exc.Unsupported as error:
                pytest.fail(f"{name}, {type(operand).__name__}: {error}")


def test_a_graph_built_within_the_compiled_function():
    def function(edges, x):
        return sparse.mm(sparse.Graph(edges, size=(30, 30)), x, "mean")

    edges, x, _ = edges_and_features()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_same_training(function, compiled, edges, x)


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
def test_a_scipy_matrix_closed_over(layout):
    import scipy.sparse

    matrix = scipy.sparse.random_array((30, 30), density=0.2, format=layout, dtype=np.float32)

    def function(x):
        return sparse.mm(matrix, x)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_same_training(function, compiled, torch.randn(30, 5))


def test_edge_index():
    """PyG's EdgeIndex, also built within the function, when it has cached nothing."""
    with warnings.catch_warnings():
        # PyG scripts some of its own classes on import, which torch calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        edge_index_class = pytest.importorskip("torch_geometric", reason="needs PyG").EdgeIndex

    def passed(index, x):
        return sparse.mm(index, x, "amax")

    def built(edges, x):
        return sparse.mm(edge_index_class(edges, sparse_size=(30, 30)), x, "amax")

    edges, x, _ = edges_and_features()
    compiled = torch.compile(built, backend="aot_eager", fullgraph=True)
    assert_same_training(built, compiled, edges, x)
    compiled = torch.compile(passed, backend="aot_eager", fullgraph=True)
    assert_same_training(passed, compiled, edge_index_class(edges, sparse_size=(30, 30)), x)


def test_a_second_graph_of_the_same_sizes_is_not_taken_for_the_first():
    compiled = torch.compile(lambda e, x: sparse.mm(e, x), backend="aot_eager", fullgraph=True)
    as_graph = torch.compile(lambda g, x: sparse.mm(g, x), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        edges, x, _ = edges_and_features()
        expected = sparse.mm(edges, x)
        assert torch.equal(compiled(edges, x), expected)
        assert torch.equal(as_graph(sparse.Graph(edges, size=(30, 30)), x), expected)


def test_edges_edited_between_compiled_calls():
    compiled = torch.compile(lambda e, x: sparse.mm(e, x), backend="aot_eager", fullgraph=True)
    edges, x, _ = edges_and_features()
    for step in range(3):
        assert torch.equal(compiled(edges, x), sparse.mm(edges.clone(), x))
        edges[1, 7] = step


def test_edges_built_within_the_compiled_function():
    def function(edges, x):
        loops = torch.arange(x.shape[0])
        return sparse.mm(torch.cat([edges, torch.stack([loops, loops])], 1), x, "mean")

    edges, x, _ = edges_and_features()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_same_training(function, compiled, edges, x)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize(("shape", "dim"), [((60,), 0), ((60, 5), 0), ((2, 60, 5), 1)])
def test_scatter_reduce(shape, dim, reduce):
    src, index = torch.randn(shape), torch.randint(0, 9, (60,))

    def function(src, index):
        return scatter_reduce(src.sin(), index, dim, 9, reduce) * 2

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_same_training(function, compiled, src, index)


@pytest.mark.parametrize("reduce", REDUCES)
def test_scatter_reduce_options(reduce):
    src, index, start = torch.randn(60, 5), torch.randint(0, 9, (60,)), torch.randn(9, 5)

    def with_self(src, index, start):
        return scatter_reduce(
            src, index, reduce=reduce, include_self=True, out=start * 1, ties="first"
        )

    compiled = torch.compile(with_self, backend="aot_eager", fullgraph=True)
    assert_same_training(with_self, compiled, src, index, start)
    if reduce in ("amax", "amin"):
        winners = torch.compile(
            lambda s, i: scatter_reduce(s, i, 0, 9, reduce, return_arg=True),
            backend="aot_eager",
            fullgraph=True,
        )
        expected = scatter_reduce(src, index, 0, 9, reduce, return_arg=True)
        for mine, theirs in zip(winners(src, index), expected, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("form", ["view", "expand", "expand_as"])
def test_scatter_reduce_of_an_expanded_index(form):
    def function(src, index):
        column = index.view(-1, 1)
        if form == "expand":
            column = column.expand(-1, src.shape[1])
        elif form == "expand_as":
            column = column.expand_as(src)
        return scatter_reduce(src, column, 0, 9, "mean")

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_same_training(function, compiled, torch.randn(60, 5), torch.randint(0, 9, (60,)))


def test_scatter_reduce_without_dim_size():
    """The size depends on the data: an unbacked size, but no graph break."""
    src, index = torch.randn(60, 5), torch.randint(0, 9, (60,))
    compiled = torch.compile(
        lambda s, i: scatter_reduce(s, i).relu(), backend="aot_eager", fullgraph=True
    )
    for largest in (9, 4, 20):
        index = torch.randint(0, largest, (60,))
        index[3] = largest - 1
        assert torch.equal(compiled(src, index), scatter_reduce(src, index).relu())


@pytest.mark.parametrize("kind", ["one-dimensional", "expanded", "full rank"])
def test_gather(kind):
    x, index = torch.randn(9, 5), torch.randint(0, 9, (60,))
    if kind == "full rank":
        index = torch.randint(0, 9, (60, 5))

    def function(x, index):
        if kind == "expanded":
            index = index[:, None].expand(-1, x.shape[1])
        return gather(x.cos(), index).exp()

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_same_training(function, compiled, x, index)


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic=True"])
def test_sizes_may_change_without_compiling_each_time(dynamic):
    def function(edges, x, weight):
        out = sparse.mm(edges, x, "mean", weight=weight)
        messages = gather(out, edges[0]) * weight[:, None]
        return scatter_reduce(messages, edges[1], 0, x.shape[0], "amax")

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic)
    for num_nodes, num_edges in ((30, 200), (41, 333), (57, 90), (100, 801), (13, 1000)):
        inputs = edges_and_features(num_nodes, num_edges)
        assert_same_training(function, compiled, *inputs)
    # Once for the first sizes and once for all others; with dynamic=True once only.
    assert counter.frame_count <= (1 if dynamic else 2)


def test_errors_of_compiled_code_are_those_of_eager_code():
    compiled = torch.compile(lambda e, x: sparse.mm(e, x), backend="aot_eager", fullgraph=True)
    edges, x, _ = edges_and_features()
    compiled(edges, x)
    edges = edges.clone()
    edges[1, 17] = 977
    with pytest.raises(IndexError, match=r"(?=.*\b977\b)(?=.*\b17\b)(?=.*\b30\b)"):
        compiled(edges, x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_inductor_does_not_overwrite_what_the_cache_holds():
    """Inductor reuses buffers of op results; a cached array among them would be destroyed."""
    edges, x, weight = edges_and_features(64, 512, 8)
    graph = sparse.Graph(edges, size=(64, 64))
    names = ("rowptr", "col", "perm", "colptr", "row", "perm_t", "in_degree", "out_degree")
    before = {name: getattr(graph, name).clone() for name in names}

    def function(edges, x, weight):
        h = sparse.mm(edges, x, "mean", weight=weight).relu() + 1
        h = sparse.mm(edges, h * 2, "amax").sigmoid()
        return scatter_reduce(gather(h, edges[0]) * 3, edges[1], 0, 64).tanh() - h

    compiled = torch.compile(function, backend="inductor", fullgraph=True)
    results = []
    for run in (function, compiled, compiled, compiled):
        leaf, factor = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = run(edges, leaf, factor)
        out.square().sum().backward()
        results.append((out.detach(), leaf.grad, factor.grad))
    for result in results[1:]:
        for mine, eager in zip(result, results[0], strict=True):
            # Inductor's own vectorised sigmoid and tanh differ by a few units in the last
            # place; 40 entries of at most this size add up in a gradient.
            limit = 512 * 2.0**-24 * float(eager.abs().max())
            torch.testing.assert_close(mine, eager, rtol=0, atol=limit)
    for name in names:
        assert torch.equal(getattr(graph, name), before[name]), name
    fresh = sparse.Graph(edges.clone(), size=(64, 64))
    for name in names:
        assert torch.equal(getattr(fresh, name), before[name]), name
    assert torch.equal(sparse.mm(edges, x, "mean"), sparse.mm(graph, x, "mean"))


# torch.export


class Model(torch.nn.Module):
    def forward(self, edges, x, weight):
        h = sparse.mm(edges, x, "sum", weight=weight).relu()
        return scatter_reduce(gather(h, edges[0]), edges[1], 0, x.shape[0], "amax")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_export(dynamic):
    inputs = edges_and_features()
    shapes = None
    if dynamic:
        nodes, edges = torch.export.Dim("nodes", min=2), torch.export.Dim("edges", min=2)
        shapes = {"edges": {1: edges}, "x": {0: nodes}, "weight": {0: edges}}
    program = torch.export.export(Model(), inputs, dynamic_shapes=shapes)
    assert torch.equal(program.module()(*inputs), Model()(*inputs))
    if dynamic:
        others = edges_and_features(47, 321)
        assert torch.equal(program.module()(*others), Model()(*others))
    calls = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert any(call.startswith("edgeweave.") for call in calls), calls


# Meta tensors


@pytest.mark.parametrize("reduce", REDUCES)
def test_meta_tensors(reduce):
    edges = torch.empty(2, 50, dtype=torch.int64, device="meta")
    x = torch.empty(9, 4, 3, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(50, 4, device="meta")
    out = sparse.mm(edges, x, reduce, weight=weight)
    assert (out.shape, out.dtype, out.device.type) == ((9, 4, 3), torch.float32, "meta")
    src = torch.empty(2, 50, 3, device="meta")
    out = scatter_reduce(src, edges[1], 1, 7, reduce)
    assert (out.shape, out.dtype, out.device.type) == ((2, 7, 3), torch.float32, "meta")
    out = gather(src, edges[0, :5], -1)
    assert (out.shape, out.device.type) == ((2, 50, 5), "meta")
    leaf = x.detach().requires_grad_()
    sparse.mm(edges, leaf, reduce, weight=weight).sum().backward()
    assert leaf.grad.shape == x.shape


def test_meta_index_cannot_tell_its_size():
    src, index = torch.empty(50, device="meta"), torch.empty(50, device="meta").long()
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match="dim_size"):
        scatter_reduce(src, index)


# torch.func, where torch's own operation supports the transform


def stock_scatter(src, index, num_groups, reduce):
    index = index[:, None].expand(src.shape)
    return src.new_zeros(num_groups, src.shape[1]).scatter_reduce(
        0, index, src, reduce, include_self=False
    )


@pytest.mark.parametrize("reduce", REDUCES)
def test_func_transforms_of_scatter_reduce(reduce):
    src, index = torch.randn(4, 60, 3, dtype=torch.float64), torch.randint(0, 9, (60,))

    def ours(src):
        return scatter_reduce(src, index, 0, 9, reduce)

    def stock(src):
        return stock_scatter(src, index, 9, reduce)

    check_transforms(ours, stock, src)


@pytest.mark.parametrize("kind", ["one-dimensional", "expanded", "full rank"])
def test_func_transforms_of_gather(kind):
    x, index = torch.randn(4, 9, 3, dtype=torch.float64), torch.randint(0, 9, (60,))
    full = index[:, None].expand(60, 3)
    if kind == "expanded":
        index = full
    elif kind == "full rank":
        index = full = torch.randint(0, 9, (60, 3))
    check_transforms(lambda x: gather(x, index), lambda x: torch.gather(x, 0, full), x)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_func_transforms_of_mm(weighted, reduce):
    edges = torch.randint(0, 9, (2, 60))
    x, weight = torch.randn(4, 9, 3, dtype=torch.float64), torch.randn(60, dtype=torch.float64)
    graph = sparse.Graph(edges, size=(9, 9))

    def ours(x):
        return sparse.mm(graph, x, reduce, weight=weight if weighted else None)

    def stock(x):
        messages = x[edges[0]]
        return stock_scatter(
            messages * weight[:, None] if weighted else messages, edges[1], 9, reduce
        )

    check_transforms(ours, stock, x)


def check_transforms(ours, stock, batch) -> None:
    """Compare with stock torch; sums of 60 float64 terms of size 1 agree to 1e-13."""

    def close(a, b):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)

    x, tangent = batch[0], batch[1]
    with warnings.catch_warnings():
        # Stock torch itself may take its slow path under vmap.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        # Forward mode makes torch script its own decompositions, which torch calls deprecated.
        warnings.filterwarnings("ignore", message=".*torch.jit.script. is deprecated")
        close(torch.func.vmap(ours)(batch), torch.func.vmap(stock)(batch))
        turned = batch.movedim(0, -1)
        close(torch.func.vmap(ours, in_dims=-1)(turned), torch.func.vmap(stock, in_dims=-1)(turned))

        def loss(f):
            return lambda x: f(x).square().sum()

        close(torch.func.grad(loss(ours))(x), torch.func.grad(loss(stock))(x))
        close(
            torch.func.vmap(torch.func.grad(loss(ours)))(batch),
            torch.func.vmap(torch.func.grad(loss(stock)))(batch),
        )
        for mine, theirs in zip(
            torch.func.jvp(ours, (x,), (tangent,)),
            torch.func.jvp(stock, (x,), (tangent,)),
            strict=True,
        ):
            close(mine, theirs)


def test_vmap_over_weights():
    edges, x = torch.randint(0, 9, (2, 60)), torch.randn(9, 3, dtype=torch.float64)
    graph = sparse.Graph(edges, size=(9, 9))
    weights = torch.randn(4, 60, dtype=torch.float64)
    out = torch.func.vmap(lambda w: sparse.mm(graph, x, weight=w))(weights)
    for one, w in zip(out, weights, strict=True):
        torch.testing.assert_close(one, sparse.mm(graph, x, weight=w), rtol=1e-13, atol=1e-13)


# Autocast and inference mode


def test_autocast_keeps_result_type():
    edges, x, weight = edges_and_features()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sparse.mm(edges, x, weight=weight).dtype == torch.float32
        assert sparse.mm(edges, x.bfloat16()).dtype == torch.bfloat16
        assert scatter_reduce(x, edges[1, :30]).dtype == torch.float32
        assert gather(x.half(), edges[0]).dtype == torch.float16
        leaf = x.clone().requires_grad_()
        sparse.mm(edges, leaf, "mean").sum().backward()
    assert leaf.grad.dtype == torch.float32


def test_inference_mode_then_training_of_a_compiled_model():
    edges, x, weight = edges_and_features()
    model = torch.compile(Model(), backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(model(edges, x, weight), Model()(edges, x, weight))
    assert_same_training(Model(), model, edges, x, weight)


# opcheck


class _Recorder(torch.fx.Interpreter):
    """Runs a captured graph and keeps the arguments of each edgeweave op."""

    def __init__(self, module: torch.fx.GraphModule, calls: dict) -> None:
        super().__init__(module)
        self.calls = calls

    def call_function(self, target, args, kwargs):
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "edgeweave":
            detached = torch.utils._pytree.tree_map(
                lambda value: value.detach().clone() if isinstance(value, torch.Tensor) else value,
                (args, kwargs),
            )
            self.calls.setdefault(str(target), (target, []))[1].append(detached)
        return super().call_function(target, args, kwargs)


def recorded_calls() -> dict:
    """Return {name: (op, [(args, kwargs)])} of the ops that compiled programs call."""
    calls: dict = {}

    def compiler(module, _):
        return make_boxed_func(lambda *args: _Recorder(module, calls).run(*args))

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    edges, x, weight = edges_and_features()
    for reduce in REDUCES:
        for w in (None, weight):
            function = torch.compile(
                lambda e, x, w, reduce=reduce: sparse.mm(e, x, reduce, weight=w),
                backend=backend, fullgraph=True,
            )  # fmt: skip
            leaf = x.clone().requires_grad_()
            function(
                edges, leaf, None if w is None else w.clone().requires_grad_()
            ).sum().backward()
            torch._dynamo.reset()
    src, index = torch.randn(200, 5), edges[1].clone()
    for reduce in REDUCES:
        function = torch.compile(
            lambda s, i, reduce=reduce: scatter_reduce(s, i, 0, 30, reduce),
            backend=backend, fullgraph=True,
        )  # fmt: skip
        function(src.clone().requires_grad_(), index).sum().backward()
        torch._dynamo.reset()
    function = torch.compile(lambda x, i: gather(x, i), backend=backend, fullgraph=True)
    function(x.clone().requires_grad_(), index).sum().backward()
    torch._dynamo.reset()
    return calls


def test_opcheck():
    """Schema, fake kernel, autograd registration and AOT of every op that compiled code calls."""
    calls = recorded_calls()
    assert calls, "compiled code called no op of this library"
    for op, samples in calls.values():
        for args, kwargs in samples:
            torch.library.opcheck(op, args, kwargs)


def test_no_op_returns_memory_of_its_inputs_or_of_the_cache():
    """Two runs of an op with the same inputs give results that share no memory."""
    for name, (op, samples) in recorded_calls().items():
        for args, kwargs in samples:
            first = torch.utils._pytree.tree_leaves(op(*args, **kwargs))
            second = torch.utils._pytree.tree_leaves(op(*args, **kwargs))
            tensors = [t for t in first + second if isinstance(t, torch.Tensor) and t.numel()]
            tensors += [t for t in torch.utils._pytree.tree_leaves((args, kwargs))
                        if isinstance(t, torch.Tensor) and t.numel()]  # fmt: skip
            addresses = [t.untyped_storage().data_ptr() for t in tensors]
            assert len(set(addresses)) == len(addresses), name


@pytest.mark.parametrize("reduce", ["sum", "amax"])
def test_second_derivatives_of_compiled_code_are_an_error_not_zero(reduce):
    edges = torch.tensor([[0, 1, 2, 2], [1, 0, 0, 1]])
    weight = torch.rand(4, requires_grad=True)
    x = torch.randn(3, 2, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: sparse.mm(edges, x, reduce, weight=w), backend="eager")
    (dx,) = torch.autograd.grad(compiled(x, weight).sum(), x, create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"second derivatives must be taken outside torch\.compile"
    ):
        torch.autograd.grad(dx.sum(), weight)
