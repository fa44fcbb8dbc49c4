"""A connection, frame by frame: what is answered, what waits, what ends it, what nobody can do."""

from __future__ import annotations

import gzip
import random
import zlib

import grpc
import pytest
from _http2 import (
    GREETING,
    MESSAGE_BYTES,
    PREFACE,
    Peer,
    ask,
    block,
    data,
    echo_handlers,
    headers,
    message,
    reset,
    run,
    settings,
    window,
)

from edgeweave.inference_server._frames import Flag, FrameKind, Http2ErrorCode, Setting, frame

ECHO, WAIT = "/t.T/echo", "/t.T/wait"


@pytest.mark.parametrize("at_a_time", [0, 1, 2, 7, 9, 100])
def test_requests_in_any_pieces(at_a_time: int) -> None:
    """Padding, priorities, continuations, unknown frames: all in one session, cut anywhere."""

    async def body() -> None:
        peer = Peer(echo_handlers())
        whole = block(ECHO)
        padded = b"\x03" + bytes(5) + whole + bytes(3)
        flags = Flag.END_HEADERS | Flag.PADDED | Flag.PRIORITY
        content = message(b"padded")
        await peer.send(
            GREETING,
            ask(1, ECHO, b"first"),
            frame(FrameKind.PRIORITY, 0, 1, bytes(5)),
            frame(0xBE, 0xFF, 77, b"unknown"),
            frame(FrameKind.HEADERS, flags, 3, padded),
            frame(FrameKind.DATA, Flag.PADDED, 3, b"\x09" + content[:4] + bytes(9)),
            frame(FrameKind.DATA, 0, 3, b""),
            frame(FrameKind.DATA, Flag.PADDED | Flag.END_STREAM, 3, b"\x00" + content[4:]),
            frame(FrameKind.HEADERS, 0, 5, whole[:10]),
            frame(FrameKind.CONTINUATION, 0, 5, whole[10:30]),
            frame(FrameKind.CONTINUATION, Flag.END_HEADERS, 5, whole[30:]),
            data(5, message(b"continued")),
            frame(FrameKind.PING, 0, 0, b"12345678"),
            headers(7, ECHO),
            data(7, message(b"x" * 1000), end=False),
            headers(7, ECHO, end=True),  # trailers
            ask(9, ECHO, b""),
            at_a_time=at_a_time,
        )
        answers = peer.answers
        assert answers.ended == [1, 3, 5, 7, 9]
        got = [answers.messages(i)[0] for i in answers.ended]
        assert got == [b"first", b"padded", b"continued", b"x" * 1000, b""]
        assert {answers.status(i) for i in answers.ended} == {"OK"}
        assert answers.fields[1][":status"] == "200"
        assert answers.fields[9]["content-type"] == "application/grpc"
        assert frame(FrameKind.PING, Flag.ACK, 0, b"12345678") in peer.wire.written
        assert frame(FrameKind.SETTINGS, Flag.ACK, 0) in peer.wire.written
        assert not answers.resets
        await peer.end()

    run(body)


def test_peer_without_a_header_table() -> None:
    async def body() -> None:
        peer = Peer(echo_handlers())
        await peer.send(
            PREFACE, settings((Setting.TABLE, 0)), *(ask(i, ECHO, b"a") for i in (1, 3))
        )
        assert [peer.answers.status(i) for i in (1, 3)] == ["OK", "OK"]
        # The change is said once, at the start of the first block.
        assert peer.wire.written.count(b"\x20\x88\x0f\x10\x10application/grpc") == 1
        assert peer.wire.written.count(b"\x88\x0f\x10\x10application/grpc") == 2
        await peer.end()

    run(body)


