"""A request in a scheduler's queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ._errors import ServingError
from ._types import InferResult

__all__ = ["Answer", "Entry"]

# Gets a result, or the error that there is instead. It must not raise.
Answer = Callable[[InferResult | None, ServingError | None], None]


class Entry:
    """A request in the queue or in a batch; runs what waits for its result, once and at once.

    A future would do the same by way of the loop, at several times the cost.
    """

    __slots__ = (
        "_answer",
        "_done",
        "arrival_ns",
        "deadline_ns",
        "queued",
        "start_ns",
        "timer",
        "urgent",
    )

    def __init__(self, answer: Answer, deadline_ns: int | None) -> None:
        self._answer = answer
        self._done = False
        self.arrival_ns = time.monotonic_ns()
        self.deadline_ns = deadline_ns
        self.queued = True
        self.start_ns = 0
        self.timer: asyncio.TimerHandle | None = None
        self.urgent = False

    def done(self) -> bool:
        """Whether nobody waits any more; asked by other threads too."""
        return self._done

    def give_up(self) -> None:
        """Whoever waits has gone."""
        self._done = True

    def finish(self, result: InferResult | None, error: ServingError | None) -> None:
        """Hand over a result or an error."""
        if not self._done:
            self._done = True
            self._answer(result, error)
