"""`compile.explain` and `edgeweave explain`."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from edgeweave import cli
from edgeweave.compile import explain


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x, edges):
        h = self.linear(x)
        return torch.zeros_like(h).index_add_(0, edges[1], h[edges[0]])


class Broken(Sums):
    def forward(self, x, edges):
        h = super().forward(x, edges)
        torch._dynamo.graph_break()
        return h.relu()


def inputs(nodes: int = 9, edges: int = 60):
    return torch.randn(nodes, 5), torch.randint(0, nodes, (2, edges))


def test_rewrites_and_engine() -> None:
    model = Sums()
    report = explain(model, inputs(), engine="eager")
    (graph,) = report.graphs
    assert report.breaks == ()
    assert report.recompiled == ()
    assert graph.records_gradients
    assert graph.engine == "eager"
    assert graph.ops == {"edgeweave.mm": 1}
    (rewrite,) = graph.rewrites
    assert rewrite.name == "fuse_mm"
    assert rewrite.source.startswith(f"{__file__}:")
    assert rewrite.source.endswith("index_add_(0, edges[1], h[edges[0]])")
    assert report.first_call_s > graph.passes_s > 0
    assert report.backward_s is not None
    assert model.linear.weight.grad is None


def test_stages_and_who_got_what() -> None:
    report = explain(Sums().eval(), inputs(), engine="eager", training=False)
    assert list(report.stages) == ["capture", "passes", "autograd", "engine"]
    assert report.first_call_s > report.stages["capture"] > report.stages["passes"] > 0
    (graph,) = report.graphs
    assert graph.got == {"edgeweave's ops": 1, "ATen": graph.calls_after - 1}
    assert graph.share == pytest.approx(1 / graph.calls_after)


def test_who_got_what_of_onednn() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.GLU()).eval()
    report = explain(model, (torch.randn(256, 64),), engine="onednn", training=False)
    (graph,) = report.graphs
    assert graph.engine == "onednn"
    assert sum(graph.got.values()) == 4
    assert any(reason.startswith("aten.glu.default: ") for reason in graph.refused)
    assert "  ATen    1 x aten.glu.default: " in str(report)


def test_recompilations() -> None:
    calls = [inputs(), inputs(), inputs(17, 90), inputs(30, 35)]
    report = explain(Sums(), calls, engine="eager")
    assert len(report.graphs) == 2
    assert report.recompiled == (3,)
    assert explain(Sums(), calls, engine="eager", dynamic=True).recompiled == ()


# dynamo looks at `.grad` of what crosses a graph break.
_CROSSED = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@_CROSSED
def test_graph_breaks() -> None:
    report = explain(Broken(), inputs(), engine="eager")
    assert len(report.graphs) == 2
    (found,) = report.breaks
    assert "graph_break" in found.source
    assert found.reason


def test_inference_has_no_backward_pass() -> None:
    report = explain(Sums().eval(), inputs(), engine="eager", training=False)
    assert report.backward_s is None
    assert not report.graphs[0].records_gradients


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_files_that_inductor_wrote() -> None:
    report = explain(Sums(), inputs(), engine="inductor")
    assert report.generated
    with open(report.generated[0]) as file:
        assert "torch.ops.edgeweave.mm" in file.read()


@_CROSSED
def test_as_a_table() -> None:
    lines = str(explain(Sums(), [inputs(), inputs(17, 90)], engine="eager")).splitlines()
    assert lines[0] == "Sums: 2 graphs compiled, 0 graph breaks, 1 call recompiled"
    assert lines[1].startswith("  first call ")
    assert lines[2].startswith("  stages  capture ")
    assert lines[3].startswith("graph 1 (training): 6 calls -> ")
    assert "  engine  eager: asked for" in lines
    assert "  left    engine eager: asked for" in lines
    assert any(line.startswith("  got     edgeweave's ops 1, ATen ") for line in lines)
    assert "  ops     1 edgeweave.mm" in lines
    (first, *_) = [line for line in lines if "fuse_mm" in line]
    assert first == "  fuse_mm  getitem -> index_add_ => edgeweave::mm(sum)"
    assert "  break: " in str(explain(Broken(), inputs(), engine="eager"))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.zeros(2), TypeError, "inputs must be a tuple of arguments or a list of such tuples"),
        ([], ValueError, "inputs must hold at least one call, got an empty list"),
    ],
)
def test_wrong_inputs(given, error, message) -> None:
    with pytest.raises(error, match=f"explain: {message}"):
        explain(Sums(), given)


# ---- the command ---------------------------------------------------------------------------------

_FILE = """
import torch
from torch import nn


class Layer(nn.Module):
    def forward(self, x, edges):
        return torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])


def example():
    return Layer(), (torch.randn(9, 5), torch.randint(0, 9, (2, 60)))


pair = example()
wrong = 3
three = (1, 2, 3)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "some_model_of_a_test.py"
    path.write_text(_FILE)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    yield path
    __import__("sys").modules.pop(path.stem, None)


@pytest.mark.parametrize("name", ["", ":example", ":pair"])
def test_the_command(file, capsys, name) -> None:
    assert cli.main(["explain", f"{file}{name}", "--engine", "eager"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Layer: 1 graph compiled, 0 graph breaks, 0 calls recompiled\n")
    assert "fuse_mm" in out
    assert f"{file}:8: return torch.zeros_like(x)" in out


def test_the_command_prints_json(file, capsys) -> None:
    argv = ["explain", str(file), "--engine", "eager", "--json", "--inference", "--dynamic"]
    assert cli.main(argv) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["graphs"][0]["ops"] == {"edgeweave.mm": 1}
    assert record["graphs"][0]["rewrites"][0]["name"] == "fuse_mm"
    assert record["layers"] is None  # none of PyG's


LAYERS = """
import torch
from torch_geometric.nn import GATConv, SAGEConv, Sequential

def example():
    layers = [(SAGEConv(4, 4), "x, e -> x"), (GATConv(4, 4), "x, e -> x")]
    return Sequential("x, e", layers), (torch.randn(20, 4), torch.randint(0, 20, (2, 50)))

def several():
    model, inputs = example()
    return model, [inputs, inputs]
"""


@pytest.mark.parametrize("name", ["", ":several"])
@pytest.mark.parametrize("more", [[], ["--inference"]])
def test_layers_of_pyg_are_shown_one_by_one(tmp_path, capsys, name, more) -> None:
    file = tmp_path / "layers.py"
    file.write_text(LAYERS)
    argv = ["explain", f"{file}{name}", "--engine", "eager", *more]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    head, first, second, whole, *_ = out.splitlines()
    assert head.split("  ")[0] == "layer"
    assert "(SAGEConv)" in first
    assert "(GATConv)" in second
    assert first.endswith("fused")
    assert second.endswith("fused")
    assert whole.startswith("whole pass: ")
    assert cli.main([*argv, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [layer["fused"] for layer in record["layers"]["layers"]] == [["SAGEConv"], ["GATConv"]]
    assert cli.main([*argv, "--no-layers"]) == 0
    assert "whole pass" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("nowhere.py", "there is no file 'nowhere.py'"),
        ("FILE:nothing", "has no 'nothing'"),
        ("FILE:wrong", "wrong must give (model, inputs), got int"),
        ("FILE:three", "three must give (model, inputs), got (int, int, int)"),
        ("model", "MODEL must be FILE.py or FILE.py:NAME, got 'model'"),
    ],
)
def test_wrong_models(file, capsys, argument, message) -> None:
    assert cli.main(["explain", argument.replace("FILE", str(file))]) == 1
    assert message in capsys.readouterr().err
