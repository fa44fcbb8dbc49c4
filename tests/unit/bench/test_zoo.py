"""The zoo: a sample of models through the pipeline, and what it says about those that fail."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch import nn

from edgeweave.bench import zoo as zoo_module
from edgeweave.bench.zoo import Result, Settings, main, measure
from edgeweave.bench.zoo_models import FAMILIES, Entry, zoo
from edgeweave.compile import _engine

# transformers and torch_geometric use what torch calls deprecated; Inductor's own code too.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

# One of each way that a layer can be written, forward and backward.
_LAYERS = (
    "GCNConv, weighted", "SAGEConv, max", "GATv2Conv", "SuperGATConv", "TAGConv", "ChebConv",
    "ClusterGCNConv", "LEConv", "ResGatedGraphConv", "AGNNConv", "GENConv", "PNAConv",
    "GIN model", "RGATConv", "HGTConv", "PointTransformerConv", "SoftmaxAggregation",
)  # fmt: skip
# Of each family that oneDNN serves: attention of several kinds, sound, two towers;
# concatenations, windows, transposed convolutions, dilations.
_DENSE = (
    "T5", "Llama", "DeBERTa-v2", "Whisper", "CLIP",
    "DenseNet", "Swinv2", "DCGAN generator", "DeepLabV3 head", "SegFormer",
)  # fmt: skip
# What oneDNN may leave to eager, as it says itself: nothing else is silently in eager.
_MEASURED = "oneDNN: no faster than eager on the example"
_IN_EAGER = "in eager torch.float32 [2, 2]"
_SMALL = Settings(engine="eager", quick=True, rounds=0)


def test_families_are_as_large_as_the_documentation_says() -> None:
    counts = Counter(entry.family for entry in zoo().values())
    assert set(counts) == set(FAMILIES)
    assert counts["hf"] >= 46
    assert counts["pyg"] >= 40
    assert counts["vision"] >= 20
    assert sum(counts.values()) >= 120


@pytest.mark.parametrize(
    ("name", "train"), [*((n, True) for n in _LAYERS), ("PNAConv", False), ("GATv2Conv", False)]
)
def test_layers(name, train) -> None:
    result = measure(zoo()[name], Settings(engine="eager", quick=True, rounds=0, train=train))
    assert (result.status, result.message) == ("ok", "")
    assert result.breaks == 0
    assert result.ops > 0


@pytest.mark.parametrize("name", _DENSE)
def test_models_for_onednn(name) -> None:
    result = measure(zoo()[name], Settings(engine="onednn", quick=True, rounds=0))
    assert (result.status, result.message) == ("ok", "")
    assert result.breaks == 0
    assert result.engines == ("onednn",)
    assert set(result.left) <= {_MEASURED}
    assert result.share > 0 or result.left == (_MEASURED,)


@pytest.mark.parametrize("name", ["SAGEConv", "BERT-base", "AlexNet"])
def test_bfloat16(name) -> None:
    result = measure(zoo()[name], Settings(precision="bf16", engine="eager", quick=True, rounds=0))
    assert (result.status, result.message) == ("ok", "")
    assert result.eager_error > 1e-4  # it was not float32


def test_autocast_goes_to_inductor_and_not_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engine, "has_bf16", lambda: False)  # whatever this processor has
    result = measure(zoo()["ESPCN"], Settings(precision="bf16", quick=True, rounds=0))
    assert (result.status, result.message) == ("ok", "")
    assert result.engines == ("inductor",)
    assert result.share == 1.0
    assert result.left == ()


def entry(model: nn.Module, *args: torch.Tensor) -> Entry:
    return Entry("model", "vision", lambda quick: (model, (args or (torch.ones(2, 2),), {})))


class Raises(nn.Module):
    def forward(self, x):
        raise ValueError("no\nmore")


def test_a_model_that_raises_in_eager_is_nothing_to_compare_with() -> None:
    result = measure(entry(Raises()), _SMALL)
    assert result.status == "no eager"
    assert result.message == "eager raises ValueError: no more"


def test_a_model_that_cannot_be_made_is_an_error() -> None:
    def make(quick):
        raise KeyError("gone")

    result = measure(Entry("model", "hf", make), _SMALL)
    assert (result.status, result.message) == ("error", "KeyError: 'gone'")


class Changing(nn.Module):
    """Gives other results from its second call on, the first being eager's."""

    def __init__(self, second) -> None:
        super().__init__()
        self.calls, self.second = 0, second

    @torch._dynamo.disable
    def forward(self, x):
        self.calls += 1
        return self.second(x) if self.calls == 2 else x * 2


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda x: x * 3, ""),
        (lambda x: x * float("nan"), ""),
        (lambda x: (x * 2).half(), f"result 0 is torch.float16 [2, 2], {_IN_EAGER}"),
        (lambda x: (x * 2)[:1], f"result 0 is torch.float32 [1, 2], {_IN_EAGER}"),
        (lambda x: (x * 2, x * 2), "2 results, 1 in eager, 1 in float64"),
    ],
)  # fmt: skip
def test_what_is_wrong(second, message) -> None:
    result = measure(entry(Changing(second)), Settings(engine="eager", rounds=3))
    assert (result.status, result.message) == ("wrong", message)
    assert result.speedup is None  # and is not timed


def test_a_model_that_is_not_compiled_has_no_share() -> None:
    result = measure(entry(Changing(lambda x: x * 2)), _SMALL)
    assert result.status == "ok"
    assert (result.graphs, result.share) == (0, 0.0)


def test_graph_breaks_are_counted() -> None:
    class Broken(nn.Module):
        def forward(self, x):
            x = x.sin()
            torch._dynamo.graph_break()
            return x.cos()

    result = measure(entry(Broken()), _SMALL)
    assert (result.status, result.graphs, result.breaks) == ("ok", 2, 1)


def test_a_model_without_float64_is_compared_with_eager() -> None:
    class Narrow(nn.Module):
        def forward(self, x):
            return x @ torch.ones(2, 2, dtype=torch.float32)

    result = measure(entry(Narrow()), _SMALL)
    assert (result.status, result.eager_error) == ("ok", 0.0)


def test_sides_are_timed_in_turn(monkeypatch) -> None:
    order = []
    monkeypatch.setattr(zoo_module, "_SAMPLE_S", 0.0)  # one call in each sample
    model = nn.Linear(2, 2)
    call = zoo_module._Call(model, (torch.ones(1, 2),), {}, False)
    sides = {name: lambda x, n=name: order.append(n) or model(x) for name in ("ours", "eager")}
    times = zoo_module._time(sides, call, rounds=3)
    assert order[4:] == ["ours", "eager"] * 3
    assert min(times.values()) > 0


def test_the_process_of_one_model(tmp_path) -> None:
    path = tmp_path / "result.json"
    settings = {"engine": "eager", "quick": True, "rounds": 1, "threads": 1}
    assert main(["SAGEConv", "--settings", json.dumps(settings), "--json", str(path)]) == 0
    result = Result(**json.loads(path.read_text()))
    assert (result.name, result.status) == ("SAGEConv", "ok")
    assert result.speedup == pytest.approx(result.eager_ms / result.ours_ms)
