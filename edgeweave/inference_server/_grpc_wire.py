"""What gRPC writes into HTTP/2: time-outs, statuses, and messages with their prefix."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final
from urllib.parse import quote

import grpc

from ._hpack import encode_field

__all__ = ["PREFIX_BYTES", "CallError", "MessageReader", "parse_timeout", "status_block"]

PREFIX_BYTES: Final = 5
# Units of grpc-timeout, in seconds.
_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MOST_DIGITS: Final = 8
_WINDOW_BITS: Final = {"gzip": 31, "deflate": 15}
_ENCODINGS: Final = encode_field("grpc-accept-encoding", "identity,deflate,gzip")
# Of a status' text, encoded: with the other headers it has to fit a frame of any peer's, and into
# the 8 KiB that gRPC's clients take.
_MOST_TEXT: Final = 4096
# A shorter piece of a message would cost more as an object than it holds.
_SHORT_PIECE: Final = 1024
_PRINTABLE: Final = "".join(chr(i) for i in range(0x20, 0x7F) if chr(i) != "%")


class CallError(Exception):
    """Ends a call with a status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def parse_timeout(text: str) -> float:
    """The seconds of a `grpc-timeout`.

    Args:
        text: Up to eight digits and a unit.

    Returns:
        Seconds.

    Raises:
        CallError: It is none.
    """
    unit, digits = _UNITS.get(text[-1:]), text[:-1]
    if unit is None or not (digits.isascii() and digits.isdigit()) or len(digits) > _MOST_DIGITS:
        raise CallError(grpc.StatusCode.INVALID_ARGUMENT, "call: grpc-timeout must be a time")
    return int(digits) * unit


def status_block(code: grpc.StatusCode, text: str) -> bytes:
    """The header block of a status.

    Args:
        code: The status.
        text: For the client; is cut if it is long.

    Returns:
        The encoded fields.
    """
    fields = encode_field("grpc-status", str(code.value[0]))
    if code is grpc.StatusCode.UNIMPLEMENTED:
        fields += _ENCODINGS
    if text:
        coded = quote(text[:_MOST_TEXT], safe=_PRINTABLE, errors="replace")
        if len(coded) > _MOST_TEXT:
            cut = coded.rfind("%", _MOST_TEXT - 2, _MOST_TEXT)
            coded = coded[: _MOST_TEXT if cut < 0 else cut]
        fields += encode_field("grpc-message", coded)
    return fields


class Memory:
    """What requests that no handler has taken yet hold together.

    Args:
        most: Bytes.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0

    def check(self) -> None:
        """Refuse what was counted last, if it is too much.

        Raises:
            CallError: It is.
        """
        if self.used > self.most:
            raise CallError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "call: memory must suffice for all requests that come in, got too many",
            )


class MessageReader:
    """Puts the messages of a call together.

    Args:
        most: Bytes of a message.
        memory: Shared by all calls.
        encoding: Value of `grpc-encoding`.
        take: Gets each message.

    Raises:
        CallError: The encoding is unknown.
    """

    __slots__ = ("_bits", "_have", "_memory", "_most", "_need", "_parts", "_take")

    def __init__(
        self, most: int, memory: Memory, encoding: str, take: Callable[[bytes], None]
    ) -> None:
        self._most = most
        self._memory = memory
        self._take = take
        self._bits = 0
        if encoding != "identity":
            self._bits = _WINDOW_BITS.get(encoding, 0)
            if not self._bits:
                raise CallError(
                    grpc.StatusCode.UNIMPLEMENTED, "call: grpc-encoding must be a known one"
                )
        self._parts: list[bytes | bytearray] = []
        self._have, self._need = 0, PREFIX_BYTES

    @property
    def inside(self) -> bool:
        """Whether a message has come in part."""
        return self._have > 0

    def feed(self, data: bytes) -> None:
        """Take a piece.

        Args:
            data: What came.

        Raises:
            CallError: A message is too long, or coded otherwise than announced.
        """
        length = len(data)
        # Nearly always: one message, whole.
        if (
            not self._have
            and length >= PREFIX_BYTES
            and length == PREFIX_BYTES + int.from_bytes(data[1:PREFIX_BYTES], "big")
        ):
            self._message(data[0], data[PREFIX_BYTES:])
            return
        position = 0
        while position < length:
            piece = data[position : position + self._need - self._have]
            position += len(piece)
            if len(piece) >= _SHORT_PIECE:
                self._parts.append(piece)
            elif self._parts and isinstance(self._parts[-1], bytearray):
                self._parts[-1] += piece
            else:
                self._parts.append(bytearray(piece))
            self._have += len(piece)
            self._memory.used += len(piece)
            if self._have < self._need:
                self._memory.check()
                return
            if self._need == PREFIX_BYTES:
                prefix = b"".join(self._parts)
                self._parts = [prefix]
                self._need += int.from_bytes(prefix[1:], "big")
                if self._need - PREFIX_BYTES > self._most:
                    raise self.too_long(self._need - PREFIX_BYTES)
                if self._need > PREFIX_BYTES:
                    continue
            first, *parts = self._parts
            self.drop()
            self._message(first[0], b"".join(parts))

    def drop(self) -> None:
        """Forget the message that has come in part."""
        self._memory.used -= self._have
        self._parts = []
        self._have, self._need = 0, PREFIX_BYTES

    def too_long(self, length: int) -> CallError:
        """The error of a message of this length."""
        return CallError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"call: message must have at most {self._most} bytes, got {length}",
        )

    def _message(self, compressed: int, data: bytes) -> None:
        if compressed:
            data = self._decompress(compressed, data)
        if len(data) > self._most:
            raise self.too_long(len(data))
        self._take(data)

    def _decompress(self, compressed: int, data: bytes) -> bytes:
        if compressed != 1 or not self._bits:
            raise CallError(grpc.StatusCode.INTERNAL, "call: message must be coded as announced")
        decoder = zlib.decompressobj(self._bits)
        try:
            # One byte more than may be: a few bytes must not unpack to more than a message.
            data = decoder.decompress(data, self._most + 1)
        except zlib.error:
            raise CallError(
                grpc.StatusCode.INTERNAL, "call: message must be coded as announced"
            ) from None
        if len(data) <= self._most and not decoder.eof:
            raise CallError(grpc.StatusCode.INTERNAL, "call: message must be complete")
        return data
