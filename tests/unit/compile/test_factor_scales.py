"""Pass `factor_scales`: multiples of the same rows before a linear layer."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

N, K, D, H = 11, 8, 3, 4


def inputs(parts=3, others=D):
    return (
        torch.randn(N, K),
        torch.randn(N, 1),
        torch.randn(N, D),
        torch.randn(H, others + parts * K),
        torch.randn(H),
    )


def factored(found):
    return [r for r in found.rewrites if r.name == "factor_scales"]


def like_pna(y, s, x, weight, bias):
    y = torch.cat([y[:, :5], y[:, 5:].sin()], -1)
    rows = torch.cat([x, torch.cat([y, y * s, s.exp() * y], -1)], -1)
    return functional.linear(rows, weight, bias)


def in_another_order(y, s, x, weight, bias):
    return functional.linear(torch.cat([y * s, y, s.cos() * y, x], 1), weight, bias)


def without_bias(y, s, x, weight, bias):
    return functional.linear(torch.cat([x, y, y * s, y * s.cos()], 1), weight)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", [like_pna, in_another_order, without_bias])
def test_fires(rewrite, function, dynamic):
    def fixed(y, s, x, weight, bias):
        y, x = y.view(-1, K), x.view(-1, D)
        return function(y, s.view(-1, 1), x, weight.view(H, D + 3 * K), bias)

    found = rewrite(fixed, *inputs(), dynamic=dynamic)
    (one,) = factored(found)
    assert one.what.startswith("linear of 3 multiples of the same rows")
    assert "test_factor_scales.py" in one.source
    products = [n for n in found.module.graph.nodes if n.target is torch._C._nn.linear]
    assert sorted(int(n.meta["example_value"].shape[1]) for n in products) == [H, 3 * H]


def test_all_columns_may_be_scaled(rewrite):
    def function(y, s, x, weight, bias):
        return functional.linear(torch.cat([y * s, y * s.exp()], 1), weight, bias)

    assert len(factored(rewrite(function, *inputs(2, 0)))) == 1


@pytest.mark.parametrize("own", [False, True])
def test_towers(rewrite, own):
    def function(y, s, weight, bias):
        rows = torch.cat([y, y * s, y * s.exp()], dim=-1)
        return torch.cat([functional.linear(rows[:, t], weight[t], bias) for t in range(2)], 1)

    scale = torch.randn(N, 2 if own else 1, 1)
    found = rewrite(function, torch.randn(N, 2, K), scale, torch.randn(2, H, 3 * K), torch.randn(H))
    assert len(factored(found)) == 2


def one_alone(y, s, x, weight, bias):
    return functional.linear(torch.cat([x, y.sin(), y * s, s.cos() * y.cos()], 1), weight, bias)


def scaled_columns(y, s, x, weight, bias):
    return functional.linear(torch.cat([x, y, y * y[:1], y * y[:1].cos()], 1), weight, bias)


def wide_results(y, s, x, weight, bias):
    rows = torch.cat([x, y, y * s, y * s.cos()], 1)
    return functional.linear(rows, weight.repeat(4, 1), bias.repeat(4))


def edited(y, s, x, weight, bias):
    rows = torch.cat([x, y, y * s, y * s.cos()], 1)
    x.detach().mul_(2)
    return functional.linear(rows, weight, bias)


def multiple_written(y, s, x, weight, bias):
    scaled = y * s
    scaled[0] = 0
    return functional.linear(torch.cat([x, y, scaled, y * s.cos()], 1), weight, bias)


def rows_written(y, s, x, weight, bias):
    rows = torch.cat([x, y, y * s, y * s.cos()], 1)
    rows[:, 2] = 0
    return functional.linear(rows, weight, bias)


def activated_in_place(y, s, x, weight, bias):
    rows = torch.cat([x, y, y * s, y * s.cos()], 1)
    functional.relu(rows, inplace=True)
    return functional.linear(rows, weight, bias)


def many_others(y, s, x, weight, bias):
    x, a, b = x.split(1, 1)
    return functional.linear(torch.cat([x, y, a, y * s, b, y * s.cos()], 1), weight, bias)


def other_mode(y, s, x, weight, bias):
    with torch.no_grad():
        rows = torch.cat([x, y, y * s, y * s.cos()], 1)
    return functional.linear(rows, weight, bias) + y.sum() * 0 + s.sum() * 0 + x.sum() * 0


def half(y, s, x, weight, bias):
    rows = torch.cat([x, y, y * s, y * s.cos()], 1).bfloat16()
    return functional.linear(rows, weight.bfloat16(), bias.bfloat16()).float()


def under_autocast(y, s, x, weight, bias):
    rows = torch.cat([x, y, y * s, y * s.cos()], 1)
    with torch.autocast("cpu", torch.bfloat16):
        return functional.linear(rows, weight, bias).float()


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (one_alone, True),
        (scaled_columns, True),
        (wide_results, True),
        (edited, False),
        (multiple_written, True),
        (rows_written, True),
        (activated_in_place, True),
        (many_others, True),
        (other_mode, True),
        (half, False),
        (under_autocast, False),
    ],
)
def test_leaves_alone(rewrite, function, exact):
    assert factored(rewrite(function, *inputs(), exact=exact)) == []
