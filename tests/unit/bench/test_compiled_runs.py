"""`bench models --peer compile`: four sides with equal weights, compared before they are timed."""

from __future__ import annotations

import pytest
import torch

from edgeweave.bench import compiled_runs
from edgeweave.bench.compiled_runs import COMPILED_MODELS, GROUP, compiled_trainers
from edgeweave.bench.generators import GraphData, half_arxiv
from edgeweave.bench.models import MODELS
from edgeweave.bench.passes import Options, _list_cases
from edgeweave.bench.records import Settings
from edgeweave.compile._optimize import OptimizedModel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
_SIDES = ["edgeweave.optimize", "edgeweave.accelerate", "torch.compile", "stock PyG"]


@pytest.fixture(scope="module")
def data() -> GraphData:
    return half_arxiv(shrink=400)


def test_the_rows() -> None:
    cases = _list_cases(Options("models", quick=True, peer="compile"))
    assert [case_id for case_id, _ in cases] == [f"{GROUP}/half-arxiv/{m}" for m in COMPILED_MODELS]


def test_the_sides_begin_alike(data: GraphData) -> None:
    trainers = compiled_trainers(MODELS["GraphSAGE"], data, engine="eager")
    assert [trainer.name for trainer in trainers] == _SIDES
    assert isinstance(trainers[0].model, OptimizedModel)
    assert trainers[2].model is not trainers[3].model
    weights = [torch.cat([p.flatten() for p in t.model.parameters()]) for t in trainers]
    assert all(torch.equal(weights[0], other) for other in weights[1:])
    assert len({next(t.model.parameters()).data_ptr() for t in trainers}) == len(_SIDES)


def test_a_row_is_measured(data: GraphData, monkeypatch: pytest.MonkeyPatch) -> None:
    # What compiles for half a minute is tested where it is compiled: here the sides are.
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    settings = Settings(repeats=2, min_repeats=2, warmup=1, budget_s=60.0)
    case_id = f"{GROUP}/half-arxiv/GCN"
    result = compiled_runs._measure(MODELS["GCN"], lambda: data, case_id, settings)
    assert (result.status, result.message) == ("ok", "")
    assert [timing.name for timing in result.timings] == _SIDES
    assert [speedup.peer for speedup in result.speedups] == _SIDES[1:]
