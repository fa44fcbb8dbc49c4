"""Saved modules: the same results, no pickle, and hostile files refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from edgeweave import graphfuse


def _saved(tmp_path: Path, **settings: Any) -> tuple[nn.Module, torch.Tensor, Path]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 5),
    ).eval()
    x = torch.randn(2, 3, 8, 8)
    graphfuse.fuse(model, x, keep="all", **settings).save(tmp_path / "model")
    return model, x, tmp_path / "model"


def test_results_and_partitions_are_the_same(tmp_path: Path) -> None:
    model, x, path = _saved(tmp_path)
    loaded = graphfuse.load(path)
    torch.testing.assert_close(loaded(x), model(x))
    assert sum(len(p.nodes) for p in loaded.report().partitions) == 3
    with pytest.raises(ValueError, match=r"must have shape \[2, 3, 8, 8\]"):
        loaded(torch.randn(3, 3, 8, 8))


def test_open_sizes_stay_open(tmp_path: Path) -> None:
    model, _, path = _saved(tmp_path, dynamic=True)
    loaded = graphfuse.load(path)
    for batch in (2, 5):
        x = torch.randn(batch, 3, 8, 8)
        torch.testing.assert_close(loaded(x), model(x))


def test_nan_is_right_without_the_model(tmp_path: Path) -> None:
    model, x, path = _saved(tmp_path)
    x[0, 0, 0, 0] = float("nan")
    torch.testing.assert_close(graphfuse.load(path)(x), model(x), equal_nan=True)


def test_it_is_two_files_and_the_model_is_not_needed(tmp_path: Path, run_python: Any) -> None:
    model, x, path = _saved(tmp_path)
    assert {file.name for file in path.iterdir()} == {"graph.json", "weights.safetensors"}
    torch.save({"x": x, "y": model(x).detach()}, tmp_path / "io.pt")
    code = f"""
import pickle, torch
saved = torch.load({str(tmp_path / "io.pt")!r})
def refuse(*args, **kwargs):
    raise AssertionError("pickle was used")
pickle.load = pickle.loads = pickle.Unpickler = refuse
from edgeweave import graphfuse
made = graphfuse.load({str(path)!r})
torch.testing.assert_close(made(saved["x"]), saved["y"])
"""
    run_python(code)


def test_named_results_come_back_as_dicts(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64
    )
    model = BertModel(config).eval()
    given = {"input_ids": torch.randint(0, 100, (2, 8))}
    graphfuse.fuse(model, given, keep="all").save(tmp_path / "bert")
    found = graphfuse.load(tmp_path / "bert")(**given)
    torch.testing.assert_close(found["pooler_output"], model(**given).pooler_output)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda g: g.update(format="other/1"), "must have format edgeweave-graphfuse/1"),
        (lambda g: g["nodes"][0].update(target="os.system.default"), "must be of ATen"),
        (lambda g: g["nodes"][0].update(target="builtins.eval.default"), "must be of ATen"),
        (
            lambda g: g["nodes"][0].update(target="edgeweave.packed_linear.default"),
            "must be of ATen",
        ),
        (lambda g: g["nodes"][0].update(args=[{"$": "dtype", "name": "load"}]), "known values"),
        (lambda g: g["nodes"][0].update(args=[{"$": "python", "name": "x"}]), "known values"),
    ],
)
def test_hostile_files(tmp_path: Path, change: Any, match: str) -> None:
    _, _, path = _saved(tmp_path)
    graph = json.loads((path / "graph.json").read_text())
    change(graph)
    (path / "graph.json").write_text(json.dumps(graph))
    with pytest.raises(ValueError, match=match):
        graphfuse.load(path)


@pytest.mark.parametrize(
    "text", ["__import__('os').system('true')", "s0.real", "(lambda: 1)()", "1.5", "s0 if 1 else 2"]
)
def test_sizes_are_arithmetic_only(text: str) -> None:
    from edgeweave._fx import SizeError, evaluate_size

    with pytest.raises(SizeError, match="size must"):
        evaluate_size(text, {"s0": 3})
