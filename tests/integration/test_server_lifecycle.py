"""Versions, reloads, trust, poison, time-outs: a real server and what its folder says."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from pathlib import Path
from typing import Any

import _serving_models as models
import grpc
import numpy as np
import pytest
import torch
from _serving import add, rows, settings

from edgeweave.inference_server import BackgroundServer, Client, ModelConfigError


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    return folder


def client_of(server: BackgroundServer) -> Client:
    return Client(f"127.0.0.1:{server.port}")


def first(client: Client, model: str, **options: Any) -> float:
    return float(client.infer(model, rows(1), **options).outputs["OUTPUT0"][0, 0])


def test_versions_and_policies(repository: Path) -> None:
    for version in (1, 2, 10):
        add(
            repository,
            "m",
            models.Affine(0.0, float(version)),
            arguments={"scale": 0.0, "shift": float(version)},
            version=version,
        )
    policy = repository / "m" / "versions.toml"
    with (
        BackgroundServer(settings(repository, allow_repository_control=True)) as server,
        client_of(server) as client,
    ):
        # The latest by number, not by spelling.
        assert first(client, "m") == 10.0
        with pytest.raises(grpc.RpcError, match="version must be one of 10"):
            first(client, "m", version="1")
        policy.write_text('policy = "all"\n')
        client.load("m")
        assert [first(client, "m", version=v) for v in ("1", "2", "10", "")] == [1, 2, 10, 10]
        policy.write_text('policy = "specific"\nversions = [1, 2]\n')
        client.load("m")
        assert first(client, "m") == 2.0
        with pytest.raises(grpc.RpcError) as caught:
            first(client, "m", version="10")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        policy.write_text('policy = "specific"\nversions = [3]\n')
        with pytest.raises(grpc.RpcError, match="versions must exist, got 3") as caught:
            client.load("m")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        # What served before still does.
        assert first(client, "m") == 2.0
        client.unload("m")
        assert not client.model_ready("m")
        with pytest.raises(grpc.RpcError) as caught:
            client.load("nothing")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_reload_drops_no_request(repository: Path) -> None:
    add(repository, "m", models.Sleepy(0.002), arguments={"seconds": 0.002})
    failures: list[Exception] = []
    answered = [0] * 4
    stop = threading.Event()

    def ask(index: int, port: int) -> None:
        with Client(f"127.0.0.1:{port}") as client:
            while not stop.is_set():
                try:
                    assert first(client, "m") == 1.0
                    answered[index] += 1
                except Exception as error:
                    failures.append(error)
                    return

    with BackgroundServer(settings(repository, allow_repository_control=True)) as server:
        threads = [
            threading.Thread(target=ask, args=(i, server.port)) for i in range(len(answered))
        ]
        for thread in threads:
            thread.start()
        with client_of(server) as client:
            for _ in range(8):
                before = sum(answered)
                client.load("m")
                while sum(answered) < before + 8 and not failures:
                    time.sleep(0.001)
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert min(answered) > 0


def test_broken_reload_leaves_the_old_one(repository: Path) -> None:
    folder = add(repository, "m", models.Affine(), arguments={"scale": 2.0})
    with (
        BackgroundServer(settings(repository, allow_repository_control=True)) as server,
        client_of(server) as client,
    ):
        (folder / "model.safetensors").write_bytes(b"\x00" * 40)
        with pytest.raises(grpc.RpcError, match="safetensors file") as caught:
            client.load("m")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(repository) not in caught.value.details()
        assert first(client, "m") == 3.0
        assert client.server_ready()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "must be JSON"),
        ("[]", "must be an object"),
        ('{"kind": 3}', "kind must be of type str"),
        ("{}", "must name either an architecture or an archive"),
        ('{"architecture": {"name": "x:y"}, "surprise": 1}', "keys must be known, got surprise"),
        ('{"architecture": {"name": "os:system"}}', "inputs must be given"),
        ('{"archive": "../model.pt2"}', "archive must be a file name"),
        ('{"max_batch_size": true}', "max_batch_size must be of type int"),
        ('{"max_batch_size": -1}', r"max_batch_size must be in \[0"),
        ('{"batching": {"queue_requests": 0}}', r"queue_requests must be in \[1"),
    ],
)
def test_wrong_configuration_keeps_the_model_and_nothing_else_down(
    repository: Path, text: str, words: str
) -> None:
    add(repository, "good", models.Affine())
    bad = repository / "bad" / "1"
    bad.mkdir(parents=True)
    (bad / "config.json").write_text(text)
    with BackgroundServer(settings(repository)) as server, client_of(server) as client:
        assert list(server.failures) == ["bad"]
        with pytest.raises(ModelConfigError, match=words):
            raise ModelConfigError(server.failures["bad"])
        assert first(client, "good") == 3.0
        assert not client.model_ready("bad")
        # A model that was to be served is missing.
        assert not client.server_ready()


def test_importable_names_need_to_be_allowed(repository: Path) -> None:
    folder = repository / "m" / "1"
    folder.mkdir(parents=True)
    table = {
        "architecture": {"name": "os:system", "arguments": {"command": "false"}},
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1]}],
    }
    (folder / "config.json").write_text(json.dumps(table))
    with BackgroundServer(settings(repository)) as server:
        assert "must be built in or allowed, got 'os:system'" in server.failures["m"]


def test_archive_needs_trust_and_the_right_bytes(repository: Path) -> None:
    folder = repository / "m" / "1"
    folder.mkdir(parents=True)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(
        models.Affine(3.0, 0.0).eval(), (torch.ones(2, 4),), dynamic_shapes={"x": {0: batch}}
    )
    torch.export.save(exported, folder / "model.pt2")
    table = {
        "archive": "model.pt2",
        "max_batch_size": 8,
        "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 4]}],
    }
    (folder / "config.json").write_text(json.dumps(table))
    digest = hashlib.sha256((folder / "model.pt2").read_bytes()).hexdigest()
    with BackgroundServer(settings(repository)) as server:
        assert "must be trusted" in server.failures["m"]
    with BackgroundServer(settings(repository, trust_models={"m": "0" * 64})) as server:
        assert "SHA-256 must be 000" in server.failures["m"]
    trusting = settings(repository, trust_models={"m": digest})
    with BackgroundServer(trusting) as server, client_of(server) as client:
        assert server.failures == {}
        assert client.infer("m", rows(3)).outputs["OUTPUT0"].tolist() == [[3.0] * 4] * 3


def test_links_out_of_the_repository_are_not_followed(repository: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    add(outside, "secret", models.Affine())
    (repository / "linked").symlink_to(outside / "secret")
    add(repository, "m", models.Affine())
    weights = repository / "m" / "1" / "model.safetensors"
    weights.unlink()
    weights.symlink_to(outside / "secret" / "1" / "model.safetensors")
    with BackgroundServer(settings(repository)) as server, client_of(server) as client:
        assert "must stay inside the repository" in server.failures["m"]
        assert not client.model_ready("linked")


@pytest.mark.parametrize("name", ["../m", "a/b", ".hidden", "", "x" * 129, "a\0b"])
def test_names_that_are_none(repository: Path, name: str) -> None:
    with (
        BackgroundServer(settings(repository, allow_repository_control=True)) as server,
        client_of(server) as client,
    ):
        with pytest.raises(grpc.RpcError, match="name must match") as caught:
            client.load(name)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_error_in_one_request_does_not_fail_its_batch(
    repository: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add(repository, "m", models.Moody())
    bad = {"INPUT0": np.full((1, 4), np.nan, np.float32)}
    worse = {"INPUT0": np.full((1, 4), np.inf, np.float32)}
    with BackgroundServer(settings(repository)) as server, client_of(server) as client:
        results: dict[int, Any] = {}

        def ask(i: int) -> None:
            inputs = {5: bad, 9: worse}.get(i, rows(1, value=float(i)))
            try:
                results[i] = client.infer("m", inputs, request_id=f"r{i}")
            except grpc.RpcError as error:
                results[i] = error

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(16):
            if i in (5, 9):
                assert results[i].code() is grpc.StatusCode.INTERNAL
                assert f"request r{i}" in results[i].details()
                assert "secret" not in results[i].details()
                assert "Traceback" not in results[i].details()
            else:
                assert results[i].outputs["OUTPUT0"][0, 0] == 2.0 * i
        stats = client.statistics("m").model_stats[0]
        assert stats.inference_stats.success.count == 14
        assert stats.inference_stats.fail.count == 2
    # The traceback is in the log.
    assert "secret words" in caplog.text


def test_requested_outputs_are_heeded_in_a_batch(repository: Path) -> None:
    from edgeweave.inference_server import TensorSpec, export_model

    export_model(
        models.TwoOutputs(),
        repository,
        "two",
        inputs=[TensorSpec(name, "FP32", (-1, 1)) for name in ("A", "B")],
        outputs=[TensorSpec(name, "FP32", (-1, 1)) for name in ("SUM", "DIFFERENCE")],
        options={"max_batch_size": 8},
    )
    wanted: list[list[str]] = [["SUM"], ["DIFFERENCE"], ["DIFFERENCE", "SUM"], []] * 8
    got: dict[int, list[str]] = {}
    with BackgroundServer(settings(repository)) as server, client_of(server) as client:
        one = np.ones((1, 1), np.float32)

        def ask(i: int) -> None:
            answer = client.infer("two", {"A": i * one, "B": one}, outputs=wanted[i])
            for name, array in answer.outputs.items():
                assert array.tolist() == [[i + 1 if name == "SUM" else i - 1]]
            got[i] = list(answer.outputs)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(wanted))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [got[i] for i in range(len(wanted))] == [w or ["SUM", "DIFFERENCE"] for w in wanted]


def test_client_that_gives_up_is_cancelled_and_others_are_served(
    repository: Path, gate: threading.Event
) -> None:
    add(repository, "m", models.Gated(), max_batch_size=1)
    results: list[float] = []
    with BackgroundServer(settings(repository)) as server, client_of(server) as client:
        patient = threading.Thread(target=lambda: results.append(first(client, "m")))
        patient.start()
        assert models.Gated.entered.wait(60)
        for _ in range(5):
            with pytest.raises(grpc.RpcError) as caught:
                first(client, "m", timeout_s=0.01)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        # The queue time-out is the server's own.
        with pytest.raises(grpc.RpcError, match="in the queue") as caught:
            first(client, "m", parameters={"timeout": 10_000})
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        gate.set()
        patient.join()
        assert results == [1.0]
        # None of those that gave up was ever run.
        assert client.statistics("m").model_stats[0].execution_count == 1
        assert first(client, "m") == 1.0


def test_full_queue_is_unavailable(repository: Path, gate: threading.Event) -> None:
    add(repository, "m", models.Gated(), max_batch_size=1, batching={"queue_requests": 2})
    answers: list[float] = []
    with BackgroundServer(settings(repository)) as server, client_of(server) as client:
        assert server.server is not None
        threads = [threading.Thread(target=lambda: answers.append(first(client, "m")))]
        threads[0].start()
        assert models.Gated.entered.wait(60)
        ((_, _, entry),) = server.server.registry.entries()
        assert entry.served is not None
        for waiting in (1, 2):
            threads.append(threading.Thread(target=lambda: answers.append(first(client, "m"))))
            threads[-1].start()
            while entry.served.scheduler.queued < waiting:
                time.sleep(0.005)
        # One runs, two wait: there is no room.
        for _ in range(3):
            with pytest.raises(grpc.RpcError, match="2 requests waiting") as caught:
                first(client, "m")
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        gate.set()
        for thread in threads:
            thread.join()
    assert answers == [1.0] * 3


def test_concurrent_requests_really_share_batches(repository: Path) -> None:
    add(repository, "m", models.BatchSize())
    with BackgroundServer(settings(repository)) as server, client_of(server) as client:
        seen: list[float] = []
        threads = [
            threading.Thread(target=lambda: seen.append(first(client, "m"))) for _ in range(24)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # The first goes alone while the others gather.
    assert max(seen) > 4


def test_threads_are_shared_out(repository: Path) -> None:
    from edgeweave.inference_server._cpus import available_cpus

    cpus = len(available_cpus())
    add(repository, "share", models.ThreadCount())
    add(repository, "two", models.ThreadCount(), instances={"count": 2})
    add(repository, "many", models.ThreadCount(), instances={"threads": 4096})
    add(repository, "pinned", models.ThreadCount(), instances={"count": 1, "pin": True})
    with BackgroundServer(settings(repository)) as server, client_of(server) as client:
        assert first(client, "share") == cpus
        assert first(client, "two") == max(1, cpus // 2)
        # Asking for more than there are does not give more.
        assert first(client, "many") == cpus
        assert first(client, "pinned") == cpus


def test_warm_up_runs_before_the_first_request(repository: Path) -> None:
    add(repository, "m", models.Affine(), warmup=[{"INPUT0": [4, 4]}])
    add(repository, "bad", models.Moody(), warmup=[{"INPUT1": [4, 4]}])
    with BackgroundServer(settings(repository)) as server, client_of(server) as client:
        assert first(client, "m") == 3.0
        assert "warmup must name inputs, got ['INPUT1']" in server.failures["bad"]


@pytest.mark.parametrize("engine", ["onednn", "warp"])
def test_engine_that_is_not_there_says_what_is_missing(
    repository: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    # Whether or not this installation has it.
    monkeypatch.setitem(sys.modules, "edgeweave.graphfuse", None)
    add(repository, "m", models.Affine(), engine=engine)
    with BackgroundServer(settings(repository)) as server:
        expected = {"onednn": "engine onednn needs edgeweave.graphfuse", "warp": "must be one of"}
        assert expected[engine] in server.failures["m"]


@pytest.fixture
def memory() -> Any:
    psutil = pytest.importorskip("psutil", reason="the extra `bench` brings psutil")
    return lambda: psutil.Process().memory_info().rss


def test_clients_that_come_and_go_leak_nothing(repository: Path, memory: Any) -> None:
    add(repository, "m", models.Affine())
    with BackgroundServer(settings(repository)) as server:

        def visit(times: int) -> None:
            for _ in range(times):
                with client_of(server) as client:
                    assert first(client, "m") == 3.0

        visit(60)
        before = memory()
        visit(150)
        # A leaked connection holds over 100 KB on both sides; 150 of them would be 15 MB.
        assert memory() - before < 8 << 20
