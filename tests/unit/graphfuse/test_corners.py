"""Corners of the rewrites: names, sharing, aliasing, products that two calls could cover."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgeweave import graphfuse


class Own(nn.Module):
    """A function with parameters."""

    def __init__(self, function: Callable[..., Any], **parameters: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            made = value if isinstance(value, nn.Module) else nn.Parameter(value)
            setattr(self, name, made)

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def _pack_all(made: graphfuse.FusedModule) -> None:
    """Every product in torch's own oneDNN, everything else that it covers outside of partitions."""
    engine = made._engines[0]
    calls = engine.packed_calls(made._settings["example_symbols"])
    engine.packed = {name: call.variants[-1] for name, call in calls.items()}
    engine.forced = {name: "for this test" for call in calls.values() for name in call.nodes}
    engine.drop_plans()


def _check(made: graphfuse.FusedModule, model: nn.Module, *args: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(made(*args), model(*args))


@pytest.mark.parametrize("name", ["w_turned", "w_packed"])
def test_a_parameter_may_have_the_name_of_a_derived_one(name: str) -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        y = torch.mm(x.view(-1, 64), self.w).view(x.shape[0], x.shape[1], 64)
        return F.linear(y.sin(), getattr(self, name))

    w, other = torch.randn(64, 64) / 8, torch.randn(64, 64) / 8
    model, x = Own(function, w=w, **{name: other}).eval(), torch.randn(2, 4, 64)
    made = graphfuse.fuse(model, x, keep="all")
    _check(made, model, x)
    _pack_all(made)
    _check(made, model, x)
    assert len(made.report().packed) == 2


@pytest.mark.parametrize("sizes", [(64, 64), (64, 48)])
def test_one_weight_read_in_both_directions(sizes: tuple[int, int]) -> None:
    model = Own(
        lambda self, x: torch.mm(F.linear(x, self.w).tanh(), self.w), w=torch.randn(sizes) / 8
    ).eval()
    x = torch.randn(5, sizes[1])
    made = graphfuse.fuse(model, x, keep="all")
    _pack_all(made)
    _check(made, model, x)
    assert len(made.report().packed) == 2


def test_a_sum_of_two_products() -> None:
    model = Own(lambda self, x: self.a(x) + self.b(x), a=nn.Linear(16, 16), b=nn.Linear(16, 16))
    model, x = model.eval(), torch.randn(5, 16)
    made = graphfuse.fuse(model, x, keep="all")
    _pack_all(made)
    _check(made, model, x)
    assert sorted(len(product.nodes) for product in made.report().packed) == [1, 2]


def test_what_is_covered_may_depend_on_the_sizes() -> None:
    model, x = Own(lambda self, x, y: self.a(x) + y, a=nn.Linear(16, 16)).eval(), torch.randn(8, 16)
    for first, second in ((1, 8), (8, 1)):
        made = graphfuse.fuse(model, (x, torch.randn(first, 16)), keep="all")
        _pack_all(made)
        for rows in (first, second):
            _check(made, model, x, torch.randn(rows, 16))


def test_a_variant_that_the_call_does_not_have() -> None:
    """At other sizes, or in a file that somebody wrote, there may be no activation to set apart."""
    model, x = nn.Linear(16, 24).eval(), torch.randn(5, 16)
    made = graphfuse.fuse(model, x, keep="all")
    _pack_all(made)
    made._engines[0].packed = {"linear": True}
    _check(made, model, x)


def test_an_infinite_bias() -> None:
    def infinite(layer: nn.Linear) -> nn.Linear:
        with torch.no_grad():
            layer.bias[0] = -math.inf
        return layer

    x = torch.randn(16, 256)
    layers = {"a": infinite(nn.Linear(256, 256)), "b": infinite(nn.Linear(256, 256))}
    for function in (
        lambda self, x: self.a(x) + self.b(x),
        lambda self, x: self.b(self.a(x).clamp(min=-5.0)),
    ):
        model = Own(function, **layers).eval()
        _check(graphfuse.fuse(model, x), model, x)


def test_a_model_in_bfloat16_runs_everywhere() -> None:
    model, x = nn.Linear(64, 64).eval().bfloat16(), torch.randn(8, 64).bfloat16()
    made = graphfuse.fuse(model, x)
    with torch.no_grad():
        torch.testing.assert_close(made(x), model(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (torch.relu(x).view(-1), torch.relu(x).view(-1)),
        lambda x: (F.pad(x, (0, 0)).transpose(0, 1), torch.sin(x)),
        lambda x: (x.clone().transpose(0, 1), torch.sin(x)),
        lambda x: (torch.sin(x).split(2, 1)[0], torch.sin(x).split(2, 1)[1]),
    ],
)
def test_results_share_no_memory_that_eager_keeps_apart(call: Any, function: Any) -> None:
    model, x = call(function).eval(), torch.randn(4, 6)
    made = graphfuse.fuse(model, x, keep="all")
    kept = x.clone()
    first, second = made(x)
    before = second.clone()
    first.zero_()
    assert torch.equal(second, before)
    assert torch.equal(x, kept)


def test_a_result_is_no_view_of_a_parameter() -> None:
    model = Own(
        lambda self, x: (self.a(x), F.pad(self.t, (0, 0)).t()),
        a=nn.Linear(6, 6),
        t=torch.zeros(3, 4),
    ).eval()
    made = graphfuse.fuse(model, torch.randn(4, 6), keep="all")
    with torch.no_grad():
        made(torch.randn(4, 6))[1].add_(1)
    assert model.t.abs().sum() == 0


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: torch.poisson(x.exp()),
        torch.bernoulli,
    ],
)
def test_what_is_drawn_is_drawn_each_time(call: Any, draw: Any) -> None:
    model, x = call(lambda x: (draw(x), draw(x))).eval(), torch.rand(2, 40, 6)
    first, second = graphfuse.fuse(model, x)(x)
    assert not torch.equal(first, second)


