"""`edgeweave demo --quick` to its end: table, chart, record and exit status."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from edgeweave.cli import _demo, _demo_report, _demo_serving, _demo_stages

PNG_START = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def demo(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[subprocess.CompletedProcess[str], Path]:
    output = tmp_path_factory.mktemp("demo") / "made-by-the-demo"
    done = run_python(
        "import sys; from edgeweave.cli import main; sys.exit(main())",
        args=("demo", "--quick", "--json", "--threads", "1", "--output", str(output)),
        timeout_s=600,
    )
    return done, output


def test_artifacts(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, output = demo
    assert sorted(path.name for path in output.iterdir()) == ["demo.json", "demo.png"]
    chart = (output / "demo.png").read_bytes()
    assert chart.startswith(PNG_START)
    assert len(chart) > 20_000
    # With --json, stdout holds the record alone.
    assert json.loads(done.stdout) == json.loads((output / "demo.json").read_text())


def test_accuracies_are_those_known_for_cora(
    demo: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    record = json.loads(demo[0].stdout)
    assert [result["model"] for result in record["cora"]] == ["GCN", "GraphSAGE"]
    for result in record["cora"]:
        # About 0.8; a little less after the few epochs of --quick. Chance is 0.3.
        for side in ("stock_accuracies", "accuracies"):
            assert 0.7 < statistics.mean(result[side]) < 0.88
        assert result["agrees"]


def test_losses_agree_and_fall(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    record = json.loads(demo[0].stdout)
    assert [result["model"] for result in record["half_arxiv"]] == ["GCN", "GraphSAGE", "GIN"]
    for result in record["half_arxiv"]:
        assert result["loss_difference"] < 1e-2
        assert result["losses"][-1] < result["losses"][0]
        assert result["speedup"] > 0
    assert record["problems"] == []


def test_layers_were_fused_and_none_fell_back(
    demo: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    record = json.loads(demo[0].stdout)
    assert {"GCNConv", "SAGEConv", "GINConv"} <= record["fused"].keys()
    assert record["fell_back"] == {}


def test_the_model_was_served(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    serving = json.loads(demo[0].stdout)["serving"]
    assert serving["nodes"] == 1000
    assert 0.7 < serving["accuracy"] < 0.88
    # Over the wire and from a part of the graph, the same classes.
    assert serving["differing"] == 0
    assert "served over gRPC" in demo[0].stderr


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_demo_serving, "missing_extra", lambda: "grpc")
    assert _demo_serving.run_serving(Console(width=120)) is None
    assert 'needs grpc; pip install "edgeweave[server]"' in capsys.readouterr().out


def test_other_predictions_are_a_problem() -> None:
    served = _demo_serving.ServingResult("c", 9, 0.8, 2, 1.0, 2.0, [])
    assert "got 2 others among 9" in served.problems[0]


def test_table_goes_to_stderr_beside_json(
    demo: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    for words in ("Cora, GCN", "half-arxiv, GIN", "speed-up", "demo.png"):
        assert words in demo[0].stderr


def cora_result(stock: list[float], ours: list[float]) -> _demo_stages.CoraResult:
    return _demo_stages.CoraResult("GCN", stock, ours, 1.0, 1.0)


def large_result(stock: list[float], ours: list[float]) -> _demo_stages.LargeResult:
    return _demo_stages.LargeResult("GIN", 2.0, 0.5, 2.0, 0.6, stock, ours)


@pytest.mark.parametrize(
    ("cora", "large", "problems"),
    [
        (cora_result([0.8, 0.81], [0.81, 0.8]), large_result([3.0, 2.0], [3.0, 2.0]), 0),
        (cora_result([0.8, 0.81], [0.7, 0.71]), large_result([3.0, 2.0], [3.0, 2.0]), 1),
        (cora_result([0.8, 0.81], [0.8, 0.81]), large_result([3.0, 2.0], [3.0, 2.1]), 1),
        (cora_result([0.8, 0.81], [0.2, 0.2]), large_result([3.0, 2.0], [3.0, float("nan")]), 2),
    ],
)
def test_disagreement_is_a_failure(
    cora: _demo_stages.CoraResult,
    large: _demo_stages.LargeResult,
    problems: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(_demo_stages, "run_cora", lambda size, console: [cora])
    monkeypatch.setattr(_demo_stages, "run_large", lambda size, console, left_s: [large])
    monkeypatch.setattr(_demo_serving, "run_serving", lambda console: None)
    from edgeweave.cli import main

    assert main(["demo", "--output", str(tmp_path)]) == (1 if problems else 0)
    complaints = capsys.readouterr().err
    assert complaints.count("must agree within") == problems
    record = json.loads((tmp_path / "demo.json").read_text())
    assert len(record["problems"]) == problems


def test_missing_data_is_said_plainly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from edgeweave.bench.cora import CoraUnavailableError
    from edgeweave.cli import main

    def missing(size: object, console: object) -> None:
        raise CoraUnavailableError("load_cora: Cora must be installed; pip install it")

    monkeypatch.setattr(_demo_stages, "run_cora", missing)
    assert main(["demo", "--output", str(tmp_path / "none")]) == 1
    assert "pip install it" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_chart_needs_no_display(tmp_path: Path) -> None:
    report = _demo_report.DemoReport(
        [cora_result([0.8], [0.8])],
        [large_result([3.0, 2.0], [3.0, 2.0])],
        {"GCNConv": 3},
        {},
        {
            "cpu": "cpu",
            "isa": "avx2",
            "threads": 2,
            "versions": {"torch": "2", "torch_geometric": "2"},
        },
        1.0,
    )
    _demo_report.draw_report(report, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(PNG_START)
    assert _demo.add_parser.__doc__
