"""Elementwise functions and softmax: wrong arguments, and NaN that fused kernels drop.

The x86 instructions behind a fused clamp return the bound when the value is NaN. torch has each
clamp under a second name with the very same kernel, which the bridge does not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from edgeweave.jitfuser._edit import Editor, is_constant

__all__ = ["ACTIVATION_RULES", "keep_out_activation"]

_NAN = "turns NaN into a number"
_INTEGER = "throws on an integer argument ('expected double')"
_BOUNDS = "throws on tensor bounds, a NaN bound, or min > max"
_SHAPE = "throws or changes the shape without a dimension, or without elements"

Rule = Callable[[Any, Editor], None]


def keep_out_activation(node: Any, editor: Editor, fault: str) -> None:
    """Keeps an elementwise function or softmax out of fusion.

    Args:
        node: The node.
        editor: Its graph.
        fault: What the bridge would do wrong.
    """
    inputs = list(node.inputs())
    kind = node.kind()
    if kind == "aten::relu":
        # What torch's relu calls.
        inputs = [inputs[0], editor.constant(node, 0)]
        editor.replace(node, "aten::clamp_min", inputs, fault, "kept out")
    elif kind == "aten::relu6":
        bounds = [editor.constant(node, 0), editor.constant(node, 6)]
        editor.replace(node, "aten::clip", [inputs[0], *bounds], fault, "kept out")
    elif kind in ("aten::clamp", "aten::hardtanh"):
        editor.replace(node, "aten::clip", inputs, fault, "kept out")
    elif kind in _TWINS:
        editor.replace(node, _TWINS[kind], inputs, fault, "kept out")
    else:
        editor.isolate(node, fault)


_TWINS = {
    "aten::abs": "aten::absolute",
    "aten::sigmoid": "aten::special_expit",
    "aten::round": "aten::special_round",
    "aten::softmax": "aten::special_softmax",
}


def _plain_only(then: Rule | None = None) -> Rule:
    """A rule for functions that go wrong on tensors without dimensions or elements."""

    def check(node: Any, editor: Editor) -> None:
        if not editor.is_bridged(node):
            return
        if not editor.is_plain(node):
            keep_out_activation(node, editor, _SHAPE)
        elif then is not None:
            then(node, editor)

    return check


def _check_relu(node: Any, editor: Editor) -> None:
    if editor.keep_nan:
        keep_out_activation(node, editor, _NAN)


def _check_clamp(node: Any, editor: Editor) -> None:
    bounds = [node.inputsAt(place) for place in range(1, node.inputsSize())]
    if not all(_is_sound_bound(bound) for bound in bounds) or _crossed(bounds):
        keep_out_activation(node, editor, _BOUNDS)
    elif editor.keep_nan:
        keep_out_activation(node, editor, _NAN)


def _is_sound_bound(value: Any) -> bool:
    if not is_constant(value):
        return False
    bound = value.toIValue()
    return bound is None or (not isinstance(bound, Tensor) and not math.isnan(bound))


def _crossed(bounds: list[Any]) -> bool:
    numbers = [bound.toIValue() for bound in bounds]
    return len(numbers) == 2 and None not in numbers and numbers[0] > numbers[1]


def _check_leaky_relu(node: Any, editor: Editor) -> None:
    slope = _number(node, 1)
    if slope is None:
        editor.isolate(node, _INTEGER)
    elif slope == 0.0 and editor.keep_nan:
        editor.isolate(node, _NAN)
    else:
        _make_float(node, editor, 1)


def _check_elu(node: Any, editor: Editor) -> None:
    numbers = [_number(node, place) for place in range(1, node.inputsSize())]
    if None in numbers or any(number != 1.0 for number in numbers[1:]):
        editor.isolate(node, "ignores scale and input_scale")
    else:
        _make_float(node, editor, 1)


def _check_gelu(node: Any, editor: Editor) -> None:
    if node.inputsSize() > 1 and _constant(node, 1) != "none":
        editor.isolate(node, 'runs approximate="tanh" as erf')


def _check_round(node: Any, editor: Editor) -> None:
    if node.inputsSize() > 1 and _constant(node, 1) != 0:
        keep_out_activation(node, editor, "ignores decimals")


def _check_exp(node: Any, editor: Editor) -> None:
    if editor.keep_nan:
        editor.isolate(node, _NAN)


def check_softmax(node: Any, editor: Editor) -> None:
    """Keeps a softmax out if it has a dtype, or behind elementwise functions drops NaN.

    Args:
        node: The node.
        editor: Its graph.
    """
    if not editor.is_bridged(node):
        return
    if not is_constant(node.inputsAt(2)) or node.inputsAt(2).toIValue() is not None:
        keep_out_activation(node, editor, "throws on a dtype argument")
    elif not editor.is_plain(node):
        keep_out_activation(node, editor, _SHAPE)
    elif editor.keep_nan:
        keep_out_activation(node, editor, _NAN)


def _constant(node: Any, place: int) -> Any:
    value = node.inputsAt(place)
    return value.toIValue() if is_constant(value) else float("nan")


def _number(node: Any, place: int) -> float | None:
    value = _constant(node, place)
    return float(value) if isinstance(value, bool | int | float) else None


def _make_float(node: Any, editor: Editor, place: int) -> None:
    if not isinstance(node.inputsAt(place).toIValue(), float):
        node.replaceInput(place, editor.constant(node, _number(node, place)))
        editor.note(node, _INTEGER, "rewritten")


ACTIVATION_RULES: dict[str, Rule] = {
    "aten::relu": _plain_only(_check_relu),
    "aten::relu6": _plain_only(_check_relu),
    "aten::clamp": _plain_only(_check_clamp),
    "aten::hardtanh": _plain_only(_check_clamp),
    "aten::leaky_relu": _plain_only(_check_leaky_relu),
    "aten::elu": _plain_only(_check_elu),
    "aten::gelu": _plain_only(_check_gelu),
    "aten::round": _plain_only(_check_round),
    "aten::exp": _plain_only(_check_exp),
    "aten::softmax": check_softmax,
    **{
        f"aten::{name}": _plain_only()
        for name in ("abs", "hardswish", "log", "sigmoid", "sqrt", "square", "tanh")
    },
}
