"""Rules for elementwise operations, matrix products, normalisation and shapes.

Each takes one ATen call and appends operations of oneDNN Graph, or raises `Refused` with a reason.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from .._fx import Meta, Node, Ref
from .._fx._simplify import operator_of
from ._code import Attribute
from ._lowering import Lowering, Refused, Rule

__all__ = ["RULES", "arguments", "rule"]

RULES: dict[str, Rule] = {}


def rule(*targets: str) -> Callable[[Rule], Rule]:
    """Register a rule for ATen overloads, named below `aten.`."""

    def register(function: Rule) -> Rule:
        for target in targets:
            RULES[f"aten.{target}"] = function
        return function

    return register


@lru_cache(maxsize=512)
def _signature(target: str) -> tuple[tuple[str, Any], ...]:
    schema = operator_of(target)._schema  # type: ignore[attr-defined]
    return tuple(
        (a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty)
        for a in schema.arguments
    )


def arguments(node: Node) -> dict[str, Any]:
    """Arguments of a call by name, with defaults put in."""
    found = {}
    for position, (name, default) in enumerate(_signature(node.target)):
        if position < len(node.args):
            found[name] = node.args[position]
        else:
            found[name] = node.kwargs.get(name, default)
    return found


def number(value: Any, what: str) -> float:
    """A plain number; a tensor or a size that changes is refused."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(f"{what} must be a number, is {type(value).__name__}")
    return float(value)


def _unary(kind: str) -> Rule:
    def apply(low: Lowering, node: Node) -> None:
        low.meta(node.args[0])
        low.op(kind, [node.args[0]])

    return apply


for _target, _kind in {
    "relu.default": "relu",
    "sigmoid.default": "sigmoid",
    "tanh.default": "tanh",
    "hardswish.default": "hard_swish",
    "mish.default": "mish",
    "abs.default": "abs",
}.items():
    RULES[f"aten.{_target}"] = _unary(_kind)


@rule("gelu.default")
def gelu(low: Lowering, node: Node) -> None:
    """GELU by the error function; the tanh form is another function and stays in ATen."""
    args = arguments(node)
    if args["approximate"] != "none":
        raise Refused(f"gelu(approximate={args['approximate']!r}): oneDNN has the erf form only")
    low.meta(args["self"])
    low.op("gelu", [args["self"]])


@rule("silu.default")
def silu(low: Lowering, node: Node) -> None:
    """X * sigmoid(x), which oneDNN recognises."""
    meta = low.meta(node.args[0])
    gate = low.between(meta)
    low.op("sigmoid", [node.args[0]], gate)
    low.op("multiply", [node.args[0], gate])


@rule("elu.default")
def elu(low: Lowering, node: Node) -> None:
    """ELU without the outer and inner scales."""
    args = arguments(node)
    if number(args["scale"], "scale") != 1 or number(args["input_scale"], "input_scale") != 1:
        raise Refused("elu with scale or input_scale")
    alpha = number(args["alpha"], "alpha")
    if alpha < 0:
        raise Refused("elu with a negative alpha")
    low.meta(args["self"])
    low.op("elu", [args["self"]], attributes={"alpha": alpha})


@rule("leaky_relu.default")
def leaky_relu(low: Lowering, node: Node) -> None:
    """Leaky ReLU with any slope."""
    args = arguments(node)
    low.meta(args["self"])
    slope = number(args["negative_slope"], "negative_slope")
    low.op("leaky_relu", [args["self"]], attributes={"alpha": slope})


@rule("hardsigmoid.default")
def hardsigmoid(low: Lowering, node: Node) -> None:
    """clamp(x / 6 + 1/2, 0, 1)."""
    low.meta(node.args[0])
    low.op("hard_sigmoid", [node.args[0]], attributes={"alpha": 1 / 6, "beta": 0.5})


def _clamp(low: Lowering, value: Any, least: Any, most: Any) -> None:
    low.meta(value)
    lower = -math.inf if least is None else number(least, "min")
    upper = math.inf if most is None else number(most, "max")
    if not lower <= upper:
        raise Refused("clamp with min above max")
    low.op("clamp", [value], attributes={"min": lower, "max": upper})


