"""What is queued, what runs it, and how a batch runs in an instance's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ._types import InferResult

__all__ = ["BatchSettings", "Outcome", "Runner", "Work", "run_batch"]


@dataclass(slots=True)
class Work:
    """A validated request.

    Attributes:
        signature: Requests with equal signatures may share a batch.
        cost: What it takes of each part of the budget.
        size: Rows or graphs, for the statistics.
        nbytes: Memory it holds.
        payload: What the runner needs; dropped once it ran.
        request_id: For the log.
    """

    signature: Hashable
    cost: tuple[int, ...]
    size: int
    nbytes: int
    payload: Any
    request_id: str = ""


class Waiting(Protocol):
    """Who waits for a request."""

    def done(self) -> bool:
        """Whether nobody does any more."""


class Runner(Protocol):
    """Runs batches of one model, in any thread."""

    budget: tuple[int, ...]

    def collate(self, works: Sequence[Work]) -> Any:
        """Put requests together."""

    def infer(self, batch: Any) -> Any:
        """Run the model."""

    def split(self, raw: Any, works: Sequence[Work]) -> list[InferResult]:
        """Take the answer apart, in the order of the requests."""


@dataclass(frozen=True)
class BatchSettings:
    """How requests wait.

    Attributes:
        max_queue_delay_us: How long a batch that found no idle instance may wait for more.
        queue_requests: Requests that may wait.
        queue_bytes: Bytes that may wait.
        priority_levels: Levels of the `priority` parameter, 1 first; requests without it come last.
        timeout_us: Time in the queue of a request that names none; 0 for no limit.
    """

    max_queue_delay_us: int = 0
    queue_requests: int = 1024
    queue_bytes: int = 256 << 20
    priority_levels: int = 1
    timeout_us: int = 0


@dataclass(slots=True)
class Outcome:
    """What became of a batch: one result or error per request, and the times if it ran whole."""

    results: list[InferResult | BaseException]
    times_ns: tuple[int, int, int] | None


def run_batch(runner: Runner, waiting: Sequence[Waiting], works: Sequence[Work]) -> Outcome:
    """Run a batch; if it fails, its requests one by one, so that only the faulty one does.

    Args:
        runner: Of the model.
        waiting: Who waits for each request.
        works: The requests.

    Returns:
        One result or error per request. Nothing is raised.
    """
    try:
        results, times_ns = _attempt(runner, works)
        return Outcome(list(results), times_ns)
    # Everything: a model that calls sys.exit must not end the thread either.
    except BaseException as error:
        if len(works) == 1:
            return Outcome([error], None)
    alone: list[InferResult | BaseException] = []
    for who, work in zip(waiting, works, strict=True):
        if who.done():  # cancelled meanwhile: nobody waits for it
            alone.append(asyncio.CancelledError())
            continue
        try:
            alone.append(_attempt(runner, [work])[0][0])
        except BaseException as error:
            alone.append(error)
    return Outcome(alone, None)


def _attempt(
    runner: Runner, works: Sequence[Work]
) -> tuple[list[InferResult], tuple[int, int, int]]:
    start = time.monotonic_ns()
    batch = runner.collate(works)
    collated = time.monotonic_ns()
    raw = runner.infer(batch)
    inferred = time.monotonic_ns()
    results = runner.split(raw, works)
    if len(results) != len(works):
        raise RuntimeError(f"runner: {len(works)} results expected, got {len(results)}")
    end = time.monotonic_ns()
    return results, (collated - start, inferred - collated, end - inferred)
