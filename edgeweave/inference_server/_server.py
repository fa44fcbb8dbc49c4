"""A server in an event loop: start, announce, drain."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from ._core import InferenceCore
from ._errors import ModelConfigError
from ._health import HealthService
from ._registry import Registry
from ._repository import Repository
from ._service import build_admission, build_handlers
from ._settings import ServerSettings
from ._tracing import Tracer
from ._transport import Transport, open_transport

__all__ = ["BackgroundServer", "InferenceServer"]

_log = logging.getLogger("edgeweave.server")
# After the models have drained, answers still have to reach their clients.
_LAST_WRITES_S = 1.0
_MOST_TOKENS = 1024


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelConfigError(f"settings: {what} must be readable, got {error.strerror}") from None


def _tokens(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    lines = _read(path, "token_file").decode("utf-8", "replace").split()
    if not lines or len(lines) > _MOST_TOKENS:
        raise ModelConfigError(
            f"settings: token_file must hold 1 to {_MOST_TOKENS} tokens, got {len(lines)}"
        )
    return tuple(lines)


class InferenceServer:
    """A gRPC server of a repository's models, for use inside an event loop.

    Args:
        settings: How to serve.

    Raises:
        ModelConfigError: The repository, a file of the settings, or an option is not there.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.port = 0
        self.metrics_port: int | None = None
        self.failures: dict[str, str] = {}
        self.registry = Registry(settings, Repository(settings.model_repository))
        self.core = InferenceCore(settings, self.registry)
        self._health = HealthService(self.core)
        self.registry.on_change = self._health.changed
        self._tracer = Tracer(settings.tracing)
        self._token_values = _tokens(settings.token_file)
        self._transport: Transport | None = None
        self._stop_metrics: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Listen, then load the models; until they are, the server answers but is not ready.

        Raises:
            ModelConfigError: The address cannot be bound, or a TLS file is wrong.
        """
        handlers = build_handlers(self.core, self._health, self._token_values, self._tracer)
        admit = build_admission(self._token_values) if self._token_values else None
        self._transport = open_transport(self.settings, handlers, admit)
        self.port = self._transport.port
        self._start_metrics()
        await self._transport.start()
        _log.info("listening", extra={"port": self.port, "metrics_port": self.metrics_port})
        self.failures = await self.registry.load_all()
        # The models that did load serve, also where others did not and the server is not ready.
        self.core.ready = True
        self._health.changed()
        _log.info("ready", extra={"port": self.port, "failed": sorted(self.failures)})

    def _start_metrics(self) -> None:
        wanted = self.settings.metrics_port
        if wanted is None:
            return
        from prometheus_client import start_http_server

        from ._metrics import build_metrics_registry

        tls = self.settings.tls
        try:
            http, thread = start_http_server(
                wanted,
                addr=self.settings.metrics_host,
                registry=build_metrics_registry(self.core),
                certfile=None if tls is None else str(tls.cert),
                keyfile=None if tls is None else str(tls.key),
            )
        except OSError as error:
            raise ModelConfigError(
                f"settings: metrics port {wanted} must be free, got {error.strerror}"
            ) from None
        self.metrics_port = http.server_address[1]

        def stop() -> None:
            http.shutdown()
            http.server_close()
            thread.join()

        self._stop_metrics = stop

    async def stop(self) -> bool:
        """Refuse new requests, let those inside finish, then end.

        Returns:
            Whether all of them finished within `drain_s`.
        """
        _log.info("draining", extra={"in_flight": self.core.in_flight})
        self.registry.closing = True
        self._health.changed()
        finished = await self.registry.close(self.settings.drain_s)
        if self._transport is not None:
            await self._transport.stop(_LAST_WRITES_S)
        await asyncio.to_thread(self._stop_metrics)
        _log.info("stopped", extra={"all_finished": finished})
        return finished


class BackgroundServer:
    """A server in a thread of this process, for notebooks and tests.

    Args:
        settings: How to serve.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from edgeweave.inference_server import BackgroundServer, Client, ServerSettings
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     settings = ServerSettings(Path(folder), port=0, metrics_port=None)
        ...     with BackgroundServer(settings) as server:
        ...         with Client(f"127.0.0.1:{server.port}") as client:
        ...             print(client.server_ready())
        True
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="edgeweave-server", daemon=True)
        self.server: InferenceServer | None = None

    @property
    def port(self) -> int:
        """The port of gRPC."""
        return self._inner.port

    @property
    def metrics_port(self) -> int | None:
        """The port of the metrics, if there are any."""
        return self._inner.metrics_port

    @property
    def failures(self) -> dict[str, str]:
        """Models that did not load, and why."""
        return self._inner.failures

    @property
    def _inner(self) -> InferenceServer:
        if self.server is None:
            raise RuntimeError("BackgroundServer: must be started first; use it in `with`")
        return self.server

    def __enter__(self) -> BackgroundServer:
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Drain and end; a second call does nothing."""
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        server = InferenceServer(self._settings)
        try:
            await server.start()
            self.server = server
            self._started.set()
            await self._stopping.wait()
        finally:
            await server.stop()
