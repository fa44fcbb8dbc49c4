"""Header compression: the standard's own examples, and everything that is malformed."""

from __future__ import annotations

import random

import pytest

from edgeweave.inference_server._hpack import (
    _CODE_LENGTHS,
    HeaderDecoder,
    HpackError,
    _huffman,
    encode_field,
)


def decode(*blocks: str, most: int = 1 << 16) -> list[list[tuple[str, str]]]:
    decoder = HeaderDecoder(most)
    return [decoder.decode(bytes.fromhex(block)) for block in blocks]


REQUESTS = [
    [
        (":method", "GET"),
        (":scheme", "http"),
        (":path", "/"),
        (":authority", "www.example.com"),
    ],
    [
        (":method", "GET"),
        (":scheme", "http"),
        (":path", "/"),
        (":authority", "www.example.com"),
        ("cache-control", "no-cache"),
    ],
    [
        (":method", "GET"),
        (":scheme", "https"),
        (":path", "/index.html"),
        (":authority", "www.example.com"),
        ("custom-key", "custom-value"),
    ],
]


@pytest.mark.parametrize(
    "blocks",
    [
        # RFC 7541, C.3: plain.
        (
            "828684410f7777772e6578616d706c652e636f6d",
            "828684be58086e6f2d6361636865",
            "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
        ),
        # C.4: in Huffman's code.
        (
            "828684418cf1e3c2e5f23a6ba0ab90f4ff",
            "828684be5886a8eb10649cbf",
            "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
        ),
    ],
)
def test_examples_of_the_standard(blocks: tuple[str, ...]) -> None:
    assert decode(*blocks) == REQUESTS


def test_literals_that_are_not_remembered() -> None:
    # C.2.2, C.2.3; then the first index of the dynamic table, which must be empty.
    plain, secret = "040c2f73616d706c652f70617468", "100870617373776f726406736563726574"
    assert decode(plain, secret) == [[(":path", "/sample/path")], [("password", "secret")]]
    with pytest.raises(HpackError, match="index without entry"):
        decode(plain, "be")


def test_table_gives_way_to_new_entries() -> None:
    decoder = HeaderDecoder(1 << 16)
    long = bytes([0x40]) + b"\x01a" + b"\x7f\xd1\x0e" + b"v" * 2000  # 127 + 81 + (14 << 7)
    for _ in range(3):
        decoder.decode(long)
    # Two entries of 2,033 bytes fit into 4,096, a third does not.
    assert decoder.decode(b"\xbe\xbf") == [("a", "v" * 2000)] * 2
    with pytest.raises(HpackError, match="index without entry"):
        decoder.decode(b"\xc0")
    assert decoder.decode(b"\x20") == []
    with pytest.raises(HpackError, match="index without entry"):
        decoder.decode(b"\xbe")


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("80", "index without entry"),
        ("be", "index without entry"),
        ("40", "block ends early"),
        ("4001", "outside the block"),
        ("400161", "block ends early"),
        ("ff", "block ends early"),
        ("ffffffffffffff7f", "too large"),
        ("7fffffffff0f", "too large"),
        ("3fe21f", "out of place or range"),
        ("8220", "out of place or range"),
        # Padding with zeros, padding of eight bits, the end-of-string symbol.
        ("04811c", "wrong padding"),
        ("0482ffff", "wrong padding"),
        ("0484ffffffff", "end of string"),
    ],
)
def test_malformed(block: str, words: str) -> None:
    with pytest.raises(HpackError, match=words):
        decode(block)


def test_few_bytes_do_not_name_a_long_list() -> None:
    # An entry of 4,000 bytes, and then its index a thousand times.
    entry = bytes([0x40]) + b"\x01a" + b"\x7f\xa1\x1e" + b"v" * 4000  # 127 + 33 + (30 << 7)
    decoder = HeaderDecoder(1 << 16)
    decoder.decode(entry)
    with pytest.raises(HpackError, match="list too long"):
        decoder.decode(b"\xbe" * 1000)


def coded(text: bytes) -> bytes:
    """Huffman's code, from its lengths: written without a look at the decoder's table."""
    codes: dict[int, str] = {}
    code = previous = 0
    for length, symbol in sorted((ord(c) - 96, i) for i, c in enumerate(_CODE_LENGTHS)):
        code <<= length - previous
        previous = length
        codes[symbol] = f"{code:0{length}b}"
        code += 1
    bits = "".join(codes[byte] for byte in text)
    bits += "1" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big") if bits else b""


def test_huffman_code_of_every_byte() -> None:
    # The standard's own: "www.example.com" and "custom-value".
    assert coded(b"www.example.com").hex() == "f1e3c2e5f23a6ba0ab90f4ff"
    assert coded(b"custom-value").hex() == "25a849e95bb8e8b4bf"
    rng = random.Random(0)
    for _ in range(300):
        text = bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
        assert _huffman(coded(text)) == text
    assert _huffman(coded(bytes(range(256)))) == bytes(range(256))


def test_fields_we_encode() -> None:
    for value in ("", "x", "y" * 126, "y" * 127, "y" * 5000):
        assert HeaderDecoder(1 << 16).decode(encode_field("name", value)) == [("name", value)]
