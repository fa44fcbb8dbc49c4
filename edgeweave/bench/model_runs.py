"""`bench models`: stock PyG and the accelerated library in training and inference, in turn."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import edgeweave
from edgeweave.bench.environment import is_installed
from edgeweave.bench.generators import COMMUNITIES, GraphData, half_arxiv, molecule_batch
from edgeweave.bench.harness import (
    CheckFailedError,
    check_distances,
    compare,
    distance_to_reference,
    summarise,
)
from edgeweave.bench.models import MODELS, TEN_MODELS, ModelSpec, build_model, select_models
from edgeweave.bench.op_graph import OpGraph
from edgeweave.bench.peers import sparse_tensor
from edgeweave.bench.records import CaseResult, Reference, Settings
from edgeweave.bench.training import (
    MAX_LOSS_DIFFERENCE,
    Trainer,
    TrainingBatch,
    loss_difference,
    outputs_with_reference,
    predictions_with_reference,
    train_interleaved,
)

STOCK = "stock PyG"
SPARSE_PEER = "PyG + SparseTensor"
OURS = "edgeweave"
# A step on a small batch takes milliseconds: many are affordable, and needed.
_SMALL_STEPS_FACTOR = 8
_MOLECULE_CLASSES = 2
# Two layers, two hops, as in PyG's own examples of `NeighborLoader`.
_SAMPLED_MODELS = ("GCN", "GraphSAGE", "GAT")
_SAMPLED_LAYERS = (128, 128)
_NUM_NEIGHBORS = (10, 10)
_NUM_SEEDS = 512


@dataclass(frozen=True)
class ModelRun:
    """A row by name, built only when it is to run.

    Attributes:
        case_id: `group/graph/model`, what `--filter` looks at.
        run: Measures it.
    """

    case_id: str
    run: Callable[[Settings], CaseResult]


def model_runs(everything: bool, quick: bool, peer: str) -> Iterator[ModelRun]:
    """Lists the rows.

    Args:
        everything: Also the rows which are measured only on request.
        quick: Makes the full-batch graph 16 times smaller.
        peer: `"eager"` for plain `edge_index`, `"sparse"` for `torch_sparse.SparseTensor`
            besides.

    Yields:
        One run per model: training with full batches, on molecules and on sampled batches, then
        inference.

    Raises:
        RuntimeError: If `torch_sparse` is asked for and not installed.
    """
    if peer == "sparse" and not is_installed("torch_sparse"):
        raise RuntimeError(
            "bench models: --peer sparse must find torch_sparse, got none; "
            "pip install --no-build-isolation torch-sparse torch-scatter (compiles ten minutes)"
        )
    shrink = 16 if quick else 1
    graph = cache(lambda: half_arxiv(shrink=shrink))
    for spec in select_models(everything):
        case_id = f"{spec.group}/half-arxiv/{spec.name}"
        with_sparse = peer == "sparse" and spec.takes_sparse_tensor
        yield ModelRun(case_id, partial(_measure_full_batch, spec, graph, case_id, with_sparse))
    for spec in select_models(everything=False):
        case_id = f"train-molecules/molecules/{spec.name}"
        yield ModelRun(case_id, partial(_measure_molecules, spec, case_id))
    if not everything:
        return
    for name in _SAMPLED_MODELS:
        case_id = f"train-sampled/half-arxiv/{name}"
        yield ModelRun(case_id, partial(_measure_sampled, MODELS[name], graph, case_id))
    for name in TEN_MODELS:
        case_id = f"infer-gnn/half-arxiv/{name}"
        yield ModelRun(case_id, partial(_measure_inference, MODELS[name], graph, case_id))


def measure_training(
    case_id: str, params: dict[str, str | int], trainers: list[Trainer], settings: Settings
) -> CaseResult:
    """Checks the outputs, trains the sides in turn and compares times and losses.

    Args:
        case_id: `group/...`.
        params: What to show about the case.
        trainers: Ours first, a stock side last.
        settings: `warmup` and `repeats` count training steps.

    Returns:
        The result; `distances` also holds `loss curve`, the largest relative difference of
        any side's losses to the stock side's. Status `"wrong"` if outputs or losses disagree.
    """
    group = case_id.split("/", 1)[0]
    distances, wrong = _check(case_id, trainers, *outputs_with_reference(trainers))
    if wrong:
        return CaseResult(group, case_id, params, "wrong", wrong, distances)
    train_interleaved(trainers, settings.warmup)
    round_s = sum(trainer.times_s[-1] for trainer in trainers)
    train_interleaved(trainers, settings.rounds(round_s))
    stock = trainers[-1].losses
    distances["loss curve"] = max(loss_difference(side.losses, stock) for side in trainers)
    if distances["loss curve"] > MAX_LOSS_DIFFERENCE:
        message = (
            f"{case_id}: loss curves must agree within {MAX_LOSS_DIFFERENCE:.0e}, "
            f"got {distances['loss curve']:.2e}"
        )
        return CaseResult(group, case_id, params, "wrong", message, distances)
    samples = {trainer.name: trainer.times_s[settings.warmup :] for trainer in trainers}
    return _timed(case_id, params, distances, samples)


def measure_inference(
    case_id: str, params: dict[str, str | int], trainers: list[Trainer], settings: Settings
) -> CaseResult:
    """Checks the outputs in evaluation mode, then times the forward pass of the sides in turn.

    Args:
        case_id: `group/...`.
        params: What to show about the case.
        trainers: Ours first, a stock side last; none is trained.
        settings: `warmup` and `repeats` count forward passes.

    Returns:
        The result, with status `"wrong"` and no timings if outputs disagree.
    """
    group = case_id.split("/", 1)[0]
    distances, wrong = _check(case_id, trainers, *predictions_with_reference(trainers))
    if wrong:
        return CaseResult(group, case_id, params, "wrong", wrong, distances)
    batches = [trainer.batch(0) for trainer in trainers]

    def rounds(count: int) -> list[list[float]]:
        pairs = list(zip(trainers, batches, strict=True))
        return [[side.time_prediction(batch) for side, batch in pairs] for _ in range(count)]

    # The check was a first call; the last of these says how many rounds are affordable.
    round_s = sum(rounds(settings.warmup + 1)[-1])
    times = rounds(settings.rounds(round_s))
    samples = {
        side.name: list(s) for side, s in zip(trainers, zip(*times, strict=True), strict=True)
    }
    return _timed(case_id, params, distances, samples)


def _check(
    case_id: str, trainers: list[Trainer], outputs: list[Tensor], exact: Tensor
) -> tuple[dict[str, float], str]:
    """Each side's distance to the float64 output, and what is wrong with them, if anything."""
    reference = Reference((exact,))
    distances = {
        trainer.name: distance_to_reference(output, reference)
        for trainer, output in zip(trainers, outputs, strict=True)
    }
    ours, *peers = distances
    try:
        check_distances(case_id, distances, ours, peers, reference.eps)
    except CheckFailedError as error:
        return distances, str(error)
    return distances, ""


