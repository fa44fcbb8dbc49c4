"""add, mul and div: the bridge rewrites them in the whole graph, fused or not.

It turns scalars into 1-d tensors of the other operand's dtype, drops additions of 0 and products
with 1, and knows no `rounding_mode`. torch has the same operations under other names, which the
bridge does not touch: `multiply`, `divide`, and `sub` with the sign of `alpha` turned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from edgeweave.jitfuser._edit import Editor, is_constant
from edgeweave.jitfuser._values import Info

__all__ = ["ARITHMETIC_RULES"]

_PROMOTION = "takes the other operand's dtype for the result"
_ROUNDING = "ignores rounding_mode"
_IDENTITY = "returns its input itself"
_CONSTANT = "throws on a constant tensor in a fused group"
_ALPHA = "multiplies by alpha with a rounding of its own, or throws"
_SCALAR_ROUNDED = "rounds the scalar to bf16 first"

# Codes of c10::ScalarType for `aten::to`.
_CODES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bfloat16: 15,
}


def check_arithmetic(node: Any, editor: Editor) -> None:
    """Leaves an addition, product or quotient to the bridge only if all is well.

    Args:
        node: The node.
        editor: Its graph.
    """
    if node.kind() in ("aten::add", "aten::mul"):
        _put_tensor_first(node, editor)
    _unwrap_scalar(node, editor)
    fault = _fault(node, editor)
    if fault is not None:
        keep_out_arithmetic(node, editor, fault)


def keep_out_arithmetic(node: Any, editor: Editor, fault: str) -> None:
    """Renames an operation to its twin that the bridge does not know.

    Args:
        node: The node.
        editor: Its graph.
        fault: What the bridge would do wrong.
    """
    inputs = list(node.inputs())
    if node.kind() != "aten::add":
        twin = {"aten::mul": "aten::multiply", "aten::div": "aten::divide"}[node.kind()]
        editor.replace(node, twin, inputs, fault, "kept out")
        return
    result = editor.info(node.output())
    if result is not None and result.dtype is torch.bool:
        editor.replace(node, "aten::logical_or", inputs[:2], fault, "kept out")
        return
    # sub takes no booleans; the sum's dtype is the same if they are cast to it first.
    operands = [_without_bool(node, editor, value, result) for value in inputs[:2]]
    editor.replace(node, "aten::sub", [*operands, _minus(node, editor)], fault, "kept out")


def _put_tensor_first(node: Any, editor: Editor) -> None:
    """Swaps a leading scalar behind the tensor, where the bridge can use it."""
    first, second = node.inputsAt(0), node.inputsAt(1)
    info = editor.info(second)
    if (
        _scalar(first) is not None
        and info is not None
        and info.dtype == torch.float32
        and info.shape
        and not (node.kind() == "aten::add" and _constant_of(node, 2, 1) != 1)
    ):
        node.replaceInput(0, second)
        node.replaceInput(1, first)


def _unwrap_scalar(node: Any, editor: Editor) -> None:
    """Makes a number of a constant 0-d tensor, as tracing writes Python numbers."""
    number, info = _scalar(node.inputsAt(1)), editor.info(node.inputsAt(0))
    if number is None or info is None or info.dtype is not torch.float32 or not info.shape:
        return
    if isinstance(number, bool | int | float) and isinstance(
        node.inputsAt(1).type(), torch._C.TensorType
    ):
        # A 0-d operand does not promote an fp32 tensor, so the number alone says the same.
        node.replaceInput(1, editor.constant(node, float(number)))


def _fault(node: Any, editor: Editor) -> str | None:
    """What the bridge would do wrong, or None."""
    if not editor.is_plain(node):
        return _PROMOTION
    first, second = node.inputsAt(0), node.inputsAt(1)
    number = second.toIValue() if is_constant(second) else None
    if isinstance(number, complex):
        return _PROMOTION
    if node.kind() == "aten::div" and _constant_of(node, 2, None) is not None:
        return _ROUNDING
    if node.kind() == "aten::add" and _constant_of(node, 2, 1) != 1:
        return _ALPHA
    if isinstance(number, bool | int | float):
        if number == {"aten::add": 0, "aten::mul": 1}.get(node.kind()):
            return _IDENTITY
        info = editor.info(first)
        if (
            info is not None
            and info.dtype is torch.bfloat16
            and torch.tensor(number, dtype=torch.bfloat16).item() != number
        ):
            return _SCALAR_ROUNDED
    if any(is_constant(v) and isinstance(v.toIValue(), Tensor) for v in (first, second)):
        return _CONSTANT
    return None


def _constant_of(node: Any, place: int, default: Any) -> Any:
    """A constant input; NaN, which equals nothing, if it is computed."""
    if node.inputsSize() <= place:
        return default
    value = node.inputsAt(place)
    return value.toIValue() if is_constant(value) else float("nan")


def _scalar(value: Any) -> Any:
    """The number that a constant is, be it a number or a 0-d tensor; None otherwise."""
    if not is_constant(value):
        return None
    constant = value.toIValue()
    if isinstance(constant, Tensor):
        return constant.item() if constant.dim() == 0 and not constant.is_complex() else None
    return constant if isinstance(constant, bool | int | float) else None


def _without_bool(node: Any, editor: Editor, value: Any, result: Info | None) -> Any:
    if is_constant(value) and isinstance(value.toIValue(), bool):
        return editor.constant(node, int(value.toIValue()))
    info = editor.info(value)
    if info is None or info.dtype is not torch.bool or result is None or result.dtype is None:
        return value
    no = editor.constant(node, False)
    none = editor.constant(node, None)
    code = editor.constant(node, _CODES[result.dtype])
    cast = Info(result.dtype, info.shape, info.stride)
    return editor.insert(node, "aten::to", [value, code, no, no, none], cast)


def _minus(node: Any, editor: Editor) -> Any:
    """`-alpha`."""
    if node.inputsSize() < 3:
        return editor.constant(node, -1)
    alpha = node.inputsAt(2)
    if is_constant(alpha):
        number = alpha.toIValue()
        info = editor.info(node.output())
        # The tracer writes an integer alpha for a float sum; integers refuse a float alpha.
        if info is not None and info.dtype is not None and not info.dtype.is_floating_point:
            number = int(number) if not isinstance(number, complex) else number
        return editor.constant(node, -number)
    negated = editor.graph.create("aten::neg", [alpha], 1)
    negated.insertBefore(node)
    negated.output().setType(alpha.type())
    return negated.output()


ARITHMETIC_RULES = {
    "aten::add": check_arithmetic,
    "aten::mul": check_arithmetic,
    "aten::div": check_arithmetic,
}