def test_answers_wait_for_windows_and_keep_their_order() -> None:
    async def body() -> None:
        peer = Peer(echo_handlers())
        content = bytes(range(256)) * 200
        await peer.send(PREFACE, settings((Setting.WINDOW, 0)), ask(1, ECHO, content))
        assert 1 in peer.answers.fields
        assert peer.answers.content == {}
        await peer.send(window(1, 100))
        assert len(peer.answers.content[1]) == 100
        # A smaller first window makes that of a stream negative.
        await peer.send(settings((Setting.WINDOW, 50)), settings((Setting.WINDOW, 0)))
        await peer.send(settings((Setting.WINDOW, 7)))
        assert len(peer.answers.content[1]) == 150 - 0
        await peer.send(window(1, 1 << 20))
        # Now the connection's own window of 65,535 holds; this answer is shorter.
        assert peer.answers.messages(1) == [content]
        assert peer.answers.ended == [1]
        await peer.send(ask(3, ECHO, content), window(3, 1 << 20))
        assert peer.answers.ended == [1]
        await peer.send(window(0, 1 << 20))
        assert peer.answers.messages(3) == [content]
        assert peer.answers.ended == [1, 3]
        await peer.end()

    run(body)


def test_frames_are_no_longer_than_the_peer_takes() -> None:
    async def body() -> None:
        peer = Peer(echo_handlers())
        await peer.send(GREETING, window(0, 1 << 20), ask(1, ECHO, bytes(60000)))
        lengths = [len(p) for k, _, _, p in _frames(peer) if k == FrameKind.DATA]
        assert max(lengths) == 1 << 14
        before = len(peer.wire.written)
        await peer.send(settings((Setting.FRAME, 1 << 17)), ask(3, ECHO, bytes(60000)))
        assert peer.answers.messages(3) == [bytes(60000)]
        assert len(peer.wire.written) - before < 60000 + 200
        await peer.end()

    run(body)


def _frames(peer: Peer) -> list[tuple[int, int, int, bytes]]:
    from _http2 import frames

    return list(frames(peer.wire.written))


def test_slow_reader_stops_what_is_made_and_what_is_read() -> None:
    async def body() -> None:
        log: list[str] = []
        peer = Peer(echo_handlers(log))
        await peer.send(GREETING, window(0, 1 << 20))
        peer.connection.pause_writing()
        assert not peer.wire.reading
        await peer.send(ask(1, "/t.T/count", b"50"))
        assert log == ["made 0"]
        peer.connection.resume_writing()
        assert peer.wire.reading
        await peer.rest()
        # Until the stream's window of 65,535 is full.
        assert log == ["made 0", "made 1", "made 2"]
        for _ in range(60):
            await peer.send(window(1, 30000), window(0, 30000))
        assert len(peer.answers.messages(1)) == 50
        assert peer.answers.status(1) == "OK"
        await peer.end()

    run(body)


def test_answers_that_nobody_reads_end_the_connection() -> None:
    async def body() -> None:
        peer = Peer(echo_handlers(), backlog=200_000)
        await peer.send(PREFACE, settings((Setting.WINDOW, 0)))
        for i in range(1, 20, 2):
            await peer.send(ask(i, ECHO, bytes(50_000)))
        assert peer.answers.goaways[0][1] == Http2ErrorCode.CALM
        assert peer.wire.closed
        await peer.end()

    run(body)


