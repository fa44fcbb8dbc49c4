"""What a peer may do to a connection: it holds no memory, and halts neither loop nor others."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from _http2 import (
    GREETING,
    MESSAGE_BYTES,
    PREFACE,
    Peer,
    ask,
    data,
    echo_handlers,
    headers,
    message,
    reset,
    run,
    settings,
    window,
)

from edgeweave.inference_server._frames import FrameKind, Http2ErrorCode, Setting, frame
from edgeweave.inference_server._http2_send import STREAM_WINDOW

ECHO, WAIT, CHAT = "/t.T/echo", "/t.T/wait", "/t.T/chat"


def test_whole_messages_without_an_end_count_too() -> None:
    """Unary calls whose client never ends them hold their messages."""

    async def body() -> None:
        peer = Peer(echo_handlers())
        await peer.send(GREETING)
        for i in range(1, 41, 2):
            await peer.send(headers(i, ECHO), data(i, message(bytes(MESSAGE_BYTES)), end=False))
        assert peer.calls.memory.used <= peer.calls.memory.most
        refused = [i for i in peer.answers.ended if peer.answers.status(i) == "RESOURCE_EXHAUSTED"]
        assert len(refused) >= 15
        await peer.end()

    run(body)


def test_messages_that_no_handler_takes_count_too() -> None:
    async def body() -> None:
        async def deaf(requests: Any, context: Any) -> Any:
            await asyncio.Event().wait()
            yield b""

        peer = Peer({"deaf": grpc.stream_stream_rpc_method_handler(deaf)})
        await peer.send(GREETING)
        for i in range(1, 41, 2):
            await peer.send(headers(i, "/t.T/deaf"), data(i, message(bytes(60_000)), end=False))
            # Messages without content cost an object each.
            await peer.send(data(i, message(b"") * 2000, end=False))
        assert peer.calls.memory.used <= peer.calls.memory.most
        refused = [i for i in peer.answers.ended if peer.answers.status(i) == "RESOURCE_EXHAUSTED"]
        assert refused
        await peer.end()

    run(body)


def test_stream_takes_messages_longer_than_its_window() -> None:
    async def body() -> None:
        got: list[int] = []

        async def lengths(requests: Any, context: Any) -> Any:
            async for request in requests:
                got.append(len(request))
                yield b""

        peer = Peer({"lengths": grpc.stream_stream_rpc_method_handler(lengths)})
        peer.calls.message_bytes = 4 * STREAM_WINDOW
        peer.calls.memory.most = 16 * STREAM_WINDOW
        await peer.send(GREETING, headers(1, "/t.T/lengths"))
        raw = message(bytes(3 * STREAM_WINDOW))
        room, position = STREAM_WINDOW, 0
        seen = 0
        while position < len(raw):
            piece = raw[position : position + min(room, 1 << 18)]
            assert piece, "the stream's window is never given back"
            await peer.send(data(1, piece, end=False))
            position += len(piece)
            room -= len(piece)
            updates = [
                int.from_bytes(payload, "big")
                for kind, _, i, payload in peer.frames
                if kind == FrameKind.WINDOW_UPDATE and i == 1
            ]
            room += sum(updates[seen:])
            seen = len(updates)
        assert got == [3 * STREAM_WINDOW]
        await peer.end()

    run(body)


@pytest.mark.parametrize("method", [ECHO, CHAT])
def test_answer_that_waited_for_the_window_leaves_nothing(method: str) -> None:
    async def body() -> None:
        peer = Peer(echo_handlers())
        await peer.send(PREFACE, settings((Setting.WINDOW, 0)))
        await peer.send(ask(1, method, b"abc", grpc_timeout="1H"))
        assert not peer.answers.ended
        await peer.send(window(1, 100))
        assert peer.answers.status(1) == "OK"
        held = [entry for entry in peer.calls.deadlines._heap if entry[2] is not None]
        assert not held
        await peer.end()

    run(body)


def test_status_waiting_for_the_window_takes_no_more_requests() -> None:
    async def body() -> None:
        began: list[int] = []

        async def refuse(requests: Any, context: Any) -> Any:
            began.append(1)
            yield b"abc"
            await context.abort(grpc.StatusCode.NOT_FOUND, "no")

        peer = Peer({"refuse": grpc.stream_stream_rpc_method_handler(refuse)})
        await peer.send(GREETING, settings((Setting.WINDOW, 0)))
        await peer.send(headers(1, "/t.T/refuse", grpc_timeout="20m"))
        await asyncio.sleep(0.05)
        for _ in range(3):
            await peer.send(data(1, message(b"more"), end=False))
        assert began == [1]
        await peer.end()

    run(body)


def test_connection_that_failed_holds_nothing_although_the_peer_does_not_read() -> None:
    """`transport.close` waits for the peer to take what was written; that may be for ever."""

    async def body() -> None:
        log: list[str] = []
        peer = Peer(echo_handlers(log), backlog=200_000)
        await peer.send(PREFACE, settings((Setting.WINDOW, 0)), ask(1, WAIT, b""))
        for i in range(3, 21, 2):
            await peer.send(ask(i, ECHO, bytes(50_000)))
        assert peer.answers.goaways[0][1] == Http2ErrorCode.CALM
        assert not peer.connection.streams
        assert peer.connection._backlog_bytes == 0
        assert log == ["began", "cancelled"]
        await peer.end()

    run(body)


def test_failed_connection_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeweave.inference_server._http2_send._LAST_WRITES_S", 0.01)

    async def body() -> None:
        peer = Peer(echo_handlers())
        await peer.send(GREETING, frame(FrameKind.PING, 0, 1, bytes(8)))
        assert peer.wire.closed
        while not peer.wire.aborted:
            await asyncio.sleep(0.005)
        await peer.end()

    run(body)


def test_unread_answers_of_all_connections_are_bounded() -> None:
    async def body() -> None:
        peers = [Peer(echo_handlers(), backlog=150_000)]
        peers += [Peer(echo_handlers(), shared=peers[0].shared) for _ in range(7)]
        shared = peers[0].shared
        shared.all_backlog_bytes = 300_000
        closed: list[int] = []
        for n, peer in enumerate(peers):
            await peer.send(PREFACE, settings((Setting.WINDOW, 0)))
            for i in range(2 if n == 2 else 1):
                await peer.send(ask(2 * i + 1, ECHO, bytes(49_000)))
            assert shared.backlog_used <= 300_000
            closed += [n for n, peer in enumerate(peers) if peer.wire.closed and n not in closed]
        # The one that holds most is the first to go.
        assert closed[0] == 2
        for peer in peers:
            await peer.end()
        assert peers[0].shared.backlog_used == 0

    run(body)


def test_connections_at_a_time() -> None:
    async def body() -> None:
        first = Peer(echo_handlers())
        first.shared.most_connections = 2
        second, third = (Peer(echo_handlers(), shared=first.shared) for _ in range(2))
        assert [p.wire.closed for p in (first, second, third)] == [False, False, True]
        await third.end()
        await second.end()
        fourth = Peer(echo_handlers(), shared=first.shared)
        await fourth.send(GREETING, ask(1, ECHO, b"room"))
        assert fourth.answers.messages(1) == [b"room"]
        await fourth.end()
        await first.end()

    run(body)


def test_updates_of_the_connections_window_do_not_visit_every_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streams that wait for their own window have nothing to gain."""

    async def body() -> None:
        peer = Peer(echo_handlers(), streams=1000)
        await peer.send(PREFACE, settings((Setting.WINDOW, 0)))
        await peer.send(*(ask(i, ECHO, b"abc") for i in range(1, 1001, 2)))
        tried: list[int] = []
        plain = peer.connection._send_backlog

        def counted(stream: Any) -> None:
            tried.append(stream.id)
            plain(stream)

        monkeypatch.setattr(peer.connection, "_send_backlog", counted)
        await peer.send(*[window(0, 1)] * 100)
        assert not tried
        await peer.send(window(501, 100))
        assert peer.answers.messages(501) == [b"abc"]
        await peer.end()

    run(body)


