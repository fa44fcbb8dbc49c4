"""Training rows: the sides start equal, take turns, and disagreement is found."""

from __future__ import annotations

import math

import pytest
import torch

from edgeweave import pyg
from edgeweave.bench import generators, model_runs, training
from edgeweave.bench.compiled_runs import compiled_runs
from edgeweave.bench.models import MODELS, TEN_MODELS, build_model, select_models
from edgeweave.bench.records import Settings
from edgeweave.bench.targets import GROUP_TITLES, TARGETS, TOGETHER
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


def test_rows_that_are_measured_only_on_request() -> None:
    few = {run.case_id for run in model_runs.model_runs(False, True, "eager")}
    rest = {run.case_id for run in model_runs.model_runs(True, True, "eager")} - few
    assert {case_id.split("/")[0] for case_id in few} == {"train-gnn", "train-molecules"}
    assert {f"infer-gnn/half-arxiv/{name}" for name in TEN_MODELS} <= rest
    assert {f"train-sampled/half-arxiv/{n}" for n in ("GCN", "GraphSAGE", "GAT")} <= rest
    assert "train-graphconv/half-arxiv/GraphConv" in rest
    assert len(TEN_MODELS) == len(set(TEN_MODELS)) == 10
    compiled = {run.case_id for run in compiled_runs(quick=True)}
    groups = {case_id.split("/")[0] for case_id in few | rest | compiled}
    assert groups <= GROUP_TITLES.keys()
    promised = {group for group in TARGETS if group.startswith(("train-", "infer-"))}
    assert promised <= groups | TOGETHER.keys()
    assert all(case_ids <= few | rest for case_ids in TOGETHER.values())


@pytest.mark.parametrize("name", TEN_MODELS)
def test_every_model_predicts_and_the_outputs_agree(name: str, graph: generators.GraphData) -> None:
    trainers = model_runs.full_batch_trainers(MODELS[name], graph)
    result = model_runs.measure_inference(f"infer-gnn/{name}", {}, trainers, SETTINGS)
    assert result.status == "ok", result.message
    assert result.group == "infer-gnn"
    assert [timing.samples for timing in result.timings] == [2, 2]
    assert [speedup.peer for speedup in result.speedups] == [model_runs.STOCK]
    assert set(result.distances) == {model_runs.OURS, model_runs.STOCK}
    assert not any(trainer.losses or trainer.model.training for trainer in trainers)


def test_predictions_need_no_gradients(graph: generators.GraphData) -> None:
    ours, stock = model_runs.full_batch_trainers(MODELS["GCN"], graph)
    seen: list[tuple[bool, bool]] = []
    for side in (ours, stock):
        side.model.register_forward_hook(
            lambda *_: seen.append((torch.is_grad_enabled(), pyg.is_accelerated()))
        )
        assert side.time_prediction(side.batch(0)) > 0.0
    assert seen == [(False, True), (False, False)]


def test_wrong_prediction_is_refused(graph: generators.GraphData) -> None:
    ours, stock = model_runs.full_batch_trainers(MODELS["GCN"], graph)
    with torch.no_grad():
        ours.model.convs[1].lin.weight[3, 5] += 0.05
    result = model_runs.measure_inference("infer-gnn/GCN", {}, [ours, stock], SETTINGS)
    assert (result.status, result.timings) == ("wrong", ())
    assert "edgeweave must be within" in result.message


@pytest.mark.parametrize("name", ["GCN", "GraphSAGE", "GAT"])
def test_sampled_rows_train_on_the_seeds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runs, "_NUM_SEEDS", 16)
    runs = {run.case_id: run for run in model_runs.model_runs(True, True, "eager")}
    pyg.reset_report()
    result = runs[f"train-sampled/half-arxiv/{name}"].run(Settings(1, 1, 0, 1e9))
    assert result.status == "ok", result.message
    assert result.timings[0].samples >= 8
    (layer,) = (site for site in pyg.report().sites if site.site.endswith("Conv"))
    # Once for the check, then in every step: two layers each.
    assert layer.fused == 2 * (1 + 2 + result.timings[0].samples)
    assert layer.fell_back == 0


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
