"""What serves in processes of their own: edgeweave, a bare echo, LitServe."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

__all__ = ["ECHO_PATH", "Wide", "edgeweave_server", "peer_server"]

ECHO_PATH = "/bench.Echo/Echo"
_START_S = 120.0


class Wide(nn.Module):
    """Layers of one width: the model that the bench serves.

    Args:
        width: Features of input, output and what is between.
        depth: How many layers.
    """

    def __init__(self, width: int = 1024, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU()))
        )

    def forward(self, x: Tensor) -> Tensor:
        """fp32 `[B, width]` to the same."""
        out: Tensor = self.layers(x)
        return out


class Shift(nn.Module):
    """Adds one: next to no work on many bytes."""

    def forward(self, x: Tensor) -> Tensor:
        """Any tensor to the same shape."""
        return x + 1


class Slow(nn.Module):
    """Takes its time, without work.

    Args:
        seconds: How long a batch takes.
    """

    def __init__(self, seconds: float = 0.1) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """Any tensor to itself."""
        time.sleep(self.seconds)
        return x.clone()


@contextmanager
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    # A group of its own: LitServe leaves processes behind that hold its port and our pipe.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=os.setpgrp)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):  # none was left
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def peer_server(kind: str, *arguments: str) -> Iterator[tuple[int, int]]:
    """Run the echo or LitServe.

    Args:
        kind: `echo` or `litserve`.
        *arguments: More words for it.

    Yields:
        Port and process id.
    """
    command = [sys.executable, "-m", "edgeweave.bench.serving_peers", kind, *arguments]
    with _process(command) as process:
        yield _announced(process), process.pid


@contextmanager
def edgeweave_server(repository: Path) -> Iterator[tuple[int, int]]:
    """Run what `edgeweave serve` runs, on a repository.

    Args:
        repository: Its models may use this module's classes.

    Yields:
        Port and process id.
    """
    command = [sys.executable, "-m", "edgeweave.bench.serving_peers", "edgeweave", str(repository)]
    with _process(command) as process:
        yield _announced(process), process.pid


def _announced(process: subprocess.Popen[str]) -> int:
    if process.stdout is None:
        raise RuntimeError("bench serving: server must have an output")
    start = time.monotonic()
    while time.monotonic() - start < _START_S:
        line = process.stdout.readline()
        if not line:
            break
        if line.startswith("{"):
            return int(json.loads(line)["port"])
    raise RuntimeError("bench serving: server must start, got none; its log is above")


def _announce(port: int) -> None:
    print(json.dumps({"port": port, "pid": os.getpid()}), flush=True)


async def _echo() -> None:
    """The least that `grpc.aio` can do: bytes come, the same bytes go."""
    import grpc
    import grpc.aio

    async def echo(data: bytes, context: Any) -> bytes:
        return data

    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(options=options)
    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench.Echo", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _announce(port)
    await server.wait_for_termination()


def _edgeweave(repository: Path) -> int:
    """What `edgeweave serve` does, and a line that says the port once it is ready."""
    import logging

    from edgeweave.inference_server import ServerSettings
    from edgeweave.inference_server._logs import configure_logs
    from edgeweave.inference_server._process import serve

    class Announcer(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if record.getMessage() == "ready":
                _announce(int(vars(record)["port"]))
            return record.levelno >= logging.WARNING

    configure_logs("text", "info")
    logging.getLogger("edgeweave.server").addFilter(Announcer())
    names = tuple(f"edgeweave.bench.serving_peers:{name}" for name in ("Wide", "Shift", "Slow"))
    return serve(ServerSettings(repository, port=0, metrics_port=None, allow_architectures=names))


def main() -> int:
    """Be the server that the first word names."""
    from edgeweave.inference_server._process import end_with_parent

    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("echo", "litserve", "edgeweave"))
    parser.add_argument("words", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    end_with_parent()
    if args.kind == "echo":
        asyncio.run(_echo())
    elif args.kind == "litserve":
        from edgeweave.bench.serving_litserve import serve

        port, batch, depth = (int(word) for word in args.words)
        _announce(port)
        serve(port, batch, depth)
    else:
        return _edgeweave(Path(args.words[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
