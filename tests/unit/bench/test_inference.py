"""`edgeweave bench inference`: the models, the engines, and what is left out and why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgeweave.bench import inference, inference_engines, results
from edgeweave.bench.harness import distance_to_reference
from edgeweave.bench.inference import BEST_OF_TORCH, InferenceRun, inference_runs
from edgeweave.bench.inference_engines import ENGINES, EngineUnavailableError, Run, Task, flat
from edgeweave.bench.inference_models import ZOO, ZooModel, build
from edgeweave.bench.records import Reference, Settings
from edgeweave.cli import main

SHORT = Settings(repeats=2, min_repeats=2, warmup=0, budget_s=0.5)
# fp32 networks of up to a hundred layers against float64.
CLOSE = 1e-4


@pytest.fixture(params=list(ZOO))
def entry(request: pytest.FixtureRequest) -> ZooModel:
    return ZOO[request.param]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_models_are_the_same_every_time_and_compute_with_normal_numbers(entry: ZooModel) -> None:
    state = torch.get_rng_state()
    model, (args, kwargs) = build(entry, 2, quick=True)
    again, _ = build(entry, 2, quick=True)
    assert torch.equal(torch.get_rng_state(), state)
    one, two = flat(model(*args, **kwargs)), flat(again(*args, **kwargs))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not model.training
    smallest: list[float] = []

    def look(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            smallest.append(float(output.abs().amax()))

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.LayerNorm | nn.BatchNorm2d):
            module.register_forward_hook(look)
    model(*args, **kwargs)
    assert min(smallest) > 1e-6, "activations must not vanish"
    assert max(smallest) < 1e6


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "engine", ["jitfuser", "jitfuser nan=fast", "eager", "eager channels_last", "fuser3"]
)
@pytest.mark.parametrize("name", ["U-Net", "DLRM", "BERT-base"])
def test_engines_compute_the_model(engine: str, name: str) -> None:
    model, inputs = build(ZOO[name], 2, quick=True)
    task = Task(model, inputs)
    if engine == "eager channels_last" and name != "U-Net":
        with pytest.raises(EngineUnavailableError, match="no images among the inputs"):
            ENGINES[engine](task)
        return
    wide = build(ZOO[name], 2, quick=True)[0].double()
    args = [x.double() if x.is_floating_point() else x for x in inputs[0]]
    reference = Reference(flat(wide(*args, **inputs[1])))
    assert distance_to_reference(ENGINES[engine](task)(), reference) < CLOSE


def test_a_model_that_the_hand_recipe_cannot_take_is_left_out_by_name() -> None:
    run = InferenceRun("GPT-2", 2, "fp32", True, ("jitfuser", "eager", "fuser3"))
    result = run.run(SHORT)
    assert result.status == "ok"
    assert [t.name for t in result.timings] == ["jitfuser", "eager", BEST_OF_TORCH]
    assert "raised: vector::_M_range_check" in str(result.params["left out: fuser3"])


def _engine(value: float) -> Run:
    def make(task: Task) -> Run:
        args, kwargs = task.inputs
        return lambda: tuple(y * value for y in flat(task.model(*args, **kwargs)))

    return make  # type: ignore[return-value]


def _absent(task: Task) -> Run:
    raise EngineUnavailableError("is not installed")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, Run]:
    made = {
        "good": _engine(1.0),
        "wrong": _engine(1.5),
        "absent": _absent,
        "raises": lambda task: 1 / 0,
        "eager": ENGINES["eager"],
    }
    monkeypatch.setattr(inference, "ENGINES", made)
    return made


@pytest.mark.usefixtures("engines")
def test_wrong_absent_and_raising_peers_are_left_out() -> None:
    run = InferenceRun("MLP", 2, "fp32", True, ("good", "wrong", "absent", "raises", "eager"))
    result = run.run(SHORT)
    assert [t.name for t in result.timings] == ["good", "eager", BEST_OF_TORCH]
    assert str(result.params["left out: wrong"]).startswith("wrong: ")
    assert result.params["left out: absent"] == "is not installed"
    assert "ZeroDivisionError" in str(result.params["left out: raises"])
    assert result.params["best of torch is"] == "eager"
    assert int(result.params["compile ms: good"]) >= 0
    assert int(result.params["memory MiB: good"]) >= 0


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("ours", ["wrong", "absent", "raises"])
def test_ours_left_out_is_an_error(ours: str) -> None:
    result = InferenceRun("MLP", 2, "fp32", True, (ours, "eager")).run(SHORT)
    assert result.status == "error"
    assert ours in result.message


def test_cases_have_every_model_batch_and_the_precisions_there_are() -> None:
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    runs = inference_runs(quick=False)
    assert len(runs) == len(ZOO) * 2 * (2 if bf16 else 1)
    assert {run.batch for run in runs} == {1, 16}
    assert "Inductor" in runs[0].engines
    quick = inference_runs(quick=True)
    assert {run.batch for run in quick} == {2}
    assert "Inductor" not in quick[0].engines
    assert len({run.case_id for run in runs}) == len(runs)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_engines, "is_installed", lambda module: False)
    monkeypatch.setattr(inference_engines, "find_engine", lambda name: None)
    task = Task(*build(ZOO["MLP"], 2, quick=True))
    for engine, message in {
        "OpenVINO": "openvino is not installed",
        "ONNX Runtime": "onnxruntime is not installed",
        "graphfuse": "edgeweave.graphfuse is not there",
    }.items():
        with pytest.raises(EngineUnavailableError, match=message):
            ENGINES[engine](task)


def test_inductor_finds_no_kernels_of_earlier_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = list[Path]()

    def compile_(model: nn.Module) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
            assert not list(folder.iterdir())
            (folder / "kernel").touch()
            folders.append(folder)
            return model(*args, **kwargs)

        return call

    monkeypatch.setattr(torch, "compile", compile_)
    task = Task(*build(ZOO["MLP"], 2, quick=True))
    for _ in range(2):
        inference_engines.make_inductor(task)
    assert len(set(folders)) == 2
    assert not any(folder.exists() for folder in folders)


def test_command_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file = tmp_path / "inference.json"
    words = ["bench", "inference", "--quick", "--filter", "MLP/b2/fp32", "--repeat", "2"]
    words += ["--engines", "jitfuser,eager,fuser3", "--json", str(json_file)]
    assert main(words) == 0
    report = results.read_report(json_file)
    (case,) = report["runs"][0]["cases"]
    assert case["case_id"] == "inference-mlp/MLP/b2/fp32"
    assert [t["name"] for t in case["timings"]] == ["jitfuser", "eager", "fuser3", BEST_OF_TORCH]
    assert {"compile ms: jitfuser", "memory MiB: fuser3"} <= set(case["params"])
    assert "inference: MLPs" in capsys.readouterr().out


def test_unknown_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "inference", "--engines", "warp"]) == 1
    assert "--engines must be among jitfuser" in capsys.readouterr().err
