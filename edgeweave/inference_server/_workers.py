"""Several serving processes on one port, watched over by a parent that serves nothing itself."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Final

from ._errors import ModelConfigError
from ._settings import ServerSettings

__all__ = ["supervise"]

_log = logging.getLogger("edgeweave.server")
# A worker that ends sooner than this is taken to be unable to start.
_YOUNG_S: Final = 10.0
_MOST_YOUNG_DEATHS: Final = 3
# Beyond `drain_s`: the interpreter's own end, before the worker is killed.
_GRACE_S: Final = 5.0


def _reserve(host: str, port: int) -> socket.socket:
    """Hold a port for the workers, and make sure that nobody else has it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = (host.strip("[]"), port)
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Without SO_REUSEPORT this fails where any process has the port, also one that shares it.
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Never listens, so no connection comes here.
        holder.bind(address)
    except OSError as error:
        holder.close()
        raise ModelConfigError(
            f"settings: port {port} must be free, got {error.strerror}"
        ) from None
    return holder


def supervise(settings: ServerSettings, command: Sequence[str]) -> int:
    """Run workers until SIGTERM or SIGINT; start one anew when it dies.

    Args:
        settings: How to serve.
        command: What starts a worker; `--port`, `--metrics-port` and `--worker-index` are added.

    Returns:
        0, or 1 if a worker cannot start or had to be killed.

    Raises:
        ModelConfigError: The port is taken.
    """
    with _reserve(settings.host, settings.port) as holder:
        port = holder.getsockname()[1]
        return asyncio.run(_Supervisor(settings, command, port).run())


class _Supervisor:
    def __init__(self, settings: ServerSettings, command: Sequence[str], port: int) -> None:
        self._settings = settings
        self._command = list(command)
        self._port = port
        self._stopping = asyncio.Event()
        self._failed = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        await asyncio.gather(*(self._keep(i) for i in range(self._settings.workers)))
        return int(self._failed)

    def _arguments(self, index: int) -> list[str]:
        metrics = self._settings.metrics_port
        ports = ["--port", str(self._port)]
        if metrics:
            ports += ["--metrics-port", str(metrics + index)]
        return [*self._command, *ports, "--worker-index", str(index)]

    async def _keep(self, index: int) -> None:
        """Keep one worker alive until the end."""
        young_deaths = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            worker = await asyncio.create_subprocess_exec(sys.executable, *self._arguments(index))
            _log.info("worker started", extra={"worker": index, "pid": worker.pid})
            ended = asyncio.ensure_future(worker.wait())
            told = asyncio.ensure_future(self._stopping.wait())
            await asyncio.wait({ended, told}, return_when=asyncio.FIRST_COMPLETED)
            told.cancel()
            if not ended.done():
                await self._end(worker, ended)
                return
            _log.error("worker died", extra={"worker": index, "status": worker.returncode})
            young_deaths = young_deaths + 1 if time.monotonic() - started < _YOUNG_S else 0
            if young_deaths >= _MOST_YOUNG_DEATHS:
                _log.error("worker cannot start", extra={"worker": index})
                self._failed = True
                self._stopping.set()

    async def _end(self, worker: asyncio.subprocess.Process, ended: asyncio.Future[int]) -> None:
        worker.send_signal(signal.SIGTERM)
        try:
            status = await asyncio.wait_for(ended, self._settings.drain_s + _GRACE_S)
            self._failed |= status != 0
        except asyncio.TimeoutError:
            worker.kill()
            await worker.wait()
            self._failed = True
