"""A server for tests: repositories of small models, requests as a client makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _serving_models as models
import numpy as np
import torch

from edgeweave.inference_server import ServerSettings, TensorSpec, export_model

ARCHITECTURES = tuple(
    f"_serving_models:{name}"
    for name in (
        "Affine",
        "Affinity",
        "BatchSize",
        "Echo",
        "Gated",
        "GraphSum",
        "InPlace",
        "Moody",
        "Sleepy",
        "ThreadCount",
        "TwoOutputs",
    )
)


def settings(repository: Path, **options: Any) -> ServerSettings:
    """Settings for any free port on loopback, without metrics."""
    common: dict[str, Any] = {
        "port": 0,
        "metrics_port": None,
        "drain_s": 10.0,
        "allow_architectures": ARCHITECTURES,
    }
    return ServerSettings(repository, **{**common, **options})


def add(
    repository: Path,
    name: str,
    module: torch.nn.Module,
    *,
    columns: int = 4,
    datatype: str = "FP32",
    outputs: Sequence[TensorSpec] = (),
    version: int = 1,
    arguments: Mapping[str, Any] | None = None,
    **options: Any,
) -> Path:
    """Write a model of one input `INPUT0` `[-1, columns]`."""
    spec = TensorSpec("INPUT0", datatype, (-1, columns))
    return export_model(
        module,
        repository,
        name,
        version=version,
        arguments=arguments,
        inputs=[spec],
        outputs=outputs or [TensorSpec("OUTPUT0", datatype, (-1, columns))],
        options={"max_batch_size": 32, **options},
    )


def add_graph_sum(repository: Path, name: str = "graphs", **graph: Any) -> Path:
    """Write a model that adds each node's in-neighbours to it."""
    table = {"features": 3, "channels": 3, "level": "node", **graph}
    return export_model(
        models.GraphSum(), repository, name, kind="graphs", options={"graph": table}
    )


def add_resident(
    repository: Path,
    x: torch.Tensor,
    edge_index: torch.Tensor,
    name: str = "resident",
    **graph: Any,
) -> Path:
    """Write the same model with a graph of its own."""
    features = x.shape[1]
    table = {"features": features, "channels": features, "hops": 1, **graph}
    return export_model(
        models.GraphSum(),
        repository,
        name,
        kind="resident_graph",
        graph=(x, edge_index),
        options={"graph": table},
    )


def rows(count: int, columns: int = 4, value: float = 1.0) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs of a model written by `add`."""
    return {"INPUT0": np.full((count, columns), value, np.float32)}
