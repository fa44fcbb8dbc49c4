"""From bytes to arrays: what is accepted, what is refused, and with which kind of error."""

from __future__ import annotations

import struct
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from edgeweave.inference_server._client_wire import decode_response, encode_request
from edgeweave.inference_server._decode import RequestDecoder, _cut, decode_infer_request
from edgeweave.inference_server._encode import encode_infer_response
from edgeweave.inference_server._errors import InvalidArgumentError, ResourceExhaustedError
from edgeweave.inference_server._messages import message_class
from edgeweave.inference_server._types import DATATYPES, InferResult, Limits, OutputTensor

REQUEST = message_class("inference.ModelInferRequest")
LIMITS = Limits()


def request(
    shape: list[int], datatype: str = "FP32", raw: bytes | None = None, **contents: Any
) -> Any:
    message = REQUEST(model_name="m")
    tensor = message.inputs.add(name="x", datatype=datatype, shape=shape)
    for name, values in contents.items():
        getattr(tensor.contents, name).extend(values)
    if raw is not None:
        message.raw_input_contents.append(raw)
    return message


def decode(message: Any, limits: Limits = LIMITS) -> Any:
    return decode_infer_request(message.SerializeToString(), limits)


@pytest.mark.parametrize("name", [n for n in DATATYPES if n != "BYTES"])
def test_raw_contents_of_every_datatype(name: str) -> None:
    datatype = DATATYPES[name]
    raw = bytes(i % 2 for i in range(6 * datatype.numpy.itemsize))
    array = decode(request([2, 3], name, raw)).inputs["x"].array
    assert array.shape == (2, 3)
    assert array.dtype == datatype.numpy
    assert array.tobytes() == raw


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("BOOL", [True, False]),
        ("INT8", [-128, 127]),
        ("INT16", [-32768, 32767]),
        ("INT32", [-(2**31), 2**31 - 1]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("UINT8", [0, 255]),
        ("UINT16", [0, 65535]),
        ("UINT32", [0, 2**32 - 1]),
        ("UINT64", [0, 2**64 - 1]),
        ("FP32", [0.5, -2.0]),
        ("FP64", [0.1, -1e300]),
        ("BYTES", [b"", b"\xff\x00"]),
    ],
)
def test_typed_contents(name: str, values: list[Any]) -> None:
    message = request([2], name, **{DATATYPES[name].contents: values})
    array = decode(message).inputs["x"].array
    assert array.dtype == DATATYPES[name].numpy
    assert array.tolist() == values


def test_large_message_is_cut_without_copies() -> None:
    values = np.arange(1 << 14, dtype=np.float32)
    data = request([len(values)], raw=values.tobytes()).SerializeToString()
    array = decode_infer_request(data, LIMITS).inputs["x"].array
    assert array.tolist() == values.tolist()
    # The array is a view of the message itself.
    start = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    assert start <= array.__array_interface__["data"][0] < start + len(data)


@given(st.lists(st.binary(max_size=300), max_size=5), st.binary(max_size=40))
def test_cut_agrees_with_protobuf(raws: list[bytes], tail: bytes) -> None:
    message = REQUEST(model_name="m", id="i", raw_input_contents=raws)
    message.inputs.add(name="x", datatype="FP32", shape=[1])
    data = message.SerializeToString() + tail
    try:
        expected = REQUEST.FromString(data)
    except Exception:
        expected = None
    cut = _cut(data)
    if cut is None:  # left to protobuf
        return
    rest, views, request_id = cut
    if expected is None:  # lengths fit, but what is inside is wrong: the rest must not parse
        with pytest.raises(Exception, match=r"pars|decod"):
            REQUEST.FromString(rest)
        return
    again = REQUEST.FromString(rest)
    again.id = request_id.decode()
    assert [bytes(view) for view in views] == list(expected.raw_input_contents)
    del expected.raw_input_contents[:]
    assert again == expected


