"""Header compression of HTTP/2 (RFC 7541): all of the decoder, and what an answer needs to encode.

The decoder bounds what a peer can make it hold or do: the dynamic table has the size that we
announced, a list may not become longer than its limit however few bytes name it, and a Huffman code
is read by the half byte from a table of states.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Final

__all__ = ["HeaderDecoder", "HpackError", "encode_field"]

# What SETTINGS_HEADER_TABLE_SIZE is unless announced otherwise, and we do not.
TABLE_BYTES: Final = 4096
_ENTRY_BYTES: Final = 32  # of overhead that each entry counts for (section 4.1)
_MOST_INTEGER: Final = 1 << 20
# Appendix A.
_STATIC: Final = tuple(
    (name, value)
    for name, _, value in (
        line.partition(" ")
        for line in (
            ":authority,:method GET,:method POST,:path /,:path /index.html,:scheme http,"
            ":scheme https,:status 200,:status 204,:status 206,:status 304,:status 400,"
            ":status 404,:status 500,accept-charset,accept-encoding gzip; deflate,"
            "accept-language,accept-ranges,accept,access-control-allow-origin,age,allow,"
            "authorization,cache-control,content-disposition,content-encoding,content-language,"
            "content-length,content-location,content-range,content-type,cookie,date,etag,expect,"
            "expires,from,host,if-match,if-modified-since,if-none-match,if-range,"
            "if-unmodified-since,last-modified,link,location,max-forwards,proxy-authenticate,"
            "proxy-authorization,range,referer,refresh,retry-after,server,set-cookie,"
            "strict-transport-security,transfer-encoding,user-agent,vary,via,www-authenticate"
        )
        .replace("; deflate", "\0 deflate")
        .split(",")
    )
)
_STATIC_FIELDS: Final = tuple((n, v.replace("\0", ",")) for n, v in _STATIC)
# Appendix B: the code is canonical, so the lengths say all. One letter per symbol: a is 1 bit.
# The four symbols beyond 26 bits: { is 27, | is 28, ~ is 30.
_CODE_LENGTHS: Final = (
    "mw|||||||x~||~||||||||~|||||||||fjjlmfhkjjhkhfffeeefffffffghofljmfgggggggggggggggggggggghg"
    "hmsmnfoefefefffeggfffefgfeefgggggoknm|tvttvvvwvwwwwwxwxxvwxwwwwuvwvwwxvutvvwwuwvvxuvwwuuvu"
    "wvwwtvvvwvvwzztsvwvyzzz{{zxysuz{{z{xuuzz|{{{txtuvuuwvvyyxxzwz{zz{{{{{|{{{{{z~"
)
_END_OF_STRING: Final = 256
_Field = tuple[str, str]


class HpackError(Exception):
    """A header block that cannot be decoded; the connection cannot go on after it."""


def _huffman_states() -> list[tuple[list[tuple[int, int]], bool]]:
    """A state per inner node of the code's tree.

    Each has for each half byte the next state and the symbol that it completes (or -1), and
    whether the bits since the last symbol may be padding.
    """
    children: list[list[int]] = [[-1, -1]]
    leaf: list[dict[int, int]] = [{}]
    code = previous = 0
    for length, symbol in sorted((ord(c) - 96, i) for i, c in enumerate(_CODE_LENGTHS)):
        code <<= length - previous
        previous = length
        node = 0
        for shift in range(length - 1, 0, -1):
            bit = (code >> shift) & 1
            if children[node][bit] < 0:
                children[node][bit] = len(children)
                children.append([-1, -1])
                leaf.append({})
            node = children[node][bit]
        leaf[node][code & 1] = symbol
        code += 1
    padding = {0}
    node = 0
    # Padding is fewer than eight ones.
    for _ in range(7):
        node = children[node][1]
        padding.add(node)
    states = []
    for start in range(len(children)):
        row = []
        for nibble in range(16):
            node, symbol = start, -1
            for shift in (3, 2, 1, 0):
                bit = (nibble >> shift) & 1
                if bit in leaf[node]:
                    # Codes have five bits or more, so a half byte completes at most one.
                    symbol, node = leaf[node][bit], 0
                else:
                    node = children[node][bit]
            row.append((node, symbol))
        states.append((row, start in padding))
    return states


_HUFFMAN: Final = _huffman_states()


def _huffman(data: bytes) -> bytes:
    out = bytearray()
    state = 0
    for byte in data:
        for nibble in (byte >> 4, byte & 15):
            state, symbol = _HUFFMAN[state][0][nibble]
            if symbol >= 0:
                if symbol == _END_OF_STRING:
                    raise HpackError("end of string inside a string")
                out.append(symbol)
    if not _HUFFMAN[state][1]:
        raise HpackError("wrong padding")
    return bytes(out)


@lru_cache(maxsize=512)
def _short_text(data: bytes, coded: bool) -> str:
    return (_huffman(data) if coded else data).decode("latin-1")


def _text(data: bytes, coded: bool) -> str:
    if len(data) <= 64:
        return _short_text(data, coded)
    return (_huffman(data) if coded else data).decode("latin-1")


class HeaderDecoder:
    """One direction of one connection.

    Args:
        list_bytes: What a list of headers may hold at most, as HTTP/2 counts it.
    """

    def __init__(self, list_bytes: int) -> None:
        self._most = list_bytes
        # The newest first, as the indices go.
        self._table: deque[_Field] = deque()
        self._table_bytes = 0
        self._table_most = TABLE_BYTES
        # Of the last list, as HTTP/2 counts it.
        self.size = 0

    def decode(self, block: bytes) -> list[_Field]:
        """Decode a header block.

        Args:
            block: All of its fragments.

        Returns:
            Names and values, in order.

        Raises:
            HpackError: It is malformed, or too long when decoded.
        """
        fields: list[_Field] = []
        position, size, end = 0, 0, len(block)
        while position < end:
            first = block[position]
            if first & 0x80:
                index, position = _integer(block, position, 7)
                field = self._field(index)
            elif first & 0x40:
                field, position = self._literal(block, position, 6)
                self._remember(field)
            elif first & 0x20:
                most, position = _integer(block, position, 5)
                if fields or most > TABLE_BYTES:
                    raise HpackError("size update out of place or range")
                self._table_most = most
                self._shrink()
                continue
            else:
                field, position = self._literal(block, position, 4)
            size += len(field[0]) + len(field[1]) + _ENTRY_BYTES
            if size > self._most:
                raise HpackError("list too long")
            fields.append(field)
        self.size = size
        return fields

    def _field(self, index: int) -> _Field:
        if 0 < index <= len(_STATIC_FIELDS):
            return _STATIC_FIELDS[index - 1]
        index -= len(_STATIC_FIELDS) + 1
        if not 0 <= index < len(self._table):
            raise HpackError("index without entry")
        return self._table[index]

    def _literal(self, block: bytes, position: int, bits: int) -> tuple[_Field, int]:
        index, position = _integer(block, position, bits)
        if index:
            name = self._field(index)[0]
        else:
            name, position = self._string(block, position)
        value, position = self._string(block, position)
        return (name, value), position

    def _string(self, block: bytes, position: int) -> tuple[str, int]:
        if position >= len(block):
            raise HpackError("block ends early")
        coded = block[position] >= 0x80
        length, position = _integer(block, position, 7)
        if length > len(block) - position:
            raise HpackError("string ends outside the block")
        end = position + length
        return _text(block[position:end], coded), end

    def _remember(self, field: _Field) -> None:
        self._table.appendleft(field)
        self._table_bytes += len(field[0]) + len(field[1]) + _ENTRY_BYTES
        self._shrink()

    def _shrink(self) -> None:
        while self._table_bytes > self._table_most:
            name, value = self._table.pop()
            self._table_bytes -= len(name) + len(value) + _ENTRY_BYTES


def _integer(block: bytes, position: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value = block[position] & most
    position += 1
    if value < most:
        return value, position
    shift = 0
    while True:
        if position >= len(block):
            raise HpackError("block ends early")
        byte = block[position]
        position += 1
        value += (byte & 0x7F) << shift
        if value > _MOST_INTEGER or shift > 21:
            raise HpackError("integer too large")
        if byte < 0x80:
            return value, position
        shift += 7


def encode_field(name: str, value: str) -> bytes:
    """Encode one header that enters no table.

    Args:
        name: In lower case.
        value: Its value.

    Returns:
        A literal field, its strings as they are.
    """
    parts = [b"\x00"]
    for text in (name, value):
        data = text.encode("latin-1")
        parts += (_prefixed(len(data)), data)
    return b"".join(parts)


def _prefixed(value: int) -> bytes:
    """A length with a prefix of seven bits."""
    if value < 127:
        return bytes((value,))
    out = bytearray((127,))
    value -= 127
    while value >= 0x80:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
