"""The table: what torch's bridge does to valid models, each row a function of weights and inputs.

Found by running every operation that the bridge maps alone, behind a linear layer or convolution,
and in a chain, over dtypes, defaults, 0-d and empty tensors, NaN and infinities (torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WRONG, RAISES, LUCK = "wrong", "raises", "luck"
Function = Callable[..., Any]


class Body(nn.Module):
    """A function with some weights to use."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(1)
        self.w = nn.Parameter(torch.randn(6, 6, generator=generator))
        self.b = nn.Parameter(torch.randn(6, generator=generator))
        self.kernel = nn.Parameter(torch.randn(4, 3, 3, 3, generator=generator))
        self.kernel_bias = nn.Parameter(torch.randn(4, generator=generator))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)

    def linear(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w, self.b)

    def conv(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, self.kernel_bias)


@dataclass(frozen=True)
class Fault:
    """One row.

    Attributes:
        name: What is done.
        function: Does it.
        inputs: For tracing.
        raw: What torch's bridge does on 2.13: `WRONG`, `RAISES`, or `LUCK`.
        probe: Another input of the same shape, or None to use `inputs`.
    """

    name: str
    function: Function
    inputs: tuple[Tensor, ...]
    raw: str
    probe: tuple[Tensor, ...] | None = None


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


X, IMAGE = _numbers(4, 6), _numbers(2, 3, 8, 8)
INTEGERS = torch.arange(-12, 12).reshape(4, 6)
BOOLEANS = (INTEGERS % 2 == 0).clone()


def _with(x: Tensor, value: float) -> tuple[Tensor, ...]:
    y = x.clone()
    y[(0,) * y.dim()] = value
    return (y,)


X_NAN, IMAGE_NAN, X_INF = _with(X, math.nan), _with(IMAGE, math.nan), _with(X, math.inf)


def _named(inputs: Tensor, raw: str, rows: dict[str, Function], probe: Any = None) -> list[Fault]:
    return [Fault(name, function, (inputs,), raw, probe) for name, function in rows.items()]


INTEGER_ROWS = _named(
    INTEGERS,
    WRONG,
    {
        "int * 0.5": lambda m, i: i * 0.5,
        "int + 0.5": lambda m, i: i + 0.5,
        "int * 1.0": lambda m, i: i * 1.0,
        "int + 0.0": lambda m, i: i + 0.0,
        "1.5 + int": lambda m, i: 1.5 + i,
        "int32 * 0.5": lambda m, i: i.int() * 0.5,
        "float + 0.5 int": lambda m, i: torch.add(i.float(), i, alpha=0.5),
    },
) + _named(
    INTEGERS,
    RAISES,
    {
        "int + 3 int": lambda m, i: torch.add(i, i, alpha=3),
        "mean of int * 1.5": lambda m, i: (i * 1.5).mean(),
    },
)

BOOLEAN_ROWS = _named(
    BOOLEANS,
    WRONG,
    {
        "bool * 2.5": lambda m, i: i * 2.5,
        "bool * 2": lambda m, i: i * 2,
        "bool + 1": lambda m, i: i + 1,
        "bool * 1": lambda m, i: i * 1,
        "bool + 0": lambda m, i: i + 0,
        "bool / 2": lambda m, i: i / 2,
    },
)

NUMBER_ROWS = [
    Fault("half * 1e-3", lambda m, x: x.half() * 1e-3, (X,), WRONG),
    Fault("0-d * 2", lambda m, x: x * 2, (torch.tensor(1.5),), WRONG),
    Fault("relu of 0-d", lambda m, x: (x * 2 + 1).relu(), (torch.tensor(1.5),), RAISES),
    Fault("0-d * weight", lambda m, x: (x * m.w).relu() * m.w, (torch.tensor(1.5),), RAISES),
    Fault(
        "floor division",
        lambda m, x: torch.div(m.linear(x), 0.3, rounding_mode="floor"),
        (X,),
        WRONG,
    ),
    Fault(
        "truncated division",
        lambda m, x: torch.div(m.linear(x), x, rounding_mode="trunc"),
        (X,),
        WRONG,
    ),
    Fault("linear + constant", lambda m, x: m.linear(x) + m.b, (X,), RAISES),
    Fault("constant + linear", lambda m, x: m.b + m.linear(x), (X,), RAISES),
    Fault("bias outside", lambda m, x: F.linear(x, m.w) + m.b, (X,), RAISES),
    Fault("linear * constant", lambda m, x: F.linear(x, m.w) * m.b, (X,), RAISES),
    Fault("written in place", lambda m, x: x.clone().add_(1) * 2, (X,), RAISES),
    Fault("linear written in place", lambda m, x: (m.linear(x) * 1.0).add_(1), (X,), RAISES),
]