def test_statuses() -> None:
    async def body() -> None:
        peer = Peer(echo_handlers())
        await peer.send(
            GREETING,
            ask(1, "/t.T/refuse", b""),
            ask(3, "/t.T/fail", b""),
            ask(5, "/t.T/nothing", b""),
            ask(7, "/t.T/echo", b"", grpc_encoding="snappy"),
            ask(9, "/t.T/echo", b"", grpc_timeout="soon"),
            ask(11, "/t.T/echo", b"", grpc_timeout="123456789S"),
            headers(13, ECHO, end=True),
            headers(15, ECHO) + data(15, message(b"a") + message(b"b")),
            headers(17, ECHO) + data(17, message(b"abc")[:-1]),
            headers(19, ECHO) + data(19, b"\x02" + message(b"abc")[1:]),
            headers(21, ECHO) + data(21, message(b"abc", compressed=1)),
            ask(23, ECHO, bytes(MESSAGE_BYTES + 1)),
            ask(25, ECHO, b"", content_type="text/html"),
        )
        answers = peer.answers
        assert {i: answers.status(i) for i in answers.ended} == {
            1: "NOT_FOUND",
            3: "INTERNAL",
            5: "UNIMPLEMENTED",
            7: "UNIMPLEMENTED",
            9: "INVALID_ARGUMENT",
            11: "INVALID_ARGUMENT",
            13: "INTERNAL",
            15: "INTERNAL",
            17: "INTERNAL",
            19: "INTERNAL",
            21: "INTERNAL",
            23: "RESOURCE_EXHAUSTED",
            25: "INVALID_ARGUMENT",
        }
        assert answers.fields[1]["grpc-message"] == "100%25 g%C3%B6ne%0A"
        assert answers.fields[7]["grpc-accept-encoding"] == "identity,deflate,gzip"
        assert b"secret" not in peer.wire.written
        # Its client is told to stop, where it had not yet ended.
        assert set(answers.resets.values()) <= {Http2ErrorCode.NO_ERROR}
        assert not peer.wire.closed
        await peer.end()

    run(body)


def test_compressed_messages_and_what_they_may_not_unpack_to() -> None:
    async def body() -> None:
        peer = Peer(echo_handlers())
        packed = gzip.compress(b"hello")
        bomb = gzip.compress(bytes(50 << 20))
        assert len(bomb) < MESSAGE_BYTES
        await peer.send(
            GREETING,
            headers(1, ECHO, grpc_encoding="gzip") + data(1, message(packed, 1)),
            headers(3, ECHO, grpc_encoding="deflate") + data(3, message(zlib.compress(b"hi"), 1)),
            headers(5, ECHO, grpc_encoding="gzip") + data(5, message(bomb, 1)),
            headers(7, ECHO, grpc_encoding="gzip") + data(7, message(packed[:-1], 1)),
            headers(9, ECHO, grpc_encoding="gzip") + data(9, message(b"no gzip", 1)),
            headers(11, ECHO, grpc_encoding="gzip") + data(11, message(b"plain", 0)),
        )
        answers = peer.answers
        assert [answers.messages(i) for i in (1, 3, 11)] == [[b"hello"], [b"hi"], [b"plain"]]
        assert [answers.status(i) for i in (5, 7, 9)] == [
            "RESOURCE_EXHAUSTED",
            "INTERNAL",
            "INTERNAL",
        ]
        await peer.end()

    run(body)


def test_context() -> None:
    async def body() -> None:
        peer = Peer(echo_handlers())
        await peer.send(
            GREETING,
            ask(1, "/t.T/tell", b"", x_key="v", key_bin="AP8", bad_bin="!", grpc_timeout="5S"),
        )
        (said,) = peer.answers.messages(1)
        # What is no base64 is left out.
        assert said.decode() == repr(([("key-bin", b"\x00\xff"), ("x-key", "v")], False))
        await peer.end()

    run(body)


def test_deadline_and_cancellation_reach_the_handler() -> None:
    async def body() -> None:
        import asyncio

        log: list[str] = []
        peer = Peer(echo_handlers(log))
        await peer.send(GREETING, ask(1, WAIT, b""), ask(3, WAIT, b"", grpc_timeout="1n"))
        await asyncio.sleep(0.01)
        assert peer.answers.status(3) == "DEADLINE_EXCEEDED"
        assert log == ["began", "began", "cancelled"]
        await peer.send(reset(1))
        assert log == ["began", "began", "cancelled", "cancelled"]
        assert 1 not in peer.answers.fields
        await peer.send(ask(5, WAIT, b""))
        # A connection that is lost takes its calls along.
        await peer.end()
        assert log[-2:] == ["began", "cancelled"]

    run(body)


