"""What gRPC writes into HTTP/2: statuses that fit, messages in small pieces."""

from __future__ import annotations

import grpc

from edgeweave.inference_server._grpc_wire import Memory, MessageReader, status_block


def test_long_status_fits_a_frame_and_what_clients_take() -> None:
    for text in ("x" * 100_000, "ü" * 100_000, "\U0001f600" * 100_000, "\ud800" * 10):
        assert len(status_block(grpc.StatusCode.INTERNAL, text)) < 5000


def test_small_pieces_of_a_message_cost_no_object_each() -> None:
    got: list[bytes] = []
    reader = MessageReader(1 << 20, Memory(1 << 20), "identity", got.append)
    raw = b"\x00" + (102_400).to_bytes(4, "big") + bytes(range(256)) * 400
    for start in range(0, len(raw) - 3, 3):
        reader.feed(raw[start : start + 3])
    assert len(reader._parts) < 10
    reader.feed(raw[start + 3 :])
    assert got == [raw[5:]]