def _timed(
    case_id: str,
    params: dict[str, str | int],
    distances: dict[str, float],
    samples: dict[str, list[float]],
) -> CaseResult:
    """The result of a case whose sides took so many seconds, ours first."""
    ours, *peers = samples
    return CaseResult(
        case_id.split("/", 1)[0],
        case_id,
        params,
        distances=distances,
        timings=[summarise(name, times) for name, times in samples.items()],
        speedups=[compare(peer, samples[ours], samples[peer]) for peer in peers],
    )


def community_features(graph: GraphData, channels: int, seed: int = 0) -> Tensor:
    """Makes features that tell the communities apart, with noise, so that training has a task.

    Args:
        graph: A graph with communities.
        channels: Width.
        seed: Seed.

    Returns:
        fp32 `[num_nodes, channels]`.

    Raises:
        ValueError: If the graph has no communities.
    """
    if graph.community is None:
        raise ValueError("community_features: graph must have communities, got none")
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(COMMUNITIES, channels, generator=generator)
    noise = torch.randn(graph.num_nodes, channels, generator=generator)
    return centre[graph.community] + 2.0 * noise


def full_batch_trainers(
    spec: ModelSpec, graph: GraphData, with_sparse: bool = False, seed: int = 0
) -> list[Trainer]:
    """Makes the sides of a full-batch training row, all with equal weights.

    Args:
        spec: The model.
        graph: A graph with communities, which are the classes.
        with_sparse: Whether PyG on a `SparseTensor` is a side too.
        seed: Seed of weights and features.

    Returns:
        Ours first, stock PyG last.
    """
    x = spec.feature_scale * community_features(graph, spec.channels, seed)
    extra = (spec.extra(graph),) if spec.extra else ()
    assert graph.community is not None  # community_features has checked it
    plain = TrainingBatch(x, graph.edge_index, graph.community, extra)
    model = build_model(spec, graph, seed=seed)
    trainers = [
        Trainer(OURS, copy.deepcopy(model), lambda _: plain, edgeweave.accelerated, spec.lr),
        Trainer(STOCK, model, lambda _: plain, lr=spec.lr),
    ]
    if with_sparse:
        # PyG takes a SparseTensor as the transposed adjacency: rows are destinations, as here.
        adj_t: Any = sparse_tensor(OpGraph(lambda: graph))
        adjacent = TrainingBatch(x, adj_t, graph.community, extra)
        peer = Trainer(SPARSE_PEER, copy.deepcopy(model), lambda _: adjacent, lr=spec.lr)
        trainers.insert(1, peer)
    return trainers


