"""Training rows: the sides start equal, take turns, and disagreement is found."""

from __future__ import annotations

import math

import pytest
import torch

from edgeweave import pyg
from edgeweave.bench import generators, model_runs, training
from edgeweave.bench.models import MODELS, build_model, select_models
from edgeweave.bench.records import Settings
from edgeweave.bench.training import Trainer

SETTINGS = Settings(repeats=2, min_repeats=2, warmup=1, budget_s=1e9)


@pytest.fixture(scope="module")
def graph() -> generators.GraphData:
    return generators.half_arxiv(shrink=500)


@pytest.mark.parametrize("name", MODELS)
def test_every_row_trains_and_its_losses_agree(name: str, graph: generators.GraphData) -> None:
    trainers = model_runs.full_batch_trainers(MODELS[name], graph)
    result = model_runs.measure_training(f"train/{name}", {}, trainers, SETTINGS)
    assert result.status == "ok", result.message
    assert [timing.samples for timing in result.timings] == [2, 2]
    assert [speedup.peer for speedup in result.speedups] == [model_runs.STOCK]
    assert result.distances["loss curve"] < training.MAX_LOSS_DIFFERENCE
    assert len(trainers[0].losses) == 3


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GIN"])
def test_only_our_side_is_accelerated(name: str, graph: generators.GraphData) -> None:
    ours, stock = model_runs.full_batch_trainers(MODELS[name], graph)
    pyg.reset_report()
    stock.step()
    assert pyg.report().sites == ()
    ours.step()
    layer = type(ours.model.convs[0]).__name__
    assert pyg.report()[layer].fused == 3
    assert pyg.report()[layer].fell_back == 0
    assert not pyg.is_accelerated()


def test_molecule_rows_get_a_new_batch_at_every_step() -> None:
    runs = {run.case_id: run for run in model_runs.model_runs(False, True, "eager")}
    assert list(runs)[:3] == [f"train-gnn/half-arxiv/{n}" for n in ("GCN", "GraphSAGE", "GIN")]
    result = runs["train-molecules/molecules/GIN"].run(Settings(1, 1, 0, 1e9))
    assert result.status == "ok", result.message
    assert result.timings[0].samples >= 8


def test_models_are_three_layers_of_the_promised_widths(graph: generators.GraphData) -> None:
    for spec in select_models(everything=True):
        model = build_model(spec, graph)
        assert len(model.convs) == 3
        x = torch.randn(graph.num_nodes, spec.channels)
        extra = (spec.extra(graph),) if spec.extra else ()
        assert model(x, graph.edge_index, *extra).shape == (graph.num_nodes, 40)
    assert MODELS["PNA"].channels == MODELS["EdgeCNN"].channels == 32
    assert MODELS["GCN"].channels == 128


def test_weights_depend_on_the_seed_only(graph: generators.GraphData) -> None:
    first, again, other = (build_model(MODELS["GCN"], graph, seed=seed) for seed in (0, 0, 1))
    assert all(map(torch.equal, first.state_dict().values(), again.state_dict().values()))
    weights = [model.convs[0].lin.weight for model in (first, other)]
    assert not torch.equal(*weights)


def test_wrong_output_is_refused_before_training(graph: generators.GraphData) -> None:
    ours, stock = model_runs.full_batch_trainers(MODELS["GCN"], graph)
    with torch.no_grad():
        ours.model.convs[1].lin.weight[3, 5] += 0.05
    result = model_runs.measure_training("train/GCN", {}, [ours, stock], SETTINGS)
    assert result.status == "wrong"
    assert "edgeweave must be within" in result.message
    assert ours.losses == []


def test_diverging_losses_are_refused(graph: generators.GraphData) -> None:
    ours, stock = model_runs.full_batch_trainers(MODELS["GCN"], graph)
    other = Trainer(ours.name, ours.model, ours.batch, ours.context, lr=0.1)
    result = model_runs.measure_training("train/GCN", {}, [other, stock], SETTINGS)
    assert result.status == "wrong"
    assert "loss curves must agree" in result.message
    assert result.timings == ()


def test_sides_take_turns(graph: generators.GraphData) -> None:
    trainers = model_runs.full_batch_trainers(MODELS["GCN"], graph)
    order: list[str] = []
    training.train_interleaved(trainers, 2, lambda trainer, _: order.append(trainer.name))
    assert order == [model_runs.OURS, model_runs.STOCK] * 2


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        ([2.0, 1.0], [2.0, 1.0], 0.0),
        ([2.0, 1.1], [2.0, 1.0], pytest.approx(0.1)),
        ([2.0, math.nan], [2.0, 1.0], math.inf),
        ([math.inf], [math.inf], math.inf),
        ([], [], math.inf),
    ],
)
def test_loss_difference(ours: list[float], theirs: list[float], difference: float) -> None:
    assert training.loss_difference(ours, theirs) == difference


def test_same_values_are_dropped_on_both_sides() -> None:
    batch = training.TrainingBatch(torch.ones(4, 8), None, torch.zeros(4, dtype=torch.int64))

    class Dropping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor, edge_index: object) -> torch.Tensor:
            return torch.nn.functional.dropout(x * self.scale, 0.5, self.training)

    sides = [Trainer(n, Dropping(), lambda _: batch, dropout_seed=7) for n in ("A", "B")]
    training.train_interleaved(sides, 5)
    assert sides[0].losses == sides[1].losses
    assert len(set(sides[0].losses)) == 5


def test_sparse_peer_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runs, "is_installed", lambda module: False)
    with pytest.raises(RuntimeError, match="--peer sparse must find torch_sparse, got none"):
        list(model_runs.model_runs(False, True, "sparse"))
