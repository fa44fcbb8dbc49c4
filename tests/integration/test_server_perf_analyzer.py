"""Triton's perf_analyzer, unmodified, against a real server; and what it asks, call by call."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import _serving_models as models
import grpc
import numpy as np
import pytest
import torch
from _serving import add, add_graph_sum, add_resident, settings

from edgeweave.inference_server import BackgroundServer, Client
from edgeweave.inference_server._messages import INFERENCE_SERVICE, message_class

FETCHED = Path(__file__).resolve().parents[2] / "build" / "perf-analyzer" / "perf_analyzer"
PATIENCE_S = 240


@pytest.fixture(scope="module", params=["http2", "grpcio"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BackgroundServer]:
    repository = tmp_path_factory.mktemp("repository")
    add(repository, "affine", models.Affine(), arguments={"scale": 2.0})
    add_graph_sum(repository, "graphs")
    edges = torch.stack([torch.arange(40), (torch.arange(40) + 1) % 40])
    add_resident(repository, torch.ones(40, 3), edges)
    with BackgroundServer(settings(repository, transport=request.param)) as running:
        assert running.failures == {}
        yield running


@pytest.fixture(scope="session")
def program() -> str:
    """The program: what `make test` fetched, or one on the path (older wheels are empty)."""
    found = str(FETCHED) if FETCHED.is_file() else shutil.which("perf_analyzer")
    if found is None:
        pytest.skip("perf_analyzer is not here; scripts/fetch_perf_analyzer.py fetches it")
    return found


DENSE = ("-m", "affine", "--shape", "INPUT0:4", "-b", "2")
NODES = {"NODE_IDS": {"content": [0, 5, 7], "shape": [3]}}
GRAPH = {
    "NODE_FEATURES": {"content": [1.0] * 6, "shape": [2, 3]},
    "EDGE_INDEX": {"content": [0, 1], "shape": [2, 1]},
}


@pytest.mark.parametrize(
    ("words", "data"),
    [
        ((*DENSE, "--concurrency-range", "4"), None),
        ((*DENSE, "--async", "--concurrency-range", "1:3:2"), None),
        ((*DENSE, "--async", "--request-rate-range", "200"), None),
        ((*DENSE, "--streaming", "--concurrency-range", "2"), None),
        # Inputs that may be left out must be told as such.
        (("-m", "resident"), NODES),
        (("-m", "graphs"), GRAPH),
    ],
)
def test_perf_analyzer(
    server: BackgroundServer,
    program: str,
    words: tuple[str, ...],
    data: dict[str, object] | None,
    tmp_path: Path,
) -> None:
    table = tmp_path / "table.csv"
    command = [program, *words, "-i", "grpc", "-u", f"127.0.0.1:{server.port}", "-f", str(table)]
    # Counted windows, and any spread will do: this is no measurement.
    command += ["--measurement-mode", "count_windows", "--measurement-request-count", "20"]
    command += ["--stability-percentage", "999", "--max-trials", "3"]
    if data is not None:
        (tmp_path / "data.json").write_text(json.dumps({"data": [data]}))
        command += ["--input-data", str(tmp_path / "data.json")]
    with Client(f"127.0.0.1:{server.port}") as client:
        before = client.statistics(words[1]).model_stats[0].inference_stats
        result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert result.returncode == 0, result.stdout + result.stderr
        after = client.statistics(words[1]).model_stats[0].inference_stats
    with table.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == (2 if "1:3:2" in words else 1)
    for line in lines:
        assert float(line["Inferences/Second"]) > 0
        # From the server's own statistics.
        assert float(line["Server Compute Infer"]) > 0
    assert after.success.count - before.success.count >= 20
    # Its last requests are cut off when it ends; none failed otherwise.
    assert after.fail.count - before.fail.count <= 4


def recorded(name: str) -> bytes:
    """A request as the program's version 2.60 sends it."""
    return b"\n" + bytes((len(name),)) + name.encode()


def test_the_calls_that_it_makes(server: BackgroundServer) -> None:
    """Also where the program itself cannot run: its calls, as they were recorded."""
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:

        def ask(rpc: str, request: bytes, answer: str) -> object:
            call = channel.unary_unary(f"/{INFERENCE_SERVICE}/{rpc}")
            return message_class(f"inference.{answer}").FromString(call(request))

        metadata = ask("ModelMetadata", recorded("affine"), "ModelMetadataResponse")
        assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [
            ("INPUT0", "FP32", [-1, 4])
        ]
        config = ask("ModelConfig", recorded("affine"), "ModelConfigResponse").config
        assert (config.max_batch_size, list(config.input[0].dims)) == (32, [4])
        assert config.WhichOneof("scheduling_choice") == "dynamic_batching"
        # It asks for statistics where the server says that it has them.
        assert "statistics" in ask("ServerMetadata", b"", "ServerMetadataResponse").extensions
        (before,) = ask(
            "ModelStatistics", recorded("affine"), "ModelStatisticsResponse"
        ).model_stats
        values = np.arange(8, dtype=np.float32)
        infer = (
            recorded("affine")
            + b'"(\n"triton_enable_empty_final_response\x12\x02\x08\x01'
            + b"*\x12\n\x06INPUT0\x12\x04FP32\x1a\x02\x02\x04"
            + b"2\t\n\x07OUTPUT0"
            + b": "
            + values.tobytes()
        )
        answer = ask("ModelInfer", infer, "ModelInferResponse")
        assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == [
            2 * v + 1 for v in values.tolist()
        ]
        stream = channel.stream_stream(f"/{INFERENCE_SERVICE}/ModelStreamInfer")
        streamed = [
            message_class("inference.ModelStreamInferResponse").FromString(data)
            for data in stream(iter([infer] * 3))
        ]
        assert [(s.error_message, s.infer_response.raw_output_contents[0]) for s in streamed] == [
            ("", answer.raw_output_contents[0])
        ] * 3
        (after,) = ask("ModelStatistics", recorded("affine"), "ModelStatisticsResponse").model_stats
        assert after.inference_count - before.inference_count == 8
        for part in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
            old, new = (getattr(s.inference_stats, part) for s in (before, after))
            assert new.count - old.count == 4
            assert new.ns > old.ns
        config = ask("ModelConfig", recorded("resident"), "ModelConfigResponse").config
        assert {(tensor.name, tensor.optional) for tensor in config.input} == {
            ("NODE_IDS", False),
            ("NEW_FEATURES", True),
            ("NEW_EDGES", True),
        }