def test_streams_of_requests() -> None:
    async def body() -> None:
        log: list[str] = []
        peer = Peer(echo_handlers(log))
        await peer.send(GREETING, window(0, 1 << 20), headers(1, "/t.T/chat"))
        await peer.send(data(1, message(b"a") + message(b"bc")[:6], end=False))
        # Answered before the client has ended.
        assert peer.answers.messages(1) == [b"a"]
        await peer.send(data(1, b"c" + message(b"")))
        assert peer.answers.messages(1) == [b"a", b"bc", b""]
        assert peer.answers.status(1) == "OK"
        await peer.send(headers(3, "/t.T/chat"), data(3, message(b"x"), end=False), reset(3))
        assert 3 not in peer.answers.ended
        await peer.end()

    run(body)


def test_stream_whose_answers_are_not_read_gets_no_new_window() -> None:
    async def body() -> None:
        peer = Peer(echo_handlers())
        peer.calls.memory.most = 1 << 24
        await peer.send(PREFACE, settings((Setting.WINDOW, 0)), headers(1, "/t.T/chat"))
        piece = data(1, message(bytes(60_000)) * 10, end=False)
        for _ in range(6):
            await peer.send(piece)
        updates = [i for k, _, i, _ in _frames(peer) if k == FrameKind.WINDOW_UPDATE]
        assert 1 not in updates
        # What it sends beyond the window ends the connection.
        for _ in range(4):
            await peer.send(piece)
        assert peer.answers.goaways[0][1] == Http2ErrorCode.FLOW_CONTROL
        await peer.end()

    run(body)


def test_long_requests_get_their_window_back() -> None:
    async def body() -> None:
        peer = Peer(echo_handlers())
        await peer.send(GREETING)
        # Far more than the window of the connection, in requests that are refused half way.
        for i in range(1, 400, 2):
            await peer.send(
                headers(i, ECHO), *(data(i, bytes(500_000), end=k == 1) for k in (0, 1))
            )
        assert not peer.wire.closed
        assert len(peer.answers.ended) == 200
        await peer.end()

    run(body)


def test_memory_of_requests_that_come_in_part_is_bounded() -> None:
    async def body() -> None:
        peer = Peer(echo_handlers())
        await peer.send(GREETING)
        part = message(bytes(MESSAGE_BYTES - 10))[:-1]
        for i in range(1, 21, 2):
            await peer.send(headers(i, ECHO), data(i, part, end=False))
        assert peer.calls.memory.used <= peer.calls.memory.most
        refused = [i for i in peer.answers.ended if peer.answers.status(i) == "RESOURCE_EXHAUSTED"]
        assert len(refused) >= 5
        await peer.end()

    run(body)


