"""Windows of any size, in any order: the server stays inside them and loses nothing."""

from __future__ import annotations

import random

import pytest
from _http2 import PREFACE, Answers, Peer, ask, echo_handlers, run, settings, window

from edgeweave.inference_server._frames import FrameKind, Setting

STREAMS = 12


class Account:
    """What the server may send, as the peer counts it."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.connection = 65535
        self.granted: dict[int, int] = {}
        self.seen: dict[int, int] = {}

    def room(self, stream_id: int) -> int:
        return self.first + self.granted.get(stream_id, 0) - self.seen.get(stream_id, 0)

    def take(self, frames: list[tuple[int, int, int, bytes]]) -> None:
        for kind, _, stream_id, payload in frames:
            if kind == FrameKind.DATA:
                assert payload, "an empty frame"
                assert len(payload) <= 1 << 14
                self.seen[stream_id] = self.seen.get(stream_id, 0) + len(payload)
                self.connection -= len(payload)
                assert self.connection >= 0
                assert self.room(stream_id) >= 0


@pytest.mark.parametrize("seed", range(20))
def test_random_windows(seed: int) -> None:
    rng = random.Random(seed)

    async def body() -> None:
        first = rng.choice((0, 1, 1000, 65535))
        peer, account, taken = Peer(echo_handlers(), backlog=1 << 24), Account(first), 0
        contents = {i: rng.randbytes(rng.choice((0, 3, 20_000, 60_000))) for i in range(1, 24, 2)}
        assert len(contents) == STREAMS
        to_ask = [ask(i, "/t.T/echo", content) for i, content in contents.items()]
        to_ask[0] = PREFACE + settings((Setting.WINDOW, first)) + to_ask[0]
        for turn in range(400):
            parts = []
            if to_ask and rng.random() < 0.2:
                parts.append(to_ask.pop(0))
            begun = 2 * (STREAMS - len(to_ask))
            if begun and rng.random() < 0.7:
                stream_id, more = rng.randrange(1, begun, 2), rng.choice((1, 100, 5000))
                account.granted[stream_id] = account.granted.get(stream_id, 0) + more
                parts.append(window(stream_id, more))
            if begun and rng.random() < 0.3:
                more = rng.choice((1, 1000, 30_000))
                account.connection += more
                parts.append(window(0, more))
            if turn % 9 == 8:
                (peer.connection.pause_writing, peer.connection.resume_writing)[turn % 2]()
            await peer.send(*parts)
            account.take(peer.frames[taken:])
            taken = len(peer.frames)
            if begun and rng.random() < 0.05:
                account.first = rng.choice((0, 10, 3000, 65535))
                raw = settings(
                    (Setting.WINDOW, account.first), (Setting.TABLE, rng.choice((0, 4096)))
                )
                await peer.send(raw)
                account.take(peer.frames[taken:])
                taken = len(peer.frames)
        peer.connection.resume_writing()
        await peer.send(*to_ask, window(0, 1 << 24), settings((Setting.WINDOW, 1 << 20)))
        answers = Answers(peer.wire.written)
        assert sorted(answers.ended) == sorted(contents)
        assert {i: answers.messages(i) for i in contents} == {i: [c] for i, c in contents.items()}
        assert {answers.status(i) for i in contents} == {"OK"}
        await peer.end()

    run(body)
