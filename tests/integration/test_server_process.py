"""`edgeweave serve` as a process: signals, workers, checks, logs, settings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _serving_models as models
import grpc
import pytest
from _serving import ARCHITECTURES, add, rows, settings

from edgeweave.cli import main
from edgeweave.inference_server import BackgroundServer, Client, ModelConfigError

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0


class Process:
    """A running `edgeweave serve`, and its log."""

    def __init__(self, repository: Path, *arguments: str) -> None:
        allowed = [word for name in ARCHITECTURES for word in ("--allow-architecture", name)]
        paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "edgeweave", "serve", "--model-repository"),
                *(str(repository), "--port", "0", "--metrics-port", "-1", "--log-format", "json"),
                *(*allowed, *arguments),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[dict[str, Any]] = []
        self.noise: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as log:
            for line in log:
                with self._news:
                    # Other libraries write to stderr as they please.
                    if line.startswith("{"):
                        self.lines.append(json.loads(line))
                    else:
                        self.noise.append(line)
                    self._news.notify_all()

    def wait_for(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """The first lines that tell of an event."""
        with self._news:
            found = self._news.wait_for(
                lambda: sum(line["event"] == event for line in self.lines) >= count, PATIENCE_S
            )
        assert found, f"no {event!r} in {self.lines}"
        return [line for line in self.lines if line["event"] == event]

    def end(self, *, tell: bool = True) -> int:
        """Send SIGTERM, unless that was done, and return the exit status."""
        if tell and self.process.poll() is None:
            self.process.terminate()
        status = self.process.wait(PATIENCE_S)
        self._reader.join()
        return status


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    running: list[Process] = []

    def begin(repository: Path, *arguments: str) -> Process:
        running.append(Process(repository, *arguments))
        return running[-1]

    yield begin
    for process in running:
        if process.process.poll() is None:
            process.process.kill()
        process.end()


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
def test_sigterm_under_load(tmp_path: Path, start: Callable[..., Process], transport: str) -> None:
    add(tmp_path, "slow", models.Sleepy(0.3), arguments={"seconds": 0.3}, max_batch_size=4)
    server = start(tmp_path, "--drain-s", "10", "--transport", transport)
    port = server.wait_for("ready")[0]["port"]
    codes: list[str] = []

    def ask(client: Client) -> None:
        try:
            client.infer("slow", rows(1))
            codes.append("OK")
        except grpc.RpcError as error:
            codes.append(error.code().name)

    with Client(f"127.0.0.1:{port}") as client:
        inside = [threading.Thread(target=ask, args=(client,)) for _ in range(12)]
        for thread in inside:
            thread.start()
        while client.statistics("slow").model_stats[0].execution_count == 0:
            time.sleep(0.01)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining")
        # On the connection that is open: refused, with a code that clients retry elsewhere.
        with pytest.raises(grpc.RpcError) as caught:
            client.infer("slow", rows(1))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        for thread in inside:
            thread.join()
    # A second signal would end it at once.
    assert server.end(tell=False) == 0, server.noise
    # Within its grace, and the second that last answers get.
    assert time.monotonic() - began < 10 + 1 + PATIENCE_S / 2
    assert codes == ["OK"] * 12
    assert server.wait_for("stopped")[0]["all_finished"] is True


def test_a_model_that_never_ends_does_not_hold_the_process(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    add(tmp_path, "stuck", models.Sleepy(600.0), arguments={"seconds": 600.0})
    server = start(tmp_path, "--drain-s", "0.2")
    port = server.wait_for("ready")[0]["port"]
    with Client(f"127.0.0.1:{port}") as client:
        with pytest.raises(grpc.RpcError):
            client.infer("stuck", rows(1), timeout_s=0.5)
        assert client.server_ready()
    assert server.end() == 1
    assert server.wait_for("stopped")[0]["all_finished"] is False


def test_log_has_the_ids_of_requests(tmp_path: Path, start: Callable[..., Process]) -> None:
    import numpy as np

    add(tmp_path, "m", models.Moody())
    server = start(tmp_path, "--log-level", "debug")
    port = server.wait_for("ready")[0]["port"]
    with Client(f"127.0.0.1:{port}") as client:
        client.infer("m", rows(1), request_id="mine")
        with pytest.raises(grpc.RpcError, match="request poison: the model failed") as caught:
            client.infer("m", {"INPUT0": np.full((1, 4), np.nan, np.float32)}, request_id="poison")
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret words" not in caught.value.details()
        # Where the client names none, the server does.
        client.infer("m", rows(1))
        with pytest.raises(grpc.RpcError) as caught:
            client.infer("m", {"INPUT0": np.full((1, 4), np.nan, np.float32)})
    given = caught.value.details().split(":")[0].removeprefix("request ")
    answered = server.wait_for("answered", 2)
    assert answered[0]["request"] == "mine"
    assert answered[0]["model"] == "m"
    assert answered[1]["request"] not in ("mine", "")
    raised = server.wait_for("model raised", 2)
    assert [line["request"] for line in raised] == ["poison", given]
    assert "secret words" in raised[0]["traceback"]
    assert server.end() == 0


def test_sigterm_while_a_model_loads(tmp_path: Path, start: Callable[..., Process]) -> None:
    add(tmp_path, "m", models.Sleepy(600.0), arguments={"seconds": 600.0}, warmup=[{}])
    server = start(tmp_path)
    port = server.wait_for("listening")[0]["port"]
    with Client(f"127.0.0.1:{port}") as client:
        # It answers meanwhile, and is not ready.
        assert not client.server_ready()
        with pytest.raises(grpc.RpcError) as caught:
            client.infer("m", rows(1))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert server.end() == 0


def test_workers_share_a_port_and_are_replaced(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    add(tmp_path, "m", models.Affine())
    server = start(tmp_path, "--workers", "2")
    ready = server.wait_for("ready", 2)
    assert len({line["port"] for line in ready}) == 1
    pids = [line["pid"] for line in server.wait_for("worker started", 2)]
    os.kill(pids[0], signal.SIGKILL)
    server.wait_for("worker died")
    server.wait_for("ready", 3)
    with Client(f"127.0.0.1:{ready[0]['port']}") as client:
        assert client.infer("m", rows(1)).outputs["OUTPUT0"][0, 0] == 3.0
    # A second server must not share the port by accident.
    other = settings(tmp_path, port=ready[0]["port"])
    with pytest.raises(ModelConfigError, match="must be free"), BackgroundServer(other):
        pass
    assert server.end() == 0, server.noise
    assert len(server.wait_for("stopped", 2)) == 2


def test_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    folder = add(tmp_path, "m", models.Affine())
    words = ["serve", "--model-repository", str(tmp_path), "--check"]
    assert main(words) == 1
    assert "m: m/1: architecture: name must be built in or allowed" in capsys.readouterr().err
    words += ["--allow-architecture", ARCHITECTURES[0]]
    assert main(words) == 0
    assert "all models load and answer" in capsys.readouterr().out
    (folder / "model.safetensors").unlink()
    assert main(words) == 1
    assert "model.safetensors: must be readable" in capsys.readouterr().err
    logging.getLogger("edgeweave.server").handlers.clear()
    logging.getLogger("edgeweave.server").propagate = True


def test_settings_file_and_words_over_it(tmp_path: Path) -> None:
    from edgeweave.inference_server._settings import read_settings

    file = tmp_path / "server.toml"
    file.write_text(
        f'model_repository = "{tmp_path}"\nport = 9000\nmetrics_port = -1\nworkers = 2\n'
        '[limits]\nmessage_bytes = 1000\nrank = 4\n[trust_models]\nm = "' + "a" * 64 + '"\n'
    )
    read = read_settings(file, {"port": 9001, "limits": {"rank": 5}, "host": None})
    assert (read.port, read.workers, read.metrics_port) == (9001, 2, None)
    assert (read.limits.message_bytes, read.limits.rank) == (1000, 5)
    assert read.trust_models == {"m": "a" * 64}
    for text, words in (
        ("prot = 1", "keys must be known, got prot"),
        ('port = "x"', "port must be of type int"),
        ("port = 70000", r"port must be in \[0, 65535\]"),
        ('host = "0.0.0.0"', "must be this machine's own address"),
        ('metrics_host = "0.0.0.0"', "must be this machine's own address"),
        ('tls_cert = "c"', "given together"),
        ("workers = 2\nallow_graph_updates = true", "workers must be 1"),
        ('transport = "quic"', "transport must be one of http2, grpcio"),
        ("[limits]\nrank = 0", "rank must be a positive integer"),
        ("[limits]\nranks = 1", "keys must be known, got ranks"),
        ('[trust_models]\nm = "abc"', "NAME=SHA256"),
        ("= 1", "must be TOML"),
    ):
        file.write_text(text)
        with pytest.raises(ModelConfigError, match=words):
            read_settings(file, {"model_repository": str(tmp_path)})
    with pytest.raises(ModelConfigError, match="model_repository must be given"):
        read_settings(None, {})