def test_streams_at_a_time() -> None:
    async def body() -> None:
        peer = Peer(echo_handlers(), streams=3)
        await peer.send(GREETING, *(ask(i, WAIT, b"") for i in (1, 3, 5, 7)), reset(1))
        assert peer.answers.resets == {7: Http2ErrorCode.REFUSED}
        await peer.send(ask(9, ECHO, b"room"))
        assert peer.answers.messages(9) == [b"room"]
        await peer.end()

    run(body)


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ((b"GET / HTTP/1.1\r\n\r\n",), "PROTOCOL"),
        ((PREFACE, ask(1, ECHO, b"")), "PROTOCOL"),
        ((GREETING, frame(FrameKind.PING, 0, 0, b"short")), "FRAME_SIZE"),
        ((GREETING, frame(FrameKind.PING, 0, 1, bytes(8))), "FRAME_SIZE"),
        ((GREETING, frame(FrameKind.SETTINGS, 0, 0, bytes(5))), "FRAME_SIZE"),
        ((GREETING, frame(FrameKind.SETTINGS, 0, 3, b"")), "FRAME_SIZE"),
        ((GREETING, settings((Setting.WINDOW, 1 << 31))), "FLOW_CONTROL"),
        ((GREETING, settings((Setting.FRAME, 100))), "PROTOCOL"),
        ((GREETING, headers(2, ECHO)), "PROTOCOL"),
        ((GREETING, headers(0, ECHO)), "PROTOCOL"),
        ((GREETING, data(1, b"")), "PROTOCOL"),
        ((GREETING, data(0, b"")), "PROTOCOL"),
        ((GREETING, reset(1)), "PROTOCOL"),
        ((GREETING, frame(FrameKind.RST_STREAM, 0, 1, b"")), "FRAME_SIZE"),
        ((GREETING, window(1, 1)), "PROTOCOL"),
        ((GREETING, window(0, 0)), "FLOW_CONTROL"),
        ((GREETING, window(0, (1 << 31) - 1)), "FLOW_CONTROL"),
        ((GREETING, frame(FrameKind.WINDOW_UPDATE, 0, 0, b"")), "FRAME_SIZE"),
        ((GREETING, frame(FrameKind.PUSH_PROMISE, 0, 1, bytes(4))), "PROTOCOL"),
        ((GREETING, frame(FrameKind.PRIORITY, 0, 1, bytes(4))), "FRAME_SIZE"),
        ((GREETING, frame(FrameKind.CONTINUATION, 4, 1, b"")), "PROTOCOL"),
        ((GREETING, frame(FrameKind.HEADERS, 0, 1, b""), ask(3, ECHO, b"")), "PROTOCOL"),
        ((GREETING, frame(FrameKind.HEADERS, 4, 1, b"\x80")), "COMPRESSION"),
        ((GREETING, frame(FrameKind.HEADERS, 0xC, 1, b"\x05abc")), "PROTOCOL"),
        ((GREETING, frame(FrameKind.HEADERS, 0xC, 1, b"")), "PROTOCOL"),
        ((GREETING, frame(FrameKind.HEADERS, 0x24, 1, b"abc")), "PROTOCOL"),
        ((GREETING, headers(1, WAIT), frame(FrameKind.DATA, 8, 1, b"\x05abc")), "PROTOCOL"),
        ((GREETING, headers(1, WAIT), frame(FrameKind.DATA, 8, 1, b"")), "PROTOCOL"),
        ((GREETING, ask(1, WAIT, b""), data(1, b"x")), "STREAM_CLOSED"),
        ((GREETING, ask(1, WAIT, b""), headers(1, WAIT, end=True)), "STREAM_CLOSED"),
        ((GREETING, headers(1, WAIT), headers(1, WAIT)), "STREAM_CLOSED"),
        ((GREETING, b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"), "FRAME_SIZE"),
        ((GREETING, b"\x01\x02\x00\x01\x00\x00\x00\x00\x01"), "FRAME_SIZE"),
        ((GREETING, frame(FrameKind.HEADERS, 4, 1, bytes((1 << 16) + 1))), "CALM"),
        # Floods.
        ((GREETING, headers(1, WAIT), *[data(1, b"", end=False)] * 1100), "CALM"),
        (
            (
                GREETING,
                frame(FrameKind.HEADERS, 0, 1, b""),
                *[frame(FrameKind.CONTINUATION, 0, 1, b"")] * 1100,
            ),
            "CALM",
        ),
        (
            (
                GREETING,
                frame(FrameKind.HEADERS, 0, 1, b""),
                *[frame(FrameKind.CONTINUATION, 0, 1, bytes(16000))] * 5,
            ),
            "CALM",
        ),
    ],
)
def test_what_ends_a_connection(parts: tuple[bytes, ...], code: str) -> None:
    async def body() -> None:
        peer = Peer(echo_handlers())
        await peer.send(*parts)
        assert [c for _, c in peer.answers.goaways] == [getattr(Http2ErrorCode, code)]
        assert peer.wire.closed
        await peer.end()

    run(body)


