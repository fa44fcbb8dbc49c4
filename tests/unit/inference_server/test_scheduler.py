"""The queue: what goes together, what goes first, what is dropped, and that nobody is forgotten."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from edgeweave.inference_server._batch import BatchSettings, Work
from edgeweave.inference_server._errors import (
    DeadlineExceededError,
    ModelFailedError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeweave.inference_server._instances import Instance
from edgeweave.inference_server._scheduler import Scheduler
from edgeweave.inference_server._stats import ModelStats
from edgeweave.inference_server._types import InferResult, OutputTensor

# Far above what anything here takes; a test that gets there has failed.
PATIENCE_S = 30.0


class Recorder:
    """Doubles numbers, records batches, and waits at a gate."""

    def __init__(self, budget: tuple[int, ...] = (8,)) -> None:
        self.budget = budget
        self.batches: list[list[Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def collate(self, works: Sequence[Work]) -> list[Any]:
        payloads = [work.payload for work in works]
        self.batches.append(payloads)
        return payloads

    def infer(self, batch: list[Any]) -> list[Any]:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        for value in batch:
            if value == "raise":
                raise RuntimeError("secret")
            if value == "exit":
                sys.exit(3)
            if value == "memory":
                raise MemoryError
        return [value * 2 for value in batch]

    def split(self, raw: list[Any], works: Sequence[Work]) -> list[InferResult]:
        return [InferResult([OutputTensor("y", "INT64", np.array(value))]) for value in raw]


def work(payload: Any, rows: int = 1, nbytes: int = 10, signature: Any = None) -> Work:
    return Work(signature, (rows,), rows, nbytes, payload, f"id-{payload}")


def value(result: InferResult) -> int:
    return int(result.outputs[0].array)


def run(
    body: Callable[[Scheduler, Recorder], Awaitable[None]],
    *,
    budget: tuple[int, ...] = (8,),
    instances: int = 1,
    **settings: Any,
) -> tuple[Recorder, ModelStats]:
    recorder, stats = Recorder(budget), ModelStats()

    async def main() -> None:
        threads = [Instance(f"test#{i}", 1) for i in range(instances)]
        scheduler = Scheduler("test", recorder, threads, BatchSettings(**settings), stats)
        await asyncio.wait_for(body(scheduler, recorder), PATIENCE_S)
        recorder.gate.set()
        assert await scheduler.drain(PATIENCE_S)
        assert (scheduler.queued, scheduler.queued_bytes, scheduler.running) == (0, 0, 0)
        assert all(thread.join(PATIENCE_S) for thread in threads)

    asyncio.run(main())
    return recorder, stats


async def block(scheduler: Scheduler, recorder: Recorder) -> asyncio.Task[InferResult]:
    """Occupy the only instance until the gate opens."""
    recorder.gate.clear()
    recorder.entered.clear()
    task = asyncio.create_task(scheduler.submit(work(0)))
    assert await asyncio.to_thread(recorder.entered.wait, PATIENCE_S)
    return task


async def turns() -> None:
    """Let everything that can run in the loop run."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_requests_of_one_turn_share_a_batch_within_the_budget() -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        results = await asyncio.gather(*(scheduler.submit(work(i)) for i in range(20)))
        assert [value(result) for result in results] == [2 * i for i in range(20)]

    recorder, stats = run(body)
    assert [len(batch) for batch in recorder.batches] == [8, 8, 4]
    assert (stats.inference_count, stats.execution_count, stats.success.count) == (20, 3, 20)


def test_every_part_of_the_budget_counts() -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        works = [Work(None, (1, 40), 1, 1, i) for i in range(4)]
        await asyncio.gather(*(scheduler.submit(w) for w in works))

    recorder, _ = run(body, budget=(100, 100))
    assert [len(batch) for batch in recorder.batches] == [2, 2]


def test_signatures_do_not_mix() -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        await asyncio.gather(*(scheduler.submit(work(i, signature=(i % 2,))) for i in range(8)))

    recorder, _ = run(body)
    assert sorted(map(sorted, recorder.batches)) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_idle_instance_goes_at_once_whatever_the_delay() -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        # With the delay this would outlast the patience.
        assert value(await scheduler.submit(work(1))) == 2

    run(body, max_queue_delay_us=3_600_000_000)


