"""`edgeweave bench serving`: what the server adds to a bare echo and to the model itself.

Client and servers share this machine, as the numbers say; everything stays on loopback and every
load is bounded in count and time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import torch
from torch import nn

from edgeweave.bench.environment import describe_environment, is_installed
from edgeweave.bench.serving_bounds import measure_bounds
from edgeweave.bench.serving_load import (
    Call,
    Load,
    closed_loop,
    grpc_call,
    http_call,
    open_loop,
)
from edgeweave.bench.serving_models import (
    GIN_ARGUMENTS,
    MAX_BATCH,
    MOLECULE_EDGES,
    MOLECULE_NODES,
    WIDTH,
    write_molecule_models,
    write_shift,
    write_wide,
)
from edgeweave.bench.serving_peers import ECHO_PATH, Wide, edgeweave_server, peer_server
from edgeweave.inference_server._client_wire import decode_response, encode_request
from edgeweave.inference_server._messages import INFERENCE_SERVICE, message_class

__all__ = ["SCENARIOS", "ServingOptions", "run"]

_INFER = f"/{INFERENCE_SERVICE}/ModelInfer"
_STATISTICS = f"/{INFERENCE_SERVICE}/ModelStatistics"
_MB_FLOATS = (1 << 20) // 4
_ROUNDS = 5
_UNBOUNDED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


@dataclass(frozen=True)
class ServingOptions:
    """How much to measure.

    Attributes:
        clients: Clients of the concurrent scenarios.
        requests: Requests of one load, at most.
        seconds: Time of one load, at most.
        soak: Requests of the soak; 0 to leave it out.
        only: Names of scenarios; empty for all but the soak.
    """

    clients: int = 64
    requests: int = 4000
    seconds: float = 6.0
    soak: int = 0
    only: tuple[str, ...] = ()


@contextlib.asynccontextmanager
async def _channel(port: int) -> Any:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_UNBOUNDED) as channel:
        yield channel


async def _stats(channel: Any, model: str) -> Any:
    request = message_class("inference.ModelStatisticsRequest")(name=model)
    data = await channel.unary_unary(_STATISTICS)(request.SerializeToString())
    return message_class("inference.ModelStatisticsResponse").FromString(data).model_stats[0]


def _cpu_s(pid: int) -> float:
    """Processor time of a server and its children: what a busy machine does not change much."""
    import psutil

    server = psutil.Process(pid)
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return float(sum(t.user + t.system for t in times))


async def _measured(
    call: Call, pid: int, clients: int, options: ServingOptions, share: float = 1.0
) -> Load:
    """A short load to warm up, then the load."""
    requests = max(2 * clients, int(options.requests * share))
    await closed_loop(call, clients, max(2, clients, requests // 10), options.seconds / 4)
    before = _cpu_s(pid)
    load = await closed_loop(call, clients, requests, options.seconds)
    return replace(load, server_cpu_ms=1e3 * (_cpu_s(pid) - before) / load.requests)


def _mean_ms(after: Any, before: Any) -> float:
    count = after.count - before.count
    return float((after.ns - before.ns) / max(1, count) / 1e6)


async def _one_megabyte(repository: Path, options: ServingOptions) -> dict[str, Any]:
    """One client, 1 MB in and out: what is added to an echo and to the model's own time."""
    x = np.random.default_rng(0).standard_normal((1, _MB_FLOATS), dtype=np.float32)
    body = encode_request("shift", {"INPUT0": x})
    with peer_server("echo") as (echo_port, echo_pid), edgeweave_server(repository) as (port, pid):
        async with _channel(echo_port) as echo_channel, _channel(port) as channel:
            ours = grpc_call(channel, _INFER, [body])
            echo = grpc_call(echo_channel, ECHO_PATH, [body])
            answer = decode_response(await ours(0)).outputs["OUTPUT0"]
            if not np.array_equal(answer, x + 1):
                raise RuntimeError("bench serving: answer must be the input plus one, got another")
            loads: dict[str, list[Load]] = {"echo": [], "edgeweave": []}
            before = await _stats(channel, "shift")
            # In turn, so that a change of the machine's mood meets both.
            for _ in range(4):
                loads["echo"].append(await _measured(echo, echo_pid, 1, options, 0.05))
                loads["edgeweave"].append(await _measured(ours, pid, 1, options, 0.05))
            after = await _stats(channel, "shift")
    model_ms = _mean_ms(after.inference_stats.compute_infer, before.inference_stats.compute_infer)
    medians = {name: statistics.median(v.p50_ms for v in some) for name, some in loads.items()}
    return {
        "echo_p50_ms": medians["echo"],
        "p50_ms": medians["edgeweave"],
        "model_ms": model_ms,
        "added_ms": medians["edgeweave"] - medians["echo"] - model_ms,
        "p99_ms": statistics.median(v.p99_ms for v in loads["edgeweave"]),
        "echo_cpu_ms": statistics.median(v.server_cpu_ms for v in loads["echo"]),
        "cpu_ms": statistics.median(v.server_cpu_ms for v in loads["edgeweave"]),
    }