def test_gelu_by_hand_of_integers(call: Any) -> None:
    def function(x: Tensor) -> Tensor:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))

    model, x = call(function).eval(), torch.arange(8)
    torch.testing.assert_close(graphfuse.fuse(model, x, keep="all")(x), model(x))


def test_verify_widens_what_calls_make_by_themselves() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        made = torch.full((4, 4), 2.0, dtype=torch.float32) * x.sum()
        return torch.mm(made, self.a(x)).softmax(1, dtype=torch.float32)

    model = Own(function, a=nn.Linear(8, 8)).eval()
    made = graphfuse.fuse(model, torch.randn(4, 8), keep="all")
    lines = made.verify()
    assert [line.inputs for line in lines][-1] == "whole"
    assert all(line.good for line in lines), [line for line in lines if not line.good]


LAYOUTS = {"dense": torch.contiguous_format, "channels last": torch.channels_last}


@pytest.mark.parametrize("other", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pool", [F.avg_pool2d, F.max_pool2d])
@pytest.mark.parametrize("combine", [torch.add, torch.sub, torch.mul, torch.div])
def test_what_is_combined_with_pooled_values(
    call: Any, assert_fused: Any, pool: Any, combine: Any, layout: str, other: str
) -> None:
    # In one partition with the pooling, oneDNN 3.2 reads the other operand in a wrong layout.
    x = torch.randn(2, 8, 6, 10).to(memory_format=LAYOUTS[layout])
    y = (torch.rand(2, 8, 3, 5) + 1).to(memory_format=LAYOUTS[other])
    assert_fused(call(lambda x, y: combine(pool(x, 2, 2), y)), x, y, fused=1)
    turned = torch.randn(2, 6, 10, 8)
    assert_fused(call(lambda x, y: combine(pool(x.permute(0, 3, 1, 2), 2, 2), y)), turned, y)


def test_a_layer_norm_reads_rows_of_any_layout(assert_fused: Any) -> None:
    # oneDNN 3.2 takes no notice of the strides.
    norm = nn.LayerNorm(32).eval()
    fused = graphfuse.fuse(norm, torch.randn(2, 9, 32), keep="all")
    assert len(fused.report().partitions) == 1
    for x in (
        torch.randn(9, 2, 32).transpose(0, 1),
        torch.randn(2, 32, 9).transpose(1, 2),
        torch.randn(2, 9, 64)[..., ::2],
        torch.randn(9, 32).expand(2, 9, 32),
    ):
        torch.testing.assert_close(fused(x), norm(x))
    strided = nn.LayerNorm(64)
    strided.weight = nn.Parameter(torch.randn(128)[::2])
    strided.bias = nn.Parameter(torch.randn(64, 2)[:, 1])
    made = assert_fused(strided, torch.randn(2, 17, 64), fused=1)
    with torch.no_grad():
        strided.weight.mul_(2)
    x = torch.randn(2, 17, 64)
    torch.testing.assert_close(made(x), strided(x))


def test_a_parameter_that_forward_changes() -> None:
    model = nn.Embedding(10, 8, max_norm=1.0).eval()
    with pytest.raises(graphfuse.FuseError, match="must not change its state or inputs"):
        graphfuse.fuse(model, torch.arange(6))


def _einsums(module: Any, x: Tensor, y: Tensor) -> Any:
    z = F.relu(module.layer(x))
    # A product of both, of one of them, and with no product at all.
    return (
        torch.einsum("bij,bj->bi", z, y),
        torch.einsum("bij,bjk->bik", y.unsqueeze(1).expand_as(x), x),
        torch.einsum("bij->bj", x),
    )


def test_autocast_acts_within_an_einsum() -> None:
    model = Own(_einsums, layer=nn.Linear(32, 32)).eval()
    inputs = torch.randn(4, 32, 32), torch.randn(4, 32)
    made = graphfuse.fuse(model, inputs, dtype=torch.bfloat16, keep="all")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        eager = model(*inputs)
    assert [out.dtype for out in eager] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for mine, theirs in zip(made(*inputs), eager, strict=True):
        assert mine.dtype == theirs.dtype
        # The linear layer's rounding, summed over 32 columns.
        torch.testing.assert_close(mine, theirs, rtol=2.0**-6, atol=2.0**-4)
    assert not made.report().eager_calls
