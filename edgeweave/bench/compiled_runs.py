"""`bench models --peer compile`: a training step under `optimize`, against three others in turn.

The others are the same model under `accelerate()`, stock PyG under `torch.compile`, and stock PyG.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn

import edgeweave
from edgeweave.bench.generators import GraphData, half_arxiv
from edgeweave.bench.model_runs import (
    STOCK,
    ModelRun,
    community_features,
    measure_training,
)
from edgeweave.bench.models import MODELS, ModelSpec, build_model
from edgeweave.bench.records import CaseResult, Settings
from edgeweave.bench.training import Trainer, TrainingBatch

__all__ = ["COMPILED_MODELS", "GROUP", "compiled_runs", "compiled_trainers"]

GROUP = "train-compiled"
COMPILED_MODELS = ("GCN", "GraphSAGE", "GIN", "GAT", "GATv2", "PNA", "EdgeCNN")
"""The models whose geometric mean has a number to reach."""


def compiled_runs(quick: bool) -> Iterator[ModelRun]:
    """List the rows.

    Args:
        quick: Makes the graph 16 times smaller.

    Yields:
        One run per model.
    """
    graph = cache(lambda: half_arxiv(shrink=16 if quick else 1))
    for name in COMPILED_MODELS:
        case_id = f"{GROUP}/half-arxiv/{name}"
        yield ModelRun(case_id, partial(_measure, MODELS[name], graph, case_id))


def compiled_trainers(
    spec: ModelSpec, graph: GraphData, engine: Any = "auto", seed: int = 0
) -> list[Trainer]:
    """Make the sides of a row, all with equal weights.

    Args:
        spec: The model.
        graph: A graph with communities, which are the classes.
        engine: Of `optimize`.
        seed: Seed of weights and features.

    Returns:
        `optimize` first, stock PyG last.
    """
    x = spec.feature_scale * community_features(graph, spec.channels, seed)
    extra = (spec.extra(graph),) if spec.extra else ()
    assert graph.community is not None  # community_features has checked it
    plain = TrainingBatch(x, graph.edge_index, graph.community, extra)
    model = build_model(spec, graph, seed=seed)

    def side(name: str, ours: nn.Module, **more: Any) -> Trainer:
        return Trainer(name, ours, lambda _: plain, lr=spec.lr, **more)

    compiled: Any = torch.compile(copy.deepcopy(model))
    return [
        side("edgeweave.optimize", edgeweave.optimize(copy.deepcopy(model), engine=engine)),
        side("edgeweave.accelerate", copy.deepcopy(model), context=edgeweave.accelerated),
        side("torch.compile", compiled),
        side(STOCK, model),
    ]


def _measure(
    spec: ModelSpec, graph: Callable[[], GraphData], case_id: str, settings: Settings
) -> CaseResult:
    data = graph()
    # Every row starts like a process of its own: what torch knows of other sizes is forgotten.
    torch._dynamo.reset()
    trainers = compiled_trainers(spec, data)
    params: dict[str, str | int] = {
        "graph": data.name,
        "model": spec.name,
        "channels": spec.channels,
    }
    return measure_training(case_id, params, trainers, settings)
