"""HTTP/2 (RFC 9113) as far as a gRPC server needs it: one connection, its frames and its windows.

Bytes come in by `data_received` and are cut into frames; what a frame asks for is done at once, and
what there is to send is gathered and written once per turn of the event loop. So a burst of small
requests costs one read, and their answers one write.

A peer can be hostile. Everything that it can make us hold has a bound: header blocks, streams,
request bytes (windows), answers that it does not read; everything that it can make us do for little
is counted (resets, empty frames).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from ._checks import EMPTY_COST, VISIT_COST, Effort, is_request
from ._frames import (
    FIRST_WINDOW,
    LARGEST_FRAME,
    LARGEST_ID,
    LARGEST_WINDOW,
    LEAST_FRAME,
    Flag,
    FrameKind,
    Http2Error,
    Http2ErrorCode,
    Setting,
    frame,
)
from ._hpack import TABLE_BYTES, HeaderDecoder, HpackError
from ._http2_send import STREAM_WINDOW, ConnectionSettings, Sender

__all__ = ["Connection"]

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADER_BYTES: Final = 9
# DATA frames are taken piece by piece, so that a long one needs no buffer of its length; the
# others are buffered whole and may not be longer than this.
_OUR_FRAME: Final = 1 << 20
_HEADER_BLOCK_BYTES: Final = 1 << 16
# A header block in one frame, with all the padding there can be.
_MOST_BUFFERED_FRAME: Final = _HEADER_BLOCK_BYTES + 300
_CONNECTION_WINDOW: Final = 1 << 26
_GREETING_S: Final = 10.0
_WRITE_HIGH_WATER: Final = 1 << 20
_log = logging.getLogger("edgeweave.server")


class Connection(Sender):
    """The server's side of one connection.

    Args:
        settings: Shared by all connections of a server.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        super().__init__(settings)
        self._decoder = HeaderDecoder(_HEADER_BLOCK_BYTES)
        self._rest = b""
        self._greeted = False
        self._settled = False
        self._timer: asyncio.TimerHandle | None = None
        self._owed = 0
        self._received_window = _CONNECTION_WINDOW
        # The DATA frame in progress: stream, flags, bytes of content and of padding to come.
        self._data: tuple[int, int] | None = None
        self._content_left = 0
        self._padding_left = 0
        # The header block in progress: stream, flags of its HEADERS, fragments.
        self._block: tuple[int, int, bytearray] | None = None
        self._effort = Effort(self.loop.time())

    # --- of asyncio ---

    def connection_made(self, transport: Any) -> None:
        """Greet."""
        self._transport = transport
        tls = transport.get_extra_info("ssl_object")
        known = tls is None or tls.selected_alpn_protocol() == "h2"
        if not known or len(self._settings.connections) >= self._settings.most_connections:
            _log.info("connection refused", extra={"reason": "too many" if known else "no h2"})
            self.closing = True
            transport.abort()
            return
        transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER)
        self._settings.connections.add(self)
        self._timer = self.loop.call_later(_GREETING_S, self._too_slow)
        pairs = (
            (Setting.STREAMS, self._settings.streams),
            (Setting.WINDOW, STREAM_WINDOW),
            (Setting.FRAME, _OUR_FRAME),
            (Setting.LIST, _HEADER_BLOCK_BYTES),
        )
        body = b"".join(n.to_bytes(2, "big") + v.to_bytes(4, "big") for n, v in pairs)
        more = (_CONNECTION_WINDOW - FIRST_WINDOW).to_bytes(4, "big")
        transport.write(
            frame(FrameKind.SETTINGS, 0, 0, body) + frame(FrameKind.WINDOW_UPDATE, 0, 0, more)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up all that is in progress."""
        self.closing = True
        self._settings.connections.discard(self)
        self._settings.news.set()
        self._stop_timer()
        self._give_up()

    def pause_writing(self) -> None:
        """The peer reads slowly: make nothing more for it, and take nothing more from it."""
        self.paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It has caught up."""
        self.paused = False
        if not self.closing:
            self._transport.resume_reading()
            self._send_blocked()

    def eof_received(self) -> bool:
        """A peer that sends no more is gone."""
        return False

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        if self.closing:
            return
        try:
            self._parse(self._rest + data if self._rest else data)
        except Http2Error as error:
            self._fail(error)
        except HpackError as error:
            self._fail(Http2Error(Http2ErrorCode.COMPRESSION, str(error)))
        if self._out:
            self.flush()

    def _too_slow(self) -> None:
        self._fail(Http2Error(Http2ErrorCode.CALM, "too slow"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- in ---

    def _parse(self, buffer: bytes) -> None:
        position, end = 0, len(buffer)
        if not self._greeted:
            if not _PREFACE.startswith(buffer[: len(_PREFACE)]):
                raise Http2Error(Http2ErrorCode.PROTOCOL, "no HTTP/2")
            if end < len(_PREFACE):
                self._rest = buffer
                return
            self._greeted = True
            position = len(_PREFACE)
        while not self.closing:
            if self._data is not None:
                position = self._take_data(buffer, position, end)
                if self._data is not None:
                    break
                continue
            start = position + _HEADER_BYTES
            if start > end:
                break
            length = int.from_bytes(buffer[position : position + 3], "big")
            kind, flags = buffer[position + 3], buffer[position + 4]
            stream_id = int.from_bytes(buffer[position + 5 : start], "big") & LARGEST_ID
            if self._block is not None and kind != FrameKind.CONTINUATION:
                raise Http2Error(Http2ErrorCode.PROTOCOL, "headers interrupted")
            if kind == FrameKind.DATA:
                padding = 0
                if flags & Flag.PADDED:
                    if not length:
                        raise Http2Error(Http2ErrorCode.PROTOCOL, "wrong padding")
                    if start == end:
                        break
                    padding = buffer[start] + 1
                    start += 1
                if length > _OUR_FRAME:
                    raise Http2Error(Http2ErrorCode.FRAME_SIZE, "frame too long")
                self._begin_data(stream_id, flags, length, padding)
                position = start
                continue
            if length > _MOST_BUFFERED_FRAME:
                raise Http2Error(Http2ErrorCode.FRAME_SIZE, "frame too long")
            if start + length > end:
                break
            position = start + length
            self._control(kind, flags, stream_id, buffer[start:position])
        self._rest = buffer[position:] if position < end else b""

    def _begin_data(self, stream_id: int, flags: int, length: int, padding: int) -> None:
        """Begin a DATA frame; `padding` counts the byte that says how much there is."""
        if not stream_id or padding > length:
            raise Http2Error(Http2ErrorCode.PROTOCOL, "wrong DATA")
        if not stream_id & 1 or stream_id > self._last_id:
            raise Http2Error(Http2ErrorCode.PROTOCOL, "DATA without headers")
        if not length and not flags & Flag.END_STREAM:
            self._count_empty()
        # Padding counts for the windows too, and so does what comes for a stream that has ended.
        self._received_window -= length
        if self._received_window < 0:
            raise Http2Error(Http2ErrorCode.FLOW_CONTROL, "window exceeded")
        self._owed += length
        if self._owed >= _CONNECTION_WINDOW // 2:
            self._received_window += self._owed
            self._out.append(frame(FrameKind.WINDOW_UPDATE, 0, 0, self._owed.to_bytes(4, "big")))
            self._owed = 0
        stream = self.streams.get(stream_id)
        if stream is not None:
            if stream.remote_ended:
                raise Http2Error(Http2ErrorCode.STREAM_CLOSED, "DATA after the end")
            stream.owed += length
            if stream.owed > STREAM_WINDOW:
                raise Http2Error(Http2ErrorCode.FLOW_CONTROL, "window exceeded")
        self._data = (stream_id, flags)
        self._content_left = length - padding
        self._padding_left = max(0, padding - 1)

    def _take_data(self, buffer: bytes, position: int, end: int) -> int:
        """Take what there is of the DATA frame in progress; return where it ends."""
        stream_id, flags = self._data or (0, 0)
        take = min(self._content_left, end - position)
        piece = buffer[position : position + take]
        position += take
        self._content_left -= take
        if not self._content_left:
            skip = min(self._padding_left, end - position)
            position += skip
            self._padding_left -= skip
        complete = not self._content_left and not self._padding_left
        if complete:
            self._data = None
        stream = self.streams.get(stream_id)
        if stream is not None:
            ended = complete and bool(flags & Flag.END_STREAM)
            stream.remote_ended = ended
            if piece or ended:
                stream.receive(piece, ended)
            if complete and not ended and stream.credits_at_once:
                self.credit(stream)
        return position

    def _control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._settled and kind != FrameKind.SETTINGS:
            raise Http2Error(Http2ErrorCode.PROTOCOL, "no SETTINGS")
        if kind == FrameKind.HEADERS:
            self._headers(flags, stream_id, payload)
        elif kind == FrameKind.CONTINUATION:
            self._continuation(flags, stream_id, payload)
        elif kind == FrameKind.WINDOW_UPDATE:
            self._window_update(stream_id, payload)
        elif kind == FrameKind.PING:
            if len(payload) != 8 or stream_id:
                raise Http2Error(Http2ErrorCode.FRAME_SIZE, "wrong PING")
            if not flags & Flag.ACK:
                self._out.append(frame(FrameKind.PING, Flag.ACK, 0, payload))
        elif kind == FrameKind.SETTINGS:
            self._peer_settings(flags, stream_id, payload)
        elif kind == FrameKind.RST_STREAM:
            self._reset_by_peer(stream_id, payload)
        elif kind == FrameKind.PUSH_PROMISE:
            raise Http2Error(Http2ErrorCode.PROTOCOL, "PUSH_PROMISE from a client")
        elif kind == FrameKind.PRIORITY and (len(payload) != 5 or not stream_id):
            raise Http2Error(Http2ErrorCode.FRAME_SIZE, "wrong PRIORITY")
        # GOAWAY says that the client opens no more streams. Kinds that are unknown are ignored.

    def _count_empty(self) -> None:
        self._effort.spend(EMPTY_COST, self.loop.time(), "empty frames")

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        start, end = 0, len(payload)
        if flags & Flag.PADDED:
            start = 1
            end -= payload[0] if payload else 1
        if flags & Flag.PRIORITY:
            start += 5
        if start > end:
            raise Http2Error(Http2ErrorCode.PROTOCOL, "wrong padding")
        block = payload[start:end]
        if len(block) > _HEADER_BLOCK_BYTES:
            raise Http2Error(Http2ErrorCode.CALM, "headers too long")
        if not flags & Flag.END_HEADERS:
            self._block = (stream_id, flags, bytearray(block))
            self._stop_timer()
            self._timer = self.loop.call_later(_GREETING_S, self._too_slow)
            return
        self._request(stream_id, flags, block)

    def _continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != stream_id:
            raise Http2Error(Http2ErrorCode.PROTOCOL, "CONTINUATION out of place")
        _, first_flags, block = self._block
        block += payload
        if not payload:
            self._count_empty()
        if len(block) > _HEADER_BLOCK_BYTES:
            raise Http2Error(Http2ErrorCode.CALM, "headers too long")
        if flags & Flag.END_HEADERS:
            self._block = None
            self._stop_timer()
            self._request(stream_id, first_flags, bytes(block))

    def _request(self, stream_id: int, flags: int, block: bytes) -> None:
        # Decoded in any case: the table must stay that of the peer.
        fields = self._decoder.decode(block)
        if not stream_id & 1:
            raise Http2Error(Http2ErrorCode.PROTOCOL, "wrong stream")
        ended = bool(flags & Flag.END_STREAM)
        if stream_id <= self._last_id:
            stream = self.streams.get(stream_id)
            if stream is not None:  # trailers
                if stream.remote_ended or not ended:
                    raise Http2Error(Http2ErrorCode.STREAM_CLOSED, "headers after the end")
                stream.remote_ended = True
                stream.receive(b"", True)
            return
        self._last_id = stream_id
        refused = Http2ErrorCode.REFUSED if len(self.streams) >= self._settings.streams else 0
        if not is_request(fields):
            refused = Http2ErrorCode.PROTOCOL
        if refused:
            self._out.append(frame(FrameKind.RST_STREAM, 0, stream_id, refused.to_bytes(4, "big")))
            return
        stream = self._settings.open_stream(self, stream_id, fields, self._decoder.size)
        stream.remote_ended = ended
        self.streams[stream_id] = stream
        stream.receive(b"", ended)

    def _reset_by_peer(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(Http2ErrorCode.FRAME_SIZE, "wrong RST_STREAM")
        if not stream_id & 1 or stream_id > self._last_id:
            raise Http2Error(Http2ErrorCode.PROTOCOL, "reset of no stream")
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        self._effort.spend(1.0, self.loop.time(), "resets")
        self._forget(stream)
        stream.closed()

    def _peer_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) % 6 or (flags & Flag.ACK and payload):
            raise Http2Error(Http2ErrorCode.FRAME_SIZE, "wrong SETTINGS")
        if flags & Flag.ACK:
            return
        if not self._settled:
            self._settled = True
            self._stop_timer()
        else:
            cost = 1.0 + len(self.streams) * VISIT_COST
            self._effort.spend(cost, self.loop.time(), "settings")
        first_window = self.first_send_window
        for i in range(0, len(payload), 6):
            name = int.from_bytes(payload[i : i + 2], "big")
            value = int.from_bytes(payload[i + 2 : i + 6], "big")
            if name == Setting.WINDOW:
                if value > LARGEST_WINDOW:
                    raise Http2Error(Http2ErrorCode.FLOW_CONTROL, "window too large")
                first_window = value
            elif name == Setting.FRAME:
                if not LEAST_FRAME <= value <= LARGEST_FRAME:
                    raise Http2Error(Http2ErrorCode.PROTOCOL, "frame size out of range")
                self._peer_frame = value
            elif name == Setting.TABLE and value < TABLE_BYTES and self._indexing:
                # Rare: then the table is not used, which has to be said in the next block.
                self._indexing = False
                self._type_index = self._status_index = 0
                self._block_prefix = b"\x20"
        self._out.append(frame(FrameKind.SETTINGS, Flag.ACK, 0))
        if first_window != self.first_send_window:
            self._change_windows(first_window)

    def _window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2Error(Http2ErrorCode.FRAME_SIZE, "wrong WINDOW_UPDATE")
        more = int.from_bytes(payload, "big") & LARGEST_ID
        if not stream_id:
            self._send_window += more
            if not more or self._send_window > LARGEST_WINDOW:
                raise Http2Error(Http2ErrorCode.FLOW_CONTROL, "window out of range")
            if self._blocked:
                self._send_blocked()
            return
        if stream_id > self._last_id:
            raise Http2Error(Http2ErrorCode.PROTOCOL, "window of no stream")
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        stream.send_window += more
        if not more or stream.send_window > LARGEST_WINDOW:
            self.reset(stream, Http2ErrorCode.FLOW_CONTROL)
        elif stream.backlog:
            self._send_backlog(stream)
