"""What a peer may ask of a connection: the form of requests, and how much work it may cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ._frames import Http2Error, Http2ErrorCode

__all__ = ["EMPTY_COST", "VISIT_COST", "Effort", "is_request"]

# Of work that costs the peer little: so much at once, and so much more per second. A reset of a
# request that was not yet answered is 1.
_ROOM, _ROOM_PER_S = 4000.0, 2000.0
# What else costs: an empty frame, and to look at a stream.
EMPTY_COST: Final = 4.0
VISIT_COST: Final = 1 / 64
_METHOD, _PATH, _REGULAR = 1, 2, 16
_PSEUDO: Final = {":method": _METHOD, ":path": _PATH, ":scheme": 4, ":authority": 8}
_OF_CONNECTIONS: Final = frozenset(
    ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade")
)


class Effort:
    """How much work a peer has caused lately.

    Args:
        now: Time in seconds.
    """

    __slots__ = ("_room", "_time")

    def __init__(self, now: float) -> None:
        self._room, self._time = _ROOM, now

    def spend(self, cost: float, now: float, what: str) -> None:
        """Count work.

        Args:
            cost: In resets of requests.
            now: Time in seconds.
            what: For the error.

        Raises:
            Http2Error: It is too much.
        """
        room = self._room + (now - self._time) * _ROOM_PER_S
        self._room, self._time = min(room, _ROOM) - cost, now
        if self._room < 0:
            raise Http2Error(Http2ErrorCode.CALM, f"too many {what}")


def is_request(fields: Sequence[tuple[str, str]]) -> bool:
    """Whether headers are those of a request (RFC 9113, sections 8.2 and 8.3).

    Args:
        fields: Names and values, in order.

    Returns:
        False where two readers could see two different requests in them.
    """
    seen = 0
    for name, _ in fields:
        if name[:1] == ":":
            bit = _PSEUDO.get(name, _REGULAR)
            if seen & (bit | _REGULAR) or bit == _REGULAR:
                return False
            seen |= bit
        elif not name or name in _OF_CONNECTIONS or name != name.lower():
            return False
        else:
            seen |= _REGULAR
    return bool(seen & _METHOD and seen & _PATH)