@rule("clamp.default", "clamp_min.default", "clamp_max.default")
def clamp(low: Lowering, node: Node) -> None:
    """Clamp with numbers as limits."""
    args = arguments(node)
    _clamp(low, args["self"], args.get("min"), args.get("max"))


@rule("hardtanh.default")
def hardtanh(low: Lowering, node: Node) -> None:
    """Clamp to the given interval."""
    args = arguments(node)
    _clamp(low, args["self"], args["min_val"], args["max_val"])


@rule("relu6.default")
def relu6(low: Lowering, node: Node) -> None:
    """Clamp to [0, 6]."""
    _clamp(low, node.args[0], 0, 6)


def _binary(low: Lowering, kind: str, left: Any, right: Any, node: Node) -> None:
    out = low.result(node)
    operands = []
    for value in (left, right):
        if isinstance(value, Ref):
            meta = low.meta(value)
            if meta.dtype != out.dtype:
                raise Refused("operands of several dtypes")
            operands.append(value)
        else:
            operands.append(low.literal(number(value, "operand"), len(out.shape), out.dtype))
    if low.is_constant(operands[0]) and low.is_constant(operands[1]):
        raise Refused("both operands are constant")
    # The library fuses a product or sum into what computes its first operand.
    if kind in ("add", "multiply") and low.is_constant(operands[0]):
        operands.reverse()
    low.op(kind, operands, attributes={"auto_broadcast": "numpy"})


@rule("add.Tensor", "sub.Tensor", "add.Scalar", "sub.Scalar")
def add(low: Lowering, node: Node) -> None:
    """Sum or difference with broadcasting."""
    args = arguments(node)
    if number(args["alpha"], "alpha") != 1:
        raise Refused("add or sub with alpha")
    kind = "add" if ".add." in node.target else "subtract"
    _binary(low, kind, args["self"], args["other"], node)


@rule("mul.Tensor", "mul.Scalar")
def mul(low: Lowering, node: Node) -> None:
    """Product with broadcasting."""
    args = arguments(node)
    _binary(low, "multiply", args["self"], args["other"], node)


@rule("div.Tensor", "div.Scalar")
def div(low: Lowering, node: Node) -> None:
    """Division by what is known not to be zero: 0/0 would be a NaN that later steps may lose."""
    args = arguments(node)
    divisor = args["other"]
    if isinstance(divisor, Ref):
        known = low.constant(divisor)
        if known is None:
            raise Refused("division by a tensor that may hold zeros")
        if bool((known == 0).any()):
            raise Refused("division by zero")
    elif number(divisor, "divisor") == 0:
        raise Refused("division by zero")
    _binary(low, "divide", args["self"], divisor, node)


def _matmul(
    low: Lowering, left: Any, right: Any, bias: Any, node: Node, *, transpose: bool = False
) -> None:
    a, b = low.meta(left), low.meta(right)
    if len(a.shape) < 2 or len(b.shape) < 2:
        raise Refused("matrix times vector")
    if low.result(node).dtype != a.dtype or a.dtype != b.dtype:
        raise Refused("operands of several dtypes")
    attributes: dict[str, Attribute] = {"transpose_a": False, "transpose_b": transpose}
    if bias is not None and len(low.meta(bias).shape) != 1:
        raise Refused("bias that is no vector")
    low.op("matmul", [left, right, *([] if bias is None else [bias])], attributes=attributes)


@rule("linear.default")
def linear(low: Lowering, node: Node) -> None:
    """X @ weight.T + bias."""
    args = arguments(node)
    _matmul(low, args["input"], args["weight"], args["bias"], node, transpose=True)


@rule("addmm.default")
def addmm(low: Lowering, node: Node) -> None:
    """Bias + a @ b, without factors."""
    args = arguments(node)
    if number(args["beta"], "beta") != 1 or number(args["alpha"], "alpha") != 1:
        raise Refused("addmm with beta or alpha")
    _matmul(low, args["mat1"], args["mat2"], args["self"], node)


