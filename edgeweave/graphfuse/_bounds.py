"""Keeps NaN right at almost no cost.

oneDNN's fused ReLU, clamp and pooling drop NaN where eager keeps it. A NaN can only arise from a
NaN or an infinity that comes in, or from an overflow. So it is enough to know that what comes in is
finite and so small that nothing can overflow: then there is no NaN to drop, and fused and eager
agree. The bound of each value follows from the bound of the inputs and the weights (a convolution
multiplies it by at most the largest sum of |weights| of a channel), and grows by some 1.6 decades a
layer. A value is looked at again only where its bound nears the end of float32: once in some twenty
layers. Where a look finds an element above `LIMIT`, or NaN, the whole call runs in eager.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from ._code import Op
from ._code import Tensor as GraphTensor

__all__ = ["LIMIT", "ceiling", "output_bound"]

# What a look demands. Activations are far below it, and it leaves 31 of float32's 38 decades.
LIMIT: Final = 1e6
# No value inside a partition may come nearer to the end of float32 (3.4e38).
ceiling: Final = 1e37
# Layer norm squares its input, and sums the squares.
_SQUARE: Final = 1e17

_BOUNDED: Final = {"sigmoid": 1.0, "tanh": 1.0, "softmax": 1.0, "hard_sigmoid": 1.0}
_NOT_LARGER: Final = {
    *("relu", "gelu", "hard_swish", "mish", "max_pool", "avg_pool", "reduce_mean", "interpolate"),
    *("type_cast", "abs", "static_reshape", "static_transpose"),
}


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _row_sum(weight: Tensor, kind: str, transpose: bool) -> float:
    """The most that a product with these weights can multiply a bound by."""
    magnitudes = weight.detach().abs().double()
    if kind == "convolution":
        return float(magnitudes.flatten(1).sum(1).max())
    if kind == "conv_transpose":
        return float(magnitudes.transpose(0, 1).flatten(1).sum(1).max())
    return float(magnitudes.sum(-1 if transpose else -2).max())


def _product(
    op: Op,
    known: Sequence[float],
    constants: Mapping[str, Tensor],
    tensors: Mapping[str, GraphTensor],
    cache: dict[str, float],
) -> float:
    transpose = bool(op.attributes.get("transpose_b", False))
    weight = constants.get(op.inputs[1])
    if weight is not None:
        if op.inputs[1] not in cache:
            cache[op.inputs[1]] = _row_sum(weight, op.kind, transpose)
        bound = known[0] * cache[op.inputs[1]]
    else:
        inner = tensors[op.inputs[0]].shape[-1]
        if op.kind != "matmul":
            inner = math.prod(tensors[op.inputs[1]].shape)
        bound = known[0] * known[1] * inner
    return bound + (known[2] if len(known) > 2 else 0.0)


def output_bound(
    op: Op,
    bounds: Mapping[str, float],
    constants: Mapping[str, Tensor],
    tensors: Mapping[str, GraphTensor],
    cache: dict[str, float],
) -> float:
    """Bound of an operation's result; infinity where none can be given.

    Args:
        op: The operation.
        bounds: Of the values that are computed.
        constants: The values that are known.
        tensors: Shapes.
        cache: Of what depends on the constants alone, kept between calls.
    """
    known = []
    for name in op.inputs:
        if name in constants:
            key = f"max {name}"
            if key not in cache:
                cache[key] = _largest(constants[name])
            known.append(cache[key])
        else:
            known.append(bounds[name])
    if not all(math.isfinite(value) for value in known):
        return math.inf
    if op.kind in ("convolution", "conv_transpose", "matmul"):
        return _product(op, known, constants, tensors, cache)
    if op.kind in _BOUNDED:
        return _BOUNDED[op.kind]
    if op.kind in _NOT_LARGER:
        return known[0]
    if op.kind in ("add", "subtract"):
        return known[0] + known[1]
    if op.kind == "multiply":
        return known[0] * known[1]
    if op.kind == "divide":
        return known[0] / float(constants[op.inputs[1]].abs().min())
    if op.kind == "concat":
        return max(known)
    return _other(op, known, tensors)


def _attribute(op: Op, name: str) -> float:
    value = op.attributes[name]
    assert isinstance(value, int | float)
    return float(value)


def _other(op: Op, known: Sequence[float], tensors: Mapping[str, GraphTensor]) -> float:
    if op.kind == "leaky_relu":
        return known[0] * max(1.0, abs(_attribute(op, "alpha")))
    if op.kind == "elu":
        return max(known[0], _attribute(op, "alpha"))
    if op.kind == "clamp":
        ends = (abs(_attribute(op, "min")), abs(_attribute(op, "max")))
        return max(known[0], *(end for end in ends if math.isfinite(end)), 0.0)
    if op.kind == "layer_norm" and known[0] <= _SQUARE:
        scaled = math.sqrt(tensors[op.inputs[0]].shape[-1])
        return scaled * known[1] + known[2] if len(known) > 1 else scaled
    return math.inf