def test_rapid_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeweave.inference_server._checks._ROOM", 100.0)
    monkeypatch.setattr("edgeweave.inference_server._checks._ROOM_PER_S", 0.0)

    async def body() -> None:
        peer = Peer(echo_handlers())
        answered = [ask(i, ECHO, b"") for i in range(1, 401, 2)]
        await peer.send(GREETING, *answered)
        # Of what was answered: they cost nothing.
        await peer.send(*(reset(i) for i in range(1, 401, 2)))
        pairs = [ask(i, WAIT, b"") + reset(i) for i in range(401, 801, 2)]
        await peer.send(*pairs[:100])
        assert not peer.wire.closed
        await peer.send(*pairs[100:])
        assert peer.answers.goaways[0][1] == Http2ErrorCode.CALM
        await peer.end()

    run(body)


def test_frames_for_streams_that_have_ended_do_no_harm() -> None:
    async def body() -> None:
        peer = Peer(echo_handlers())
        await peer.send(GREETING, ask(1, ECHO, b"a"))
        late = (data(1, b"late"), reset(1), window(1, 5), headers(1, ECHO, end=True))
        await peer.send(*late, ask(3, ECHO, b"b"))
        assert peer.answers.messages(3) == [b"b"]
        assert not peer.wire.closed
        await peer.end()

    run(body)


def test_greeting_and_headers_have_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setattr("edgeweave.inference_server._http2._GREETING_S", 0.01)

    async def body() -> None:
        silent, halted, good = (Peer(echo_handlers()) for _ in range(3))
        await halted.send(GREETING, frame(FrameKind.HEADERS, 0, 1, b""))
        await good.send(GREETING, ask(1, WAIT, b""))
        await asyncio.sleep(0.05)
        assert (silent.wire.closed, halted.wire.closed, good.wire.closed) == (True, True, False)
        for peer in (silent, halted, good):
            await peer.end()

    run(body)


def test_going_away_lets_calls_finish() -> None:
    async def body() -> None:
        peer = Peer(echo_handlers())
        await peer.send(GREETING, headers(1, ECHO))
        peer.connection.go_away()
        await peer.send(data(1, message(b"still")))
        assert peer.answers.messages(1) == [b"still"]
        peer.connection.go_away(finally_=True)
        assert peer.answers.goaways == [((1 << 31) - 1, 0), (1, 0)]
        assert peer.wire.closed
        await peer.end()

    run(body)


def _session(rng: random.Random) -> bytes:
    parts = [GREETING]
    for i in range(1, 2 * rng.randrange(1, 5), 2):
        path = rng.choice((ECHO, WAIT, "/t.T/chat", "/t.T/count", "/t.T/none"))
        content = b"2" if path.endswith("count") else bytes(rng.randrange(2000))
        more = {"grpc_timeout": "1n"} if rng.random() < 0.2 else {}
        parts.append(ask(i, path, content, **more))
        if rng.random() < 0.3:
            parts.append(rng.choice((reset(i), window(i, 9), window(0, 9), settings((4, 9)))))
    return b"".join(parts)


def test_fuzz() -> None:
    """Sessions with bytes changed, cut out, doubled: an answer or an end, and nothing left."""
    rng = random.Random(0)
    ended = answered = 0

    async def body() -> None:
        nonlocal ended, answered
        for _ in range(8000):
            raw = bytearray(_session(rng))
            # Behind the preface, or the first byte would decide.
            for _ in range(rng.randrange(1, 6)):
                at = rng.randrange(len(PREFACE), len(raw))
                kind = rng.randrange(4)
                if kind == 0:
                    raw[at] = rng.randrange(256)
                elif kind == 1:
                    raw[at] ^= 1 << rng.randrange(8)
                elif kind == 2:
                    del raw[at : at + rng.randrange(1, 20)]
                else:
                    raw[at:at] = raw[at : at + rng.randrange(1, 20)]
                if len(raw) <= len(PREFACE):
                    break
            peer = Peer(echo_handlers())
            await peer.send(bytes(raw), at_a_time=rng.choice((0, 0, 1 + rng.randrange(200))))
            ended += peer.wire.closed
            answered += bool(peer.answers.ended)
            await peer.end()

    run(body, timeout_s=300.0)
    # Neither is rare, or the mutations would not be worth much.
    assert ended > 800
    assert answered > 800


