"""From results to the bytes of a ModelInferResponse.

The answer is the serialised head with the raw contents appended field by field: a message is the
concatenation of its fields, so that each tensor is copied once, by `join`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ._messages import message_class
from ._types import BYTES, InferResult

__all__ = [
    "encode_infer_response",
    "encode_stream_error",
    "encode_stream_response",
    "set_parameter",
    "strings_to_bytes",
]

_RESPONSE: Final = message_class("inference.ModelInferResponse")
_STREAM: Final = message_class("inference.ModelStreamInferResponse")
_ID_TAG: Final = bytes([(3 << 3) | 2])
_RAW_TAG: Final = bytes([(6 << 3) | 2])
_INFER_RESPONSE_TAG: Final = bytes([(2 << 3) | 2])
# Heads of answers that were given, by what they say; clients choose the shapes, so it is bounded.
_heads: Final[dict[tuple[Any, ...], bytes]] = {}
_MOST_HEADS: Final = 512


def encode_infer_response(
    model_name: str, model_version: str, request_id: str, result: InferResult
) -> bytes:
    """Encode an answer.

    Args:
        model_name: The model that answered.
        model_version: Its version.
        request_id: The client's id, "" if it gave none.
        result: The outputs, contiguous.

    Returns:
        The serialised message, all contents raw.
    """
    parts: list[Any] = [_head(model_name, model_version, result)]
    if request_id:
        text = request_id.encode()
        parts += (_ID_TAG, _varint(len(text)), text)
    for output in result.outputs:
        if output.datatype == BYTES:
            strings = strings_to_bytes(output.array)
            parts += (_RAW_TAG, _varint(len(strings)), strings)
        else:
            # `join` takes the array's own bytes.
            parts += (_RAW_TAG, _varint(output.array.nbytes), output.array)
    return b"".join(parts)


def _head(model_name: str, model_version: str, result: InferResult) -> bytes:
    """The answer without its id and its contents."""
    outputs = result.outputs
    key = (model_name, model_version, *[(o.name, o.datatype, o.array.shape) for o in outputs])
    if not result.parameters:
        known = _heads.get(key)
        if known is not None:
            return known
    message = _RESPONSE(model_name=model_name, model_version=model_version)
    for name, value in result.parameters.items():
        set_parameter(message.parameters[name], value)
    for output in outputs:
        message.outputs.add(name=output.name, datatype=output.datatype, shape=output.array.shape)
    head = bytes(message.SerializeToString())
    if not result.parameters:
        if len(_heads) >= _MOST_HEADS:
            _heads.clear()
        _heads[key] = head
    return head


def encode_stream_response(response: bytes) -> bytes:
    """Wrap an encoded ModelInferResponse for the stream."""
    return b"".join((_INFER_RESPONSE_TAG, _varint(len(response)), response))


def encode_stream_error(model_name: str, request_id: str, text: str) -> bytes:
    """Encode an error for the stream, with the id of the request it answers."""
    message = _STREAM(error_message=text)
    message.infer_response.model_name = model_name
    message.infer_response.id = request_id
    return bytes(message.SerializeToString())


def set_parameter(target: Any, value: bool | int | float | str) -> None:
    """Set an InferParameter by the value's type."""
    if isinstance(value, bool):
        target.bool_param = value
    elif isinstance(value, int):
        target.int64_param = value
    elif isinstance(value, float):
        target.double_param = value
    else:
        target.string_param = value


def strings_to_bytes(array: np.ndarray[Any, Any]) -> bytes:
    """Strings as the wire has them: a u32 length before each, in row-major order."""
    parts: list[bytes] = []
    for item in array.reshape(-1):
        data = item.encode() if isinstance(item, str) else bytes(item)
        parts += (len(data).to_bytes(4, "little"), data)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
