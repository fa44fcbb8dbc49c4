"""The zoo: a sample of models through the pipeline, and what it says about those that fail."""

from __future__ import annotations

import json

import pytest
import torch

from edgeweave.bench import zoo as zoo_module
from edgeweave.bench.zoo import Result, main, measure
from edgeweave.bench.zoo_models import Entry, zoo

# One of each way that a layer can be written.
_SAMPLE = (
    "GCNConv, weighted", "SAGEConv, max", "GATv2Conv", "SuperGATConv", "TAGConv", "ChebConv",
    "ClusterGCNConv", "LEConv", "ResGatedGraphConv", "AGNNConv", "GENConv", "PNAConv",
    "GIN model", "MLP",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "train"), [*((n, True) for n in _SAMPLE), ("PNAConv", False), ("GATv2Conv", False)]
)
def test_sample(name, train) -> None:
    result = measure(zoo()[name], quick=True, engine="eager", train=train, rounds=1)
    assert (result.status, result.message) == ("ok", "")
    assert result.breaks == 0
    assert (result.ops > 0) == (zoo()[name].family.startswith("graph"))


def test_a_model_that_raises_is_a_result() -> None:
    class Bad(torch.nn.Module):
        def forward(self, x):
            raise ValueError("no\nmore")

    entry = Entry("bad", "mlp", lambda quick: (Bad(), ((torch.ones(2),), {})))
    result = measure(entry, engine="eager")
    assert result.status == "error"
    assert "ValueError" in result.message


def test_a_wrong_model_is_wrong(monkeypatch) -> None:
    original = zoo_module._once
    calls = []

    def once(function, *args):
        out = original(function, *args)
        calls.append(1)
        return [t + 1 for t in out] if len(calls) == 1 else out

    monkeypatch.setattr(zoo_module, "_once", once)
    assert measure(zoo()["SAGEConv"], quick=True, engine="eager", rounds=1).status == "wrong"


def test_the_command(tmp_path, capsys) -> None:
    path = tmp_path / "zoo.json"
    argv = ["--quick", "--filter", "/SAGEConv$", "--engine", "eager", "--rounds", "1"]
    assert main([*argv, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("SAGEConv ")
    assert "1 of 1 right, 0 of them not left to eager" in out
    (result,) = json.loads(path.read_text())["results"]
    assert Result(**result).status == "ok"
