"""What models write out by hand is recognised, and only that."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgeweave import graphfuse


def gelu_new(x: Tensor, half: float = 0.5, cubic: float = 0.044715, power: float = 3.0) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (x + cubic * torch.pow(x, power))
    return half * x * (1.0 + torch.tanh(inner))


def _targets(made: graphfuse.FusedModule) -> list[str]:
    return [node.target for node in made._engines[0].nodes]


def test_gelu_by_hand(assert_fused: Any, call: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 16), call(gelu_new))
    made = assert_fused(model, torch.randn(4, 8))
    assert _targets(made) == ["aten.linear.default", "aten.gelu.default"]


def test_its_special_values(call: Any) -> None:
    model = call(gelu_new).eval()
    x = torch.tensor([0.0, -0.0, 1e-30, 10.0, -10.0, math.inf, math.nan, 3e38, 1e20])
    made = graphfuse.fuse(model, torch.randn(9))
    assert _targets(made) == ["aten.gelu.default"]
    torch.testing.assert_close(
        made(x), torch.nn.functional.gelu(x, approximate="tanh"), equal_nan=True
    )
    # By hand, x**3 is infinite from 7e12 on, and the result is the same.
    torch.testing.assert_close(made(x), model(x), equal_nan=True)


@pytest.mark.parametrize(
    "change", [{"half": 0.25}, {"cubic": 0.05}, {"power": 2.0}], ids=lambda c: next(iter(c))
)
def test_other_numbers_are_another_function(assert_fused: Any, call: Any, change: Any) -> None:
    made = assert_fused(call(lambda x: gelu_new(x, **change)), torch.randn(4, 8))
    assert "aten.gelu.default" not in _targets(made)


def test_a_part_that_others_read_stays(assert_fused: Any, call: Any) -> None:
    def also(x: Tensor) -> tuple[Tensor, Tensor]:
        tanh = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        return 0.5 * x * (1 + tanh), tanh

    model, x = call(also).eval(), torch.randn(4, 8)
    made = graphfuse.fuse(model, x, keep="all")
    for found, expected in zip(made(x), model(x), strict=True):
        torch.testing.assert_close(found, expected)
    assert "aten.gelu.default" not in _targets(made)


class Turned(nn.Module):
    """A product as GPT-2 writes it: weights `[in, out]`, rows flattened."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6))
        self.bias = nn.Parameter(torch.randn(6)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 8)
        y = (
            torch.addmm(self.bias, rows, self.weight)
            if self.bias is not None
            else rows @ self.weight
        )
        return y.view(*x.shape[:-1], 6)


@pytest.mark.parametrize("bias", [True, False])
def test_flattened_products(assert_fused: Any, bias: bool) -> None:
    model = nn.Sequential(Turned(bias), nn.GELU())
    made = assert_fused(model, torch.randn(2, 5, 8), fused=2)
    assert _targets(made) == ["aten.linear.default", "aten.gelu.default"]
    with torch.no_grad():
        model[0].weight.mul_(2)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(made(x), model(x))


def test_flattened_products_of_open_sizes() -> None:
    model = Turned(True).eval()
    made = graphfuse.fuse(model, torch.randn(2, 5, 8), dynamic=True)
    for shape in ((2, 5, 8), (3, 7, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(made(x), model(x))


def test_a_view_to_other_sizes_stays(call: Any) -> None:
    weight = torch.randn(8, 6)
    model = call(lambda x: (x.view(-1, 8) @ weight).view(5, 2, 6)).eval()
    x = torch.randn(2, 5, 8)
    made = graphfuse.fuse(model, x, keep="all")
    torch.testing.assert_close(made(x), model(x))
    assert "aten.linear.default" not in _targets(made)
