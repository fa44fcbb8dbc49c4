"""The client's side of HTTP/2 for tests, frame by frame, and a connection without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc

from edgeweave.inference_server._calls import CallSettings, Methods
from edgeweave.inference_server._frames import Flag, FrameKind, frame
from edgeweave.inference_server._hpack import HeaderDecoder, encode_field
from edgeweave.inference_server._http2 import Connection
from edgeweave.inference_server._http2_send import ConnectionSettings

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
GREETING = PREFACE + frame(FrameKind.SETTINGS, 0, 0)
MESSAGE_BYTES = 1 << 16


def settings(*pairs: tuple[int, int]) -> bytes:
    body = b"".join(name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in pairs)
    return frame(FrameKind.SETTINGS, 0, 0, body)


def window(stream_id: int, more: int) -> bytes:
    return frame(FrameKind.WINDOW_UPDATE, 0, stream_id, more.to_bytes(4, "big"))


def reset(stream_id: int, code: int = 8) -> bytes:
    return frame(FrameKind.RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def block(path: str, **more: str) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "here",
        "te": "trailers",
        "content-type": "application/grpc",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    return b"".join(encode_field(name, value) for name, value in fields.items())


def headers(stream_id: int, path: str, *, end: bool = False, **more: str) -> bytes:
    flags = Flag.END_HEADERS | (Flag.END_STREAM if end else 0)
    return frame(FrameKind.HEADERS, flags, stream_id, block(path, **more))


def message(data: bytes, compressed: int = 0) -> bytes:
    return bytes((compressed,)) + len(data).to_bytes(4, "big") + data


def data(stream_id: int, content: bytes, *, end: bool = True) -> bytes:
    return frame(FrameKind.DATA, Flag.END_STREAM if end else 0, stream_id, content)


def ask(stream_id: int, path: str, content: bytes, **more: str) -> bytes:
    """A whole unary request."""
    return headers(stream_id, path, **more) + data(stream_id, message(content))


def frames(raw: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Kind, flags, stream and payload of each frame."""
    position = 0
    while position < len(raw):
        length = int.from_bytes(raw[position : position + 3], "big")
        kind, flags = raw[position + 3], raw[position + 4]
        stream_id = int.from_bytes(raw[position + 5 : position + 9], "big")
        position += 9
        yield kind, flags, stream_id, raw[position : position + length]
        position += length
    assert position == len(raw), "a frame is cut short"


class Answers:
    """What a server sent, by stream."""

    def __init__(self, raw: bytes) -> None:
        decoder = HeaderDecoder(1 << 16)
        self.fields: dict[int, dict[str, str]] = {}
        self.content: dict[int, bytes] = {}
        self.ended: list[int] = []
        self.resets: dict[int, int] = {}
        self.kinds: list[int] = []
        self.goaways: list[tuple[int, int]] = []
        for kind, flags, stream_id, payload in frames(raw):
            self.kinds.append(kind)
            if kind == FrameKind.HEADERS:
                self.fields.setdefault(stream_id, {}).update(decoder.decode(payload))
            elif kind == FrameKind.DATA:
                self.content[stream_id] = self.content.get(stream_id, b"") + payload
            elif kind == FrameKind.RST_STREAM:
                self.resets[stream_id] = int.from_bytes(payload, "big")
            elif kind == FrameKind.GOAWAY:
                self.goaways.append(
                    (int.from_bytes(payload[:4], "big"), int.from_bytes(payload[4:8], "big"))
                )
            if kind in (FrameKind.HEADERS, FrameKind.DATA) and flags & Flag.END_STREAM:
                self.ended.append(stream_id)

    def status(self, stream_id: int) -> str:
        """Name of a stream's status."""
        number = int(self.fields[stream_id]["grpc-status"])
        return next(code.name for code in grpc.StatusCode if code.value[0] == number)

    def messages(self, stream_id: int) -> list[bytes]:
        """The messages of a stream."""
        raw, found = self.content.get(stream_id, b""), []
        while raw:
            length = int.from_bytes(raw[1:5], "big")
            found.append(raw[5 : 5 + length])
            raw = raw[5 + length :]
        return found


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = self.aborted = False
        self.reading = True
        # The socket takes this many bytes, if `protocol` is told when they are exceeded.
        self.high = 1 << 30
        self.protocol: Connection | None = None

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data
        if self.protocol is not None and len(self.written) > self.high:
            self.protocol.pause_writing()

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def get_extra_info(self, name: str) -> None:
        """Nothing: no TLS."""

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_write_buffer_limits(self, high: int) -> None:
        assert high > 0


class Peer:
    """A server's connection in the running loop, and its handlers' log."""

    def __init__(
        self,
        handlers: dict[str, Any],
        streams: int = 100,
        backlog: int = 1 << 20,
        shared: ConnectionSettings | None = None,
    ) -> None:
        generic = grpc.method_handlers_generic_handler("t.T", handlers)
        self.calls = CallSettings(Methods([generic]), MESSAGE_BYTES, 4 * MESSAGE_BYTES)
        self.shared = shared or ConnectionSettings(streams, backlog, self.calls.open)
        self.connection = Connection(self.shared)
        self.wire = Wire()
        self.connection.connection_made(self.wire)

    async def send(self, *parts: bytes, at_a_time: int = 0) -> None:
        """Hand bytes over, in pieces if asked, and let the loop work."""
        raw = b"".join(parts)
        step = at_a_time or max(1, len(raw))
        for start in range(0, len(raw), step):
            if not self.wire.closed:
                self.connection.data_received(raw[start : start + step])
        await self.rest()

    async def rest(self) -> None:
        """Let everything that can run in the loop run."""
        for _ in range(12):
            await asyncio.sleep(0)

    @property
    def frames(self) -> list[tuple[int, int, int, bytes]]:
        return list(frames(self.wire.written))

    @property
    def answers(self) -> Answers:
        return Answers(self.wire.written)

    async def end(self) -> None:
        """Lose the connection; nothing may be left behind."""
        self.connection.connection_lost(None)
        await self.rest()
        assert not self.connection.streams
        assert not self.calls.tasks
        assert self.calls.memory.used == 0
        assert self.connection._backlog_bytes == 0
        assert self.connection not in self.shared.connections


def echo_handlers(log: list[str] | None = None) -> dict[str, Any]:
    """Unary echo, a call that waits for ever, and streams."""
    seen = [] if log is None else log

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async def wait(request: bytes, context: Any) -> bytes:
        seen.append("began")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        return b""

    async def refuse(request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "100% göne\n")
        return b""

    async def fail(request: bytes, context: Any) -> bytes:
        raise RuntimeError("secret words")

    async def tell(request: bytes, context: Any) -> bytes:
        remaining = context.time_remaining()
        return repr((sorted(context.invocation_metadata()), remaining is None)).encode()

    async def chat(requests: Any, context: Any) -> Any:
        async for request in requests:
            seen.append(f"got {len(request)}")
            yield request

    async def count(request: bytes, context: Any) -> Any:
        for i in range(int(request)):
            seen.append(f"made {i}")
            yield bytes(30000)

    return {
        **{f.__name__: grpc.unary_unary_rpc_method_handler(f) for f in (echo, wait, refuse, fail)},
        "tell": grpc.unary_unary_rpc_method_handler(tell),
        "chat": grpc.stream_stream_rpc_method_handler(chat),
        "count": grpc.unary_stream_rpc_method_handler(count),
    }


def run(body: Any, timeout_s: float = 60.0) -> None:
    """Run a coroutine function, with patience."""
    asyncio.run(asyncio.wait_for(body(), timeout_s))