def _offline_rate(module: nn.Module, batch: int, seconds: float = 1.0) -> float:
    """Rows per second of the module alone, in batches of one size."""
    x = torch.randn(batch, WIDTH)
    count, start = 0, time.perf_counter()
    with torch.inference_mode():
        for _ in range(3):
            module(x)
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            module(x)
            count += 1
    return count * batch / (time.perf_counter() - start)


def _depth_of_one_ms() -> int:
    """Layers that take a millisecond for one row, on one thread as the server runs them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = [1 / _offline_rate(Wide(WIDTH, 3).eval(), 1, 0.1) for _ in range(5)]
    finally:
        torch.set_num_threads(threads)
    return max(1, round(3e-3 / statistics.median(times)))


async def _concurrent(repository: Path, options: ServingOptions) -> dict[str, Any]:
    """Many clients, a model of about 1 ms: against offline batches, echo, LitServe."""
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal((1, WIDTH), dtype=np.float32) for _ in range(32)]
    bodies = [encode_request("wide", {"INPUT0": x}) for x in xs]
    depth = _depth_of_one_ms()
    write_wide(repository, depth)
    module = Wide(WIDTH, depth).eval()
    record: dict[str, Any] = {
        "clients": options.clients,
        "depth": depth,
        "model_ms": 1e3 / _offline_rate(module, 1),
    }
    with peer_server("echo") as (echo_port, echo_pid), edgeweave_server(repository) as (port, pid):
        async with _channel(echo_port) as echo_channel, _channel(port) as channel:
            call = grpc_call(channel, _INFER, bodies)
            echo_call = grpc_call(echo_channel, ECHO_PATH, bodies)
            before = await _stats(channel, "wide")
            # In turn, so that a change of the machine's mood meets both.
            echoes, loads = [], []
            for _ in range(_ROUNDS):
                echoes.append(await _measured(echo_call, echo_pid, options.clients, options))
                loads.append(await _measured(call, pid, options.clients, options))
            after = await _stats(channel, "wide")
            echo, ours = (
                sorted(some, key=lambda load: load.rate)[_ROUNDS // 2] for some in (echoes, loads)
            )
            half = await open_loop(call, ours.rate / 2, min(options.requests, 3000))
    batch = max(
        1,
        round(
            (after.inference_count - before.inference_count)
            / max(1, after.execution_count - before.execution_count)
        ),
    )
    offline = _offline_rate(module, batch)
    record |= {
        "echo": echo.record(),
        "edgeweave": ours.record(),
        "open_loop_at_half_rate": half.record(),
        "mean_batch": batch,
        "offline_rate": offline,
        # Of the medians; a round's own ratio says how far they can be trusted.
        "share_of_the_lower": ours.rate / min(offline, echo.rate),
        "share_of_echo_by_round": [
            round(load.rate / other.rate, 3) for load, other in zip(loads, echoes, strict=True)
        ],
    }
    if is_installed("litserve"):
        load = await _litserve(xs, depth, options)
        record |= {
            "litserve": load.record(),
            "ratio_to_litserve": ours.rate / load.rate,
            "ratio_of_processor_time": load.server_cpu_ms / ours.server_cpu_ms,
        }
    return record


async def _litserve(
    xs: Sequence[np.ndarray[Any, Any]], depth: int, options: ServingOptions
) -> Load:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    bodies = [json.dumps({"input": x[0].tolist()}).encode() for x in xs]
    with peer_server("litserve", str(port), str(MAX_BATCH), str(depth)) as (_, pid):
        call = http_call(port, "/predict", bodies, options.clients)
        await _until_up(port)
        await call(0)
        return await _measured(call, pid, options.clients, options)


async def _until_up(port: int, patience_s: float = 180.0) -> None:
    start = time.monotonic()
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if time.monotonic() - start > patience_s:
                raise RuntimeError(
                    f"bench serving: LitServe must listen within {patience_s:.0f} s, got nothing"
                ) from None
            await asyncio.sleep(0.2)
            continue
        writer.close()
        return


async def _molecules(repository: Path, options: ServingOptions) -> dict[str, Any]:
    """Small graphs, one per request: block-diagonal batches against one graph at a time."""
    write_molecule_models(repository)
    rng = np.random.default_rng(0)
    graphs = [
        {
            "NODE_FEATURES": rng.standard_normal(
                (MOLECULE_NODES, GIN_ARGUMENTS["in_channels"]), dtype=np.float32
            ),
            "EDGE_INDEX": rng.integers(0, MOLECULE_NODES, (2, MOLECULE_EDGES)),
        }
        for _ in range(64)
    ]
    loads = {}
    with edgeweave_server(repository) as (port, pid):
        async with _channel(port) as channel:
            for name in ("one_molecule", "molecules"):
                bodies = [encode_request(name, graph) for graph in graphs]
                call = grpc_call(channel, _INFER, bodies)
                loads[name] = await _measured(call, pid, options.clients, options)
            stats = await _stats(channel, "molecules")
    return {
        "clients": options.clients,
        "unbatched": loads["one_molecule"].record(),
        "batched": loads["molecules"].record(),
        "mean_batch": stats.inference_count / max(1, stats.execution_count),
        "ratio": loads["molecules"].rate / loads["one_molecule"].rate,
        "ratio_of_processor_time": loads["one_molecule"].server_cpu_ms
        / loads["molecules"].server_cpu_ms,
    }


async def _soak(repository: Path, options: ServingOptions) -> dict[str, Any]:
    """Many requests, each with data of its own: none lost, none swapped, no memory kept."""
    import psutil

    columns = 64
    wrong: list[int] = []
    with edgeweave_server(repository) as (port, pid):
        process = psutil.Process(pid)
        async with _channel(port) as channel:
            method = channel.unary_unary(_INFER)

            async def call(number: int) -> bytes:
                x = np.full((1, columns), float(number % (1 << 23)), np.float32)
                x[0, 0] = number % 977
                data: bytes = await method(encode_request("shift", {"INPUT0": x}), timeout=60)
                if not np.array_equal(decode_response(data).outputs["OUTPUT0"], x + 1):
                    wrong.append(number)
                return data

            warm = max(4 * options.clients, options.soak // 10)
            await closed_loop(call, options.clients, warm, 600.0)
            before = process.memory_info().rss
            load = await closed_loop(call, options.clients, options.soak, 600.0)
            after = process.memory_info().rss
    return {
        "load": load.record(),
        "lost": options.soak - load.requests,
        "wrong": len(wrong),
        "rss_before_mb": before / 2**20,
        "rss_after_mb": after / 2**20,
        "growth_percent": 100.0 * (after - before) / before,
    }


async def _bounds(repository: Path, options: ServingOptions) -> dict[str, Any]:
    return await measure_bounds(repository)


SCENARIOS: dict[str, Callable[[Path, ServingOptions], Any]] = {
    "one-megabyte": _one_megabyte,
    "concurrent": _concurrent,
    "molecules": _molecules,
    "bounds": _bounds,
    "soak": _soak,
}


def run(options: ServingOptions) -> dict[str, Any]:
    """Measure.

    Args:
        options: How much.

    Returns:
        JSON-ready data: environment, settings, and one record per scenario.

    Raises:
        ValueError: A scenario is unknown.
        RuntimeError: A server does not start, or answers wrongly.
    """
    unknown = sorted(set(options.only) - set(SCENARIOS))
    if unknown:
        raise ValueError(
            f"bench serving: filter must be among {', '.join(SCENARIOS)}, got {', '.join(unknown)}"
        )
    names = options.only or tuple(n for n in SCENARIOS if n != "soak" or options.soak)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        write_shift(repository)
        for name in names:
            results[name] = asyncio.run(SCENARIOS[name](repository, options))
    return {
        "schema": "edgeweave-serving/1",
        "environment": describe_environment(),
        "settings": vars(options),
        "results": results,
    }
