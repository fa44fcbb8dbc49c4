"""A plan may be built anywhere, in any mode, and must be usable everywhere else."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from edgeweave import scatter, sparse

pytestmark = pytest.mark.usefixtures("empty_cache")


def make(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return edges, weights and features of small integers, for exact comparison."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, 12, (2, 60), generator=generator)
    weight = torch.randint(1, 4, (60,), generator=generator).float()
    x = torch.randint(-9, 10, (12, 3), generator=generator).float()
    return edges, weight, x


def train(edges, weight, x) -> None:
    """Run forward and backward of `mm` and `scatter_reduce`, and check both exactly."""
    src, dst = edges[0].clone(), edges[1].clone()
    for reduce in ("sum", "amax"):
        leaf, factor = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = sparse.mm(edges, leaf, reduce, weight=factor)
        assert out.requires_grad
        assert not out.is_inference()
        if reduce == "sum":
            messages = weight[:, None] * x[src]
            assert torch.equal(out, torch.zeros(12, 3).index_add_(0, dst, messages))
        out.sum().backward()
        if reduce == "sum":
            routed = weight[:, None].expand(60, 3)
            assert torch.equal(leaf.grad, torch.zeros(12, 3).index_add_(0, src, routed))
            assert torch.equal(factor.grad, x[src].sum(1))
        else:
            assert leaf.grad.isfinite().all()
    per_edge = x[src].clone().requires_grad_()
    out = scatter.scatter_reduce(per_edge, edges[1], dim_size=12)
    assert torch.equal(out, torch.zeros(12, 3).index_add_(0, dst, x[src]))
    out.sum().backward()
    assert torch.equal(per_edge.grad, torch.ones(60, 3))


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class _Transparent(TorchDispatchMode):
    """Lets everything pass; stands for any mode a user may have active."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device meta": lambda: torch.device("meta"),
    "default dtype": lambda: _default_dtype(torch.float64),
    "deterministic": lambda: _deterministic(),
    "a dispatch mode": _Transparent,
    "saved tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone(), lambda t: t
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_plan_built_under_a_mode_serves_training(mode):
    edges, weight, x = make()
    expected = torch.zeros(12, 3).index_add_(0, edges[1], weight[:, None] * x[edges[0]])
    with MODES[mode]():
        out = sparse.mm(edges, x, weight=weight)
        largest = sparse.mm(edges, x, "amax", weight=weight)
        sparse.mm(edges, x.clone().requires_grad_())
        scatter.scatter_reduce(x[edges[0]], edges[1], dim_size=12)
    assert out.device == largest.device == x.device
    assert torch.equal(out, expected)
    before = sparse.cache_info()
    train(edges, weight, x)
    assert sparse.cache_info().misses == before.misses


@pytest.mark.parametrize("mode", MODES)
def test_plan_built_in_training_serves_a_mode(mode):
    edges, weight, x = make()
    train(edges, weight, x)
    expected = sparse.mm(edges, x, weight=weight)
    with MODES[mode]():
        assert torch.equal(sparse.mm(edges, x, weight=weight).cpu(), expected)


def test_default_device_set_for_good():
    edges, weight, x = make()
    torch.set_default_device("meta")
    try:
        graph = sparse.Graph(edges, size=(12, 12))
        out = sparse.mm(graph, x, weight=weight)
        degree = graph.in_degree
        leaf = x.clone().requires_grad_()
        sparse.mm(graph, leaf, "amax").sum().backward()
        turned = scatter.scatter_reduce(x, edges[1, :12], dim_size=12, reduce="mean")
        picked = scatter.gather(x, edges[0])
    finally:
        torch.set_default_device(None)
    for tensor in (out, degree, leaf.grad, turned, picked, graph.rowptr, graph.row):
        assert tensor.device.type == "cpu"
    assert torch.equal(out, sparse.mm(edges, x, weight=weight))
    train(edges, weight, x)


def test_graph_built_in_inference_mode_trains():
    edges, _, x = make()
    with torch.inference_mode():
        graph = sparse.Graph(edges, size=(12, 12))
        sparse.mm(graph, x)
        assert graph.row.numel() == 60
        assert graph.in_degree.numel() == 12
    leaf = x.clone().requires_grad_()
    sparse.mm(graph, leaf, "mean").sum().backward()
    sparse.mm(graph, leaf, "amin").sum().backward()
    assert leaf.grad.shape == (12, 3)
    for name in ("rowptr", "col", "perm", "colptr", "row", "perm_t", "in_degree", "out_degree"):
        assert not getattr(graph, name).is_inference(), name


def test_inference_edges_serve_training():
    """The edges themselves may come from inference mode: only features carry gradients."""
    with torch.inference_mode():
        edges, weight, x = make()
        edges = edges + 0
    train(edges, weight.clone(), x.clone())


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(12, 3)),
    "grad of grad": lambda f, x: torch.func.grad(
        lambda x: torch.func.grad(lambda x: f(x).square().sum())(x).sum()
    )(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_plan_built_within_a_transform_serves_training(transform):
    edges, weight, x = make()
    TRANSFORMS[transform](lambda x: sparse.mm(edges, x, weight=weight), x)
    TRANSFORMS[transform](lambda x: scatter.scatter_reduce(x[edges[0]], edges[1], 0, 12), x)
    train(edges, weight, x)


def test_plan_built_while_compiling_serves_training():
    edges, weight, x = make()
    compiled = torch.compile(lambda e, x: sparse.mm(e, x), backend="aot_eager", fullgraph=True)
    out = compiled(edges, x)
    assert torch.equal(out, sparse.mm(edges, x))
    train(edges, weight, x)


def test_fake_tensors_build_no_plan():
    edges, weight, x = make()
    index = edges[1, :12].clone()
    with FakeTensorMode() as mode:
        out = sparse.mm(mode.from_tensor(edges), mode.from_tensor(x))
        reduced = scatter.scatter_reduce(mode.from_tensor(x), mode.from_tensor(index), dim_size=7)
    assert out.shape == (12, 3)
    assert reduced.shape == (7, 3)
    assert sparse.cache_info().entries == 0
    train(edges, weight, x)


def test_plans_hold_no_autograd_history():
    edges, _, x = make()
    leaf = x.clone().requires_grad_()
    graph = sparse.Graph(edges, size=(12, 12))
    sparse.mm(graph, leaf, "mean").sum().backward()
    for name in ("rowptr", "col", "perm", "colptr", "row", "perm_t", "in_degree", "out_degree"):
        tensor = getattr(graph, name)
        assert not tensor.requires_grad, name
        assert tensor.grad_fn is None, name
