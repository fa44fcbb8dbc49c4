"""Products, convolutions, norms, pools and cat: default arguments, missing weights, NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from edgeweave.jitfuser._edit import Editor, is_constant

__all__ = ["LAYER_RULES", "keep_out_layer"]

_EMPTY = "reads memory that was never written, or throws, without elements"
_AFFINE = "throws without weight or bias"
_STRIDE = "throws on the default stride"
_UNBATCHED = "throws without a batch dimension"
_NAN = "turns NaN into a number"
_MIXED = "throws on inputs of different dtypes, and on empty ones"
_BIAS = "throws on a constant bias"

Rule = Callable[[Any, Editor], None]


def keep_out_layer(node: Any, editor: Editor, fault: str) -> None:
    """Keeps a product, norm, pool or cat out of fusion, under another name of the same kernel.

    Args:
        node: The node.
        editor: Its graph.
        fault: What the bridge would do wrong.
    """
    inputs = list(node.inputs())
    kind = node.kind()
    if kind in ("aten::matmul", "aten::mm", "aten::bmm"):
        editor.replace(node, "aten::linalg_matmul", inputs, fault, "kept out")
    elif kind == "aten::cat":
        editor.replace(node, "aten::concat", inputs, fault, "kept out")
    elif kind == "aten::layer_norm":
        _first_of(node, editor, "aten::native_layer_norm", inputs[:5], 3, fault)
    elif kind == "aten::max_pool2d":
        _first_of(node, editor, "aten::max_pool2d_with_indices", inputs, 2, fault)
    elif kind == "aten::avg_pool2d":
        _average_in_3d(node, editor, fault)
    elif kind == "aten::linear":
        _linear_by_hand(node, editor, fault)
    else:
        editor.isolate(node, fault)


def _first_of(
    node: Any, editor: Editor, kind: str, inputs: list[Any], results: int, fault: str
) -> None:
    made = editor.graph.create(kind, inputs, results)
    made.insertBefore(node)
    for value in made.outputs():
        value.setType(torch._C.TensorType.get())
    info = editor.info(node.output())
    if info is not None:
        editor.know(made.outputsAt(0), info)
    editor.swap(node, made.outputsAt(0), fault, "kept out")


def _average_in_3d(node: Any, editor: Editor, fault: str) -> None:
    """avg_pool2d as avg_pool3d over one plane: the only other name of that kernel's kind."""
    image, kernel, stride, padding, *rest = node.inputs()
    lists = []
    for value, front in ((kernel, 1), (stride, 1), (padding, 0)):
        numbers = value.toIValue()
        pair = list(numbers) * (2 if len(numbers) == 1 else 1)
        lists.append(editor.constant(node, [front, *pair] if pair else []))
    plane = editor.constant(node, -3)
    lifted = editor.insert(node, "aten::unsqueeze", [image, plane], None)
    pooled = editor.insert(node, "aten::avg_pool3d", [lifted, *lists, *rest], None)
    made = editor.insert(node, "aten::squeeze", [pooled, plane], editor.info(node.output()))
    editor.swap(node, made, fault, "kept out")


def _pool_batched(node: Any, editor: Editor) -> None:
    """A pool of one image as a pool of a batch of one."""
    image, *rest = node.inputs()
    front = editor.constant(node, 0)
    batch = editor.insert(node, "aten::unsqueeze", [image, front], None)
    kind = node.kind()
    if kind == "aten::max_pool2d":
        made = editor.graph.create("aten::max_pool2d_with_indices", [batch, *rest], 2)
    else:
        made = editor.graph.create("aten::avg_pool2d", [batch, *rest], 1)
    made.insertBefore(node)
    for value in made.outputs():
        value.setType(torch._C.TensorType.get())
    result = editor.insert(
        node, "aten::squeeze", [made.outputsAt(0), front], editor.info(node.output())
    )
    editor.swap(node, result, _UNBATCHED, "rewritten")


def _linear_by_hand(node: Any, editor: Editor, fault: str) -> None:
    x, weight, bias = node.inputs()
    turned = editor.insert(node, "aten::t", [weight], None)
    made = editor.insert(node, "aten::linalg_matmul", [x, turned], editor.info(node.output()))
    if not (is_constant(bias) and bias.toIValue() is None):
        minus = editor.constant(node, -1)
        made = editor.insert(node, "aten::sub", [made, bias, minus], editor.info(node.output()))
    editor.swap(node, made, fault, "kept out")


def _check_product(node: Any, editor: Editor) -> None:
    if not editor.is_bridged(node):
        return
    if any(info is not None and info.empty for info in editor.infos(node)):
        keep_out_layer(node, editor, _EMPTY)


def _check_addmm(node: Any, editor: Editor) -> None:
    bias, x, weight, beta, alpha = node.inputs()
    out, start = editor.info(node.output()), editor.info(bias)
    if not editor.is_bridged(node) or out is None or start is None:
        return
    numbers = [v.toIValue() if is_constant(v) else None for v in (beta, alpha)]
    if (
        numbers == [1, 1]
        and is_constant(weight)
        and start.shape == out.shape[-1:]
        and not out.empty
    ):
        turned = editor.constant(node, weight.toIValue().t())
        editor.replace(node, "aten::linear", [x, turned, bias], _BIAS, "rewritten")
        return
    product = editor.insert(
        node, "aten::linalg_matmul" if out.empty else "aten::mm", [x, weight], out
    )
    fault = "throws on integer beta or alpha" if numbers != [1, 1] else _BIAS
    scaled = editor.insert(node, "aten::multiply", [product, alpha], out)
    if numbers[0] == 0:  # by its definition, beta=0 ignores what the bias holds
        editor.swap(node, scaled, fault, "rewritten")
        return
    start_scaled = editor.insert(node, "aten::multiply", [bias, beta], start)
    minus = editor.constant(node, -1)
    made = editor.insert(node, "aten::sub", [scaled, start_scaled, minus], out)
    editor.swap(node, made, fault, "rewritten")


