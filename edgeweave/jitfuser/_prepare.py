"""Passes over a frozen graph before fusion, for forms that folding and the bridge do not see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from edgeweave.jitfuser._edit import is_constant

__all__ = ["prepare"]


def prepare(graph: Any) -> None:
    """Writes out padding, folds it, and folds batch norms that this lays open.

    Convolutions with `padding="same"` and those behind a zero pad (as TensorFlow's models have
    them) hide from both the folding of batch norms and the bridge.

    Args:
        graph: A frozen graph; changed in place.
    """
    changed = [_write_out_same_padding(graph), _fold_zero_pads(graph)]
    if any(changed):
        torch._C._jit_pass_dce(graph)
        torch._C._jit_pass_fold_frozen_conv_bn(graph)
        torch._C._jit_pass_fold_frozen_conv_mul_or_div(graph)
        torch._C._jit_pass_fold_frozen_conv_add_or_sub(graph)
        torch._C._jit_pass_dce(graph)


def _write_out_same_padding(graph: Any) -> bool:
    """`_convolution_mode` becomes `_convolution` where the padding is the same on both sides."""
    changed = False
    for node in list(graph.findAllNodes("aten::_convolution_mode", False)):
        x, weight, bias, stride, mode, dilation, groups = node.inputs()
        if not all(is_constant(value) for value in (weight, stride, mode, dilation, groups)):
            continue
        kernel = weight.toIValue().shape[2:]
        total = [0] * len(kernel)
        if mode.toIValue() == "same":
            steps = list(dilation.toIValue()) * (1 if len(dilation.toIValue()) > 1 else len(kernel))
            total = [d * (k - 1) for d, k in zip(steps, kernel, strict=True)]
        if any(pad % 2 for pad in total):
            continue
        with graph.insert_point_guard(node):
            padding = graph.insertConstant([pad // 2 for pad in total])
            zeros = graph.insertConstant([0] * len(kernel))
            no, yes = graph.insertConstant(False), graph.insertConstant(True)
        flags = [no, zeros, groups, no, no, yes, yes]
        made = graph.create(
            "aten::_convolution", [x, weight, bias, stride, padding, dilation, *flags], 1
        )
        made.insertBefore(node)
        made.copyMetadata(node)
        node.output().replaceAllUsesWith(made.output())
        node.destroy()
        changed = True
    return changed


def _fold_zero_pads(graph: Any) -> bool:
    """A zero pad of equal sides becomes the padding of the convolution behind it."""
    changed = False
    for node in list(graph.findAllNodes("aten::_convolution", False)):
        pad = node.inputsAt(0).node()
        weight = node.inputsAt(1)
        if (
            pad.kind() not in ("aten::pad", "aten::constant_pad_nd")
            or not is_constant(weight)
            or not isinstance(weight.toIValue(), Tensor)
            or not all(is_constant(node.inputsAt(place)) for place in (4, 6))
            or node.inputsAt(6).toIValue()
        ):
            continue
        sides = _equal_sides(pad, weight.toIValue().dim() - 2)
        if sides is None:
            continue
        own = list(node.inputsAt(4).toIValue())
        own = own * (1 if len(own) == len(sides) else len(sides))
        with graph.insert_point_guard(node):
            padding = graph.insertConstant([a + b for a, b in zip(own, sides, strict=True)])
        node.replaceInput(4, padding)
        node.replaceInput(0, pad.inputsAt(0))
        changed = True
    return changed


def _equal_sides(pad: Any, dims: int) -> list[int] | None:
    """Rows of zeros on either side of each image dimension, if that is all that a pad adds."""
    if not all(is_constant(value) for value in list(pad.inputs())[1:]):
        return None
    widths = pad.inputsAt(1).toIValue()
    if pad.kind() == "aten::pad":
        mode, value = pad.inputsAt(2).toIValue(), pad.inputsAt(3).toIValue()
        if mode != "constant":
            return None
    else:
        value = pad.inputsAt(2).toIValue()
    if value not in (None, 0, 0.0) or len(widths) > 2 * dims:
        return None
    widths = [*widths, *[0] * (2 * dims - len(widths))]
    pairs = [(widths[2 * i], widths[2 * i + 1]) for i in range(dims)]
    if any(a != b or a < 0 for a, b in pairs):
        return None
    return [a for a, _ in reversed(pairs)]