def test_settings_flood_with_many_streams_ends_the_connection() -> None:
    async def body() -> None:
        peer = Peer(echo_handlers(), streams=5000)
        await peer.send(GREETING, *(ask(i, WAIT, b"") for i in range(1, 8001, 2)))
        many = settings(*((Setting.WINDOW, 1000 + i % 2) for i in range(2000)))
        await peer.send(many, many)
        assert not peer.wire.closed
        assert peer.connection.streams[1].send_window == 1001
        await peer.send(*[settings((Setting.WINDOW, 5)), settings((Setting.WINDOW, 6))] * 500)
        assert peer.answers.goaways[0][1] == Http2ErrorCode.CALM
        await peer.end()

    run(body)


def test_empty_frames_now_and_then_are_no_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        peer = Peer(echo_handlers())
        now = peer.connection.loop.time()
        monkeypatch.setattr(peer.connection.loop, "time", lambda: now)
        await peer.send(GREETING, headers(1, WAIT))
        for _ in range(30):
            await peer.send(*[data(1, b"", end=False)] * 100)
            now += 1.0
        assert not peer.wire.closed
        await peer.end()

    run(body)


def test_table_change_is_said_in_the_first_block_whatever_it_is() -> None:
    async def body() -> None:
        for method in (ECHO, "/t.T/refuse_late"):

            async def refuse_late(request: bytes, context: Any) -> Any:
                yield b"abc"
                await context.abort(grpc.StatusCode.NOT_FOUND, "no")

            handlers = echo_handlers()
            handlers["refuse_late"] = grpc.unary_stream_rpc_method_handler(refuse_late)
            peer = Peer(handlers)
            await peer.send(GREETING, settings((Setting.WINDOW, 0)), ask(1, method, b"abc"))
            before = len(peer.frames)
            await peer.send(settings((Setting.TABLE, 0)), window(1, 100), ask(3, ECHO, b""))
            blocks = [p for k, _, _, p in peer.frames[before:] if k == FrameKind.HEADERS]
            assert [b[:1] == b"\x20" for b in blocks] == [True] + [False] * (len(blocks) - 1)
            await peer.end()

    run(body)


