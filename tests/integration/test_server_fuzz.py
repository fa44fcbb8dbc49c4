"""Malformed requests by the ten thousand: the server lives, and says whose fault it was."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import _malformed
import _serving_models as models
import grpc
import grpc.aio
import numpy as np
import pytest
import torch
from _malformed import COLUMNS, DENSE, FEATURES, GRAPHS, MAX_BATCH, RESIDENT, RESIDENT_NODES
from _serving import add, add_graph_sum, add_resident, rows, settings

from edgeweave.inference_server import BackgroundServer, Client, Limits, ServingError
from edgeweave.inference_server._core import InferenceCore
from edgeweave.inference_server._messages import INFERENCE_SERVICE
from edgeweave.inference_server._registry import Registry
from edgeweave.inference_server._repository import Repository

IN_PROCESS, OVER_THE_WIRE, AT_A_TIME = 50_000, 3_000, 64
ALLOWED = {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
LIMITS = Limits(nodes=1000, edges=2000, fan_out=64)
# Far above what it takes; a request that hangs would run into it.
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    add(folder, DENSE, models.Affine(), columns=COLUMNS, max_batch_size=MAX_BATCH)
    add_graph_sum(folder, GRAPHS)
    edges = torch.randint(0, RESIDENT_NODES, (2, 100))
    add_resident(folder, torch.ones(RESIDENT_NODES, FEATURES), edges, RESIDENT)
    return folder


def requests(count: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(count):
        yield _malformed.malformed(rng)


def test_what_is_mutated_is_valid_before(repository: Path) -> None:
    """Or the test below would prove nothing about the mutations."""

    async def main() -> None:
        chosen = settings(repository, limits=LIMITS)
        registry = Registry(chosen, Repository(repository))
        assert await registry.load_all() == {}
        core = InferenceCore(chosen, registry)
        rng = random.Random(0)
        for model in (DENSE, GRAPHS, RESIDENT):
            for _ in range(50):
                await core.infer(_malformed.valid(model, rng).SerializeToString())
        assert await registry.close(10.0)

    asyncio.run(main())
    names = {function.__name__ for _, function in _malformed.MUTATIONS}
    assert len(names) >= 30


def test_fifty_thousand_malformed_requests(repository: Path) -> None:
    """Bytes in, error out, at the data plane, which all transports share."""
    codes: Counter[str] = Counter()
    longest: list[int] = []

    async def main() -> None:
        chosen = settings(repository, limits=LIMITS)
        registry = Registry(chosen, Repository(repository))
        await registry.load_all()
        core = InferenceCore(chosen, registry)
        for data in requests(IN_PROCESS, seed=1):
            try:
                await core.infer(data)
                raise AssertionError(f"answered a malformed request: {data[:200]!r}")
            except ServingError as error:
                codes[error.code.value] += 1
                longest.append(len(str(error)))
        good = await core.infer(_malformed.valid(DENSE, random.Random(0)).SerializeToString())
        assert good
        assert core.in_flight == 0
        assert await registry.close(10.0)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert set(codes) == ALLOWED
    assert codes.total() == IN_PROCESS
    # An error does not give back what came: names are cut, values are not shown.
    assert max(longest) < 2000


def test_malformed_requests_over_the_wire(repository: Path) -> None:
    codes: Counter[str] = Counter()

    async def ask(target: str) -> None:
        waiting = requests(OVER_THE_WIRE, seed=2)
        async with grpc.aio.insecure_channel(target) as channel:
            call = channel.unary_unary(f"/{INFERENCE_SERVICE}/ModelInfer")

            async def one_after_another() -> None:
                for data in waiting:
                    try:
                        await call(data)
                        codes["OK"] += 1
                    except grpc.aio.AioRpcError as error:
                        codes[error.code().name] += 1

            await asyncio.gather(*(one_after_another() for _ in range(AT_A_TIME)))

    with BackgroundServer(settings(repository, limits=LIMITS)) as server:
        asyncio.run(asyncio.wait_for(ask(f"127.0.0.1:{server.port}"), PATIENCE_S))
        assert set(codes) == ALLOWED
        assert codes.total() == OVER_THE_WIRE
        with Client(f"127.0.0.1:{server.port}") as client:
            for model, inputs in (
                (DENSE, rows(1, columns=COLUMNS)),
                (RESIDENT, {"NODE_IDS": np.array([0])}),
            ):
                assert client.infer(model, inputs).outputs