def test_backlog_waits_for_company_until_the_batch_is_full() -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        first = await block(scheduler, recorder)
        tasks = [asyncio.create_task(scheduler.submit(work(i))) for i in range(1, 8)]
        await turns()
        recorder.gate.set()
        await first
        # Seven wait for an eighth.
        assert scheduler.queued == 7
        tasks.append(asyncio.create_task(scheduler.submit(work(8))))
        await asyncio.gather(*tasks)

    recorder, _ = run(body, max_queue_delay_us=3_600_000_000)
    assert [len(batch) for batch in recorder.batches] == [1, 8]


def test_backlog_goes_when_the_delay_is_over() -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        first = await block(scheduler, recorder)
        task = asyncio.create_task(scheduler.submit(work(1)))
        await turns()
        recorder.gate.set()
        await first
        assert value(await task) == 2

    recorder, _ = run(body, max_queue_delay_us=30_000)
    assert recorder.batches == [[0], [1]]


def test_backlog_does_not_wait_past_a_deadline() -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        first = await block(scheduler, recorder)
        deadline = time.monotonic_ns() + int(PATIENCE_S * 0.02 * 1e9)
        tasks = [
            asyncio.create_task(scheduler.submit(work(1))),
            asyncio.create_task(scheduler.submit(work(2), deadline_ns=deadline)),
        ]
        await turns()
        recorder.gate.set()
        assert [value(r) for r in await asyncio.gather(first, *tasks)] == [0, 2, 4]

    recorder, _ = run(body, max_queue_delay_us=3_600_000_000)
    assert recorder.batches == [[0], [1, 2]]


def test_priorities() -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        first = await block(scheduler, recorder)
        order = [(1, 3), (2, None), (3, 1), (4, 2), (5, 1)]
        tasks = [
            asyncio.create_task(scheduler.submit(work(payload), priority=level))
            for payload, level in order
        ]
        await turns()
        recorder.gate.set()
        await asyncio.gather(first, *tasks)

    recorder, _ = run(body, budget=(1,), priority_levels=3)
    assert recorder.batches == [[0], [3], [5], [4], [1], [2]]


@pytest.mark.parametrize("poison", ["raise", "exit"])
def test_only_the_poisonous_request_fails(poison: str) -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        payloads = [1, 2, poison, 4]
        results = await asyncio.gather(
            *(scheduler.submit(work(p)) for p in payloads), return_exceptions=True
        )
        error = results.pop(2)
        assert isinstance(error, ModelFailedError)
        assert "secret" not in str(error)
        assert f"id-{poison}" in str(error)
        assert [value(r) for r in results if isinstance(r, InferResult)] == [2, 4, 8]
        # And the instance lives.
        assert value(await scheduler.submit(work(5))) == 10

    recorder, stats = run(body)
    assert recorder.batches[0] == [1, 2, poison, 4]
    assert stats.rejects == {"model_error": 1}


def test_out_of_memory_is_a_limit() -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        with pytest.raises(ResourceExhaustedError, match="memory must suffice"):
            await scheduler.submit(work("memory"))

    run(body)


def test_cancelled_in_the_queue_is_never_run() -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        first = await block(scheduler, recorder)
        tasks = [asyncio.create_task(scheduler.submit(work(i))) for i in range(1, 6)]
        await turns()
        assert (scheduler.queued, scheduler.queued_bytes) == (5, 50)
        tasks[1].cancel()
        tasks[3].cancel()
        await turns()
        assert (scheduler.queued, scheduler.queued_bytes) == (3, 30)
        recorder.gate.set()
        await first
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [value(r) for r in done if isinstance(r, InferResult)] == [2, 6, 10]

    recorder, stats = run(body)
    assert recorder.batches == [[0], [1, 3, 5]]
    assert stats.rejects["cancelled"] == 2


def test_cancelled_while_running_does_not_harm_its_batch() -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        recorder.gate.clear()
        tasks = [asyncio.create_task(scheduler.submit(work(i))) for i in (1, 2, 3)]
        assert await asyncio.to_thread(recorder.entered.wait, PATIENCE_S)
        tasks[1].cancel()
        await turns()
        recorder.gate.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(done[1], asyncio.CancelledError)
        assert [value(r) for r in done if isinstance(r, InferResult)] == [2, 6]

    run(body)


