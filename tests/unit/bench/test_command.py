"""`edgeweave bench` from the command line to the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeweave.bench import passes, results
from edgeweave.bench.records import CaseResult
from edgeweave.cli import main

PNG_START = b"\x89PNG\r\n\x1a\n"


def test_ops_writes_report_chart_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file, png = tmp_path / "ops.json", tmp_path / "ops.png"
    words = ["bench", "ops", "--quick", "--repeat", "2", "--filter", "mm-forward/mol.*sum/F64"]
    words += ["--threads", "1", "--json", str(json_file), "--plot", str(png)]
    assert main(words) == 0
    report = results.read_report(json_file)
    (run,) = report["runs"]
    (case,) = run["cases"]
    assert case["case_id"] == "mm-forward/molecules/sum/F64"
    assert (case["status"], run["environment"]["threads"]) == ("ok", 1)
    assert run["stream_gb_s"] > 0
    assert case["compulsory_fraction"] > 0
    assert report["settings"]["repeats"] == 2
    assert png.read_bytes().startswith(PNG_START)
    printed = " ".join(capsys.readouterr().out.split())  # lines break where the machine's name ends
    assert "torch.sparse.mm" in printed
    assert "STREAM triad" in printed
    assert "geomean" in printed


def test_models_with_a_tuned_pass_of_its_own(tmp_path: Path) -> None:
    json_file, png = tmp_path / "models.json", tmp_path / "models.png"
    words = ["bench", "models", "--quick", "--repeat", "1", "--filter", "molecules/GCN", "--tuned"]
    assert main([*words, "--json", str(json_file), "--plot", str(png)]) == 0
    report = results.read_report(json_file)
    assert [run["allocator"] for run in report["runs"]] == ["default", "tuned"]
    tuned = [run["environment"]["allocator"]["tuned"] for run in report["runs"]]
    assert tuned == [False, True]
    for run in report["runs"]:
        assert [case["status"] for case in run["cases"]] == ["ok"]
    assert png.read_bytes().startswith(PNG_START)


def test_wrong_case_is_shown_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = CaseResult("gather", "gather/a", {}, "wrong", "gather/a: off by one; not timed")
    monkeypatch.setattr(passes, "_list_cases", lambda options: [("gather/a", lambda _: wrong)])
    assert main(["bench", "ops"]) == 1
    captured = capsys.readouterr()
    assert "off by one" in captured.err
    assert "wrong" in captured.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ops", "--filter", "no-such-case"], "--filter must match the name of a case"),
        (["ops", "--filter", "("], "--filter must be a regular expression"),
    ],
)
def test_refusals(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["kernels"], ["ops", "--threads", "0"], ["ops", "--repeat", "x"]]
)
def test_senseless_command_lines(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *words])
    assert stopped.value.code == 2
