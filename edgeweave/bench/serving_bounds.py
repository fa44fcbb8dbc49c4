"""How soon the server says no, and ends: full queue, deadline, cancellation, SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc.aio
import numpy as np

from edgeweave.bench.serving_peers import Slow, edgeweave_server
from edgeweave.inference_server import TensorSpec, export_model
from edgeweave.inference_server._client_wire import encode_request
from edgeweave.inference_server._messages import INFERENCE_SERVICE, message_class

__all__ = ["MODEL_S", "measure_bounds"]

_INFER: Final = f"/{INFERENCE_SERVICE}/ModelInfer"
_STATISTICS: Final = f"/{INFERENCE_SERVICE}/ModelStatistics"
MODEL_S: Final = 0.5
_QUEUE: Final = 8
_TIMES: Final = 100
_ATTEMPTS: Final = 5
_DEADLINE_S: Final = 0.05
_PATIENCE_S: Final = 60.0


def _write_model(repository: Path) -> None:
    spec = TensorSpec("INPUT0", "FP32", (-1, 1))
    export_model(
        Slow(MODEL_S),
        repository,
        "slow",
        arguments={"seconds": MODEL_S},
        architecture="edgeweave.bench.serving_peers:Slow",
        inputs=[spec],
        outputs=[TensorSpec("OUTPUT0", "FP32", (-1, 1))],
        options={"max_batch_size": 1, "batching": {"queue_requests": _QUEUE}},
    )


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "p50_ms": 1e3 * statistics.median(seconds),
        "most_ms": 1e3 * max(seconds),
        "times": len(seconds),
    }


class _Asker:
    """Asks the slow model, and the server about it."""

    def __init__(self, channel: Any) -> None:
        self._infer = channel.unary_unary(_INFER)
        self._statistics = channel.unary_unary(_STATISTICS)
        self._request = encode_request("slow", {"INPUT0": np.ones((1, 1), np.float32)})

    def ask(self, timeout_s: float = _PATIENCE_S) -> Any:
        """A call that has begun."""
        return self._infer(self._request, timeout=timeout_s)

    async def failed(self) -> int:
        """Requests that were refused, dropped or cancelled."""
        request = message_class("inference.ModelStatisticsRequest")(name="slow")
        data = await self._statistics(request.SerializeToString())
        answer = message_class("inference.ModelStatisticsResponse").FromString(data)
        return int(answer.model_stats[0].inference_stats.fail.count)

    async def fill(self, waiting: int) -> list[Any]:
        """Occupy the instance and some places of the queue."""
        calls = [self.ask()]
        # The first leaves the queue before the others come.
        await asyncio.sleep(MODEL_S / 4)
        calls += [self.ask() for _ in range(waiting)]
        await asyncio.sleep(MODEL_S / 4)
        return calls


class _AnsweredError(RuntimeError):
    """A request that should be refused got an answer."""


async def _refused(call: Callable[[], Awaitable[Any]], code: grpc.StatusCode) -> float:
    """Seconds until a call is refused with a code."""
    start = time.perf_counter()
    try:
        await call()
    except grpc.aio.AioRpcError as error:
        if error.code() is not code:
            raise RuntimeError(
                f"bench serving: the status must be {code.name}, got {error.code().name}"
            ) from error
        return time.perf_counter() - start
    raise _AnsweredError(f"bench serving: the status must be {code.name}, got an answer")


async def _refusals(asker: _Asker) -> list[float]:
    """Seconds of each refusal of a full queue."""
    full: list[float] = []
    for attempt in range(_ATTEMPTS):
        calls = await asker.fill(_QUEUE)
        start = time.perf_counter()
        try:
            # While it is full: the instance takes the next one soon.
            while len(full) < _TIMES and time.perf_counter() - start < MODEL_S / 4:
                full.append(await _refused(asker.ask, grpc.StatusCode.UNAVAILABLE))
        except _AnsweredError:
            # On a busy machine the next one was taken before.
            if not full and attempt + 1 == _ATTEMPTS:
                raise
        await asyncio.gather(*calls)
        if full:
            break
    return full


async def _cancelled(asker: _Asker) -> float:
    """Seconds until a request that was cancelled in the queue has left the server."""
    call = asker.ask()
    await asyncio.sleep(MODEL_S / 20)
    before = await asker.failed()
    start = time.perf_counter()
    call.cancel()
    while await asker.failed() == before:
        if time.perf_counter() - start > _PATIENCE_S:
            raise RuntimeError("bench serving: a cancelled request must leave the queue")
    return time.perf_counter() - start


async def measure_bounds(repository: Path) -> dict[str, Any]:
    """Measure them.

    Args:
        repository: Where the model is written.

    Returns:
        Milliseconds: until the refusal of a full queue, from a deadline to its status, from a
        cancellation to its effect (with the question whether it came), and of the end.

    Raises:
        RuntimeError: A request got another status than it should.
    """
    import psutil

    _write_model(repository)
    late: list[float] = []
    cancelled: list[float] = []
    with edgeweave_server(repository) as (port, pid):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            asker = _Asker(channel)
            full = await _refusals(asker)
            calls = await asker.fill(_QUEUE - 2)
            for _ in range(4):
                took = await _refused(
                    lambda: asker.ask(_DEADLINE_S), grpc.StatusCode.DEADLINE_EXCEEDED
                )
                late.append(took - _DEADLINE_S)
                cancelled.append(await _cancelled(asker))
            await asyncio.gather(*calls)
            calls = await asker.fill(3)
            start = time.perf_counter()
            os.kill(pid, signal.SIGTERM)
            answered = await asyncio.gather(*calls, return_exceptions=True)
            last_answer_s = time.perf_counter() - start
        status = await asyncio.to_thread(psutil.Process(pid).wait, _PATIENCE_S)
        end_s = time.perf_counter() - start
    lost = sum(isinstance(answer, BaseException) for answer in answered)
    return {
        "full_queue": _summary(full),
        "after_deadline": _summary(late),
        "after_cancellation": _summary(cancelled),
        "sigterm": {
            "inside": len(calls),
            "lost": lost,
            "last_answer_ms": 1e3 * last_answer_s,
            "end_ms": 1e3 * end_s,
            "status": status,
        },
    }
