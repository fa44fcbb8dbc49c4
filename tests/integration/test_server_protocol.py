"""Every rpc through Triton's own client, unmodified, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import _serving_models as models
import grpc
import numpy as np
import pytest
import torch
from _serving import add, rows, settings

from edgeweave.inference_server import (
    AsyncClient,
    BackgroundServer,
    Client,
    Limits,
    TensorSpec,
    export_model,
)
from edgeweave.inference_server._messages import INFERENCE_SERVICE, message_class

triton = pytest.importorskip("tritonclient.grpc", reason="the extra `dev` brings tritonclient")


@pytest.fixture(scope="module", params=["http2", "grpcio"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BackgroundServer]:
    repository = tmp_path_factory.mktemp("repository")
    add(repository, "affine", models.Affine(), arguments={"scale": 2.0})
    add(repository, "inplace", models.InPlace())
    for datatype in ("BF16", "FP16", "BYTES", "INT64", "BOOL"):
        export_model(
            models.Echo(),
            repository,
            f"echo_{datatype}",
            inputs=[TensorSpec("X", datatype, (-1, -1))],
            outputs=[TensorSpec("Y", datatype, (-1, -1))],
            options={"max_batch_size": 16},
        )
    export_model(
        models.TwoOutputs(),
        repository,
        "two",
        inputs=[TensorSpec("A", "FP32", (2,)), TensorSpec("B", "FP32", (2,))],
        outputs=[TensorSpec("SUM", "FP32", (2,)), TensorSpec("DIFFERENCE", "FP32", (2,))],
    )
    limits = Limits(message_bytes=6 << 20)
    with BackgroundServer(settings(repository, limits=limits, transport=request.param)) as running:
        assert running.failures == {}
        yield running


@pytest.fixture(scope="module")
def client(server: BackgroundServer) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as made:
        yield made


def triton_input(name: str, array: np.ndarray[Any, Any], datatype: str) -> Any:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def test_server_rpcs(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    metadata = client.get_server_metadata()
    assert metadata.name == "edgeweave"
    # Repository control and graph updates are off, so they are not advertised.
    assert list(metadata.extensions) == ["model_configuration", "statistics", "parameters"]


def test_model_ready_of_an_unknown_model_is_false_not_an_error(client: Any) -> None:
    assert client.is_model_ready("affine")
    assert client.is_model_ready("affine", "1")
    assert not client.is_model_ready("affine", "2")
    assert not client.is_model_ready("nothing")


def test_metadata_and_config(client: Any) -> None:
    metadata = client.get_model_metadata("affine")
    assert (metadata.name, list(metadata.versions)) == ("affine", ["1"])
    (tensor,) = metadata.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("INPUT0", "FP32", [-1, 4])
    config = client.get_model_config("affine").config
    assert config.max_batch_size == 32
    # Without the batch dimension, which max_batch_size implies.
    assert list(config.input[0].dims) == [4]
    assert config.WhichOneof("scheduling_choice") == "dynamic_batching"
    assert client.get_model_config("two").config.max_batch_size == 0


def test_infer_and_statistics(client: Any) -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    before = client.get_inference_statistics("affine").model_stats[0]
    answer = client.infer("affine", [triton_input("INPUT0", x, "FP32")], request_id="r1")
    assert answer.as_numpy("OUTPUT0").tolist() == (2 * x + 1).tolist()
    assert answer.get_response().id == "r1"
    after = client.get_inference_statistics("affine").model_stats[0]
    assert after.inference_count == before.inference_count + 2
    assert after.execution_count == before.execution_count + 1
    assert after.inference_stats.success.count == before.inference_stats.success.count + 1
    assert after.inference_stats.compute_infer.ns > before.inference_stats.compute_infer.ns
    assert {stats.batch_size for stats in after.batch_stats} == {2}


def test_requested_outputs_and_their_order(client: Any) -> None:
    a, b = np.array([3, 4], np.float32), np.array([1, 1], np.float32)
    inputs = [triton_input("A", a, "FP32"), triton_input("B", b, "FP32")]
    answer = client.infer("two", inputs, outputs=[triton.InferRequestedOutput("DIFFERENCE")])
    assert [output.name for output in answer.get_response().outputs] == ["DIFFERENCE"]
    assert answer.as_numpy("DIFFERENCE").tolist() == [2, 3]
    assert client.infer("two", inputs).as_numpy("SUM").tolist() == [4, 5]


def test_bf16_through_tritons_client(client: Any) -> None:
    from tritonclient.utils import triton_to_np_dtype

    # float32 or ml_dtypes' bfloat16, as the client's version has it; bf16 holds these exactly.
    values = np.array([[1.5, -2.0, 3.0]], triton_to_np_dtype("BF16"))
    answer = client.infer("echo_BF16", [triton_input("X", values, "BF16")])
    assert answer.as_numpy("Y").tolist() == values.tolist()


def test_fp16_without_elements(client: Any) -> None:
    empty = np.empty((1, 0), np.float16)
    answer = client.infer("echo_FP16", [triton_input("X", empty, "FP16")])
    assert answer.as_numpy("Y").shape == (1, 0)


def test_strings(client: Any) -> None:
    words = np.array([[b"a", b""], ["ü".encode(), b"\xff\x00"]], object)
    answer = client.infer("echo_BYTES", [triton_input("X", words, "BYTES")])
    assert answer.as_numpy("Y").tolist() == words.tolist()


def test_typed_contents_are_answered_raw(server: BackgroundServer) -> None:
    message = message_class("inference.ModelInferRequest")(model_name="echo_INT64")
    tensor = message.inputs.add(name="X", datatype="INT64", shape=[1, 2])
    tensor.contents.int64_contents.extend([5, -6])
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        data = channel.unary_unary(f"/{INFERENCE_SERVICE}/ModelInfer")(message.SerializeToString())
    answer = message_class("inference.ModelInferResponse").FromString(data)
    assert np.frombuffer(answer.raw_output_contents[0], "<i8").tolist() == [5, -6]
    assert not answer.outputs[0].HasField("contents")


def test_model_may_write_to_its_input(server: BackgroundServer) -> None:
    with Client(f"127.0.0.1:{server.port}") as ours:
        for _ in range(3):
            assert ours.infer("inplace", rows(1)).outputs["OUTPUT0"].tolist() == [[2.0] * 4]
        large = rows(32, value=5.0)
        assert (ours.infer("inplace", large).outputs["OUTPUT0"] == 6.0).all()


def test_single_byte_inputs_do_not_touch_pythons_shared_bytes(server: BackgroundServer) -> None:
    # b"\x01" is one object for the whole process: a view of it must never be writable.
    with Client(f"127.0.0.1:{server.port}") as ours:
        answer = ours.infer("echo_BOOL", {"X": np.array([[True]])})
    assert answer.outputs["Y"].tolist() == [[True]]
    assert bytes([1]) == b"\x01"


def test_index_and_control_that_is_off(client: Any) -> None:
    index = client.get_model_repository_index()
    assert {(m.name, m.version, m.state) for m in index.models} >= {
        ("affine", "1", "READY"),
        ("two", "1", "READY"),
    }
    with pytest.raises(triton.InferenceServerException, match="control must be switched on"):
        client.unload_model("affine")


def test_stream_answers_in_order_and_reports_errors_in_band(server: BackgroundServer) -> None:
    import queue

    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as made:
        made.start_stream(callback=lambda result, error: answers.put((result, error)))
        for i in range(20):
            x = np.full((1, 4), i, np.float32)
            name = "affine" if i != 7 else "nothing"
            made.async_stream_infer(name, [triton_input("INPUT0", x, "FP32")], request_id=str(i))
        got = [answers.get(timeout=30) for _ in range(20)]
        made.stop_stream()
    for i, (result, error) in enumerate(got):
        if i == 7:
            assert "NOT_FOUND" in str(error)
        else:
            assert result.get_response().id == str(i)
            assert result.as_numpy("OUTPUT0").tolist() == [[2.0 * i + 1] * 4]


def test_tritons_asyncio_client(server: BackgroundServer) -> None:
    import asyncio

    import tritonclient.grpc.aio as triton_aio

    async def ask() -> Any:
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{server.port}") as made:
            x = np.ones((1, 4), np.float32)
            return await made.infer("affine", [triton_input("INPUT0", x, "FP32")])

    assert asyncio.run(ask()).as_numpy("OUTPUT0").tolist() == [[3.0] * 4]


def test_our_clients(server: BackgroundServer) -> None:
    import asyncio

    target = f"127.0.0.1:{server.port}"
    with Client(target) as ours:
        assert ours.server_ready()
        assert ours.model_ready("affine")
        assert not ours.model_ready("nothing")
        assert ours.model_metadata("affine").inputs[0].name == "INPUT0"
        streamed = list(ours.infer_stream("affine", [rows(1, value=v) for v in (1.0, 2.0)]))
        assert [answer.outputs["OUTPUT0"][0, 0] for answer in streamed] == [3.0, 5.0]
        with pytest.raises(RuntimeError, match="NOT_FOUND"):
            list(ours.infer_stream("nothing", [rows(1)]))

    async def ask() -> list[float]:
        async with AsyncClient(target) as made:
            assert await made.server_ready()
            assert await made.model_ready("affine")
            answers = await asyncio.gather(
                *(made.infer("affine", rows(1, value=float(v))) for v in range(40))
            )
            streamed = [a async for a in made.infer_stream("affine", [rows(1)])]
            assert streamed[0].outputs["OUTPUT0"][0, 0] == 3.0
            return [float(answer.outputs["OUTPUT0"][0, 0]) for answer in answers]

    assert asyncio.run(ask()) == [2.0 * v + 1 for v in range(40)]


@pytest.mark.parametrize(
    ("rpc", "code"),
    [
        ("inference.GRPCInferenceService/SystemSharedMemoryStatus", "UNIMPLEMENTED"),
        ("inference.GRPCInferenceService/LogSettings", "UNIMPLEMENTED"),
        ("edgeweave.GraphService/Update", "FAILED_PRECONDITION"),
        ("inference.GRPCInferenceService/RepositoryModelLoad", "FAILED_PRECONDITION"),
    ],
)
def test_what_is_not_offered(server: BackgroundServer, rpc: str, code: str) -> None:
    with (
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(f"/{rpc}")(b"")
    assert caught.value.code().name == code


def _rpcs() -> list[str]:
    return [
        "ServerLive",
        "ServerReady",
        "ServerMetadata",
        "ModelReady",
        "ModelMetadata",
        "ModelInfer",
        "ModelConfig",
        "ModelStatistics",
        "RepositoryIndex",
        "RepositoryModelLoad",
        "RepositoryModelUnload",
    ]


@pytest.mark.parametrize("rpc", _rpcs())
def test_bytes_that_are_no_message_are_an_invalid_argument(
    server: BackgroundServer, rpc: str
) -> None:
    with (
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(f"/{INFERENCE_SERVICE}/{rpc}")(b"\x0a\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("ask", "code", "words"),
    [
        ({"model": "nothing"}, "NOT_FOUND", "served model"),
        ({"version": "9"}, "NOT_FOUND", "version must be one of 1"),
        ({"inputs": rows(33)}, "INVALID_ARGUMENT", "at most 32"),
        ({"inputs": rows(1, columns=5)}, "INVALID_ARGUMENT", r"shape must be \[-1, 4\]"),
        ({"inputs": {"X": np.ones(1)}}, "INVALID_ARGUMENT", "'INPUT0': must be given"),
        (
            {"inputs": {**rows(1), "X": np.ones(1)}},
            "INVALID_ARGUMENT",
            "inputs must be among INPUT0, got 'X'",
        ),
        ({"inputs": {"INPUT0": np.ones((1, 4))}}, "INVALID_ARGUMENT", "datatype must be FP32"),
        ({"outputs": ["Z"]}, "INVALID_ARGUMENT", "outputs must be among OUTPUT0"),
        ({"parameters": {"sequence_id": 3}}, "INVALID_ARGUMENT", "got 'sequence_id'"),
        ({"parameters": {"priority": 2}}, "INVALID_ARGUMENT", "priority must be at most 1"),
        ({"parameters": {"timeout": -1}}, "INVALID_ARGUMENT", "timeout must be 0 or more"),
        ({"parameters": {"timeout": "soon"}}, "INVALID_ARGUMENT", "timeout must be 0 or more"),
    ],
)
def test_status_codes(server: BackgroundServer, ask: dict[str, Any], code: str, words: str) -> None:
    call = {"model": "affine", "inputs": rows(1), **ask}
    with (
        Client(f"127.0.0.1:{server.port}") as ours,
        pytest.raises(grpc.RpcError, match=words) as caught,
    ):
        ours.infer(call.pop("model"), call.pop("inputs"), **call)
    assert caught.value.code().name == code


def test_message_of_5_mb_passes_and_one_over_the_limit_does_not(server: BackgroundServer) -> None:
    with Client(f"127.0.0.1:{server.port}") as ours:
        wide = np.ones((1, 5 << 20), bool)
        assert ours.infer("echo_BOOL", {"X": wide}).outputs["Y"].shape == wide.shape
        with pytest.raises(grpc.RpcError) as caught:
            ours.infer("echo_BOOL", {"X": np.ones((1, 7 << 20), bool)})
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # The connection lives on.
        assert ours.server_ready()


def test_stream_of_messages_longer_than_a_window(server: BackgroundServer) -> None:
    long = {"X": np.ones((1, 5_000_000 // 8), np.int64)}
    with Client(f"127.0.0.1:{server.port}") as ours:
        answers = list(ours.infer_stream("echo_INT64", [long] * 3))
    assert [answer.outputs["Y"].shape for answer in answers] == [(1, 625_000)] * 3


def test_small_message_that_unpacks_to_a_large_one_is_refused(server: BackgroundServer) -> None:
    options = [("grpc.max_send_message_length", -1)]
    with (
        grpc.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        # 20 MiB of zeros are 20 KiB on the wire.
        channel.unary_unary(f"/{INFERENCE_SERVICE}/ModelInfer")(
            bytes(20 << 20), compression=grpc.Compression.Gzip
        )
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_torch_tensors_go_in(server: BackgroundServer) -> None:
    with Client(f"127.0.0.1:{server.port}") as ours:
        x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        assert ours.infer("affine", {"INPUT0": x}).outputs["OUTPUT0"].tolist() == [
            [3.0, 5.0, 7.0, 9.0]
        ]
