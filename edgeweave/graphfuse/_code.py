"""The integers in which graphs and programs are described to the native side."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import torch

__all__ = ["ATTRIBUTES", "KINDS", "Attribute", "Op", "Tensor", "ValueKind", "graph_code", "real"]

# dnnl_graph_op_kind_t of dnnl_graph_types.h; the API is append-only.
KINDS: Final[dict[str, int]] = {
    name: number
    for number, name in enumerate(
        [
            "abs",
            "abs_backward",
            "add",
            "avg_pool",
            "avg_pool_backward",
            "batch_norm_backward",
            "batch_norm_forward_training",
            "batch_norm_inference",
            "bias_add",
            "bias_add_backward",
            "clamp",
            "clamp_backward",
            "concat",
            "convolution",
            "convolution_backward_data",
            "convolution_backward_weights",
            "conv_transpose",
            "conv_transpose_backward_data",
            "conv_transpose_backward_weights",
            "dequantize",
            "divide",
            "dynamic_dequantize",
            "dynamic_quantize",
            "elu",
            "elu_backward",
            "end",
            "exp",
            "gelu",
            "gelu_backward",
            "hard_swish",
            "hard_swish_backward",
            "interpolate",
            "interpolate_backward",
            "layer_norm",
            "layer_norm_backward",
            "leaky_relu",
            "log",
            "log_softmax",
            "log_softmax_backward",
            "matmul",
            "maximum",
            "max_pool",
            "max_pool_backward",
            "minimum",
            "mish",
            "mish_backward",
            "multiply",
            "prelu",
            "prelu_backward",
            "quantize",
            "reciprocal",
            "reduce_l1",
            "reduce_l2",
            "reduce_max",
            "reduce_mean",
            "reduce_min",
            "reduce_prod",
            "reduce_sum",
            "relu",
            "relu_backward",
            "reorder",
            "round",
            "sigmoid",
            "sigmoid_backward",
            "softmax",
            "softmax_backward",
            "softplus",
            "softplus_backward",
            "sqrt",
            "sqrt_backward",
            "square",
            "squared_difference",
            "static_reshape",
            "static_transpose",
            "subtract",
            "tanh",
            "tanh_backward",
            "type_cast",
            "wildcard",
            "hard_sigmoid",
            "hard_sigmoid_backward",
            "select",
            "pow",
        ]
    )
}
# dnnl_graph_op_attr_t: a number, and how its value is passed.
ATTRIBUTES: Final[dict[str, tuple[int, str]]] = {
    "alpha": (0x1, "real"),
    "beta": (0x2, "real"),
    "epsilon": (0x3, "real"),
    "max": (0x4, "real"),
    "min": (0x5, "real"),
    "axis": (0x30, "integer"),
    "begin_norm_axis": (0x31, "integer"),
    "groups": (0x32, "integer"),
    "axes": (0x40, "integers"),
    "dilations": (0x41, "integers"),
    "kernel": (0x43, "integers"),
    "order": (0x44, "integers"),
    "output_padding": (0x45, "integers"),
    "pads_begin": (0x46, "integers"),
    "pads_end": (0x47, "integers"),
    "shape": (0x48, "integers"),
    "sizes": (0x49, "integers"),
    "strides": (0x4B, "integers"),
    "exclude_pad": (0x60, "bool"),
    "keep_dims": (0x61, "bool"),
    "keep_stats": (0x62, "bool"),
    "special_zero": (0x64, "bool"),
    "transpose_a": (0x65, "bool"),
    "transpose_b": (0x66, "bool"),
    "use_affine": (0x67, "bool"),
    "auto_broadcast": (0x80, "text"),
    "auto_pad": (0x81, "text"),
    "coordinate_transformation_mode": (0x82, "text"),
    "data_format": (0x83, "text"),
    "mode": (0x84, "text"),
    "rounding_type": (0x86, "text"),
    "weights_format": (0x87, "text"),
}
_FORMS: Final = {"real": 0, "integers": 1, "integer": 2, "bool": 3, "text": 4}
_DTYPES: Final = {torch.bfloat16: 2, torch.float32: 3, torch.int32: 4}  # dnnl_data_type_t
_UNKNOWN: Final = -(2**63)  # DNNL_GRAPH_UNKNOWN_DIM
FPMATH: Final = {"strict": 0, "bf16": 1}  # dnnl_fpmath_mode_t
POLICIES: Final = {"fusion": 1, "debug": 2}  # dnnl_graph_partition_policy_t

Attribute = float | int | bool | str | Sequence[int]


class ValueKind(IntEnum):
    """As `ValueKind` of csrc/onednn/program.h."""

    INPUT = 0
    CONSTANT = 1
    BLOCKED = 2
    STRIDED = 3
    OUTPUT = 4
    VIEW = 5


@dataclass(frozen=True)
class Tensor:
    """A tensor of a oneDNN graph, without a layout."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    constant: bool = False
    # Dimensions that are left open, so that the partitions serve other sizes too.
    open: tuple[bool, ...] = ()


@dataclass
class Op:
    """One oneDNN operation. `node` is the captured node that it stems from."""

    kind: str
    inputs: list[str]
    outputs: list[str]
    node: str
    attributes: dict[str, Attribute] = field(default_factory=dict)


def real(value: float) -> int:
    """The bits of a float64 as an int64."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def counted(values: Iterable[int]) -> list[int]:
    """A list with its length before it."""
    items = list(values)
    return [len(items), *items]


def dtype_number(dtype: torch.dtype) -> int:
    """dnnl_data_type_t; float32 for what only a wildcard carries."""
    return _DTYPES.get(dtype, 3)


def _attribute(name: str, value: Attribute) -> list[int]:
    number, form = ATTRIBUTES[name]
    start = [number, _FORMS[form]]
    if form == "real":
        assert isinstance(value, float | int)
        return [*start, real(float(value))]
    if form == "integers":
        assert not isinstance(value, float | int | str)
        return [*start, *counted(value)]
    if form == "text":
        assert isinstance(value, str)
        return [*start, *counted(value.encode())]
    assert isinstance(value, int)
    return [*start, int(value)]


def graph_code(
    tensors: Mapping[str, Tensor], ops: Sequence[Op], *, fpmath: str, policy: str
) -> list[int]:
    """Describe a graph. Tensors are numbered in the order of `tensors`, operations as in `ops`."""
    number = {name: index for index, name in enumerate(tensors)}
    code = [FPMATH[fpmath], POLICIES[policy], len(tensors)]
    for tensor in tensors.values():
        open_ = tensor.open or (False,) * len(tensor.shape)
        shape = [_UNKNOWN if o else size for size, o in zip(tensor.shape, open_, strict=True)]
        code += [dtype_number(tensor.dtype), 2 if tensor.constant else 1, *counted(shape)]
    code.append(len(ops))
    for op in ops:
        code.append(KINDS[op.kind])
        code += counted(number[name] for name in op.inputs)
        code += counted(number[name] for name in op.outputs)
        code.append(len(op.attributes))
        for name, value in op.attributes.items():
            code += _attribute(name, value)
    return code
