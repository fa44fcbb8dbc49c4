"""Frames of HTTP/2 (RFC 9113): their kinds, flags, error codes and bytes."""

from __future__ import annotations

from typing import Final

__all__ = ["Flag", "FrameKind", "Http2Error", "Http2ErrorCode", "Setting", "frame"]

LARGEST_ID: Final = (1 << 31) - 1
LARGEST_WINDOW: Final = (1 << 31) - 1
# Of either side until it says otherwise.
FIRST_WINDOW: Final = 65535
LEAST_FRAME, LARGEST_FRAME = 1 << 14, (1 << 24) - 1


class FrameKind:
    """The byte that says what a frame is."""

    DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
    PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9


class Flag:
    """Bits of a frame's flags."""

    END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20


class Http2ErrorCode:
    """Why a stream or a connection ends."""

    NO_ERROR, PROTOCOL, FLOW_CONTROL, STREAM_CLOSED, FRAME_SIZE = 0, 1, 3, 5, 6
    REFUSED, CANCEL, COMPRESSION, CALM = 7, 8, 9, 11


class Setting:
    """Names in a SETTINGS frame."""

    TABLE, STREAMS, WINDOW, FRAME, LIST = 1, 3, 4, 5, 6


class Http2Error(Exception):
    """What the connection cannot go on after."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """A frame as bytes."""
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big")
    return head + payload