@rule("mm.default", "bmm.default", "matmul.default")
def matmul(low: Lowering, node: Node) -> None:
    """Matrix product, batched or not."""
    _matmul(low, node.args[0], node.args[1], None, node)


@rule("softmax.int", "_softmax.default")
def softmax(low: Lowering, node: Node) -> None:
    """Softmax over one dimension."""
    args = arguments(node)
    meta = low.meta(args["self"])
    if low.result(node).dtype != meta.dtype:
        raise Refused("softmax with another dtype")
    low.op("softmax", [args["self"]], attributes={"axis": args["dim"] % len(meta.shape)})


@rule("layer_norm.default")
def layer_norm(low: Lowering, node: Node) -> None:
    """Layer norm over the last dimension, with both weight and bias or neither."""
    args = arguments(node)
    meta = low.meta(args["input"])
    if len(args["normalized_shape"]) != 1 or len(meta.shape) < 2:
        raise Refused("layer_norm over more than the last dimension")
    weight, bias = args["weight"], args["bias"]
    if (weight is None) != (bias is None):
        raise Refused("layer_norm with a weight but no bias")
    attributes: dict[str, Attribute] = {
        "begin_norm_axis": -1,
        "keep_stats": False,
        "use_affine": weight is not None,
        "epsilon": number(args["eps"], "eps"),
    }
    affine = [] if weight is None else [weight, bias]
    low.op("layer_norm", [args["input"], *affine], attributes=attributes)


@rule("cat.default")
def cat(low: Lowering, node: Node) -> None:
    """Concatenation of tensors of one dtype."""
    args = arguments(node)
    metas = [low.meta(value) for value in args["tensors"]]
    if len({meta.dtype for meta in metas}) != 1 or len({len(meta.shape) for meta in metas}) != 1:
        raise Refused("cat of several dtypes or ranks")
    if any(low.is_constant(value) for value in args["tensors"]) or len(metas) < 2:
        raise Refused("cat with constants")
    axis = args["dim"] % len(metas[0].shape)
    low.op("concat", list(args["tensors"]), attributes={"axis": axis})


@rule("mean.dim")
def mean(low: Lowering, node: Node) -> None:
    """Mean over some dimensions."""
    args = arguments(node)
    meta = low.meta(args["self"])
    if args["dim"] is None or low.result(node).dtype != meta.dtype:
        raise Refused("mean over all dimensions, or in another dtype")
    rank = len(meta.shape)
    axes = sorted(d % rank for d in args["dim"])
    if rank >= 3 and axes == list(range(2, rank)) and args["keepdim"]:
        pool_all(low, args["self"], meta)
        return
    keep = bool(args["keepdim"])
    low.op("reduce_mean", [args["self"]], attributes={"axes": axes, "keep_dims": keep})


def pool_all(low: Lowering, value: Any, meta: Meta) -> None:
    """Average over all of the space, as a pooling, which reads blocked layouts best."""
    space = list(meta.sizes[2:])
    zeros = [0] * len(space)
    attributes: dict[str, Attribute] = {
        "strides": space,
        "pads_begin": zeros,
        "pads_end": zeros,
        "kernel": space,
        "exclude_pad": False,
        "data_format": "NCX",
        "rounding_type": "floor",
    }
    low.op("avg_pool", [value], attributes=attributes)


@rule("_to_copy.default")
def to_copy(low: Lowering, node: Node) -> None:
    """Change between float32 and bfloat16."""
    args = arguments(node)
    meta, out = low.meta(args["self"]), low.result(node)
    if meta.dtype == out.dtype or {meta.dtype, out.dtype} != {torch.float32, torch.bfloat16}:
        raise Refused("copy to another layout or device")
    if args["memory_format"] not in (None, torch.preserve_format):
        raise Refused("copy to another memory format")
    low.op("type_cast", [args["self"]])
