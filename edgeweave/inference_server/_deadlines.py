"""Deadlines of many calls behind one timer."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Any, Final, Protocol

__all__ = ["MOST_ANSWERED", "Deadlines"]

# Of answered calls, before the deadlines are cleared of them.
MOST_ANSWERED: Final = 256


class Expiring(Protocol):
    """What has a deadline."""

    def expire(self) -> None:
        """The deadline is here."""


class Deadlines:
    """Ends calls at their deadlines, with one timer for all.

    A timer of the loop per call would cost more than the rest of a call's beginning: those of calls
    that were answered stay in the loop's heap, and it compares them in Python.

    Args:
        loop: Runs the timer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # Time, a number that no other has, and the call, or None once it is answered.
        self._heap: list[list[Any]] = []
        self._numbers = itertools.count()
        self._answered = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, time: float, call: Expiring) -> list[Any]:
        """Have `call.expire` called at a time; returns what `drop` takes."""
        entry = [time, next(self._numbers), call]
        heapq.heappush(self._heap, entry)
        if self._heap[0] is entry:
            self._set_timer()
        return entry

    def drop(self, entry: list[Any]) -> None:
        """Forget a call."""
        if entry[2] is None:
            return
        entry[2] = None
        self._answered += 1
        if self._answered > MOST_ANSWERED and 2 * self._answered > len(self._heap):
            self._heap = [kept for kept in self._heap if kept[2] is not None]
            heapq.heapify(self._heap)
            self._answered = 0
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            self._timer = self._loop.call_at(self._heap[0][0], self._ring)

    def _ring(self) -> None:
        now = self._loop.time()
        try:
            while self._heap and self._heap[0][0] <= now:
                entry = heapq.heappop(self._heap)
                call, entry[2] = entry[2], None
                if call is None:
                    self._answered -= 1
                else:
                    call.expire()
        finally:
            # Whatever became of one call, the others have their deadlines.
            self._set_timer()
