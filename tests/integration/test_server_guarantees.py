"""What docs/serving.md promises and no other test of a real server shows."""

from __future__ import annotations

import json
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import _serving_models as models
import grpc
import numpy as np
import pytest
from _serving import add, rows, settings

from edgeweave.inference_server import BackgroundServer, Client, Limits
from edgeweave.inference_server._messages import INFERENCE_SERVICE, message_class

TRANSPORTS = ("http2", "grpcio")


def client_of(server: BackgroundServer) -> Client:
    return Client(f"127.0.0.1:{server.port}")


def inside(server: BackgroundServer) -> int:
    assert server.server is not None
    return server.server.core.in_flight


def until(condition: Any) -> None:
    """Wait for another thread; the test's own time-out is the bound."""
    while not condition():
        time.sleep(0.002)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_concurrent_requests_have_a_limit(
    tmp_path: Path, gate: threading.Event, transport: str
) -> None:
    add(tmp_path, "m", models.Gated(), max_batch_size=1)
    limits = Limits(concurrent_rpcs=2)
    answers: list[Any] = []
    with (
        BackgroundServer(settings(tmp_path, limits=limits, transport=transport)) as server,
        client_of(server) as client,
    ):
        threads = [
            threading.Thread(target=lambda: answers.append(client.infer("m", rows(1))))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        until(lambda: inside(server) == 2)
        with pytest.raises(grpc.RpcError, match="inside must be at most 2") as caught:
            client.infer("m", rows(1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # Probes are not counted.
        assert client.server_ready()
        gate.set()
        for thread in threads:
            thread.join()
        assert client.infer("m", rows(1)).outputs
    assert len(answers) == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stream_has_so_many_requests_inside(
    tmp_path: Path, gate: threading.Event, transport: str
) -> None:
    add(tmp_path, "m", models.Gated(), max_batch_size=1)
    limits = Limits(stream_requests=3)
    answers: list[float] = []
    with BackgroundServer(settings(tmp_path, limits=limits, transport=transport)) as server:

        def ask() -> None:
            with client_of(server) as client:
                inputs = (rows(1, value=float(i)) for i in range(30))
                for answer in client.infer_stream("m", inputs):
                    answers.append(float(answer.outputs["OUTPUT0"][0, 0]))

        thread = threading.Thread(target=ask)
        thread.start()
        most = 0
        assert models.Gated.entered.wait(60)
        for _ in range(50):
            most = max(most, inside(server))
            time.sleep(0.002)
        gate.set()
        thread.join()
    # Those in the queue of answers, the one that is awaited, and the one that waits for a place.
    assert 3 <= most <= 5
    assert answers == [float(i) for i in range(30)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_deadline_and_cancellation_leave_the_queue(
    tmp_path: Path, gate: threading.Event, transport: str
) -> None:
    add(tmp_path, "m", models.Gated(), max_batch_size=1)
    with (
        BackgroundServer(settings(tmp_path, transport=transport)) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        client_of(server) as client,
    ):
        assert server.server is not None
        ((_, _, entry),) = server.server.registry.entries()
        assert entry.served is not None
        scheduler = entry.served.scheduler
        first = threading.Thread(target=lambda: client.infer("m", rows(1)))
        first.start()
        assert models.Gated.entered.wait(60)
        infer = channel.unary_unary(f"/{INFERENCE_SERVICE}/ModelInfer")
        request = _request(rows(1)["INPUT0"])
        calls = [infer.future(request) for _ in range(5)]
        until(lambda: scheduler.queued == 5)
        calls[1].cancel()
        calls[3].cancel()
        # While the instance is still busy.
        until(lambda: scheduler.queued == 3 and inside(server) == 4)
        with pytest.raises(grpc.RpcError) as caught:
            infer(request, timeout=0.01)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        until(lambda: scheduler.queued == 3 and inside(server) == 4)
        gate.set()
        for i in (0, 2, 4):
            assert calls[i].result(60)
        first.join()
        until(lambda: inside(server) == 0)
        assert client.statistics("m").model_stats[0].execution_count == 4


def _request(array: np.ndarray[Any, Any]) -> bytes:
    from edgeweave.inference_server._client_wire import encode_request

    return encode_request("m", {"INPUT0": array})


def test_extensions_are_told_when_they_are_on(tmp_path: Path) -> None:
    chosen = settings(tmp_path, allow_repository_control=True, allow_graph_updates=True)
    with (
        BackgroundServer(chosen) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        data = channel.unary_unary(f"/{INFERENCE_SERVICE}/ServerMetadata")(b"")
    extensions = message_class("inference.ServerMetadataResponse").FromString(data).extensions
    assert set(extensions) >= {"model_repository", "edgeweave_graph_updates"}


def test_index_tells_what_is_wrong_but_no_path(tmp_path: Path) -> None:
    add(tmp_path, "good", models.Affine())
    folder = add(tmp_path, "bad", models.Affine())
    (folder / "model.safetensors").write_bytes(b"none")
    with (
        BackgroundServer(settings(tmp_path)) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        call = channel.unary_unary(f"/{INFERENCE_SERVICE}/RepositoryIndex")
        request = message_class("inference.RepositoryIndexRequest")
        answer = message_class("inference.RepositoryIndexResponse")
        models_ = {m.name: m for m in answer.FromString(call(b"")).models}
        ready = answer.FromString(call(request(ready=True).SerializeToString())).models
    assert (models_["good"].state, models_["bad"].state) == ("READY", "UNAVAILABLE")
    assert "must be a safetensors file" in models_["bad"].reason
    assert str(tmp_path) not in models_["bad"].reason
    assert [m.name for m in ready] == ["good"]


class _Evil:
    """What a pickle may do when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_pickles_are_not_read(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    repository = tmp_path / "repository"
    data = pickle.dumps(_Evil(marker))
    pickle.loads(data)
    assert marker.exists()
    marker.unlink()
    folder = add(repository, "m", models.Affine(), weights=name)
    (folder / name).write_bytes(data)
    with BackgroundServer(settings(repository)) as server:
        assert "must be a safetensors file" in server.failures["m"]
    # Nor as an archive, even of a model that is trusted.
    tensor = {"datatype": "FP32", "shape": [1]}
    table = {
        "archive": name,
        "inputs": [{"name": "x", **tensor}],
        "outputs": [{"name": "y", **tensor}],
    }
    (folder / "config.json").write_text(json.dumps(table))
    with BackgroundServer(settings(repository, trust_models={"m": "0" * 64})) as server:
        assert "must be a .pt2 archive" in server.failures["m"]
    assert not marker.exists()


def masks(client: Client, model: str, requests: int = 12) -> set[int]:
    """The processors of the threads that answered, as bits."""
    seen: list[int] = []

    def ask() -> None:
        seen.append(int(client.infer(model, rows(1)).outputs["OUTPUT0"][0, 0]))

    threads = [threading.Thread(target=ask) for _ in range(requests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return set(seen)


def test_pinned_instances_have_processors_of_their_own(tmp_path: Path) -> None:
    from edgeweave.inference_server._cpus import available_cpus

    cpus = available_cpus()
    if len(cpus) < 2 or max(cpus) > 22:
        pytest.skip("needs two processors, numbered so that fp32 holds their bits")
    one = {"max_batch_size": 1}
    add(tmp_path, "pinned", models.Affinity(), instances={"count": 2, "pin": True}, **one)
    add(tmp_path, "free", models.Affinity(), instances={"count": 2}, **one)
    half = len(cpus) // 2
    with BackgroundServer(settings(tmp_path)) as server, client_of(server) as client:
        assert masks(client, "free") == {sum(1 << cpu for cpu in cpus)}
        shares = (cpus[:half], cpus[half : 2 * half])
        assert masks(client, "pinned") == {sum(1 << cpu for cpu in share) for share in shares}
    # The second of two workers takes other processors than the first.
    own = [settings(tmp_path, workers=2, worker_index=i, models=("pinned",)) for i in (0, 1)]
    with BackgroundServer(own[0]) as first, BackgroundServer(own[1]) as second:
        found = []
        for server in (first, second):
            with client_of(server) as client:
                found.append(masks(client, "pinned"))
    if len(cpus) >= 4:
        assert not found[0] & found[1]
    else:
        # Four instances on two processors: each worker still uses both.
        assert found == [{1 << cpu for cpu in cpus}] * 2


def test_no_more_torch_threads_than_the_control_group_grants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tmp_path, "m", models.ThreadCount(), instances={"threads": 64})
    add(tmp_path, "pinned", models.Affinity(), instances={"pin": True})
    monkeypatch.setattr("edgeweave.inference_server._cpus.cgroup_cpu_limit", lambda root: 0.5)
    with BackgroundServer(settings(tmp_path)) as server, client_of(server) as client:
        assert client.infer("m", rows(1)).outputs["OUTPUT0"][0, 0] == 1.0
        (mask,) = masks(client, "pinned")
        assert mask.bit_count() == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_client_that_vanishes_takes_its_requests_along(
    tmp_path: Path, gate: threading.Event, transport: str
) -> None:
    add(tmp_path, "m", models.Gated(), max_batch_size=1)
    with BackgroundServer(settings(tmp_path, transport=transport)) as server:
        channel = grpc.insecure_channel(f"127.0.0.1:{server.port}")
        infer = channel.unary_unary(f"/{INFERENCE_SERVICE}/ModelInfer")
        calls = [infer.future(_request(rows(1)["INPUT0"])) for _ in range(4)]
        until(lambda: inside(server) == 4)
        channel.close()
        # Also the one that runs: nobody waits for it, though its batch goes on.
        until(lambda: inside(server) == 0)
        assert all(call.done() for call in calls)
        gate.set()
        with client_of(server) as client:
            assert client.infer("m", rows(1)).outputs
