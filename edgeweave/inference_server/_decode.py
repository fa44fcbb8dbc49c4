"""From the bytes of a ModelInferRequest to an `InferRequest`.

Everything a request claims is checked against the limits and against the bytes that came before
anything is allocated for it. Tensors are views of the request's bytes: a request is cut up by hand,
since protobuf would copy its raw contents twice. What is left, the head, says the same for every
request of a kind (the model, names, datatypes and shapes), so what was found in it is remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ._errors import InvalidArgumentError, ResourceExhaustedError
from ._messages import message_class, parse
from ._types import BYTES, DATATYPES, Datatype, InferRequest, Limits, WireTensor

__all__ = ["RequestDecoder", "decode_infer_request"]

_REQUEST: Final = message_class("inference.ModelInferRequest")
# Tags of the seven fields of ModelInferRequest: number << 3 | 2 (length-delimited), one byte each.
_TAGS: Final = frozenset((number << 3) | 2 for number in range(1, 8))
_ID_TAG: Final = (3 << 3) | 2
_RAW_TAG: Final = (7 << 3) | 2
_U32: Final = 4
# Heads are remembered up to this many, and up to this length: clients choose both.
_MOST_HEADS: Final = 512
_MOST_HEAD_BYTES: Final = 1024
# The head, the raw contents, the id.
_Cut = tuple[bytes, list[memoryview], bytes]


class RequestDecoder:
    """Decodes requests, and knows again the heads that it has decoded.

    Args:
        limits: What a request may ask for.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._heads: dict[bytes, _Head] = {}

    def decode(self, data: bytes) -> InferRequest:
        """Decode a request; see `decode_infer_request`."""
        cut = _cut(data)
        if cut is None:
            return _decode(data, None, self._limits)
        head = self._heads.get(cut[0])
        if head is not None:
            request = head.fill(cut, len(data))
            if request is not None:
                return request
        request = _decode(data, cut, self._limits)
        if cut[1] and len(cut[0]) <= _MOST_HEAD_BYTES:
            self._remember(cut[0], request)
        return request

    def _remember(self, head: bytes, request: InferRequest) -> None:
        tensors = []
        for tensor in request.inputs.values():
            # Whether these are well formed depends on more than their length.
            if tensor.datatype in (BYTES, "BOOL"):
                return
            array = tensor.array
            tensors.append((tensor.name, tensor.datatype, array.dtype, array.shape, array.nbytes))
        if len(self._heads) >= _MOST_HEADS:
            self._heads.clear()
        self._heads[head] = _Head(request, tuple(tensors))


class _Head:
    """What a request says besides its contents and its id, checked."""

    __slots__ = ("_model_name", "_model_version", "_outputs", "_parameters", "_tensors")

    def __init__(
        self,
        request: InferRequest,
        tensors: tuple[tuple[str, str, np.dtype[Any], tuple[int, ...], int], ...],
    ) -> None:
        self._model_name = request.model_name
        self._model_version = request.model_version
        self._outputs = request.outputs
        self._parameters = request.parameters
        self._tensors = tensors

    def fill(self, cut: _Cut, nbytes: int) -> InferRequest | None:
        """The request with these contents; None if they are wrong, for `_decode` to say how."""
        _, raw, request_id = cut
        if len(raw) != len(self._tensors):
            return None
        inputs = {}
        for view, (name, datatype, dtype, shape, size) in zip(raw, self._tensors, strict=True):
            if len(view) != size:
                return None
            inputs[name] = WireTensor(name, datatype, np.ndarray(shape, dtype, view))
        return InferRequest(
            self._model_name,
            self._model_version,
            _text(request_id) if request_id else "",
            inputs,
            self._outputs,
            self._parameters,
            nbytes,
        )


def decode_infer_request(data: bytes, limits: Limits) -> InferRequest:
    """Decode a request.

    Args:
        data: The serialised ModelInferRequest.
        limits: What it may ask for.

    Returns:
        The request, its tensors as views of `data` where they came raw.

    Raises:
        InvalidArgumentError: The bytes contradict the protocol or themselves.
        ResourceExhaustedError: The request is above a limit.
    """
    return _decode(data, _cut(data), limits)


