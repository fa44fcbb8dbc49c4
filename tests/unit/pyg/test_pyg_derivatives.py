"""Derivatives of the fused layers beyond one backward: second ones, and many at once."""

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GINConv, Linear, SAGEConv

import edgeweave.pyg
from edgeweave.pyg import _linear

NODES = 260  # enough rows for the faster products


@pytest.fixture
def edges() -> Tensor:
    return torch.randint(0, NODES, (2, 1000))


MODELS = {
    "linear": lambda: Linear(3, 2),
    "sage narrow": lambda: SAGEConv(3, 2),
    "sage wide": lambda: SAGEConv(2, 3, aggr="sum"),
    "gin": lambda: GINConv(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), eps=0.5),
}


def call(model: nn.Module, x: Tensor, edges: Tensor) -> Tensor:
    return model(x) if isinstance(model, Linear) else model(x, edges)


def both(function) -> tuple[list[Tensor], list[Tensor]]:
    stock = function()
    with edgeweave.pyg.accelerated():
        return function(), stock


def assert_close(ours: list[Tensor], stock: list[Tensor]) -> None:
    for a, s in zip(ours, stock, strict=True):
        # float32 sums over up to 260 nodes in another order, relative to the largest entry.
        assert (a - s).abs().max() <= 1e-4 * (1 + s.abs().max())


@pytest.mark.parametrize("x_grad", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_batched_gradients(name, x_grad, edges):
    model = MODELS[name]()
    x = torch.randn(NODES, 2 if name == "sage wide" else 3, requires_grad=x_grad)
    leaves = [*model.parameters(), *([x] if x_grad else [])]
    cotangents: list[Tensor] = []

    def batched() -> list[Tensor]:
        out = call(model, x, edges)
        cotangents[:] = cotangents or [torch.randn(3, *out.shape)]
        return list(torch.autograd.grad(out, leaves, cotangents[0], is_grads_batched=True))

    def mapped() -> list[Tensor]:
        out = call(model, x, edges)
        grads = torch.vmap(lambda v: torch.autograd.grad(out, leaves, v, retain_graph=True))
        return list(grads(cotangents[0]))

    ours, stock = both(batched)
    assert_close(ours, stock)
    assert_close(both(mapped)[0], stock)


def test_vectorized_jacobian(edges):
    model, x = SAGEConv(3, 1), torch.randn(NODES, 3)
    jacobian = torch.autograd.functional.jacobian
    assert_close(*both(lambda: [jacobian(lambda x: model(x, edges).square(), x, vectorize=True)]))


@pytest.mark.parametrize("frozen", [("lin_l",), ("lin_r",), ("lin_l", "lin_r"), ()])
@pytest.mark.parametrize("width", [2, 5])
@pytest.mark.parametrize("x_grad", [True, False])
def test_second_derivative_with_frozen_parts(frozen, width, x_grad, edges):
    model, x = SAGEConv(3, width), torch.randn(NODES, 3, requires_grad=x_grad)
    for name in frozen:
        getattr(model, name).weight.requires_grad_(False)
    leaves = [p for p in [*model.parameters(), x] if p.requires_grad]

    def second() -> list[Tensor]:
        out = call(model, x, edges).square().sum()
        first = torch.autograd.grad(out, leaves, create_graph=True)
        total = sum(g.square().sum() for g in first)
        return [*first, *torch.autograd.grad(total, leaves)]

    assert_close(*both(second))


def test_infinite_gradient_at_a_masked_unit():
    x = torch.randn(NODES, 3, requires_grad=True)
    weight = torch.randn(2, 3, requires_grad=True)
    out = _linear.linear(x, weight, None, True)
    masked = out == 0
    assert masked.any()
    upstream = torch.where(masked, float("inf"), 1.0)
    for create_graph in (False, True):
        grads = torch.autograd.grad(
            out, [x, weight], upstream, create_graph=create_graph, retain_graph=True
        )
        assert all(g.isfinite().all() for g in grads), create_graph