def test_expired_in_the_queue_is_never_run() -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        first = await block(scheduler, recorder)
        past = time.monotonic_ns()
        soon = past + 20_000_000
        tasks = [
            asyncio.create_task(scheduler.submit(work(1), deadline_ns=past)),
            asyncio.create_task(scheduler.submit(work(2), deadline_ns=soon)),
            asyncio.create_task(scheduler.submit(work(3))),
        ]
        # Before the instance is free: a deadline does not wait for it.
        for task in tasks[:2]:
            with pytest.raises(DeadlineExceededError, match="in the queue"):
                await task
        assert scheduler.queued == 1
        recorder.gate.set()
        await asyncio.gather(first, tasks[2])

    recorder, stats = run(body)
    assert recorder.batches == [[0], [3]]
    assert stats.rejects == {"deadline": 2}


def test_full_queue() -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        first = await block(scheduler, recorder)
        tasks = [asyncio.create_task(scheduler.submit(work(i))) for i in (1, 2)]
        await turns()
        with pytest.raises(UnavailableError, match="2 requests waiting"):
            await scheduler.submit(work(3))
        tasks[0].cancel()
        await turns()
        with pytest.raises(UnavailableError, match="10 bytes waiting"):
            await scheduler.submit(work(4, nbytes=95))
        with pytest.raises(ResourceExhaustedError, match="at most the queue's 100 bytes"):
            await scheduler.submit(work(5, nbytes=101))
        # The cancelled one made room.
        tasks.append(asyncio.create_task(scheduler.submit(work(6))))
        await turns()
        recorder.gate.set()
        await asyncio.gather(first, *tasks[1:])

    run(body, queue_requests=2, queue_bytes=100)


def test_drain_finishes_what_is_inside_and_refuses_the_rest() -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        first = await block(scheduler, recorder)
        waiting = asyncio.create_task(scheduler.submit(work(1)))
        await turns()
        draining = asyncio.create_task(scheduler.drain(PATIENCE_S))
        await turns()
        with pytest.raises(UnavailableError, match="being unloaded"):
            await scheduler.submit(work(2))
        assert not draining.done()
        recorder.gate.set()
        assert await draining
        assert [value(await first), value(await waiting)] == [0, 2]

    run(body)


def test_drain_gives_up_in_time() -> None:
    async def main() -> None:
        recorder = Recorder()
        scheduler = Scheduler(
            "test", recorder, [Instance("test", 1)], BatchSettings(), ModelStats()
        )
        first = await block(scheduler, recorder)
        waiting = asyncio.create_task(scheduler.submit(work(1)))
        await turns()
        assert not await scheduler.drain(0.05)
        with pytest.raises(UnavailableError, match="one that ends"):
            await waiting
        recorder.gate.set()
        await first

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_everyone_gets_the_own_answer_under_a_storm() -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        rng = np.random.default_rng(0)
        cancelled = set(rng.choice(600, 60, replace=False).tolist())

        async def one(i: int) -> None:
            await asyncio.sleep(float(rng.random()) * 0.05)
            request = work(i, rows=int(rng.integers(1, 4)), signature=i % 3)
            task = asyncio.create_task(scheduler.submit(request))
            if i in cancelled:
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                assert value(await task) == 2 * i

        await asyncio.gather(*(one(i) for i in range(600)))

    _, stats = run(body, instances=2, priority_levels=2)
    assert stats.success.count + stats.rejects["cancelled"] >= 600


def test_cancelled_requests_do_not_pile_up_while_the_model_works() -> None:
    async def body(scheduler: Scheduler, recorder: Recorder) -> None:
        recorder.gate.clear()
        first = asyncio.create_task(scheduler.submit(work(1)))
        await asyncio.to_thread(recorder.entered.wait, PATIENCE_S)
        last = asyncio.create_task(scheduler.submit(work(2)))
        for _ in range(20):
            for _ in range(500):
                scheduler.enqueue(work(3), lambda result, error: None)()
            await asyncio.sleep(0)
        assert sum(map(len, scheduler._lanes.values())) < 4000
        recorder.gate.set()
        assert [value(await task) for task in (first, last)] == [2, 4]
        assert recorder.batches == [[1], [2]]

    run(body)
