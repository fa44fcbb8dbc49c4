"""Messages: the same on the wire as Triton's, and in a pool that harms nobody."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import descriptor_pool

from edgeweave.inference_server import _messages
from edgeweave.inference_server._descriptors import FILES
from scripts import generate_protocol


def test_the_generated_file_is_what_would_be_generated() -> None:
    assert generate_protocol.TARGET.read_text() == generate_protocol.generated()


def _all_messages(file: Any) -> list[Any]:
    found = []
    waiting = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        found.append(message)
        waiting += message.nested_types
    return found


INFERENCE_MESSAGES = [
    message.full_name
    for message in _all_messages(_messages.pool.FindFileByName("open_inference.proto"))
    if message.name != "PropertiesEntry"  # see OF_THE_PROTOCOL_ONLY
]


# In the Open Inference Protocol, but not in Triton's version of it.
OF_THE_PROTOCOL_ONLY = {("inference.ModelMetadataResponse", "properties")}


def _theirs() -> Any:
    pytest.importorskip("tritonclient.grpc", reason="the extra `dev` brings tritonclient")
    return descriptor_pool.Default()


def _shape(field: Any) -> tuple[Any, ...]:
    inner = field.message_type or field.enum_type
    return (
        field.number,
        field.type,
        field.is_repeated,
        inner.full_name if inner else None,
        field.containing_oneof.name if field.containing_oneof else None,
    )


@pytest.mark.parametrize("name", INFERENCE_MESSAGES)
def test_message_equals_tritons(name: str) -> None:
    theirs = _theirs().FindMessageTypeByName(name)
    ours = _messages.pool.FindMessageTypeByName(name)
    for field in ours.fields:
        if (name, field.name) in OF_THE_PROTOCOL_ONLY:
            assert field.number not in theirs.fields_by_number
            continue
        assert _shape(field) == _shape(theirs.fields_by_name[field.name])
    for enum in ours.enum_types:
        theirs_enum = theirs.enum_types_by_name[enum.name]
        assert {(v.name, v.number) for v in enum.values} == {
            (v.name, v.number) for v in theirs_enum.values
        }


def test_datatype_numbers_equal_tritons() -> None:
    ours = _messages.pool.FindEnumTypeByName("inference.DataType")
    theirs = _theirs().FindEnumTypeByName("inference.DataType")
    assert {(v.name, v.number) for v in ours.values} == {(v.name, v.number) for v in theirs.values}


def test_methods_equal_tritons() -> None:
    theirs = _theirs().FindServiceByName(_messages.INFERENCE_SERVICE).methods_by_name
    ours = _messages.pool.FindServiceByName(_messages.INFERENCE_SERVICE)
    assert len(ours.methods) == 12
    for method in ours.methods:
        other = theirs[method.name]
        assert method.input_type.full_name == other.input_type.full_name
        assert method.output_type.full_name == other.output_type.full_name
        assert method.client_streaming == other.client_streaming
        assert method.server_streaming == other.server_streaming


def test_health_equals_grpcs() -> None:
    health_pb2 = pytest.importorskip("grpc_health.v1.health_pb2", reason="the extra `dev` has it")
    for name, theirs in health_pb2.DESCRIPTOR.message_types_by_name.items():
        ours = _messages.pool.FindMessageTypeByName(f"grpc.health.v1.{name}")
        assert [f.name for f in ours.fields] == [f.name for f in theirs.fields]
        for field in ours.fields:
            assert _shape(field) == _shape(theirs.fields_by_name[field.name])


@pytest.mark.parametrize("first", ["tritonclient.grpc", "edgeweave.inference_server._service"])
def test_tritonclient_and_server_in_one_process(
    run_python: Callable[..., subprocess.CompletedProcess[str]], first: str
) -> None:
    pytest.importorskip("tritonclient.grpc", reason="the extra `dev` brings tritonclient")
    code = f"""
import {first}
from google.protobuf import descriptor_pool
try:
    descriptor_pool.Default().FindMessageTypeByName("inference.ModelInferRequest")
except KeyError:
    print("absent", end=" ")
import tritonclient.grpc
import edgeweave.inference_server._service
from tritonclient.grpc import service_pb2
from edgeweave.inference_server._messages import message_class
theirs = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"x"])
ours = message_class("inference.ModelInferRequest").FromString(theirs.SerializeToString())
print(ours.model_name, ours.raw_input_contents[0])
"""
    said = run_python(code).stdout.strip()
    # Ours enter no shared pool.
    assert said == ("m b'x'" if first == "tritonclient.grpc" else "absent m b'x'")


def test_every_file_is_compiled() -> None:
    assert sorted(FILES) == ["graph_service.proto", "health.proto", "open_inference.proto"]
