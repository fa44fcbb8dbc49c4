"""Compiling, exporting and tracing the operators beyond sum, mean, amax and amin; `opcheck`."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from edgeweave import scatter, sparse

pytestmark = pytest.mark.usefixtures("fresh_compiler")

# name: (function of entries [E, 4], index [E] into 30 groups and ptr, whether trainable)
FUNCTIONS = {
    "softmax": lambda x, i, p: scatter.softmax(x, i, dim_size=30),
    "softmax-without-dim-size": lambda x, i, p: scatter.softmax(x, i),
    "softmax-ptr": lambda x, i, p: scatter.softmax(x, ptr=p),
    "softmax-dim1": lambda x, i, p: scatter.softmax(x.t(), i, dim_size=30, dim=1),
    "logsumexp": lambda x, i, p: scatter.logsumexp(x, i, dim_size=30).clamp(min=-9),
    "prod": lambda x, i, p: scatter.scatter_reduce(x, i, 0, 30, "prod"),
    "multi": lambda x, i, p: torch.cat(
        scatter.multi_reduce(x, i, ["sum", "std", "amax", "mean", "var", "min"], 0, 30), 1
    ),
    "var": lambda x, i, p: scatter.var(x, i, 0, 30),
    "segment-sum": lambda x, i, p: scatter.segment_reduce(x, p),
    "segment-amax": lambda x, i, p: scatter.segment_reduce(x, p, "amax"),
    "segment-prod": lambda x, i, p: scatter.segment_reduce(x, p, "prod"),
    "segment-matmul": lambda x, i, p: sparse.segment_matmul(x, p, torch.ones(p.shape[0] - 1, 4, 3)),
    "sddmm-dot": lambda x, i, p: sparse.sddmm(torch.stack([i, i]), x, x),
    "sddmm-mul": lambda x, i, p: sparse.sddmm(torch.stack([i, i]), x, x, "mul"),
    "argmax": lambda x, i, p: scatter.argmax(x, i, 0, 30),
    "index-sort": lambda x, i, p: scatter.index_sort(i)[1],
}
POSITIONS = ("argmax", "index-sort")


def inputs(entries: int = 200, segments: int = 12) -> tuple[torch.Tensor, ...]:
    index = torch.randint(0, 30, (entries,))
    index[0] = 29
    cuts = torch.randint(0, entries + 1, (segments - 1,)).sort().values
    ptr = torch.cat([torch.tensor([0]), cuts, torch.tensor([entries])])
    return torch.randn(entries, 4), index, ptr


def assert_same(name, compiled, x, index, ptr) -> None:
    """Bitwise, but for what Inductor or plain torch operations compute in another order."""
    function = FUNCTIONS[name]
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = compiled(mine, index, ptr), function(theirs, index, ptr)
    torch.testing.assert_close(out, expected)
    if name in POSITIONS:
        return
    upstream = torch.randn(out.shape)
    out.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sizes_may_change_without_compiling_each_time(name):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(FUNCTIONS[name], backend=counter, fullgraph=True, dynamic=True)
    for entries, segments in ((200, 12), (333, 41), (90, 5)):
        assert_same(name, compiled, *inputs(entries, segments))
    assert counter.frame_count == 1
    with torch.no_grad():
        x, index, ptr = inputs()
        torch.testing.assert_close(compiled(x, index, ptr), FUNCTIONS[name](x, index, ptr))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["softmax", "multi", "segment-matmul", "sddmm-dot"])
def test_inductor(name):
    function = FUNCTIONS[name]
    compiled = torch.compile(
        lambda x, i, p: function(x.sin(), i, p).cos(), backend="inductor", fullgraph=True
    )
    x, index, ptr = inputs()
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(2):
        out, expected = compiled(mine, index, ptr), function(theirs.sin(), index, ptr).cos()
        torch.testing.assert_close(out, expected)
        grads = [torch.autograd.grad(o.sum(), t)[0] for o, t in ((out, mine), (expected, theirs))]
        # Up to 15 terms per entry, from Inductor's own sine and cosine.
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["softmax", "logsumexp", "multi", "segment-prod", "segment-matmul"]
)
def test_export(name):
    class Model(torch.nn.Module):
        def forward(self, x, index, ptr):
            return FUNCTIONS[name](x, index, ptr)

    example = inputs()
    entries, segments = torch.export.Dim("entries", min=2), torch.export.Dim("segments", min=3)
    shapes = {"x": {0: entries}, "index": {0: entries}, "ptr": {0: segments}}
    if not name.startswith("segment"):
        shapes["ptr"] = None
    program = torch.export.export(Model(), example, dynamic_shapes=shapes)
    for args in (
        example,
        (*inputs(77)[:2], example[2]) if shapes["ptr"] is None else inputs(77, 9),
    ):
        torch.testing.assert_close(program.module()(*args), Model()(*args))
    calls = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert any(call.startswith("edgeweave.") for call in calls), calls


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "softmax-without-dim-size"])
def test_fake_and_meta_tensors_have_the_right_shapes(name):
    if name == "segment-matmul":
        pytest.skip("the weight in FUNCTIONS is a real tensor; its fake kernel is in opcheck")
    x, index, ptr = inputs()
    expected = FUNCTIONS[name](x, index, ptr)
    half = x.bfloat16()
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (half, index, ptr)]
        out = FUNCTIONS[name](*fakes)
    assert out.shape == expected.shape
    assert out.dtype == (torch.int64 if name in POSITIONS else torch.bfloat16)
    out = FUNCTIONS[name](*[t.to("meta") for t in (x, index, ptr)])
    assert (out.shape, out.dtype, out.device.type) == (expected.shape, expected.dtype, "meta")


def test_opcheck():
    """Schema, fake kernel, autograd registration and AOT of each registered op."""
    ops = torch.ops.edgeweave
    x, index, ptr = inputs(40, 5)
    leaf = x.clone().requires_grad_()
    y, lse = scatter.softmax(x, index, dim_size=30), scatter.logsumexp(x, index, dim_size=30)
    grad, names = torch.randn(30, 4), ["sum", "std", "amax"]
    weight = torch.randn(5, 4, 3)
    for op, args in (
        (ops.checked_index, (index, 30, "sddmm: source index")),
        (ops.softmax, (leaf, index, 30)),
        (ops.softmax_backward, (torch.randn(40, 4), y, index, 30)),
        (ops.logsumexp, (leaf, torch.arange(40) % 30, 30)),
        (ops.logsumexp_backward, (grad, x, lse, index, 30)),
        (ops.scatter, (leaf, index, 30, "prod", "even")),
        (ops.scatter_backward, (grad, x, index, None, 30, "prod", "even")),
        (ops.multi_reduce, (leaf, index, 30, names, 1)),
        (ops.multi_reduce_backward, ([grad] * 3, x, index, 30, names, 1)),
        (ops.segment_matmul, (leaf, ptr, weight.requires_grad_())),
        (ops.segment_matmul_backward, (torch.randn(40, 3), x, ptr, weight.detach())),
    ):
        torch.library.opcheck(op.default, args)


def test_no_op_returns_memory_of_its_inputs_or_of_the_cache():
    x, index, ptr = inputs(40, 5)
    for name, function in FUNCTIONS.items():
        first, second = function(x, index, ptr), function(x, index, ptr)
        addresses = {t.untyped_storage().data_ptr() for t in (first, second, x, index, ptr)}
        assert len(addresses) == 5, name


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "prod", "multi", "segment-matmul"])
def test_second_derivatives_of_compiled_code_are_an_error_not_zero(name):
    x, index, ptr = inputs()
    compiled = torch.compile(FUNCTIONS[name], backend="eager", fullgraph=True)
    leaf = x.requires_grad_()
    (dx,) = torch.autograd.grad(compiled(leaf, index, ptr).sum(), leaf, create_graph=True)
    if not dx.requires_grad:
        return  # a first derivative that is a constant of the graph cannot be asked for a second
    with pytest.raises(
        RuntimeError, match=r"second derivatives must be taken outside torch\.compile"
    ):
        torch.autograd.grad(dx.sum(), leaf)


def test_errors_of_compiled_code_are_those_of_eager_code():
    x, index, ptr = inputs()
    index[17] = 977
    for name in ("softmax", "logsumexp", "prod", "multi"):
        compiled = torch.compile(FUNCTIONS[name], backend="aot_eager", fullgraph=True)
        with pytest.raises(IndexError, match=r"(?=.*\b977\b)(?=.*\b17\b)(?=.*\b30\b)"):
            compiled(x, index, ptr)
    ptr[-1] = 201
    compiled = torch.compile(FUNCTIONS["segment-matmul"], backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match=r"ptr must run from 0 to .*200, got 0 to 201"):
        compiled(x, index, ptr)