def _fill_affine(
    node: Any, editor: Editor, shape: tuple[int, ...], places: tuple[int, int]
) -> None:
    """Gives a norm the weight of ones or the bias of zeros that it lacks."""
    info = editor.info(node.inputsAt(0))
    assert info is not None
    lacking = [
        p for p in places if is_constant(node.inputsAt(p)) and node.inputsAt(p).toIValue() is None
    ]
    for place in lacking:
        fill = torch.ones if place == places[0] else torch.zeros
        node.replaceInput(place, editor.constant(node, fill(shape, dtype=info.dtype)))
    if lacking:
        editor.note(node, _AFFINE, "rewritten")


def _check_batch_norm(node: Any, editor: Editor) -> None:
    info = editor.info(node.inputsAt(0))
    training = node.inputsAt(5)
    if not editor.is_bridged(node) or info is None:
        return
    if not is_constant(training) or training.toIValue():
        return  # the bridge leaves those alone
    if info.empty or len(info.shape) < 2:
        editor.isolate(node, _EMPTY)
        return
    _fill_affine(node, editor, info.shape[1:2], (1, 2))
    if not editor.is_plain(node):
        editor.isolate(node, _MIXED)


def _check_layer_norm(node: Any, editor: Editor) -> None:
    info = editor.info(node.inputsAt(0))
    sizes = node.inputsAt(1)
    if not editor.is_bridged(node) or info is None:
        return
    if info.empty or not is_constant(sizes) or len(sizes.toIValue()) != 1:
        keep_out_layer(node, editor, _EMPTY)
        return
    _fill_affine(node, editor, tuple(sizes.toIValue()), (2, 3))
    if not editor.is_plain(node):
        keep_out_layer(node, editor, _MIXED)


def _check_pool(node: Any, editor: Editor) -> None:
    if not editor.is_bridged(node):
        return
    info = editor.info(node.inputsAt(0))
    places = (1, 2, 3) if node.kind() == "aten::avg_pool2d" else (1, 2, 3, 4)
    if not all(is_constant(node.inputsAt(place)) for place in places):
        return
    if not node.inputsAt(2).toIValue():
        # Needed even where it is kept out: max_pool2d_with_indices is looked at as well.
        node.replaceInput(2, editor.constant(node, list(node.inputsAt(1).toIValue())))
        editor.note(node, _STRIDE, "rewritten")
    if info is None or len(info.shape) != 4:
        _pool_batched(node, editor)
    elif info.empty:
        keep_out_layer(node, editor, _EMPTY)
    elif node.kind() == "aten::max_pool2d" and editor.keep_nan:
        keep_out_layer(node, editor, _NAN)


def _check_cat(node: Any, editor: Editor) -> None:
    if editor.is_bridged(node) and not editor.is_plain(node):
        keep_out_layer(node, editor, _MIXED)


def _check_linear(node: Any, editor: Editor) -> None:
    if not editor.is_bridged(node):
        return
    infos = editor.infos(node)
    if any(info is not None and info.empty for info in infos):
        keep_out_layer(node, editor, _EMPTY)


def fold_bias(node: Any, editor: Editor) -> None:
    """Makes a constant added to a linear layer without bias its bias.

    Args:
        node: An addition.
        editor: Its graph.
    """
    if node.inputsSize() == 3 and not (
        is_constant(node.inputsAt(2)) and node.inputsAt(2).toIValue() == 1
    ):
        return
    for product, added in ((0, 1), (1, 0)):
        linear, bias = node.inputsAt(product).node(), node.inputsAt(added)
        info, out = editor.info(bias), editor.info(node.output())
        if (
            linear.kind() == "aten::linear"
            and len(list(linear.output().uses())) == 1
            and is_constant(linear.inputsAt(2))
            and linear.inputsAt(2).toIValue() is None
            and is_constant(bias)
            and isinstance(bias.toIValue(), Tensor)
            and info is not None
            and out is not None
            and info.shape == out.shape[-1:]
            and info.dtype == out.dtype
        ):
            made = editor.insert(
                node, "aten::linear", [linear.inputsAt(0), linear.inputsAt(1), bias], out
            )
            editor.swap(node, made, _BIAS, "rewritten")
            linear.destroy()
            return


LAYER_RULES: dict[str, Rule] = {
    "aten::matmul": _check_product,
    "aten::mm": _check_product,
    "aten::bmm": _check_product,
    "aten::linear": _check_linear,
    "aten::addmm": _check_addmm,
    "aten::batch_norm": _check_batch_norm,
    "aten::layer_norm": _check_layer_norm,
    "aten::max_pool2d": _check_pool,
    "aten::avg_pool2d": _check_pool,
    "aten::cat": _check_cat,
}