@pytest.mark.parametrize(
    ("message", "error", "match"),
    [
        (request([-1, 4], raw=b""), InvalidArgumentError, "no negative size"),
        (request([-5], raw=b""), InvalidArgumentError, "no negative size"),
        (request([1, 5], fp32_contents=[0.0] * 7), InvalidArgumentError, "5 values"),
        (request([1, 5], raw=bytes(28)), InvalidArgumentError, "20 bytes"),
        (request([1], "BYTES", raw=b"\xff\xff\xff\x7f\x61"), InvalidArgumentError, "must end"),
        (request([2], "BYTES", raw=b"\x01\0\0\0a"), InvalidArgumentError, "2 strings"),
        (request([1], "BYTES", raw=b"\x01\0\0\0ab"), InvalidArgumentError, "nothing else"),
        (request([1], "COMPLEX", raw=bytes(8)), InvalidArgumentError, "datatype must be one of"),
        (request([1], raw=bytes(4), fp32_contents=[1.0]), InvalidArgumentError, "got both"),
        (request([1], int_contents=[1]), InvalidArgumentError, "fp32_contents"),
        (request([1], "INT8", int_contents=[128]), InvalidArgumentError, r"\[-128, 127\]"),
        (request([1], "BF16", fp32_contents=[1.0]), InvalidArgumentError, "raw_input_contents"),
        (request([1], "FP16"), InvalidArgumentError, "raw_input_contents"),
        (request([3], "BOOL", raw=b"\0\1\2"), InvalidArgumentError, "0 or 1"),
        (request([1] * 9, raw=bytes(4)), ResourceExhaustedError, "rank must be at most 8"),
        (request([2**40, 2**40], raw=b""), ResourceExhaustedError, "elements must be at most"),
        (request([0, 2**62], raw=b""), ResourceExhaustedError, "elements must be at most"),
        (request([2**31], "BYTES", raw=b""), ResourceExhaustedError, "must be at most"),
    ],
)
def test_refusals(message: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        decode(message)


def test_more_refusals() -> None:
    twice = request([1], raw=bytes(4))
    twice.inputs.add(name="x", datatype="FP32", shape=[1])
    twice.raw_input_contents.append(bytes(4))
    with pytest.raises(InvalidArgumentError, match="'x' twice"):
        decode(twice)
    too_few = request([1], raw=bytes(4))
    too_few.inputs.add(name="y", datatype="FP32", shape=[1])
    with pytest.raises(InvalidArgumentError, match="one entry for each of the 2 inputs, got 1"):
        decode(too_few)
    shared = request([1], raw=bytes(4))
    shared.inputs[0].parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(InvalidArgumentError, match="shared memory is not supported"):
        decode(shared)
    classes = request([1], raw=bytes(4))
    classes.outputs.add(name="y").parameters["classification"].int64_param = 3
    with pytest.raises(InvalidArgumentError, match="neither classification"):
        decode(classes)
    with pytest.raises(InvalidArgumentError, match=r"must be a inference\.ModelInferRequest"):
        decode_infer_request(b"\x0a\xff", LIMITS)
    empty = request([1], raw=bytes(4))
    empty.parameters["p"].SetInParent()
    with pytest.raises(InvalidArgumentError, match="'p' must have a value"):
        decode(empty)


def test_limits_come_before_memory() -> None:
    small = Limits(inputs=1, strings=2, string_bytes=3, elements=8, parameters=1)
    two = request([1], raw=bytes(4))
    two.inputs.add(name="y", datatype="FP32", shape=[1])
    two.raw_input_contents.append(bytes(4))
    named = request([1], raw=bytes(4))
    for name in ("a", "b"):
        named.parameters[name].bool_param = True
    asking = request([1], raw=bytes(4))
    for name in ("y", "z"):
        asking.outputs.add(name=name)
    for message, match in (
        (named, "parameters must be at most 1"),
        (asking, "outputs must be at most 1"),
        (two, "inputs must be at most 1"),
        (request([3], "BYTES", raw=bytes(12)), "strings must be at most 2"),
        (request([1], "BYTES", bytes_contents=[b"abcd"]), "at most 3 bytes"),
        (request([1], "BYTES", raw=struct.pack("<I", 4) + b"abcd"), "at most 3 bytes"),
        (request([3, 3], raw=bytes(36)), "elements must be at most 8"),
    ):
        with pytest.raises(ResourceExhaustedError, match=match):
            decode(message, small)


def test_empty_tensors_are_tensors() -> None:
    array = decode(request([1, 0], "FP16", raw=b"")).inputs["x"].array
    assert (array.shape, array.dtype) == ((1, 0), np.float16)


def test_clients_request_round_trip() -> None:
    inputs = {
        "f": np.arange(6.0).reshape(2, 3),
        "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "s": np.array(["ä", "b"], object),
        "t": np.array([True, False]),
        "big": np.arange(4, dtype=">i4"),
    }
    data = encode_request("m", inputs, "3", ["y"], {"priority": 2, "flag": True}, "id")
    got = decode_infer_request(data, LIMITS)
    assert (got.model_name, got.model_version, got.id) == ("m", "3", "id")
    assert (got.outputs, got.parameters) == (("y",), {"priority": 2, "flag": True})
    assert got.inputs["f"].array.tolist() == inputs["f"].tolist()
    # 1.5 is 0x3fc0 in bf16, -2 is 0xc000.
    assert got.inputs["b"].array.tolist() == [0x3FC0, 0xC000]
    assert got.inputs["s"].array.tolist() == ["ä".encode(), b"b"]
    assert got.inputs["big"].array.tolist() == [0, 1, 2, 3]


def test_answers_round_trip() -> None:
    result = InferResult(
        [
            OutputTensor("f", "FP32", np.arange(6, dtype=np.float32).reshape(2, 3)),
            OutputTensor("e", "INT64", np.empty((0, 2), np.int64)),
            OutputTensor("s", "BYTES", np.array([b"x", "y"], object)),
            OutputTensor("h", "BF16", np.array([0x3FC0], np.uint16)),
            OutputTensor("scalar", "FP64", np.array(2.5)),
        ],
        {"graph_version": 7, "exact": True, "name": "n", "share": 0.5},
    )
    answer = decode_response(encode_infer_response("m", "1", "id", result))
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", "id")
    assert answer.parameters == {"graph_version": 7, "exact": True, "name": "n", "share": 0.5}
    assert answer.outputs["f"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert answer.outputs["e"].shape == (0, 2)
    assert answer.outputs["s"].tolist() == [b"x", b"y"]
    assert answer.outputs["h"].tolist() == [1.5]
    assert answer.outputs["scalar"].tolist() == 2.5


def message(values: np.ndarray[Any, Any], request_id: str = "", **parts: Any) -> bytes:
    made = REQUEST(model_name="m", id=request_id, raw_input_contents=[values.tobytes()], **parts)
    made.inputs.add(name="x", datatype="FP32", shape=values.shape)
    return bytes(made.SerializeToString())


def test_remembered_head_gives_what_decoding_gives() -> None:
    decoder = RequestDecoder(LIMITS)
    for shape in ((2, 3), (0, 3), (), (2, 3)):
        for i in range(3):
            values = np.full(shape, i, np.float32)
            data = message(values, f"id-{i}" if i else "")
            got, expected = decoder.decode(data), decode_infer_request(data, LIMITS)
            assert (
                (got.id, got.nbytes)
                == (expected.id, expected.nbytes)
                == (
                    f"id-{i}" if i else "",
                    len(data),
                )
            )
            assert (got.model_name, got.outputs, got.parameters) == ("m", (), {})
            array = got.inputs["x"].array
            assert array.dtype == np.float32
            assert array.shape == shape
            assert not array.flags.writeable
            assert array.tolist() == values.tolist()


def test_remembered_head_does_not_hide_wrong_contents() -> None:
    decoder = RequestDecoder(LIMITS)
    good = message(np.zeros(4, np.float32))
    decoder.decode(good)
    head = good[: good.index(bytes([(7 << 3) | 2, 16]))]
    short = head + bytes([(7 << 3) | 2, 12]) + bytes(12)
    with pytest.raises(InvalidArgumentError, match="must have 16 bytes"):
        decoder.decode(short)
    with pytest.raises(InvalidArgumentError, match="one entry for each"):
        decoder.decode(good + bytes([(7 << 3) | 2, 16]) + bytes(16))
    with pytest.raises(InvalidArgumentError, match="UTF-8"):
        decoder.decode(good + bytes([(3 << 3) | 2, 1, 0xFF]))
    decoder.decode(request([1], "BOOL", raw=b"\x01").SerializeToString())
    with pytest.raises(InvalidArgumentError, match="BOOL"):
        decoder.decode(request([1], "BOOL", raw=b"\x02").SerializeToString())


def test_number_of_remembered_heads_is_bounded() -> None:
    decoder = RequestDecoder(LIMITS)
    for i in range(2000):
        decoder.decode(message(np.zeros(1, np.float32), model_version=str(i)))
    assert 0 < len(decoder._heads) <= 512
    decoder = RequestDecoder(LIMITS)
    decoder.decode(message(np.zeros(1, np.float32), model_version="9" * 5000))
    assert not decoder._heads
