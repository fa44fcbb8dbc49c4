"""Each fault that torch's own oneDNN fuser has, with the right answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edgeweave import graphfuse


@pytest.mark.parametrize("function", [lambda x: x * 0.5, lambda x: x + 0.5, lambda x: x - 0.5])
def test_integers_with_a_fraction_become_floats(call: Any, function: Any) -> None:
    x = torch.arange(-5, 7)
    found = graphfuse.fuse(call(function).eval(), x, keep="all")(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, function(x))


def test_bool_times_a_fraction(call: Any) -> None:
    x = torch.tensor([True, False, True])
    found = graphfuse.fuse(call(lambda x: x * 2.5).eval(), x, keep="all")(x)
    assert torch.equal(found, torch.tensor([2.5, 0.0, 2.5]))


def test_round_heeds_its_decimals(call: Any) -> None:
    x = torch.randn(4, 5)
    found = graphfuse.fuse(call(lambda x: torch.round(x, decimals=2)).eval(), x, keep="all")(x)
    assert torch.equal(found, torch.round(x, decimals=2))


def test_gelu_of_the_tanh_form(assert_fused: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(approximate="tanh"))
    assert_fused(model, 2 * torch.randn(64, 16), fused=1)


@pytest.mark.parametrize("function", [F.relu, lambda x: x.clamp(-1, 1), F.relu6, F.hardtanh])
def test_nan_stays_nan(call: Any, function: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), call(function)).eval()
    x = torch.randn(4, 8)
    made = graphfuse.fuse(model, x, keep="all")
    x[1, 2] = float("nan")
    found = made(x)
    assert torch.equal(found.isnan(), model(x).isnan())
    assert found.isnan().any()


def test_weights_edited_in_place(call: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    x = torch.randn(4, 8)
    made = graphfuse.fuse(model, x, keep="all")
    before = made(x)
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[0].bias.zero_()
    torch.testing.assert_close(made(x), model(x))
    assert not torch.allclose(made(x), before)


@pytest.mark.parametrize(
    "layer",
    [
        nn.ELU(2),
        nn.LeakyReLU(1),
        nn.LayerNorm(8, elementwise_affine=False),
    ],
)
def test_valid_settings_that_made_it_throw(assert_fused: Any, layer: nn.Module) -> None:
    assert_fused(nn.Sequential(nn.Linear(8, 8), layer), torch.randn(4, 8), fused=2)


def test_addmm_with_factors(assert_fused: Any, call: Any) -> None:
    model = call(lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2))
    assert_fused(model, torch.randn(7), torch.randn(5, 6), torch.randn(6, 7), fused=0)


def test_max_pool_with_the_default_stride(assert_fused: Any, call: Any) -> None:
    assert_fused(call(lambda x: F.max_pool2d(x, 2)), torch.randn(1, 4, 6, 6), fused=1)


def test_product_with_a_tensor_without_dimensions(assert_fused: Any, call: Any) -> None:
    model = call(lambda a, b, s: F.relu((a @ b) * s))
    assert_fused(model, torch.randn(5, 6), torch.randn(6, 7), torch.tensor(0.3))


def test_mkldnn_layout_is_refused_or_runs_in_eager() -> None:
    model = nn.ReLU().eval()
    x = torch.randn(2, 4, 6, 6)
    with pytest.raises(TypeError, match=r"fuse: example input 0 must be a dense real CPU tensor"):
        graphfuse.fuse(model, (x.to_mkldnn(),), keep="all")
    made = graphfuse.fuse(model, (x,), keep="all")
    assert torch.equal(made(x.to_mkldnn()).to_dense(), model(x))
    (reason,) = made.report().eager_calls
    assert "mkldnn" in reason


def test_it_fuses_at_the_first_call_and_for_more_than_twelve_shapes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    made = graphfuse.fuse(model, torch.randn(3, 8), keep="all", dynamic=True)
    for rows in range(2, 22):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(made(x), model(x))
    assert not made.report().eager_calls
    assert len(made._engines) == 1
