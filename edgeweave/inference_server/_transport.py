"""Where requests come in: our own HTTP/2 in the event loop, or the server of `grpc.aio`.

Both take the same handlers. Our own needs a third of the processor time per request, since it hands
nothing from thread to thread and gathers what it writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from ._calls import CallSettings, Methods
from ._errors import ModelConfigError
from ._http2 import Connection
from ._http2_send import ConnectionSettings
from ._settings import ServerSettings, TlsSettings

__all__ = ["Transport", "open_transport"]

_BACKLOG: Final = 4096
_HANDSHAKE_S: Final = 10.0
# Probes and calls that are about to be refused have to come in too.
_STREAMS_PER_RPC: Final = 4
# Memory of requests that no handler has taken yet, and per connection of answers that are not read,
# in messages of the longest kind.
_MOST_MESSAGES: Final = 16


class Transport(Protocol):
    """Listens and calls the handlers."""

    port: int

    async def start(self) -> None:
        """Begin to accept."""

    async def stop(self, grace_s: float) -> None:
        """Let calls finish for some time, then end all."""


def open_transport(
    settings: ServerSettings,
    handlers: list[Any],
    admit: Callable[[str, Any], bool] | None = None,
) -> Transport:
    """Bind the port.

    Args:
        settings: Where and how.
        handlers: Generic handlers of grpc.
        admit: Refuses calls by their path and headers, where the transport can ask it.

    Returns:
        Bound, but not yet accepting.

    Raises:
        ModelConfigError: The address cannot be bound, or a TLS file is wrong.
    """
    if settings.transport == "grpcio":
        return _Grpcio(settings, handlers)
    return _Http2(settings, handlers, admit)


def _refused(settings: ServerSettings) -> ModelConfigError:
    address = f"{_bracketed(settings.host)}:{settings.port}"
    return ModelConfigError(
        f"settings: {address} must be free and the TLS files valid, got a refusal"
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _tls_bytes(tls: TlsSettings) -> tuple[bytes, bytes, bytes | None]:
    """Certificate, key and the clients' CA, read here so that an error names which is missing."""
    found = []
    for path, what in ((tls.cert, "tls_cert"), (tls.key, "tls_key"), (tls.client_ca, "client_ca")):
        try:
            found.append(None if path is None else path.read_bytes())
        except OSError as error:
            raise ModelConfigError(
                f"settings: {what} must be readable, got {error.strerror}"
            ) from None
    cert, key, ca = found
    return cert or b"", key or b"", ca


class _Http2:
    def __init__(
        self,
        settings: ServerSettings,
        handlers: list[Any],
        admit: Callable[[str, Any], bool] | None,
    ) -> None:
        limits = settings.limits
        self._calls = CallSettings(
            Methods(handlers), limits.message_bytes, _MOST_MESSAGES * limits.message_bytes
        )
        self._calls.admit = admit
        self._connections = ConnectionSettings(
            _STREAMS_PER_RPC * limits.concurrent_rpcs,
            _MOST_MESSAGES * limits.message_bytes,
            self._calls.open,
            limits.connections,
        )
        self._tls = None if settings.tls is None else _context(settings, settings.tls)
        self._sockets = _bind(settings)
        self.port = int(self._sockets[0].getsockname()[1])
        self._servers: list[asyncio.Server] = []

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            self._servers.append(
                await loop.create_server(
                    lambda: Connection(self._connections),
                    sock=sock,
                    ssl=self._tls,
                    ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_S,
                    backlog=_BACKLOG,
                )
            )

    async def stop(self, grace_s: float) -> None:
        for server in self._servers:
            server.close()
        for sock in self._sockets:
            sock.close()
        shared = self._connections
        for connection in list(shared.connections):
            connection.go_away()
        until = asyncio.get_running_loop().time() + grace_s
        # Answers that wait for the client's window count too.
        await self._wait(until, lambda: any(c.streams for c in shared.connections))
        tasks = list(self._calls.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for connection in list(shared.connections):
            connection.go_away(finally_=True)
        # What was written last leaves in the loop's own time.
        await self._wait(until, lambda: bool(shared.connections))
        for connection in list(shared.connections):
            connection.abort()

    async def _wait(self, until: float, busy: Callable[[], bool]) -> None:
        """Wait while `busy`, but not longer than `until`."""
        loop = asyncio.get_running_loop()
        news = self._connections.news
        while busy() and loop.time() < until:
            news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(news.wait(), until - loop.time())


def _context(settings: ServerSettings, tls: TlsSettings) -> ssl.SSLContext:
    _, _, ca = _tls_bytes(tls)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    try:
        context.load_cert_chain(tls.cert, tls.key)
        if ca is not None:
            context.load_verify_locations(cadata=ca.decode("ascii"))
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, ValueError):
        raise _refused(settings) from None
    return context


def _bind(settings: ServerSettings) -> list[socket.socket]:
    """A listening socket for each address of the host, all on one port."""
    host, port = settings.host.strip("[]"), settings.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        raise _refused(settings) from None
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as undo:
        for family, _, _, _, address in found:
            everywhere = family == socket.AF_INET6 and address[0] == "::"
            try:
                made = socket.create_server(
                    (str(address[0]), port),
                    family=family,
                    backlog=_BACKLOG,
                    reuse_port=settings.reuse_port,
                    dualstack_ipv6=everywhere and socket.has_dualstack_ipv6(),
                )
            except OSError as error:
                # A name may have an address of a kind that this machine has switched off.
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    continue
                raise _refused(settings) from None
            undo.callback(made.close)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sockets.append(made)
            port = made.getsockname()[1]
        if not sockets:
            raise _refused(settings)
        undo.pop_all()
    return sockets


class _Grpcio:
    def __init__(self, settings: ServerSettings, handlers: list[Any]) -> None:
        size = settings.limits.message_bytes
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", size),
                ("grpc.max_send_message_length", size),
                # Or a second server on the port would silently take half of the requests.
                ("grpc.so_reuseport", int(settings.reuse_port)),
            ]
        )
        self._server.add_generic_rpc_handlers(handlers)
        address = f"{_bracketed(settings.host)}:{settings.port}"
        add = self._server.add_insecure_port
        if settings.tls is not None:
            cert, key, ca = _tls_bytes(settings.tls)
            credentials = grpc.ssl_server_credentials(
                [(key, cert)], root_certificates=ca, require_client_auth=ca is not None
            )
            add = functools.partial(self._server.add_secure_port, server_credentials=credentials)
        try:
            self.port = int(add(address))
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise _refused(settings)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)
