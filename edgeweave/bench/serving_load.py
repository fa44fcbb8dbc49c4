"""Bounded load over loopback: closed loops, open loops, and their latencies."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Load", "closed_loop", "grpc_call", "http_call", "open_loop"]

Call = Callable[[int], Awaitable[bytes]]


@dataclass(frozen=True)
class Load:
    """What a load found.

    Attributes:
        requests: Answered requests.
        seconds: Time from the first to the last answer.
        p50_ms: Median latency.
        p95_ms: 95th percentile.
        p99_ms: 99th percentile.
        failures: Requests that failed.
        server_cpu_ms: Processor time of the server per answer; 0 where it was not looked at.
    """

    requests: int
    seconds: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    failures: int
    server_cpu_ms: float = 0.0

    @property
    def rate(self) -> float:
        """Answers per second."""
        return self.requests / self.seconds

    def record(self) -> dict[str, float]:
        """As JSON-ready data."""
        return {**asdict(self), "rate": self.rate}


def _load(latencies_s: Sequence[float], seconds: float, failures: int) -> Load:
    if len(latencies_s) < 2:
        raise RuntimeError(
            f"bench serving: at least two requests must be answered, got {len(latencies_s)} "
            f"answers and {failures} failures"
        )
    cuts = statistics.quantiles(latencies_s, n=100, method="inclusive")
    p50, p95, p99 = (1e3 * cuts[i] for i in (49, 94, 98))
    return Load(len(latencies_s), seconds, p50, p95, p99, failures)


async def closed_loop(call: Call, clients: int, requests: int, max_s: float) -> Load:
    """Clients that each wait for an answer before they ask again.

    Args:
        call: Asks once; gets the request's number.
        clients: How many ask at a time.
        requests: How many requests in all, at most.
        max_s: When to stop in any case.

    Returns:
        Latencies and rate.
    """
    latencies: list[float] = []
    failures = 0
    numbers = iter(range(requests))
    start = time.perf_counter()

    async def client() -> None:
        nonlocal failures
        for number in numbers:
            began = time.perf_counter()
            if began - start > max_s:
                return
            try:
                await call(number)
            except OSError:
                failures += 1
                continue
            latencies.append(time.perf_counter() - began)

    await asyncio.gather(*(client() for _ in range(clients)))
    return _load(latencies, time.perf_counter() - start, failures)


async def open_loop(call: Call, rate: float, requests: int, seed: int = 0) -> Load:
    """Requests that arrive at random whether or not earlier ones were answered.

    Latency counts from when a request was due, so that a stall is seen by all that it delays.

    Args:
        call: Asks once.
        rate: Mean arrivals per second (Poisson).
        requests: How many.
        seed: Of the arrivals.

    Returns:
        Latencies and rate.
    """
    rng = random.Random(seed)
    latencies: list[float] = []
    failures = 0
    start = time.perf_counter()

    async def one(number: int, due: float) -> None:
        nonlocal failures
        try:
            await call(number)
        except OSError:
            failures += 1
            return
        latencies.append(time.perf_counter() - due)

    tasks, due = [], start
    for number in range(requests):
        due += rng.expovariate(rate)
        delay_s = due - time.perf_counter()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        tasks.append(asyncio.ensure_future(one(number, due)))
    await asyncio.gather(*tasks)
    return _load(latencies, time.perf_counter() - start, failures)


def grpc_call(channel: Any, path: str, bodies: Sequence[bytes]) -> Call:
    """Ask over gRPC with requests that are serialised beforehand.

    Args:
        channel: Of `grpc.aio`.
        path: Of the rpc.
        bodies: The requests, taken in turn.

    Returns:
        For the loops; a refused request raises OSError.
    """
    import grpc.aio

    method = channel.unary_unary(path)

    async def call(number: int) -> bytes:
        try:
            answer: bytes = await method(bodies[number % len(bodies)], timeout=60)
        except grpc.aio.AioRpcError as error:
            raise OSError(error.code().name) from error
        return answer

    return call


def http_call(port: int, path: str, bodies: Sequence[bytes], clients: int) -> Call:
    """Ask over HTTP/1.1 with connections that stay open, by the barest of clients.

    Args:
        port: On loopback.
        path: Of the endpoint.
        bodies: JSON requests, taken in turn.
        clients: How many connections.

    Returns:
        For the loops; an answer other than 200 raises OSError.
    """
    free: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter] | None] = asyncio.Queue()
    for _ in range(clients):
        free.put_nowait(None)

    async def call(number: int) -> bytes:
        body = bodies[number % len(bodies)]
        connection = await free.get()
        if connection is None:
            connection = await asyncio.open_connection("127.0.0.1", port)
        reader, writer = connection
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].split("\r\n", 1)[0])
        answer = await reader.readexactly(length)
        free.put_nowait(connection)
        if " 200 " not in head.split("\r\n", 1)[0]:
            raise OSError(head.split("\r\n", 1)[0])
        return answer

    return call
