"""Requests and answers as a client sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ._encode import set_parameter, strings_to_bytes
from ._messages import message_class
from ._types import BYTES, DATATYPE_OF_TORCH, DATATYPES

__all__ = ["InferResponse", "decode_response", "encode_graph_update", "encode_request"]

_REQUEST: Final = message_class("inference.ModelInferRequest")
_RESPONSE: Final = message_class("inference.ModelInferResponse")
_UPDATE: Final = message_class("edgeweave.GraphUpdateRequest")
_NAME_OF_NUMPY: Final = {
    d.numpy: name for name, d in DATATYPES.items() if name not in ("BF16", BYTES)
}


@dataclass(frozen=True)
class InferResponse:
    """An answer.

    Attributes:
        outputs: Arrays by name; bf16 as float32, which holds it exactly; strings as objects.
        model_name: The model that answered.
        model_version: Its version.
        id: The request's id.
        parameters: What the server adds, such as `graph_version`.
    """

    outputs: dict[str, np.ndarray[Any, Any]]
    model_name: str
    model_version: str
    id: str
    parameters: dict[str, Any]


def encode_request(
    model: str,
    inputs: Mapping[str, Any],
    version: str = "",
    outputs: Sequence[str] = (),
    parameters: Mapping[str, bool | int | float | str] | None = None,
    request_id: str = "",
) -> bytes:
    """Serialise a request.

    Args:
        model: The model.
        inputs: numpy arrays or CPU tensors by name; strings as an array of objects.
        version: Of the model; "" for the newest.
        outputs: Names of the outputs; empty for all.
        parameters: For the model or the queue.
        request_id: Comes back with the answer.

    Returns:
        The ModelInferRequest.

    Raises:
        TypeError: An input is of a type that the protocol lacks.
    """
    message = _REQUEST(model_name=model, model_version=version, id=request_id)
    for key, value in (parameters or {}).items():
        set_parameter(message.parameters[key], value)
    for name in outputs:
        message.outputs.add(name=name)
    for name, value in inputs.items():
        datatype, shape, raw = _raw(name, value)
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(raw)
    return bytes(message.SerializeToString())


def _raw(name: str, value: Any) -> tuple[str, tuple[int, ...], bytes]:
    if isinstance(value, Tensor):
        datatype = DATATYPE_OF_TORCH.get(value.dtype)
        tensor = value.detach().contiguous()
        if datatype is None:
            raise TypeError(
                f"infer: input {name} must have a dtype of the protocol, got {value.dtype}"
            )
        if value.dtype is torch.bfloat16:
            tensor = tensor.view(torch.uint16)
        return datatype, tuple(value.shape), tensor.numpy().tobytes()
    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        return BYTES, array.shape, strings_to_bytes(array.astype(object))
    found = _NAME_OF_NUMPY.get(array.dtype.newbyteorder("<"))
    if found is None:
        raise TypeError(f"infer: input {name} must have a dtype of the protocol, got {array.dtype}")
    return found, array.shape, array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def decode_response(data: bytes) -> InferResponse:
    """Read an answer.

    Args:
        data: The ModelInferResponse.

    Returns:
        Its arrays, not to be written.

    Raises:
        ValueError: A string tensor is cut short.
    """
    message = _RESPONSE.FromString(data)
    outputs: dict[str, np.ndarray[Any, Any]] = {}
    for tensor, raw in zip(message.outputs, message.raw_output_contents, strict=True):
        shape = tuple(tensor.shape)
        if tensor.datatype == BYTES:
            outputs[tensor.name] = _read_strings(raw).reshape(shape)
            continue
        array = np.frombuffer(raw, DATATYPES[tensor.datatype].numpy)
        if tensor.datatype == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        outputs[tensor.name] = array.reshape(shape)
    parameters = {
        key: getattr(value, value.WhichOneof("parameter_choice"))
        for key, value in message.parameters.items()
    }
    return InferResponse(outputs, message.model_name, message.model_version, message.id, parameters)


def _read_strings(raw: bytes) -> np.ndarray[Any, Any]:
    items, position = [], 0
    while position < len(raw):
        length = int.from_bytes(raw[position : position + 4], "little")
        position += 4
        if position + length > len(raw):
            raise ValueError(f"response: a string must end inside the contents, got {length} bytes")
        items.append(raw[position : position + length])
        position += length
    array = np.empty(len(items), object)
    array[:] = items
    return array


def encode_graph_update(
    model: str,
    *,
    version: str = "",
    expected_graph_version: int = 0,
    add_nodes: Any = None,
    set_nodes: tuple[Any, Any] | None = None,
    remove_nodes: Any = None,
    remove_edges: Any = None,
    add_edges: Any = None,
) -> bytes:
    """Serialise an update of a resident graph; see `Client.graph_update`."""
    ids, features = set_nodes if set_nodes is not None else (None, None)
    message = _UPDATE(
        model_name=model,
        model_version=version,
        expected_graph_version=expected_graph_version,
        add_node_features=_bytes(add_nodes, "<f4"),
        set_node_ids=_bytes(ids, "<i8"),
        set_node_features=_bytes(features, "<f4"),
        remove_node_ids=_bytes(remove_nodes, "<i8"),
        remove_edges=_bytes(remove_edges, "<i8"),
        add_edges=_bytes(add_edges, "<i8"),
    )
    return bytes(message.SerializeToString())


def _bytes(values: Any, dtype: str) -> bytes:
    return b"" if values is None else np.asarray(values, dtype).tobytes()