def _decode(data: bytes, cut: _Cut | None, limits: Limits) -> InferRequest:
    if cut is None:
        message = parse(_REQUEST, data)
        raw: Sequence[Any] = message.raw_input_contents
        request_id = message.id
    else:
        message = parse(_REQUEST, cut[0])
        raw = cut[1]
        request_id = _text(cut[2])
    if len(message.inputs) > limits.inputs:
        raise ResourceExhaustedError(
            f"request: inputs must be at most {limits.inputs}, got {len(message.inputs)}"
        )
    if raw and len(raw) != len(message.inputs):
        raise InvalidArgumentError(
            f"request: raw_input_contents must have one entry for each of the "
            f"{len(message.inputs)} inputs, got {len(raw)}"
        )
    inputs: dict[str, WireTensor] = {}
    for i, tensor in enumerate(message.inputs):
        name = tensor.name
        if name in inputs:
            raise InvalidArgumentError(f"request: input names must differ, got {_show(name)} twice")
        inputs[name] = _tensor(tensor, raw[i] if raw else None, limits)
    return InferRequest(
        message.model_name,
        message.model_version,
        request_id,
        inputs,
        _outputs(message, limits),
        _parameters(message.parameters, limits) if message.parameters else {},
        len(data),
    )


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidArgumentError("request: id must be text in UTF-8, got other bytes") from None


def _show(text: str) -> str:
    """A client's text, short enough for an error."""
    return repr(text if len(text) <= 64 else text[:64] + "...")


def _outputs(message: Any, limits: Limits) -> tuple[str, ...]:
    if not message.outputs:
        return ()
    if len(message.outputs) > limits.inputs:
        raise ResourceExhaustedError(
            f"request: outputs must be at most {limits.inputs}, got {len(message.outputs)}"
        )
    names = tuple(output.name for output in message.outputs)
    if len(set(names)) != len(names):
        raise InvalidArgumentError("request: output names must differ, got one twice")
    for output in message.outputs:
        for key, value in output.parameters.items():
            # What clients send by habit; the answer is raw in any case.
            if key == "binary_data" or (key == "classification" and not value.int64_param):
                continue
            raise InvalidArgumentError(
                f"request: output parameters must be left out, got {_show(key)}; "
                "neither classification nor shared memory is supported"
            )
    return names


def _parameters(source: Any, limits: Limits) -> dict[str, bool | int | float | str]:
    if len(source) > limits.parameters:
        raise ResourceExhaustedError(
            f"request: parameters must be at most {limits.parameters}, got {len(source)}"
        )
    found: dict[str, bool | int | float | str] = {}
    for key, value in source.items():
        which = value.WhichOneof("parameter_choice")
        if which is None:
            raise InvalidArgumentError(f"request: parameter {_show(key)} must have a value")
        found[key] = getattr(value, which)
    return found


def _tensor(tensor: Any, raw: Any, limits: Limits) -> WireTensor:
    name = tensor.name
    datatype = DATATYPES.get(tensor.datatype)
    if datatype is None:
        raise InvalidArgumentError(
            f"input {_show(name)}: datatype must be one of {', '.join(DATATYPES)}, "
            f"got {_show(tensor.datatype)}"
        )
    if tensor.parameters:
        _check_tensor_parameters(tensor, limits)
    shape = tuple(tensor.shape)
    count = _count(name, shape, limits)
    has_contents = tensor.HasField("contents")
    if raw is None:
        return WireTensor(name, datatype.name, _typed(tensor, datatype, shape, count, limits))
    if has_contents:
        raise InvalidArgumentError(
            f"input {_show(name)}: contents must be either typed or raw, got both"
        )
    if datatype.name == BYTES:
        return WireTensor(name, BYTES, _strings(name, raw, count, limits).reshape(shape))
    expected = count * datatype.numpy.itemsize
    if len(raw) != expected:
        raise InvalidArgumentError(
            f"input {_show(name)}: raw contents must have {expected} bytes for {datatype.name} "
            f"of shape {list(shape)}, got {len(raw)}"
        )
    array = np.frombuffer(raw, datatype.numpy)
    if datatype.name == "BOOL" and count and array.view(np.uint8).max() > 1:
        raise InvalidArgumentError(f"input {_show(name)}: BOOL must be bytes of 0 or 1")
    return WireTensor(name, datatype.name, array.reshape(shape))


def _check_tensor_parameters(tensor: Any, limits: Limits) -> None:
    for key in _parameters(tensor.parameters, limits):
        if key != "binary_data_size":
            raise InvalidArgumentError(
                f"input {_show(tensor.name)}: parameters must be left out, got {_show(key)}; "
                "shared memory is not supported"
            )


def _count(name: str, shape: tuple[int, ...], limits: Limits) -> int:
    """The number of elements; Python's integers do not overflow."""
    if len(shape) > limits.rank:
        raise ResourceExhaustedError(
            f"input {_show(name)}: rank must be at most {limits.rank}, got {len(shape)}"
        )
    count, largest = 1, 1
    for size in shape:
        if size < 0:
            raise InvalidArgumentError(
                f"input {_show(name)}: shape must have no negative size, got {list(shape)}"
            )
        count *= size
        # A zero elsewhere must not hide a size that no library could hold.
        largest *= max(size, 1)
    if largest > limits.elements:
        raise ResourceExhaustedError(
            f"input {_show(name)}: elements must be at most {limits.elements}, "
            f"got shape {list(shape)}"
        )
    return count