def test_status_numbers_are_grpcs() -> None:
    from edgeweave.inference_server._grpc_wire import status_block
    from edgeweave.inference_server._hpack import HeaderDecoder

    for code in grpc.StatusCode:
        fields = dict(HeaderDecoder(1 << 16).decode(status_block(code, "")))
        assert fields["grpc-status"] == str(code.value[0])


class Ringing:
    """A call whose deadline can come."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def expire(self) -> None:
        self.log.append(self.name)


def test_deadlines_ring_in_order_and_forget_what_was_answered() -> None:
    import asyncio

    from edgeweave.inference_server._deadlines import MOST_ANSWERED, Deadlines

    async def body() -> None:
        loop = asyncio.get_running_loop()
        deadlines, log = Deadlines(loop), []
        now = loop.time()
        entries = {
            name: deadlines.add(now + delay_s, Ringing(log, name))
            for name, delay_s in (("late", 0.03), ("first", 0.01), ("never", 0.02), ("past", -1.0))
        }
        deadlines.drop(entries["never"])
        deadlines.drop(entries["never"])
        while len(log) < 3:
            await asyncio.sleep(0.005)
        assert log == ["past", "first", "late"]
        assert len(deadlines) == 0
        # Answered calls do not stay until their deadline.
        kept = deadlines.add(now + 3600, Ringing(log, "kept"))
        for _ in range(20 * MOST_ANSWERED):
            deadlines.drop(deadlines.add(now + 3600, Ringing(log, "answered")))
        assert len(deadlines) <= 2 * MOST_ANSWERED + 2
        deadlines.drop(kept)
        assert len(log) == 3

    run(body)


def test_methods_without_a_task() -> None:
    """Answered, refused, cancelled by reset, expired, and answered with too much."""

    async def body() -> None:
        import asyncio

        from edgeweave.inference_server._grpc_wire import CallError

        waiting: list[tuple[bytes, object]] = []
        gone: list[bytes] = []

        async def echo(request: bytes, context: object) -> bytes:
            raise AssertionError("the other way must be taken")

        def begin(request: bytes, context: object, answer: object) -> object:
            if request == b"refuse":
                answer(None, CallError(grpc.StatusCode.NOT_FOUND, "no"))
                return None
            waiting.append((request, answer))
            return lambda: gone.append(request)

        echo.begin = begin
        peer = Peer({"echo": grpc.unary_unary_rpc_method_handler(echo)})
        await peer.send(
            GREETING,
            ask(1, ECHO, b"refuse"),
            ask(3, ECHO, b"a"),
            ask(5, ECHO, b"b"),
            ask(7, ECHO, b"c", grpc_timeout="1n"),
            ask(9, ECHO, b"d"),
            reset(5),
        )
        await asyncio.sleep(0.01)
        assert peer.answers.status(1) == "NOT_FOUND"
        assert peer.answers.status(7) == "DEADLINE_EXCEEDED"
        assert sorted(gone) == [b"b", b"c"]
        for request, answer in waiting:
            # Also for those that are gone: it does nothing there.
            answer(request * (1 if request == b"a" else 2 * MESSAGE_BYTES), None)
        await peer.rest()
        assert peer.answers.messages(3) == [b"a"]
        assert peer.answers.status(9) == "RESOURCE_EXHAUSTED"
        assert 5 not in peer.answers.ended
        await peer.end()

    run(body)
