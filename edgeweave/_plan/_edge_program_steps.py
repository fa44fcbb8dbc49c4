"""The steps of programs of rows: each function, and its derivative by ATen's own operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["BINARY", "STEPS", "UNARY", "Step"]

_aten: Any = torch.ops.aten
_Options = dict[str, Any]
_Grads = list[Tensor | None]


@dataclass(frozen=True)
class Step:
    """A function of rows.

    Attributes:
        run: From values, tensors and numbers to a new value.
        pull: From the gradient of the value, the value, the arguments, whether each one's gradient
            is needed, and the options, to the arguments' gradients.
        over: The same as `run`, written over the only argument; its derivative needs no more than
            the value.
        into: The same as `run`, written into the first argument.
        pull_into: From the gradient, the arguments, and where the gradients of the second and third
            are added to (or None), to that of the first, written into the last argument.
        slope_into: `pull` of the only argument, written into the last argument.
    """

    run: Callable[..., Tensor]
    pull: Callable[[Tensor, Tensor, list[Any], list[bool], _Options], _Grads]
    over: Callable[[Tensor], Tensor] | None = None
    into: Callable[..., Tensor] | None = None
    pull_into: Callable[[Tensor, list[Any], _Grads, Tensor], Tensor] | None = None
    slope_into: Callable[[Tensor, Tensor, Tensor, _Options, Tensor], Tensor] | None = None

    @staticmethod
    def width(args: list[Any]) -> int:
        """Numbers per row of what `into` writes: it is that of a linear layer."""
        rows: int = args[1].size(0)
        return rows


# ---- functions of single numbers -----------------------------------------------------------------

_Slope = Callable[[Tensor, Tensor, Tensor, _Options], Tensor]


def _elu(g: Tensor, x: Tensor, alpha: float, scale: float, inner: float) -> Tensor:
    made: Tensor = _aten.elu_backward(g, alpha, scale, inner, False, x)
    return made


def _log_sigmoid(g: Tensor, x: Tensor, y: Tensor, o: _Options) -> Tensor:
    return g * torch.sigmoid(-x)


def _softplus(g: Tensor, x: Tensor, y: Tensor, o: _Options) -> Tensor:
    made: Tensor = _aten.softplus_backward(g, x, o.get("beta", 1), o.get("threshold", 20))
    return made


_SELU = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946

UNARY: Final[dict[str, tuple[str, ...]]] = {
    "relu": (),
    "relu6": (),
    "leaky_relu": ("negative_slope",),
    "elu": ("alpha",),
    "celu": ("alpha",),
    "selu": (),
    "gelu": ("approximate",),
    "silu": (),
    "mish": (),
    "hardswish": (),
    "softplus": ("beta", "threshold"),
    "softsign": (),
    "logsigmoid": (),
    "sigmoid": (),
    "tanh": (),
    "exp": (),
    "abs": (),
    "neg": (),
    "square": (),
    "sin": (),
    "cos": (),
}
"""Functions of single numbers, and the options that each takes behind the first argument."""

_SLOPES: dict[str, _Slope] = {
    "relu": lambda g, x, y, o: _aten.threshold_backward(g, y, 0),
    "relu6": lambda g, x, y, o: _aten.hardtanh_backward(g, x, 0, 6),
    "leaky_relu": lambda g, x, y, o: _aten.leaky_relu_backward(
        g, x, o.get("negative_slope", 0.01), False
    ),
    "elu": lambda g, x, y, o: _elu(g, x, o.get("alpha", 1.0), 1.0, 1.0),
    "celu": lambda g, x, y, o: _elu(g, x, o.get("alpha", 1.0), 1.0, 1.0 / o.get("alpha", 1.0)),
    "selu": lambda g, x, y, o: _elu(g, x, _SELU[0], _SELU[1], 1.0),
    "gelu": lambda g, x, y, o: _aten.gelu_backward(g, x, approximate=o.get("approximate", "none")),
    "silu": lambda g, x, y, o: _aten.silu_backward(g, x),
    "mish": lambda g, x, y, o: _aten.mish_backward(g, x),
    "hardswish": lambda g, x, y, o: _aten.hardswish_backward(g, x),
    "softplus": _softplus,
    "softsign": lambda g, x, y, o: g / (1 + x.abs()).square(),
    "logsigmoid": _log_sigmoid,
    "sigmoid": lambda g, x, y, o: _aten.sigmoid_backward(g, y),
    "tanh": lambda g, x, y, o: _aten.tanh_backward(g, y),
    "exp": lambda g, x, y, o: g * y,
    "abs": lambda g, x, y, o: g * x.sgn(),
    "neg": lambda g, x, y, o: -g,
    "square": lambda g, x, y, o: 2 * g * x,
    "sin": lambda g, x, y, o: g * x.cos(),
    "cos": lambda g, x, y, o: -g * x.sin(),
}
# Written where they are to lie. By torch's own backward operators, which have such forms.
_SLOPES_INTO: dict[str, Callable[[Tensor, Tensor, Tensor, _Options, Tensor], Tensor]] = {
    "relu": lambda g, x, y, o, out: _aten.threshold_backward.grad_input(g, y, 0, grad_input=out),
    "leaky_relu": lambda g, x, y, o, out: _aten.leaky_relu_backward.grad_input(
        g, x, o.get("negative_slope", 0.01), False, grad_input=out
    ),
    "silu": lambda g, x, y, o, out: _aten.silu_backward.grad_input(g, x, grad_input=out),
    "tanh": lambda g, x, y, o, out: _aten.tanh_backward.grad_input(g, y, grad_input=out),
}
_OVER: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
}
_OF_TORCH = ("sigmoid", "tanh", "exp", "abs", "neg", "square", "sin", "cos")


def _unary(name: str) -> Step:
    function: Callable[..., Tensor] = getattr(torch if name in _OF_TORCH else functional, name)
    slope = _SLOPES[name]

    def pull(g: Tensor, y: Tensor, args: list[Any], need: list[bool], options: _Options) -> _Grads:
        return [slope(g, args[0], y, options)]

    return Step(function, pull, _OVER.get(name), slope_into=_SLOPES_INTO.get(name))


# ---- functions of two ----------------------------------------------------------------------------

BINARY: Final = ("add", "sub", "mul", "div", "maximum", "minimum")
"""Functions of two values of a row, or of one and a number or a tensor that is the same for all."""


def _reduced(grad: Tensor, arg: Any) -> Tensor:
    """The gradient of what was repeated for all rows."""
    return grad.sum_to_size(arg.shape) if arg.shape != grad.shape else grad


def _extreme(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    # As torch: two equal numbers share the gradient.
    share = torch.where(a == b, 0.5, 1.0).to(g.dtype)
    return (
        torch.where(a == y, g * share, torch.zeros_like(g)),
        torch.where(b == y, g * share, torch.zeros_like(g)),
    )


def _two(name: str, g: Tensor, y: Tensor, a: Any, b: Any, need: list[bool]) -> _Grads:
    first = second = None
    if name in ("maximum", "minimum"):
        first, second = _extreme(g, y, a, b)
    else:
        if need[0]:
            first = g * b if name == "mul" else g / b if name == "div" else g
        if need[1] and name == "div":
            second = -g * (y / b)
        elif need[1]:
            second = g * a if name == "mul" else -g if name == "sub" else g
    made = zip((first, second), (a, b), need, strict=True)
    return [None if d is None or not n else _reduced(d, arg) for d, arg, n in made]


def _binary(name: str) -> Step:
    def pull(g: Tensor, y: Tensor, args: list[Any], need: list[bool], options: _Options) -> _Grads:
        return _two(name, g, y, args[0], args[1], need)

    return Step(getattr(torch, name), pull)


# ---- linear layers and norms ---------------------------------------------------------------------


def _linear(g: Tensor, y: Tensor, args: list[Any], need: list[bool], options: _Options) -> _Grads:
    rows, weight = args[:2]
    made: _Grads = [g @ weight if need[0] else None, g.t() @ rows if need[1] else None]
    if len(args) > 2:
        made.append(g.sum(0) if need[2] else None)
    return made


def _linear_into(out: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias, rows, weight.t(), out=out)


def _pull_linear(g: Tensor, args: list[Any], sums: _Grads, out: Tensor) -> Tensor:
    rows, weight = args[:2]
    _, d_weight, *d_bias = sums
    if d_weight is not None:
        d_weight.addmm_(g.t(), rows)
    if d_bias and d_bias[0] is not None:
        d_bias[0].add_(g.sum(0))
    return torch.mm(g, weight, out=out)


def _layer_norm(
    g: Tensor, y: Tensor, args: list[Any], need: list[bool], options: _Options
) -> _Grads:
    rows, shape, weight, bias = args
    _, mean, rstd = torch.native_layer_norm(rows, shape, weight, bias, options["eps"])
    wanted = [need[0], need[2], need[3]]
    made = _aten.native_layer_norm_backward(
        g.contiguous(), rows, list(shape), mean, rstd, weight, bias, wanted
    )
    own, *more = (d if n else None for d, n in zip(made, wanted, strict=True))
    return [own, None, *more]


STEPS: Final[dict[str, Step]] = {
    **{name: _unary(name) for name in UNARY},
    **{name: _binary(name) for name in BINARY},
    "linear": Step(functional.linear, _linear, into=_linear_into, pull_into=_pull_linear),
    "layer_norm": Step(functional.layer_norm, _layer_norm),
}
"""All functions of rows by their names."""
