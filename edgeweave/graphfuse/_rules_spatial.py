"""Rules for convolutions, pools, batch norm and interpolation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .._fx import Node, Ref
from .._fx._simplify import PADDED_CONVOLUTIONS
from ._code import Attribute
from ._lowering import Lowering, Refused
from ._rules import RULES, arguments, number, pool_all, rule

__all__: list[str] = []


def _each(value: Any, rank: int, default: int) -> list[int]:
    """A per-dimension setting, which torch lets a user give once for all."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    if not items:
        items = [default]
    if len(items) == 1:
        items *= rank
    if len(items) != rank or not all(isinstance(item, int) for item in items):
        raise Refused("a setting that is not one integer per dimension")
    return [int(item) for item in items]


def _space(low: Lowering, value: Any, target: str) -> int:
    """Number of spatial dimensions; an input without a batch is refused."""
    rank = int(next(c for c in target.split(".")[1] if c.isdigit()))
    if len(low.meta(value).shape) != rank + 2:
        raise Refused("input without a batch dimension")
    return rank


@rule(
    *(f"conv{n}d.default" for n in (1, 2, 3)),
    *(f"conv{n}d.padding" for n in (1, 2, 3)),
)
def convolution(low: Lowering, node: Node) -> None:
    """Convolution with groups and dilation, padding given or worked out."""
    _convolution(low, node, [])


def padded_convolution(low: Lowering, node: Node) -> None:
    """Convolution of what a `pad` with zeros would have made larger."""
    target = f"aten.{node.target.split('.')[1].removeprefix('padded_')}.default"
    _convolution(low, replace(node, target=target, args=node.args[:-1]), node.args[-1])


for _target in PADDED_CONVOLUTIONS.values():
    RULES[_target] = padded_convolution


