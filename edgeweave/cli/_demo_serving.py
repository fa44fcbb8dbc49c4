"""The last stage of `edgeweave demo`: the trained Cora model, exported, served and asked."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

import edgeweave
from edgeweave.bench.cora import Cora, load_cora, split_cora

__all__ = ["ServingResult", "missing_extra", "run_serving"]

_MODEL = "cora-gcn"
_HIDDEN, _LAYERS, _EPOCHS = 64, 2, 60
# GCN's normalisation looks at the degrees of the neighbours: one hop more than it has layers.
_HOPS = _LAYERS + 1
_NODES_PER_REQUEST = 100
_TIMED_REQUESTS = 100
_START_S = 120.0
_SUBJECTS_SHOWN = 5
Ask = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]


@dataclass(frozen=True)
class ServingResult:
    """What the served model answered.

    Attributes:
        client: Whose client asked.
        nodes: Papers asked about.
        accuracy: Of the answers.
        differing: Answers whose class is not the one that the model gives without a server.
        p50_ms: Median time of a request for one paper.
        p99_ms: 99th percentile of it.
        shown: Some papers, with predicted and true subject.
    """

    client: str
    nodes: int
    accuracy: float
    differing: int
    p50_ms: float
    p99_ms: float
    shown: list[tuple[int, int, int]]

    @property
    def problems(self) -> list[str]:
        """What is wrong; empty if all is well."""
        if not self.differing:
            return []
        return [
            f"served {_MODEL}: predictions must be those of the model itself, got {self.differing} "
            f"others among {self.nodes}"
        ]

    def record(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return asdict(self)


def missing_extra() -> str:
    """The package of the extra `server` that is missing; "" if none is."""
    for module in ("grpc", "google.protobuf", "safetensors", "prometheus_client"):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # of the parent: there is no `google` at all
            found = None
        if found is None:
            return module
    return ""


def run_serving(console: Console) -> ServingResult | None:
    """Train, export, serve in a process of its own, ask about the test papers.

    Args:
        console: Shows progress.

    Returns:
        The answers; None where the extra `server` is not installed, which is said.

    Raises:
        RuntimeError: The server does not start.
    """
    missing = missing_extra()
    if missing:
        console.print(f'serving: needs {missing}; pip install "edgeweave\\[server]"')
        return None
    from edgeweave.inference_server import export_model

    cora = load_cora()
    test = split_cora(cora.y, 0).test
    module, arguments = _train(cora)
    with torch.no_grad():
        expected = module(cora.x, cora.edge_index).argmax(dim=1)[test].numpy()
    with tempfile.TemporaryDirectory() as folder:
        export_model(
            module,
            Path(folder),
            _MODEL,
            architecture="torch_geometric.nn.models:GCN",
            arguments=arguments,
            kind="resident_graph",
            graph=(cora.x, cora.edge_index),
            examples=[cora.x, cora.edge_index],
            options={
                "graph": {
                    "features": cora.x.shape[1],
                    "channels": arguments["out_channels"],
                    "hops": _HOPS,
                }
            },
        )
        with _server(Path(folder)) as port:
            console.print(f"serving: {_MODEL} on 127.0.0.1:{port}, a process of its own")
            return _ask_all(port, test, expected, cora.y[test].numpy())


def _train(cora: Cora) -> tuple[nn.Module, dict[str, Any]]:
    from torch_geometric.nn.models import GCN

    arguments: dict[str, Any] = {
        "in_channels": cora.x.shape[1],
        "hidden_channels": _HIDDEN,
        "num_layers": _LAYERS,
        "out_channels": int(cora.y.max()) + 1,
        "dropout": 0.5,
    }
    torch.manual_seed(0)
    module: nn.Module = GCN(**arguments)
    split = split_cora(cora.y, 0)
    optimiser = torch.optim.Adam(module.parameters(), lr=0.01, weight_decay=5e-4)
    with edgeweave.accelerated():
        for _ in range(_EPOCHS):
            optimiser.zero_grad()
            out = module(cora.x, cora.edge_index)
            loss = nn.functional.cross_entropy(out[split.train], cora.y[split.train])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return module.eval(), arguments


@contextmanager
def _server(repository: Path) -> Iterator[int]:
    """Run `edgeweave serve`; yield its port once it is ready."""
    command = [
        *(sys.executable, "-m", "edgeweave", "serve", "--model-repository", str(repository)),
        *("--port", "0", "--metrics-port", "-1", "--log-format", "json"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    ports: deque[int] = deque(maxlen=1)
    told = threading.Event()
    last: deque[str] = deque(maxlen=20)

    def read() -> None:
        for line in process.stderr or ():
            last.append(line)
            entry = json.loads(line) if line.startswith("{") else {}
            if entry.get("event") == "ready" and not entry["failed"]:
                ports.append(entry["port"])
                told.set()
        told.set()  # it ended

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        told.wait(_START_S)
        if not ports:
            raise RuntimeError(f"demo: server must become ready, got\n{''.join(last)}")
        yield ports[0]
    finally:
        process.terminate()
        try:
            process.wait(_START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        if process.stderr is not None:
            process.stderr.close()


@contextmanager
def _client(port: int) -> Iterator[tuple[str, Ask]]:
    """Triton's client where it is installed, or else ours."""
    if importlib.util.find_spec("tritonclient") is not None:
        import tritonclient.grpc as triton

        with triton.InferenceServerClient(f"127.0.0.1:{port}") as theirs:

            def ask_theirs(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
                tensor = triton.InferInput("NODE_IDS", list(ids.shape), "INT64")
                tensor.set_data_from_numpy(ids)
                answer: np.ndarray[Any, Any] = theirs.infer(_MODEL, [tensor]).as_numpy("OUTPUT")
                return answer

            yield "tritonclient", ask_theirs
        return
    from edgeweave.inference_server import Client

    with Client(f"127.0.0.1:{port}") as ours:
        yield "edgeweave", lambda ids: ours.infer(_MODEL, {"NODE_IDS": ids}).outputs["OUTPUT"]


def _ask_all(
    port: int, test: Tensor, expected: np.ndarray[Any, Any], truth: np.ndarray[Any, Any]
) -> ServingResult:
    ids = test.numpy()
    with _client(port) as (name, ask):
        parts = [
            ask(ids[i : i + _NODES_PER_REQUEST]) for i in range(0, len(ids), _NODES_PER_REQUEST)
        ]
        got = np.concatenate(parts).argmax(axis=1)
        times_ms = []
        for i in range(_TIMED_REQUESTS):
            start = time.perf_counter()
            ask(ids[i : i + 1])
            times_ms.append(1e3 * (time.perf_counter() - start))
    cuts = statistics.quantiles(times_ms, n=100, method="inclusive")
    shown = [(int(ids[i]), int(got[i]), int(truth[i])) for i in range(_SUBJECTS_SHOWN)]
    return ServingResult(
        client=name,
        nodes=len(ids),
        accuracy=float((got == truth).mean()),
        differing=int((got != expected).sum()),
        p50_ms=cuts[49],
        p99_ms=cuts[98],
        shown=shown,
    )