def _measure_full_batch(
    spec: ModelSpec,
    graph: Callable[[], GraphData],
    case_id: str,
    with_sparse: bool,
    settings: Settings,
) -> CaseResult:
    data = graph()
    trainers = full_batch_trainers(spec, data, with_sparse)
    return measure_training(case_id, _params(data.name, spec), trainers, settings)


def _measure_inference(
    spec: ModelSpec, graph: Callable[[], GraphData], case_id: str, settings: Settings
) -> CaseResult:
    data = graph()
    params = _params(f"{data.name}, inference", spec)
    return measure_inference(case_id, params, full_batch_trainers(spec, data), settings)


def _params(graph: str, spec: ModelSpec) -> dict[str, str | int]:
    return {"graph": graph, "model": spec.name, "channels": spec.channels}


def _measure_sampled(
    spec: ModelSpec, graph: Callable[[], GraphData], case_id: str, settings: Settings
) -> CaseResult:
    """A new neighbourhood at every step, of another size than the last one."""
    # Imported here: it needs torch_geometric, which the other modules load when they need it.
    from edgeweave.bench.neighbor_sampler import SampledBatches

    data = graph()
    x = community_features(data, spec.channels)
    batches = SampledBatches(data, x, list(_NUM_NEIGHBORS), _NUM_SEEDS)
    model = build_model(spec, data, hidden=_SAMPLED_LAYERS)
    trainers = _pair_of_trainers(model, batches)
    params = _params(f"{data.name}, sampled", spec)
    return measure_training(case_id, params, trainers, _many_steps(settings))


def _pair_of_trainers(model: nn.Module, batch: Callable[[int], TrainingBatch]) -> list[Trainer]:
    return [
        Trainer(OURS, copy.deepcopy(model), batch, edgeweave.accelerated, lr=1e-3),
        Trainer(STOCK, model, batch, lr=1e-3),
    ]


def _many_steps(settings: Settings) -> Settings:
    """Settings for steps on small batches."""
    return Settings(
        repeats=settings.repeats * _SMALL_STEPS_FACTOR,
        min_repeats=settings.min_repeats * _SMALL_STEPS_FACTOR,
        warmup=settings.warmup + 2,
        budget_s=settings.budget_s,
    )


def _measure_molecules(spec: ModelSpec, case_id: str, settings: Settings) -> CaseResult:
    """A new batch at every step: nothing that was built for the last one helps."""

    @cache
    def batch(step: int) -> TrainingBatch:
        return _molecule_training_batch(step, spec.channels)

    def own_copy(step: int) -> TrainingBatch:
        shared = batch(step)
        # No side may profit from what the other one left with the tensor.
        return TrainingBatch(
            shared.x.clone(),
            shared.edge_index.clone(),
            shared.target.clone(),
            (shared.extra[0].clone(),),
        )

    model = build_model(MODELS[spec.name], molecule_batch(), _MOLECULE_CLASSES)
    params = _params("molecules", spec)
    trainers = _pair_of_trainers(model, own_copy)
    return measure_training(case_id, params, trainers, _many_steps(settings))


def _molecule_training_batch(step: int, channels: int) -> TrainingBatch:
    graph = molecule_batch(seed=step)
    assert graph.batch is not None  # molecule_batch always sets it
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(graph.num_nodes, channels, generator=generator)
    num_graphs = int(graph.batch[-1]) + 1
    target = torch.randint(_MOLECULE_CLASSES, (num_graphs,), generator=generator)
    return TrainingBatch(x, graph.edge_index, target, (graph.batch,))