FUNCTION_ROWS = [
    *_named(
        X,
        RAISES,
        {
            "elu(2)": lambda m, x: F.elu(m.linear(x), 2),
            "leaky_relu(1)": lambda m, x: F.leaky_relu(m.linear(x), 1),
            "clamp with tensors": lambda m, x: torch.clamp(
                m.linear(x), torch.tensor(-1.0), torch.tensor(1.0)
            ),
            "clamp(1, -1)": lambda m, x: m.linear(x).clamp(1, -1),
            "clamp(nan, 1)": lambda m, x: m.linear(x).clamp(math.nan, 1),
            "softmax(dtype=float64)": lambda m, x: m.linear(x).softmax(-1, dtype=torch.float64),
        },
    ),
    *_named(
        X,
        WRONG,
        {
            "gelu(approximate='tanh')": lambda m, x: F.gelu(m.linear(x), approximate="tanh"),
            "round(decimals=2)": lambda m, x: torch.round(m.linear(x), decimals=2),
            "elu with scales": lambda m, x: torch._C._nn.elu(m.linear(x), 1.5, 2.0, 3.0),
        },
    ),
    *_named(
        X,
        WRONG,
        {
            "NaN in linear + relu": lambda m, x: m.linear(x).relu(),
            "NaN in linear + relu_": lambda m, x: m.linear(x).relu_(),
            "NaN in linear + relu6": lambda m, x: F.relu6(m.linear(x)),
            "NaN in linear + clamp": lambda m, x: m.linear(x).clamp(-1, 1),
            "NaN in linear + clamp(min)": lambda m, x: m.linear(x).clamp(min=0.1),
            "NaN in linear + clamp(max)": lambda m, x: m.linear(x).clamp(max=0.1),
            "NaN in linear + hardtanh": lambda m, x: F.hardtanh(m.linear(x)),
            "NaN in linear + leaky_relu(0)": lambda m, x: F.leaky_relu(m.linear(x), 0.0),
            "NaN in linear + exp": lambda m, x: m.linear(x).exp(),
            "NaN in add + softmax": lambda m, x: (x + m.b).softmax(-1) * x,
        },
        X_NAN,
    ),
    Fault("inf in leaky_relu(0)", lambda m, x: F.leaky_relu(m.linear(x), 0.0), (X,), WRONG, X_INF),
    Fault("inf in add + softmax", lambda m, x: (x + m.b).softmax(-1) * x, (X,), WRONG, X_INF),
]

LAYER_ROWS = [
    *_named(
        IMAGE,
        RAISES,
        {
            "max_pool2d(x, 2)": lambda m, x: F.max_pool2d(x, 2),
            "avg_pool2d(x, 2)": lambda m, x: F.avg_pool2d(x, 2),
            "max_pool2d of one image": lambda m, x: F.max_pool2d(x[0], 2, 2),
            "avg_pool2d of one image": lambda m, x: F.avg_pool2d(x[0], 2, 2),
            "layer_norm without weights": lambda m, x: F.layer_norm(x, (8,)),
            "layer_norm without bias": lambda m, x: F.layer_norm(x, (8,), torch.full((8,), 2.0)),
            "layer_norm without weight": lambda m, x: F.layer_norm(x, (8,), None, torch.ones(8)),
            "batch_norm without weights": lambda m, x: F.batch_norm(
                x, torch.zeros(3), torch.full((3,), 2.0)
            ),
            "batch_norm without bias": lambda m, x: F.batch_norm(
                x, torch.zeros(3), torch.ones(3), torch.full((3,), 2.0), None
            ),
            "cat with an empty one": lambda m, x: torch.cat([torch.empty(0), x], 1),
            "cat of two dtypes": lambda m, x: torch.cat([x, x.double()], 1),
            "cat of float and int": lambda m, x: torch.cat([x, x.long()], 1),
            "cat of float and bf16": lambda m, x: torch.cat([x, x.bfloat16()], 1),
            "conv written in place": lambda m, x: (lambda y: (y.add_(1), y * 2))(m.conv(x)),
        },
    ),
    *_named(
        IMAGE,
        WRONG,
        {
            "NaN in conv + relu": lambda m, x: m.conv(x).relu(),
            "NaN in conv + relu6": lambda m, x: F.relu6(m.conv(x)),
            "NaN in conv + add + relu": lambda m, x: (m.conv(x) + x[:, :1, 1:-1, 1:-1]).relu(),
            "NaN in conv1d + relu": lambda m, x: F.conv1d(x[:, :, 0], m.kernel[:, :, 0]).relu(),
            "NaN in max_pool2d": lambda m, x: F.max_pool2d(x, 2, 2),
        },
        IMAGE_NAN,
    ),
    *_named(
        X,
        RAISES,
        {
            "addmm": lambda m, x: torch.addmm(m.b, x, m.w),
            "addmm(beta=.5, alpha=2)": lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2),
            "addmm(beta=0) of NaN": lambda m, x: torch.addmm(m.b * math.nan, x, m.w, beta=0),
            "addmm(alpha=2)": lambda m, x: torch.addmm(m.b, x, m.w, alpha=2),
            "addmm with 0-d": lambda m, x: torch.addmm(m.b[0], x, m.w),
            "addmm + relu": lambda m, x: torch.addmm(m.b, x, m.w).relu(),
            "linear + layer_norm": lambda m, x: F.layer_norm(m.linear(x), (6,)),
        },
    ),
    # Reads memory that nobody wrote: right by luck at times, so there is no raw result to expect.
    Fault("product over nothing", lambda m, x: torch.mm(x[:, :0], m.w[:0]), (X,), LUCK, X_NAN),
]

FAULTS = [*INTEGER_ROWS, *BOOLEAN_ROWS, *NUMBER_ROWS, *FUNCTION_ROWS, *LAYER_ROWS]
