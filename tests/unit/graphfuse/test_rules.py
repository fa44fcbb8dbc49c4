"""Every operation that is lowered, against float64, and that it really ran in oneDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from edgeweave import graphfuse

IMAGE = (2, 6, 9, 7)
ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7),
    "clamp": lambda x: x.clamp(-0.3, 0.4),
    "clamp_min": lambda x: x.clamp(min=0.1),
    "clamp_max": lambda x: x.clamp(max=0.1),
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "elu": F.elu,
    "elu_2": lambda x: F.elu(x, 2),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "leaky_relu_1": lambda x: F.leaky_relu(x, 1),
    "mish": F.mish,
    "abs": torch.abs,
    "add_number": lambda x: x + 1.5,
    "sub_number": lambda x: x - 2,
    "mul_number": lambda x: x * 0.25,
    "div_number": lambda x: x / 3,
    "softmax": lambda x: x.softmax(1),
    "mean_space": lambda x: x.mean((2, 3)),
    "mean_keep": lambda x: x.mean((2, 3), keepdim=True),
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool_default_stride": lambda x: F.max_pool2d(x, 2),
    "max_pool_dilated": lambda x: F.max_pool2d(x, 2, 1, dilation=2),
    "avg_pool": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg_pool_valid": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_one_operation(assert_fused: Any, call: Any, name: str) -> None:
    x = 2 * torch.randn(IMAGE)
    made = assert_fused(call(ELEMENTWISE[name]), x, fused=1)
    # Another layout of the input needs no other capture, and the result is the same.
    again = made(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(again, made(x), rtol=1e-5, atol=1e-6)
    assert made(x).stride() == ELEMENTWISE[name](x).stride()


@pytest.mark.parametrize("name", ["relu6", "silu", "hardswish", "mul_number", "max_pool", "abs"])
def test_after_a_convolution(assert_fused: Any, call: Any, name: str) -> None:
    model = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), call(ELEMENTWISE[name]))
    assert_fused(model, torch.randn(IMAGE), fused=2)


@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "elu_2", "mish", "tanh", "sub_number"])
def test_after_a_linear_layer(assert_fused: Any, call: Any, name: str) -> None:
    model = nn.Sequential(nn.Linear(16, 24), call(ELEMENTWISE[name]))
    assert_fused(model, torch.randn(5, 16), fused=2)


@pytest.mark.parametrize(
    ("rank", "groups", "dilation", "padding", "bias"),
    [
        (1, 1, 1, 0, True),
        (1, 2, 2, 1, False),
        (2, 1, 1, 1, True),
        (2, 1, 2, "same", True),
        (2, 2, 1, "same", False),
        (2, 4, 1, 1, True),
        (2, 4, 2, 2, False),
        (3, 1, 1, 1, False),
        (3, 2, 2, "same", True),
    ],
)
def test_convolution(
    assert_fused: Any, rank: int, groups: int, dilation: int, padding: int | str, bias: bool
) -> None:
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
    stride = 1 if padding == "same" else 2
    model = layer(
        4, 8, 3, stride=stride, groups=groups, dilation=dilation, padding=padding, bias=bias
    )
    assert_fused(model, torch.randn(2, 4, *(7, 8, 9)[:rank]), fused=1)


@pytest.mark.parametrize(
    ("rank", "groups", "output_padding"), [(1, 1, 1), (2, 1, 0), (2, 2, 1), (3, 1, 1)]
)
def test_transposed_convolution(
    assert_fused: Any, rank: int, groups: int, output_padding: int
) -> None:
    layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[rank - 1]
    model = layer(4, 6, 3, stride=2, padding=1, output_padding=output_padding, groups=groups)
    assert_fused(model, torch.randn(2, 4, *(5, 6, 4)[:rank]), fused=1)


def _norm_model(layer: nn.Module, norm: nn.Module) -> nn.Module:
    for tensor in (norm.weight, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 1.5)
    for tensor in (norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    return nn.Sequential(layer, norm, nn.ReLU())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(4, 6, 3, bias=False), (2, 4, 8, 8)),
        (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 8, 8)),
        (nn.ConvTranspose2d(4, 6, 3), (2, 4, 5, 5)),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 5, 5)),
        (nn.Linear(4, 6), (5, 4)),
    ],
)
def test_batch_norm_is_folded(assert_fused: Any, layer: nn.Module, shape: tuple[int, ...]) -> None:
    norm = nn.BatchNorm1d(6) if isinstance(layer, nn.Linear) else nn.BatchNorm2d(6)
    made = assert_fused(_norm_model(layer, norm), torch.randn(shape), fused=2)
    assert len(made.report().partitions) == 1


@pytest.mark.parametrize("shapes", [((5, 6), (5, 6)), ((5, 6), (6,)), ((3, 5, 6), (5, 1))])
@pytest.mark.parametrize("op", [torch.add, torch.sub, torch.mul])
def test_two_tensors_broadcast(assert_fused: Any, call: Any, shapes: Any, op: Any) -> None:
    assert_fused(call(op), *(torch.randn(shape) for shape in shapes), fused=1)
    assert_fused(call(op), *(torch.randn(shape) for shape in reversed(shapes)), fused=1)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.mm, ((5, 6), (6, 7))),
        (torch.bmm, ((3, 5, 6), (3, 6, 7))),
        (torch.matmul, ((3, 2, 5, 6), (3, 2, 6, 7))),
        (torch.matmul, ((3, 5, 6), (6, 7))),
        (lambda c, a, b: torch.addmm(c, a, b), ((7,), (5, 6), (6, 7))),
        (lambda a, b: a @ b.transpose(-1, -2), ((3, 5, 6), (3, 7, 6))),
    ],
)
def test_matrix_products(assert_fused: Any, call: Any, function: Any, shapes: Any) -> None:
    made = assert_fused(call(function), *(torch.randn(shape) for shape in shapes))
    assert len(made.report().partitions) == 1


def test_residual_is_one_partition(assert_fused: Any) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(6, 6, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.conv(x) + x)

    made = assert_fused(Block(), torch.randn(IMAGE), fused=3)
    assert len(made.report().partitions) == 1


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(assert_fused: Any, affine: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16, elementwise_affine=affine))
    assert_fused(model, torch.randn(3, 5, 8), fused=2)


def test_concatenation(assert_fused: Any, call: Any) -> None:
    made = call(lambda x, y: torch.cat([x, y, x], 1))
    assert_fused(made, torch.randn(IMAGE), torch.randn(2, 3, 9, 7), fused=1)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), "erf form only"),
    "selu": (F.selu, "no counterpart|scale"),
    "group_norm": (lambda x: F.group_norm(x, 2), "no counterpart"),
    "ceil_mode": (lambda x: F.max_pool2d(x, 2, ceil_mode=True), "ceil_mode"),
    "divisor": (lambda x: F.avg_pool2d(x, 2, divisor_override=3), "divisor_override"),
    "adaptive_2": (lambda x: F.adaptive_avg_pool2d(x, 2), "more than one cell"),
    "alpha": (lambda x: torch.add(x, x, alpha=2), "alpha"),
    "by_zero": (lambda x: x / 0, "division by zero"),
    "by_tensor": (lambda x: x / x, "may hold zeros"),
    "corners": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
        "align_corners",
    ),
    "uneven": (lambda x: F.interpolate(x, size=(10, 11), mode="nearest"), "no integer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_runs_in_aten_and_says_why(call: Any, name: str) -> None:
    function, reason = REFUSED[name]
    x = torch.randn(IMAGE)
    made = graphfuse.fuse(call(function).eval(), x, keep="all")
    torch.testing.assert_close(made(x), function(x), rtol=0, atol=0, equal_nan=True)
    report = made.report()
    assert report.mode == "eager"
    (refusal,) = report.refused
    assert any(word in refusal.reason for word in reason.split("|")), refusal.reason