def _typed(
    tensor: Any, datatype: Datatype, shape: tuple[int, ...], count: int, limits: Limits
) -> np.ndarray[Any, Any]:
    name, contents = tensor.name, tensor.contents
    set_fields = [descriptor.name for descriptor, _ in contents.ListFields()]
    if not datatype.contents:
        if count or set_fields:
            raise InvalidArgumentError(
                f"input {_show(name)}: {datatype.name} must come in raw_input_contents"
            )
        return np.empty(shape, datatype.numpy)
    if any(field != datatype.contents for field in set_fields):
        raise InvalidArgumentError(
            f"input {_show(name)}: {datatype.name} must come in {datatype.contents}, "
            f"got {', '.join(set_fields)}"
        )
    values = getattr(contents, datatype.contents)
    if len(values) != count:
        raise InvalidArgumentError(
            f"input {_show(name)}: contents must have {count} values for shape {list(shape)}, "
            f"got {len(values)}"
        )
    if datatype.name == BYTES:
        return _object_array(list(values), name, limits).reshape(shape)
    if datatype.numpy.kind in "iu" and datatype.numpy.itemsize < 4:
        # int_contents and uint_contents have 32 bits.
        wide = np.array(values, np.int64)
        bounds = np.iinfo(datatype.numpy)
        if count and not bounds.min <= wide.min() <= wide.max() <= bounds.max:
            raise InvalidArgumentError(
                f"input {_show(name)}: {datatype.name} must lie in [{bounds.min}, {bounds.max}], "
                f"got values from {wide.min()} to {wide.max()}"
            )
        return wide.astype(datatype.numpy).reshape(shape)
    return np.array(values, datatype.numpy).reshape(shape)


def _object_array(items: list[bytes], name: str, limits: Limits) -> np.ndarray[Any, Any]:
    if len(items) > limits.strings:
        raise ResourceExhaustedError(
            f"input {_show(name)}: strings must be at most {limits.strings}, got {len(items)}"
        )
    for item in items:
        if len(item) > limits.string_bytes:
            raise _string_too_long(name, len(item), limits)
    array = np.empty(len(items), object)
    array[:] = items
    return array


def _string_too_long(name: str, length: int, limits: Limits) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"input {_show(name)}: a string must have at most {limits.string_bytes} bytes, got {length}"
    )


def _strings(name: str, raw: Any, count: int, limits: Limits) -> np.ndarray[Any, Any]:
    """Read length-prefixed elements; the claimed count must fit what came."""
    if count > limits.strings:
        raise ResourceExhaustedError(
            f"input {_show(name)}: strings must be at most {limits.strings}, got {count}"
        )
    view, position, items = memoryview(raw), 0, []
    for _ in range(count):
        if position + _U32 > len(view):
            break
        length = int.from_bytes(view[position : position + _U32], "little")
        position += _U32
        if length > len(view) - position:
            raise InvalidArgumentError(
                f"input {_show(name)}: a string must end inside the raw contents, got length "
                f"{length} with {len(view) - position} bytes left"
            )
        if length > limits.string_bytes:
            raise _string_too_long(name, length, limits)
        items.append(bytes(view[position : position + length]))
        position += length
    if len(items) != count or position != len(view):
        raise InvalidArgumentError(
            f"input {_show(name)}: raw contents must hold {count} strings and nothing else, got "
            f"{len(items)} strings in {position} of {len(view)} bytes"
        )
    array = np.empty(count, object)
    array[:] = items
    return array


def _cut(data: bytes) -> _Cut | None:
    """Split a message into its head, its raw contents as views, and its id.

    Returns None for anything unusual, which protobuf then judges: an unknown field, an odd wire
    type, a length that does not fit, two ids.
    """
    view = memoryview(data)
    end, position, kept_from = len(data), 0, 0
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    request_id = b""
    while position < end:
        start = position
        tag = data[position]
        if tag not in _TAGS:
            return None
        position += 1
        length = shift = 0
        while True:
            if position >= end or shift > 28:
                return None
            byte = data[position]
            position += 1
            length |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        if length > end - position:
            return None
        if tag in (_RAW_TAG, _ID_TAG):
            rest.append(view[kept_from:start])
            kept_from = position + length
            if tag == _RAW_TAG:
                raw.append(view[position:kept_from])
            elif request_id:
                return None
            else:
                request_id = data[position:kept_from]
        position += length
    rest.append(view[kept_from:])
    return b"".join(rest), raw, request_id
