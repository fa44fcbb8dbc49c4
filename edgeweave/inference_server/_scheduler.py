"""One model's queue: batches, priorities, deadlines, cancellation, backpressure, draining.

Everything here runs in the event loop, so nothing needs a lock; batches run in the threads of
`Instance`. A request waits in the lane of its priority and signature. When an instance is free, the
request that is first by priority and arrival leads a batch, and others of its signature join while
the budget lasts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Final

from ._batch import BatchSettings, Outcome, Runner, Work, run_batch
from ._entry import Answer, Entry
from ._errors import (
    DeadlineExceededError,
    ModelFailedError,
    ResourceExhaustedError,
    ServingError,
    UnavailableError,
)
from ._instances import Instance
from ._stats import ModelStats
from ._types import InferResult

__all__ = ["Scheduler"]


_log = logging.getLogger("edgeweave.server")
_NS: Final = 1_000_000_000
# Turns of the event loop that a batch may wait for one without an arrival.
_MOST_TURNS: Final = 16
# Cancelled requests that stay in the queue, beside as many as the queue may hold.
_MOST_HUSKS: Final = 1024


class Scheduler:
    """The queue of one model version and the instances that serve it.

    Args:
        name: For the log.
        runner: Runs batches.
        instances: Threads to run them in; the scheduler stops them.
        settings: How requests wait.
        stats: Where it counts.
    """

    def __init__(
        self,
        name: str,
        runner: Runner,
        instances: Sequence[Instance],
        settings: BatchSettings,
        stats: ModelStats,
    ) -> None:
        self.stats = stats
        self.settings = settings
        self.queued_bytes = 0
        self.queued = 0
        self._name = name
        self._runner = runner
        self._instances = list(instances)
        self._idle = list(instances)
        self._lanes: dict[tuple[int, Hashable], deque[tuple[int, Entry, Work]]] = {}
        self._sequence = 0
        self._husks = 0
        self._draining = False
        self._drained = asyncio.Event()
        self._pump_scheduled = False
        self._turns = 0
        self._arrivals_seen = 0
        self._delay_timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        """Instances at work."""
        return len(self._instances) - len(self._idle)

    async def submit(
        self,
        work: Work,
        *,
        deadline_ns: int | None = None,
        priority: int | None = None,
        watched: bool = False,
    ) -> InferResult:
        """Wait for a request's turn and for its result.

        Cancelling the call takes the request out of the queue; a batch that already has it runs on
        for the others.

        Args:
            work: The request.
            deadline_ns: When it expires, by `time.monotonic_ns`.
            priority: Its level, 1 first; None for the last.
            watched: Whether somebody else cancels the call at its deadline, as gRPC does for a
                client's; then no timer is needed.

        Returns:
            The result.

        Raises:
            UnavailableError: The queue is full, or the model is being unloaded.
            ResourceExhaustedError: No queue of this size could take it.
            DeadlineExceededError: It expired while it waited.
            ModelFailedError: The model raised.
        """
        future: asyncio.Future[InferResult] = asyncio.get_running_loop().create_future()

        def answer(result: InferResult | None, error: ServingError | None) -> None:
            if future.done():
                return
            if result is not None:
                future.set_result(result)
            elif error is not None:
                future.set_exception(error)

        cancel = self.enqueue(
            work, answer, deadline_ns=deadline_ns, priority=priority, watched=watched
        )
        try:
            return await future
        except asyncio.CancelledError:
            cancel()
            raise

    def enqueue(
        self,
        work: Work,
        answer: Answer,
        *,
        deadline_ns: int | None = None,
        priority: int | None = None,
        watched: bool = False,
    ) -> Callable[[], None]:
        """As `submit`, for who does not want to wait in a coroutine.

        Args:
            work: The request.
            answer: Gets the result or the error, in the event loop.
            deadline_ns: As in `submit`.
            priority: As in `submit`.
            watched: As in `submit`.

        Returns:
            To be called when nobody waits any more; does nothing after the answer.

        Raises:
            UnavailableError: As in `submit`.
            ResourceExhaustedError: As in `submit`.
        """
        self._admit(work)
        entry = Entry(answer, deadline_ns)
        entry.urgent = bool(self._idle) and not self.queued
        self._sequence += 1
        lane = self.settings.priority_levels if priority is None else priority
        self._lanes.setdefault((lane, work.signature), deque()).append(
            (self._sequence, entry, work)
        )
        self.queued += 1
        self.queued_bytes += work.nbytes
        if deadline_ns is not None and not watched:
            delay_s = max(0.0, (deadline_ns - entry.arrival_ns) / _NS)
            loop = asyncio.get_running_loop()
            entry.timer = loop.call_later(delay_s, self._expire, entry, work)
        self._schedule_pump()
        return lambda: self._cancel(entry, work)

    def _cancel(self, entry: Entry, work: Work) -> None:
        if entry.done():
            return
        entry.give_up()
        self.stats.record_failure("cancelled")
        if entry.queued:
            self._leave_queue(entry, work)
            # The lane keeps an empty husk; the tensors go now.
            work.payload = None
            self._husks += 1
            if self._husks == _MOST_HUSKS + self.settings.queue_requests:
                # Not now: a batch may be in the making.
                asyncio.get_running_loop().call_soon(self._sweep)
            self._finish_drain()

    def _sweep(self) -> None:
        """Drop husks. A client that asks and cancels, while the model works, makes any number."""
        self._husks = 0
        for key, lane in list(self._lanes.items()):
            self._lanes[key] = deque(item for item in lane if item[1].queued)

    def _admit(self, work: Work) -> None:
        if self._draining:
            raise UnavailableError(
                "request: model must be serving, got one being unloaded", "draining"
            )
        if work.nbytes > self.settings.queue_bytes:
            raise ResourceExhaustedError(
                f"request: size must be at most the queue's {self.settings.queue_bytes} bytes, "
                f"got {work.nbytes}"
            )
        if self.queued >= self.settings.queue_requests:
            raise UnavailableError(
                f"request: queue must have room, got {self.queued} requests waiting; "
                "try again later",
                "queue_full",
            )
        if self.queued_bytes + work.nbytes > self.settings.queue_bytes:
            raise UnavailableError(
                f"request: queue must have room, got {self.queued_bytes} bytes waiting; "
                "try again later",
                "queue_full",
            )

    def _leave_queue(self, entry: Entry, work: Work) -> None:
        entry.queued = False
        self.queued -= 1
        self.queued_bytes -= work.nbytes
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None

    def _expire(self, entry: Entry, work: Work) -> None:
        if not entry.queued:
            return
        self._leave_queue(entry, work)
        work.payload = None
        if not entry.done():
            waited_ns = time.monotonic_ns() - entry.arrival_ns
            self.stats.record_failure("deadline", waited_ns)
            error = DeadlineExceededError(
                f"request: deadline must leave time to run, got {waited_ns // 1000} us in the queue"
            )
            entry.finish(None, error)
        self._finish_drain()

    # --- batches ---

    def _schedule_pump(self) -> None:
        # Turns of the loop later: requests that arrive together go together.
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._turns = 0
            self._arrivals_seen = self._sequence
            asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        """Pump once a turn of the loop has brought no request, or after some turns.

        Microseconds where a request comes alone. In a storm a batch would otherwise leave with the
        few requests that the loop has read, and the model's thread would then take the interpreter
        from the loop that reads the others.
        """
        self._turns += 1
        quiet = self._sequence == self._arrivals_seen and self._turns > 1
        if quiet or not self._idle or self._turns >= _MOST_TURNS:
            self._pump()
            return
        self._arrivals_seen = self._sequence
        asyncio.get_running_loop().call_soon(self._settle)

    def _pump(self) -> None:
        self._pump_scheduled = False
        if self._delay_timer is not None:
            self._delay_timer.cancel()
            self._delay_timer = None
        while self._idle:
            lane_key = self._head()
            if lane_key is None:
                break
            wait_s = self._wait_s(lane_key)
            if wait_s > 0:
                loop = asyncio.get_running_loop()
                self._delay_timer = loop.call_later(wait_s, self._pump)
                break
            self._dispatch(self._take_batch(lane_key[1]))
        self._finish_drain()

    def _head(self) -> tuple[int, Hashable] | None:
        """The lane whose first request comes next; husks in front of it are dropped."""
        best: tuple[int, int] | None = None
        found = None
        for key, lane in list(self._lanes.items()):
            while lane and not lane[0][1].queued:
                lane.popleft()
            if not lane:
                del self._lanes[key]
                continue
            rank = (key[0], lane[0][0])
            if best is None or rank < best:
                best, found = rank, key
        return found

    def _wait_s(self, lane_key: tuple[int, Hashable]) -> float:
        """How long the next batch may still wait for company."""
        delay_ns = self.settings.max_queue_delay_us * 1000
        if not delay_ns or self._draining:
            return 0.0
        waiting = [
            (entry, work)
            for key in self._lanes_of(lane_key[1])
            for _, entry, work in self._lanes[key]
            if entry.queued
        ]
        if any(entry.urgent for entry, _ in waiting):
            return 0.0
        totals = [sum(costs) for costs in zip(*(work.cost for _, work in waiting), strict=True)]
        full = any(t >= limit for t, limit in zip(totals, self._runner.budget, strict=True))
        until_ns = min(entry.arrival_ns for entry, _ in waiting) + delay_ns
        for entry, _ in waiting:
            if entry.deadline_ns is not None:
                # Half of its time is for the model: at the deadline itself it would be too late.
                until_ns = min(until_ns, (entry.arrival_ns + entry.deadline_ns) // 2)
        return 0.0 if full else (until_ns - time.monotonic_ns()) / _NS

    def _lanes_of(self, signature: Hashable) -> list[tuple[int, Hashable]]:
        return sorted((key for key in self._lanes if key[1] == signature), key=lambda key: key[0])

    def _take_batch(self, signature: Hashable) -> list[tuple[Entry, Work]]:
        batch: list[tuple[Entry, Work]] = []
        left = list(self._runner.budget)
        now_ns = time.monotonic_ns()
        for key in self._lanes_of(signature):
            lane = self._lanes[key]
            while lane:
                _, entry, work = lane[0]
                if entry.queued and entry.deadline_ns is not None and entry.deadline_ns <= now_ns:
                    self._expire(entry, work)
                if not entry.queued or entry.done():
                    lane.popleft()
                    if entry.queued:
                        self._leave_queue(entry, work)
                    continue
                fits = all(c <= room for c, room in zip(work.cost, left, strict=True))
                # What alone is above the budget was admitted knowingly, and goes alone.
                if batch and not fits:
                    return batch
                lane.popleft()
                self._leave_queue(entry, work)
                entry.start_ns = now_ns
                left = [room - c for c, room in zip(work.cost, left, strict=True)]
                batch.append((entry, work))
            del self._lanes[key]
        return batch

    def _dispatch(self, batch: list[tuple[Entry, Work]]) -> None:
        if not batch:
            return
        instance = self._idle.pop()
        entries = [entry for entry, _ in batch]
        works = [work for _, work in batch]
        loop = asyncio.get_running_loop()

        def done(outcome: Outcome) -> None:
            self._idle.append(instance)
            # Before the answers: to hand them over takes the loop about as long as a small model
            # takes for a batch, and the instance would wait meanwhile.
            if 2 * self.queued >= len(batch):
                self._pump()
            self._deliver(entries, works, outcome)
            self._schedule_pump()

        instance.submit(loop, lambda: run_batch(self._runner, entries, works), done)

    # --- back in the loop ---

    def _deliver(self, entries: Sequence[Entry], works: Sequence[Work], outcome: Outcome) -> None:
        size = sum(work.size for work in works)
        if outcome.times_ns is not None:
            self.stats.record_execution(size, len(works), outcome.times_ns)
        else:
            # One by one, or not at all: counted, without times that would mean something.
            answered = [
                work.size
                for work, result in zip(works, outcome.results, strict=True)
                if isinstance(result, InferResult)
            ]
            self.stats.execution_count += len(answered)
            self.stats.inference_count += sum(answered)
        now_ns = time.monotonic_ns()
        for entry, work, result in zip(entries, works, outcome.results, strict=True):
            work.payload = None
            if entry.done():
                continue
            total_ns = now_ns - entry.arrival_ns
            if isinstance(result, InferResult):
                self.stats.record_request(entry.start_ns - entry.arrival_ns, total_ns)
                entry.finish(result, None)
            else:
                error = self._public_error(result, work)
                self.stats.record_failure(error.reason, total_ns)
                entry.finish(None, error)

    def _public_error(self, error: BaseException, work: Work) -> ServingError:
        if isinstance(error, ServingError):
            return error
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            _log.error("out of memory", extra={"model": self._name, "request": work.request_id})
            return ResourceExhaustedError(
                f"request {work.request_id}: memory must suffice for the model, got too little",
                "memory",
            )
        _log.error(
            "model raised",
            exc_info=error,
            extra={"model": self._name, "request": work.request_id},
        )
        return ModelFailedError(f"request {work.request_id}: the model failed; the log has more")

    # --- end of life ---

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those inside; then stop the instances.

        Args:
            timeout_s: How long to wait. What then still waits gets UnavailableError.

        Returns:
            Whether all of them finished in time.
        """
        self._draining = True
        self._schedule_pump()
        try:
            await asyncio.wait_for(self._drained.wait(), timeout_s)
            return True
        except asyncio.TimeoutError:
            self._refuse_rest()
            return False
        finally:
            for instance in self._instances:
                instance.stop()

    def _refuse_rest(self) -> None:
        for lane in self._lanes.values():
            for _, entry, work in lane:
                if entry.queued:
                    self._leave_queue(entry, work)
                    if not entry.done():
                        self.stats.record_failure("draining")
                        entry.finish(
                            None,
                            UnavailableError("request: server must be serving, got one that ends"),
                        )
        self._lanes.clear()

    def _finish_drain(self) -> None:
        if self._draining and not self.queued and not self.running:
            self._drained.set()