def test_long_headers_count_while_their_call_lives() -> None:
    async def body() -> None:
        peer = Peer(echo_handlers())
        await peer.send(GREETING)
        for i in range(1, 81, 2):
            await peer.send(headers(i, WAIT, big="v" * 15_000))
        assert peer.calls.memory.used <= peer.calls.memory.most
        refused = [i for i in peer.answers.ended if peer.answers.status(i) == "RESOURCE_EXHAUSTED"]
        assert len(refused) >= 20
        await peer.send(*(reset(i) for i in range(1, 81, 2)))
        assert peer.calls.memory.used == 0
        await peer.end()

    run(body)


def test_answer_goes_out_as_the_socket_takes_it() -> None:
    """However wide the windows: what waits in the transport delays pings and other streams."""

    async def body() -> None:
        async def big(request: bytes, context: Any) -> bytes:
            return bytes(8 << 20)

        peer = Peer({"big": grpc.unary_unary_rpc_method_handler(big)}, backlog=1 << 25)
        peer.calls.message_bytes = 1 << 24
        peer.wire.high = 1 << 20
        peer.wire.protocol = peer.connection
        wide = settings((Setting.WINDOW, 1 << 30))
        await peer.send(PREFACE, wide, window(0, 1 << 30), ask(1, "/t.T/big", b""))
        assert len(peer.wire.written) < 3 << 20
        peer.wire.high = 1 << 30
        peer.connection.resume_writing()
        await peer.rest()
        assert len(peer.answers.messages(1)[0]) == 8 << 20
        await peer.end()

    run(body)


@pytest.mark.parametrize(
    "fields",
    [
        [(":method", "POST"), (":path", ECHO), (":path", WAIT)],
        [(":method", "POST"), ("x", "y"), (":path", ECHO)],
        [(":method", "POST"), (":path", ECHO), ("X-Upper", "y")],
        [(":method", "POST"), (":path", ECHO), (":status", "200")],
        [(":method", "POST"), (":path", ECHO), ("connection", "close")],
    ],
)
def test_malformed_requests_are_reset(fields: list[tuple[str, str]]) -> None:
    from edgeweave.inference_server._hpack import encode_field

    async def body() -> None:
        peer = Peer(echo_handlers())
        whole = [*fields, ("content-type", "application/grpc")]
        raw = b"".join(encode_field(name, value) for name, value in whole)
        await peer.send(GREETING, frame(FrameKind.HEADERS, 4, 1, raw), data(1, message(b"a")))
        await peer.send(ask(3, ECHO, b"b"))
        assert peer.answers.resets == {1: Http2ErrorCode.PROTOCOL}
        assert 1 not in peer.answers.fields
        assert peer.answers.messages(3) == [b"b"]
        await peer.end()

    run(body)


def test_headers_longer_than_the_least_frame_size() -> None:
    """We announce a larger one, and gRPC's clients use it."""

    async def body() -> None:
        peer = Peer(echo_handlers())
        await peer.send(GREETING, ask(1, ECHO, b"a", big="v" * 60_000), ask(3, ECHO, b"b"))
        assert [peer.answers.messages(i) for i in (1, 3)] == [[b"a"], [b"b"]]
        await peer.end()

    run(body)


def test_call_without_a_token_is_refused_by_its_headers() -> None:
    """Before it can have a message kept, or unpacked."""
    from edgeweave.inference_server._service import build_admission

    async def body() -> None:
        peer = Peer(echo_handlers())
        peer.calls.admit = build_admission(("secret",))
        given = ((1, ""), (3, "Bearer wrong"), (5, "Bearer secret"))
        await peer.send(GREETING, *(headers(i, ECHO, authorization=a) for i, a in given))
        answers = peer.answers
        assert [answers.status(i) for i in (1, 3)] == ["UNAUTHENTICATED", "PERMISSION_DENIED"]
        assert answers.ended == [1, 3]
        await peer.send(data(5, message(b"a")))
        assert peer.answers.messages(5) == [b"a"]
        # What needs none, as probes do not, has to be short.
        peer.calls.admit = lambda path, context: False
        await peer.send(ask(7, ECHO, bytes(4000)), ask(9, ECHO, bytes(5000)))
        assert [peer.answers.status(i) for i in (7, 9)] == ["OK", "RESOURCE_EXHAUSTED"]
        await peer.end()

    run(body)