def _convolution(low: Lowering, node: Node, more: list[int]) -> None:
    """`more`: zeros at each end beside the convolution's own padding, last dimension first."""
    args = arguments(node)
    rank = _space(low, args["input"], node.target)
    weight = low.meta(args["weight"])
    dilations = _each(args["dilation"], rank, 1)
    strides = _each(args["stride"], rank, 1)
    if isinstance(args["padding"], str):
        total = [0] * rank
        if args["padding"] == "same":
            total = [d * (k - 1) for d, k in zip(dilations, weight.sizes[2:], strict=True)]
        begin = [t // 2 for t in total]
        end = [t - b for t, b in zip(total, begin, strict=True)]
    else:
        begin = end = _each(args["padding"], rank, 0)
    if more:
        begin = [b + m for b, m in zip(begin, more[-2::-2], strict=True)]
        end = [e + m for e, m in zip(end, more[::-2], strict=True)]
    attributes: dict[str, Attribute] = {
        "strides": strides,
        "pads_begin": begin,
        "pads_end": end,
        "dilations": dilations,
        "auto_pad": "None",
        "groups": args["groups"],
        "data_format": "NCX",
        "weights_format": "OIX",
    }
    bias = [] if args["bias"] is None else [args["bias"]]
    if low.meta(args["input"]).dtype != weight.dtype:
        raise Refused("operands of several dtypes")
    low.op("convolution", [args["input"], args["weight"], *bias], attributes=attributes)


@rule("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input")
def conv_transpose(low: Lowering, node: Node) -> None:
    """Transposed convolution."""
    args = arguments(node)
    rank = _space(low, args["input"], node.target)
    padding = _each(args["padding"], rank, 0)
    strides, dilations = _each(args["stride"], rank, 1), _each(args["dilation"], rank, 1)
    extra = _each(args["output_padding"], rank, 0)
    if any(e >= max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        # The capture lets this pass; eager does not.
        raise ValueError(
            "fuse: output_padding must be smaller than stride or dilation, got "
            f"output_padding={extra}, stride={strides}, dilation={dilations}"
        )
    attributes: dict[str, Attribute] = {
        "strides": strides,
        "pads_begin": padding,
        "pads_end": padding,
        "dilations": dilations,
        "output_padding": extra,
        "auto_pad": "None",
        "groups": args["groups"],
        "data_format": "NCX",
        "weights_format": "IOX",
    }
    bias = [] if args["bias"] is None else [args["bias"]]
    if low.meta(args["input"]).dtype != low.meta(args["weight"]).dtype:
        raise Refused("operands of several dtypes")
    low.op("conv_transpose", [args["input"], args["weight"], *bias], attributes=attributes)


def _pooled(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _pool(low: Lowering, node: Node, kind: str) -> None:
    args = arguments(node)
    rank = _space(low, args["self"], node.target)
    kernel = _each(args["kernel_size"], rank, 1)
    # No stride means the kernel's size.
    strides = _each(args["stride"], rank, 1) if args["stride"] else kernel
    padding = _each(args["padding"], rank, 0)
    dilations = _each(args.get("dilation", 1), rank, 1)
    sizes = low.meta(args["self"]).sizes[2:]
    floor = [
        _pooled(*each) for each in zip(sizes, kernel, strides, padding, dilations, strict=True)
    ]
    if floor != list(low.result(node).sizes[2:]):
        raise Refused("ceil_mode that adds a window")
    attributes: dict[str, Attribute] = {
        "strides": strides,
        "pads_begin": padding,
        "pads_end": padding,
        "kernel": kernel,
        "data_format": "NCX",
        "rounding_type": "floor",
    }
    if kind == "max_pool":
        attributes["dilations"] = dilations
    else:
        if args.get("divisor_override") is not None:
            raise Refused("avg_pool with divisor_override")
        attributes["exclude_pad"] = not args["count_include_pad"]
    low.op(kind, [args["self"]], attributes=attributes)


@rule("max_pool1d.default", "max_pool2d.default", "max_pool3d.default")
def max_pool(low: Lowering, node: Node) -> None:
    """Max pooling."""
    _pool(low, node, "max_pool")


@rule("avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default")
def avg_pool(low: Lowering, node: Node) -> None:
    """Average pooling."""
    _pool(low, node, "avg_pool")


@rule("adaptive_avg_pool1d.default", "adaptive_avg_pool2d.default", "adaptive_avg_pool3d.default")
def adaptive_avg_pool(low: Lowering, node: Node) -> None:
    """Adaptive average pooling to size 1."""
    args = arguments(node)
    _space(low, args["self"], node.target)
    if set(args["output_size"]) != {1}:
        raise Refused("adaptive pooling to more than one cell")
    pool_all(low, args["self"], low.meta(args["self"]))


@rule("_native_batch_norm_legit_no_training.default")
def batch_norm(low: Lowering, node: Node) -> None:
    """Batch norm with fixed statistics that could not be folded into the layer before it."""
    raise Refused("batch norm that no layer before it can take up")


@rule("batch_norm.default")
def whole_batch_norm(low: Lowering, node: Node) -> None:
    """Batch norm with fixed statistics, kept whole by the capture."""
    args = arguments(node)
    if args["training"]:
        raise Refused("batch norm with the batch's own statistics")
    parts = [args[name] for name in ("weight", "bias", "running_mean", "running_var")]
    if not all(isinstance(part, Ref) for part in parts):
        raise Refused("batch norm without weights or statistics")
    attributes: dict[str, Attribute] = {
        "epsilon": number(args["eps"], "eps"),
        "data_format": "NCX",
    }
    low.meta(args["input"])
    low.op("batch_norm_inference", [args["input"], *parts], attributes=attributes)


def _interpolate(low: Lowering, node: Node, mode: str) -> None:
    args = arguments(node)
    value = args.get("input", args.get("self"))
    meta, out = low.meta(value), low.result(node)
    if args.get("align_corners"):
        raise Refused("interpolation with align_corners")
    pairs = list(zip(meta.sizes[2:], out.sizes[2:], strict=True))
    if mode == "nearest" and any(big % small for small, big in pairs):
        raise Refused("nearest interpolation by a factor that is no integer")
    factors = args.get("scale_factors")
    if factors is not None and any(
        int(small * factor) != small * factor
        for (small, _), factor in zip(pairs, factors, strict=True)
    ):
        raise Refused("interpolation by a factor that does not divide the size")
    attributes: dict[str, Attribute] = {
        "mode": mode,
        "sizes": list(out.sizes[2:]),
        "coordinate_transformation_mode": "half_pixel",
        "data_format": "NCX",
    }
    low.op("interpolate", [value], attributes=attributes)


for _n in (1, 2, 3):
    RULES[f"aten.upsample_nearest{_n}d.vec"] = lambda low, node: _interpolate(low, node, "nearest")
for _name in ("linear1d", "bilinear2d", "trilinear3d"):
    RULES[f"aten.upsample_{_name}.vec"] = lambda low, node: _interpolate(
        low,
        node,
        "trilinear" if "3d" in node.target else "bilinear" if "2d" in node.target else "linear",
    )
