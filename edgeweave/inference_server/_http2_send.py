"""What a connection sends: as far as the peer's windows allow, gathered per turn of the loop."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final

from ._frames import (
    FIRST_WINDOW,
    LARGEST_ID,
    LARGEST_WINDOW,
    LEAST_FRAME,
    FrameKind,
    Http2Error,
    Http2ErrorCode,
    frame,
)

__all__ = ["ConnectionSettings", "Sender", "Stream"]

# How much a peer may send on a stream before we have taken it.
STREAM_WINDOW: Final = 1 << 22
# What is handed to the transport at a time: what waits there delays pings and all other streams.
_WRITE_BYTES: Final = 1 << 20
# How long a connection that has failed may take to tell so. A peer that reads nothing never would.
_LAST_WRITES_S: Final = 5.0
# Of all connections, in what one may hold.
_BACKLOGS: Final = 4
_log = logging.getLogger("edgeweave.server")


class ConnectionSettings:
    """What a connection may hold.

    Args:
        streams: Requests at a time.
        backlog_bytes: Answers that the peer does not read.
        open_stream: Makes a stream of a connection, an id, headers, and the headers' size.
        connections: Connections at a time.
    """

    def __init__(
        self,
        streams: int,
        backlog_bytes: int,
        open_stream: Callable[[Sender, int, list[tuple[str, str]], int], Stream],
        connections: int = 1 << 12,
    ) -> None:
        self.streams = streams
        self.backlog_bytes = backlog_bytes
        self.all_backlog_bytes = _BACKLOGS * backlog_bytes
        self.backlog_used = 0
        self.most_connections = connections
        self.open_stream = open_stream
        self.connections: set[Sender] = set()
        # Set whenever a stream or a connection ends.
        self.news = asyncio.Event()


class Stream(ABC):
    """One request and its answer, as the connection sees it.

    Args:
        connection: Its connection.
        stream_id: Its number there.
    """

    __slots__ = (
        "backlog",
        "connection",
        "id",
        "id_bytes",
        "owed",
        "remote_ended",
        "room",
        "send_window",
        "trailers",
    )

    def __init__(self, connection: Sender, stream_id: int) -> None:
        self.connection = connection
        self.id = stream_id
        self.id_bytes = stream_id.to_bytes(4, "big")
        self.send_window = connection.first_send_window
        # Received and not yet given back to the peer's window.
        self.owed = 0
        self.remote_ended = False
        # What waits for the peer's window, made when the first piece has to.
        self.backlog: deque[memoryview] | None = None
        self.trailers: bytes | None = None
        self.room: asyncio.Future[None] | None = None

    @abstractmethod
    def receive(self, data: bytes, ended: bool) -> None:
        """Take a piece of the request; `ended` after the last one."""

    @abstractmethod
    def closed(self) -> None:
        """All was sent, the peer gave up, or the connection is gone."""

    @property
    def credits_at_once(self) -> bool:
        """Whether what was received may come again before anybody has looked at it."""
        return True


class Sender(asyncio.Protocol):
    """The sending half of the server's side of a connection.

    Args:
        settings: Shared by all connections of a server.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        self.loop = asyncio.get_running_loop()
        self.streams: dict[int, Stream] = {}
        self.first_send_window = FIRST_WINDOW
        self.paused = False
        self.closing = False
        self._settings = settings
        self._transport: Any = None
        self._last_id = 0
        self._send_window = FIRST_WINDOW
        self._peer_frame = LEAST_FRAME
        self._out: list[Any] = []
        self._flush_scheduled = False
        # What waits for the connection's window or the transport, but not for its stream's window.
        self._blocked: OrderedDict[int, Stream] = OrderedDict()
        self._backlog_bytes = 0
        # The fields of every good answer enter the peer's table once: their indices, 0 for none.
        self._indexing = True
        self._type_index = 0
        self._status_index = 0
        self._block_prefix = b""

    def credit(self, stream: Stream) -> None:
        """Let the peer send again what it has sent on a stream."""
        if stream.owed >= STREAM_WINDOW // 2 and stream.id in self.streams:
            more = stream.owed.to_bytes(4, "big")
            self._out.append(frame(FrameKind.WINDOW_UPDATE, 0, stream.id, more))
            stream.owed = 0
            self._schedule_flush()

    def response_headers(self) -> bytes:
        """The header block that every answer begins with; to be sent next."""
        if self._type_index:
            return bytes((0x88, 0x80 | self._type_index))
        # 0x88 is ":status: 200"; 31 is the name "content-type"; 16 bytes follow.
        if not self._indexing:
            return b"\x88\x0f\x10\x10application/grpc"
        self._type_index = 62
        self._status_index += bool(self._status_index)
        return b"\x88\x5f\x10application/grpc"

    def good_trailers(self) -> bytes:
        """The block that says `grpc-status: 0`; to be sent next."""
        if self._status_index:
            return bytes((0x80 | self._status_index,))
        if not self._indexing:
            return b"\x00\x0bgrpc-status\x010"
        self._status_index = 62
        self._type_index += bool(self._type_index)
        return b"\x40\x0bgrpc-status\x010"

    def send_headers(self, stream: Stream, block: bytes, *, end: bool = False) -> None:
        """Send a header block; with `end` it is the last of the stream."""
        if self._block_prefix:
            block, self._block_prefix = self._block_prefix + block, b""
        head = len(block).to_bytes(3, "big") + (b"\x01\x05" if end else b"\x01\x04")
        self._out += (head, stream.id_bytes, block)
        if end:
            self._end(stream)
        self._schedule_flush()

    def send_data(self, stream: Stream, head: bytes, data: bytes) -> None:
        """Send both as far as the windows allow, and the rest when they do."""
        length = len(head) + len(data)
        if (
            stream.backlog is None
            and length <= self._peer_frame
            and length <= stream.send_window
            and length <= self._send_window
            and not self.paused
        ):
            stream.send_window -= length
            self._send_window -= length
            self._out += (length.to_bytes(3, "big") + b"\x00\x00", stream.id_bytes, head, data)
            self._schedule_flush()
            return
        if self.closing:
            return
        if stream.backlog is None:
            stream.backlog = deque()
        stream.backlog += (memoryview(part) for part in (head, data) if part)
        self._count_backlog(length)
        settings = self._settings
        too_much: Sender | None = None
        if self._backlog_bytes > settings.backlog_bytes:
            too_much = self
        elif settings.backlog_used > settings.all_backlog_bytes:
            too_much = max(settings.connections, key=lambda other: other._backlog_bytes)
        if too_much is not None:
            too_much._fail(Http2Error(Http2ErrorCode.CALM, "answers are not read"))
        if not self.closing:
            self._send_backlog(stream)

    def _count_backlog(self, more: int) -> None:
        self._backlog_bytes += more
        self._settings.backlog_used += more

    def send_trailers(self, stream: Stream, block: bytes | None) -> None:
        """End a stream once its data is sent; None for the trailers of success."""
        if stream.backlog is None:
            # Encoded when it is its turn: the table changes with each block.
            self.send_headers(stream, self.good_trailers() if block is None else block, end=True)
        else:
            stream.trailers = b"" if block is None else block

    async def sent(self, stream: Stream) -> None:
        """Wait until the peer has room for more."""
        if stream.backlog is not None:
            stream.room = self.loop.create_future()
            await stream.room

    def _send_backlog(self, stream: Stream) -> None:
        backlog = stream.backlog
        if backlog is None:
            return
        taken = gathered = 0
        while backlog and not self.paused:
            first = backlog[0]
            allowed = min(self._peer_frame, stream.send_window, self._send_window)
            if allowed <= 0:
                break
            piece = first[:allowed]
            length = len(piece)
            if length == len(first):
                backlog.popleft()
            else:
                backlog[0] = first[length:]
            taken += length
            stream.send_window -= length
            self._send_window -= length
            self._out += (length.to_bytes(3, "big") + b"\x00\x00", stream.id_bytes, piece)
            gathered += length
            if gathered >= _WRITE_BYTES:
                gathered = 0
                # May set `paused`.
                self.flush()
        self._count_backlog(-taken)
        self._schedule_flush()
        if backlog:
            if stream.send_window > 0:
                self._blocked[stream.id] = stream
            else:
                self._blocked.pop(stream.id, None)
            return
        stream.backlog = None
        self._blocked.pop(stream.id, None)
        if stream.room is not None and not stream.room.done():
            stream.room.set_result(None)
        if stream.trailers is not None:
            self.send_trailers(stream, stream.trailers or None)

    def _send_blocked(self) -> None:
        # Each turn uses the window up, or takes the stream out.
        while self._blocked and self._send_window > 0 and not (self.paused or self.closing):
            self._send_backlog(next(iter(self._blocked.values())))

    def _change_windows(self, first_window: int) -> None:
        """The peer's first window has changed, and with it those of all streams."""
        change = first_window - self.first_send_window
        self.first_send_window = first_window
        for stream in list(self.streams.values()):
            stream.send_window += change
            if stream.send_window > LARGEST_WINDOW:
                raise Http2Error(Http2ErrorCode.FLOW_CONTROL, "window too large")
            if stream.backlog:
                self._send_backlog(stream)

    def _end(self, stream: Stream) -> None:
        """Our side has ended; a request that still goes on is of no use to anybody."""
        if not stream.remote_ended:
            self._out.append(
                frame(
                    FrameKind.RST_STREAM, 0, stream.id, Http2ErrorCode.NO_ERROR.to_bytes(4, "big")
                )
            )
        self._forget(stream)
        stream.closed()

    def reset(self, stream: Stream, code: int) -> None:
        """End a stream without an answer."""
        if stream.id in self.streams:
            self._out.append(frame(FrameKind.RST_STREAM, 0, stream.id, code.to_bytes(4, "big")))
            self._forget(stream)
            stream.closed()
            self._schedule_flush()

    def _forget(self, stream: Stream) -> None:
        if self.streams.pop(stream.id, None) is not None:
            self._settings.news.set()
        self._blocked.pop(stream.id, None)
        if stream.backlog is not None:
            self._count_backlog(-sum(map(len, stream.backlog)))
            stream.backlog = None

    def _give_up(self) -> None:
        """End all that is in progress."""
        for stream in list(self.streams.values()):
            self._forget(stream)
            stream.closed()

    def _schedule_flush(self) -> None:
        if self.closing:
            self._out.clear()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what was gathered."""
        self._flush_scheduled = False
        if self._out and not self.closing:
            out, self._out = self._out, []
            self._transport.write(b"".join(out))

    def go_away(self, *, finally_: bool = False) -> None:
        """Ask the peer to open no more streams here; at last, close."""
        if self.closing:
            return
        last = self._last_id if finally_ else LARGEST_ID
        self._out.append(frame(FrameKind.GOAWAY, 0, 0, last.to_bytes(4, "big") + bytes(4)))
        self.flush()
        if finally_:
            self.closing = True
            self._transport.close()

    def _fail(self, error: Http2Error) -> None:
        if self.closing:
            return
        _log.info("connection ended", extra={"reason": str(error), "code": error.code})
        body = self._last_id.to_bytes(4, "big") + error.code.to_bytes(4, "big")
        self._out.append(frame(FrameKind.GOAWAY, 0, 0, body + str(error).encode()))
        self.flush()
        self.closing = True
        self._give_up()
        self._transport.close()
        self.loop.call_later(_LAST_WRITES_S, self._transport.abort)

    def abort(self) -> None:
        """Close without waiting for what was written."""
        self._transport.abort()
