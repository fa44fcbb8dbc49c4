"""Datatypes of the wire, tensors as they came, specifications, limits."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np
import torch

from ._errors import ModelConfigError

__all__ = [
    "BYTES",
    "DATATYPES",
    "DATATYPE_OF_TORCH",
    "Datatype",
    "InferRequest",
    "InferResult",
    "Limits",
    "OutputTensor",
    "TensorSpec",
    "WireTensor",
]

BYTES: Final = "BYTES"


@dataclass(frozen=True)
class Datatype:
    """One datatype of the protocol.

    Attributes:
        name: Its name on the wire.
        numpy: How its bytes are read; bf16 as its 16 bits, BYTES as objects.
        torch: The tensor's dtype; None for BYTES, which torch does not have.
        contents: Field of InferTensorContents that holds typed values; "" where there is none.
        config: Its number in ModelConfig's DataType.
    """

    name: str
    numpy: np.dtype[Any]
    torch: torch.dtype | None
    contents: str
    config: int


DATATYPES: Final[dict[str, Datatype]] = {
    name: Datatype(name, np.dtype(numpy), dtype, contents, config)
    for name, numpy, dtype, contents, config in (
        ("BOOL", "?", torch.bool, "bool_contents", 1),
        ("UINT8", "<u1", torch.uint8, "uint_contents", 2),
        ("UINT16", "<u2", torch.uint16, "uint_contents", 3),
        ("UINT32", "<u4", torch.uint32, "uint_contents", 4),
        ("UINT64", "<u8", torch.uint64, "uint64_contents", 5),
        ("INT8", "<i1", torch.int8, "int_contents", 6),
        ("INT16", "<i2", torch.int16, "int_contents", 7),
        ("INT32", "<i4", torch.int32, "int_contents", 8),
        ("INT64", "<i8", torch.int64, "int64_contents", 9),
        ("FP16", "<f2", torch.float16, "", 10),
        ("FP32", "<f4", torch.float32, "fp32_contents", 11),
        ("FP64", "<f8", torch.float64, "fp64_contents", 12),
        (BYTES, "O", None, "bytes_contents", 13),
        ("BF16", "<u2", torch.bfloat16, "", 14),
    )
}
DATATYPE_OF_TORCH: Final = {d.torch: name for name, d in DATATYPES.items() if d.torch is not None}


@dataclass(frozen=True)
class Limits:
    """What a request may ask for at most. docs/serving.md says what each protects.

    Attributes:
        message_bytes: One message, in either direction.
        inputs: Tensors of one request.
        rank: Dimensions of one tensor.
        elements: Product of the dimensions of one tensor.
        strings: Elements of one BYTES tensor.
        string_bytes: Length of one of them.
        parameters: Parameters of one request or tensor.
        nodes: Nodes that one graph request may touch.
        edges: Edges that one graph request may touch.
        fan_out: Neighbours that a request may ask to sample per node.
        concurrent_rpcs: Inference requests inside the server at a time.
        stream_requests: Requests of one stream inside the server at a time.
        connections: Clients' connections at a time, of the transport `http2`.
    """

    message_bytes: int = 64 << 20
    inputs: int = 64
    rank: int = 8
    elements: int = 1 << 28
    strings: int = 1 << 16
    string_bytes: int = 1 << 20
    parameters: int = 64
    nodes: int = 1 << 20
    edges: int = 1 << 23
    fan_out: int = 4096
    concurrent_rpcs: int = 4096
    stream_requests: int = 32
    connections: int = 4096

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelConfigError(
                    f"limits: {item.name} must be a positive integer, got {value!r}"
                )
        # gRPC holds message sizes in a C int.
        if self.message_bytes > (1 << 31) - 1:
            raise ModelConfigError(
                f"limits: message_bytes must be below 2 GiB, got {self.message_bytes}"
            )


@dataclass(frozen=True)
class TensorSpec:
    """Name, datatype and shape of an input or output; -1 stands for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


# Not frozen: that would make an instance several times as expensive, and each request makes some.
@dataclass(slots=True)
class WireTensor:
    """A tensor as it came: a view of the request's bytes, not to be written."""

    name: str
    datatype: str
    array: np.ndarray[Any, Any]


@dataclass(slots=True)
class InferRequest:
    """One inference request, decoded but not yet held against the model.

    Attributes:
        model_name: The model asked for.
        model_version: The version; "" for the newest.
        id: The client's id; "" if it gave none.
        inputs: By name.
        outputs: Names asked for; empty for all.
        parameters: By name.
        nbytes: Size of the message.
    """

    model_name: str
    model_version: str
    id: str
    inputs: dict[str, WireTensor]
    outputs: tuple[str, ...]
    parameters: dict[str, bool | int | float | str]
    nbytes: int


@dataclass(slots=True)
class OutputTensor:
    """One output of one request: `array` is contiguous, bf16 as its 16 bits."""

    name: str
    datatype: str
    array: np.ndarray[Any, Any]


@dataclass(slots=True)
class InferResult:
    """What a model answers to one request."""

    outputs: list[OutputTensor]
    parameters: dict[str, bool | int | float | str] = field(default_factory=dict)
