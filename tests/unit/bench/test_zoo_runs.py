"""Running the whole zoo: processes, limits, going on after an interruption, tables."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from edgeweave.bench import zoo_runs
from edgeweave.bench.zoo import Result, Settings
from edgeweave.bench.zoo_models import zoo
from edgeweave.bench.zoo_report import merge, read, report, write
from edgeweave.bench.zoo_runs import Options, Task, run, run_one, tasks
from edgeweave.bench.zoo_tables import markdown, put_between_markers, summaries
from edgeweave.cli import main

SMALL = Settings(engine="eager", quick=True, rounds=1, threads=1)


def task(name: str = "SAGEConv") -> Task:
    return Task(zoo()[name], SMALL)


def test_a_process_for_one_model() -> None:
    result = run_one(task(), 120.0)
    assert (result.status, result.message) == ("ok", "")
    assert result.engines == ("eager",)
    assert result.speedup > 0


def alive(pid: int) -> bool:
    # A process that nobody has waited for yet is a zombie: it has ended.
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_model_that_takes_too_long_is_ended_with_all_that_it_started(
    tmp_path, monkeypatch
) -> None:
    script = tmp_path / "python"
    note = tmp_path / "pid"
    script.write_text(f"#!/bin/sh\nsleep 100 &\necho $! > {note}.new; mv {note}.new {note}\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(zoo_runs.sys, "executable", str(script))
    result = run_one(task(), 2.0)
    assert (result.status, result.message) == ("timeout", "not done after 2 s")
    child = int(note.read_text())
    for _ in range(200):
        if not alive(child):
            break
        time.sleep(0.05)
    assert not alive(child)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("echo no more memory >&2; exit 3", "exit status 3: no more memory"),
        ("kill -SEGV $$", "exit status -11:"),
    ],
)
def test_a_process_that_dies_is_a_crash(tmp_path, monkeypatch, line, message) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{line}\n")
    script.chmod(0o755)
    monkeypatch.setattr(zoo_runs.sys, "executable", str(script))
    result = run_one(task(), 60.0)
    assert (result.status, result.message) == ("crash", message)


def test_tasks() -> None:
    both = Options(SMALL, precisions=("fp32", "bf16"), pattern="/(SAGEConv|T5|AlexNet)$")
    names = [(t.entry.name, t.settings.precision) for t in tasks(both)]
    assert len(names) == 6
    assert names[:2] == [("SAGEConv", "fp32"), ("SAGEConv", "bf16")]
    shards = [tasks(dataclasses.replace(both, shard=(k, 4))) for k in (1, 2, 3, 4)]
    found = [(t.entry.name, t.settings.precision) for shard in shards for t in shard]
    assert sorted(found) == sorted(names)
    (only,) = tasks(dataclasses.replace(both, families=("hf",), precisions=("fp32",)))
    assert only.entry.name == "T5"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("(", "must be a regular expression, got '\\('"), ("nobody", "must match a model")],
)
def test_filters_that_make_no_sense(pattern, message) -> None:
    with pytest.raises(ValueError, match=f"bench zoo: --filter {message}"):
        tasks(Options(pattern=pattern))


def result_of(task: Task, *_: object, **changes: object) -> Result:
    name, family, precision = task.entry.name, task.entry.family, task.settings.precision
    return dataclasses.replace(Result(name, family, precision, "ok", share=1.0), **changes)


def test_a_run_that_was_interrupted_goes_on(tmp_path, monkeypatch) -> None:
    path = tmp_path / "zoo.json"
    options = Options(SMALL, pattern="/(SAGEConv|T5|AlexNet)$", json=path)
    done: list[str] = []

    def one(task: Task, limit: float) -> Result:
        if task.entry.name == "T5" and len(done) == 1:
            raise KeyboardInterrupt
        done.append(task.entry.name)
        return result_of(task)

    monkeypatch.setattr(zoo_runs, "run_one", one)
    with pytest.raises(KeyboardInterrupt):
        run(options, Console(quiet=True))
    assert [r["name"] for r in read(path)["results"]] == ["SAGEConv"]
    done.append("after the interruption")
    results = run(dataclasses.replace(options, resume=True), Console(quiet=True))
    assert done[2:] == ["T5", "AlexNet"]
    assert [r.name for r in results] == ["SAGEConv", "T5", "AlexNet"]
    assert [r["name"] for r in read(path)["results"]] == ["SAGEConv", "T5", "AlexNet"]
    other = Options(dataclasses.replace(SMALL, threads=2), json=path, resume=True)
    with pytest.raises(ValueError, match="--resume needs the settings of the report"):
        run(other, Console(quiet=True))


def some_results() -> list[Result]:
    return [
        Result("a", "hf", "fp32", "ok", ("onednn",), share=1.0, speedup=2.0, compile_s=1.0),
        Result("b", "hf", "fp32", "ok", ("inductor",), share=0.0, speedup=0.5, breaks=2),
        Result("c", "hf", "fp32", "wrong", error=0.5, eager_error=1e-7),
        Result("b", "hf", "bf16", "error", message="bad"),
        Result("d", "hf", "bf16", "no eager", message="eager raises"),
        Result("e", "vision", "bf16", "crash", message="exit status -11: <b>`x`|"),
    ]


def test_summaries() -> None:
    first, second, third = summaries(report(SMALL, {}, some_results()))
    assert (first["models"], first["right"], first["whole"], first["breaks"]) == (3, 2, 1, 1)
    assert (first["share"], first["geomean"]) == (0.5, 1.0)
    assert (first["least"], first["least_name"]) == (0.5, "b")
    assert (second["precision"], second["models"], second["right"]) == ("bf16", 1, 0)
    assert (third["family"], third["right"], third["geomean"]) == ("vision", 0, None)


def test_markdown(tmp_path) -> None:
    text = markdown(report(SMALL, {"cpu": "some processor"}, some_results()))
    assert text.startswith("some processor, ")
    assert "| Hugging Face: text, speech, series | fp32 | 3 | 2 | 50% | 1 | 1 | 1.00x | " in text
    assert "- c, fp32: wrong. error 0.5, eager 1e-07" in text
    assert "- e, bf16: crash. exit status -11: &lt;b>'x'\\|" in text
    assert "| a | onednn | 100% | 0 | - (-) | 2.00x |" in text
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- zoo:start -->\nold\n<!-- zoo:end -->\n\nmore\n")
    put_between_markers(page, "new\n")
    assert page.read_text() == "# Title\n\n<!-- zoo:start -->\nnew\n<!-- zoo:end -->\n\nmore\n"
    put_between_markers(tmp_path / "other.md", "new\n")
    assert (tmp_path / "other.md").read_text() == "<!-- zoo:start -->\nnew\n<!-- zoo:end -->\n"
    page.write_text("# Title\n")
    with pytest.raises(ValueError, match="must hold <!-- zoo:start -->"):
        put_between_markers(page, "new\n")


def test_a_report_of_several_machines_names_them() -> None:
    parts = [
        report(
            SMALL,
            {"cpu": cpu, "date": date, "threads": 2},
            [Result(cpu, "hf", "fp32", "ok", share=1.0)],
        )
        for cpu, date in (("x", "2026-01-01"), ("y", "2026-01-02"), ("x", "2026-01-03"))
    ]
    whole = merge([merge(parts[:2]), parts[2]])
    assert whole["environment"]["cpu"] == "x"
    assert [each["cpu"] for each in whole["other_environments"]] == ["y"]
    text = markdown(whole)
    assert text.startswith("x, 2 threads, ")
    assert "2026-01-01; or y, 2 threads, " in text
    assert "other_environments" not in merge([parts[0], parts[2]])


def test_reports_are_merged_and_checked(tmp_path) -> None:
    first, second = some_results()[:2], [*some_results()[2:], some_results()[0]]
    whole = merge([report(SMALL, {"cpu": "x"}, second), report(SMALL, {}, first)])
    assert [r["name"] for r in whole["results"]] == ["a", "b", "b", "c", "d", "e"]
    assert whole["environment"] == {"cpu": "x"}
    other = report(dataclasses.replace(SMALL, rounds=9), {}, first)
    with pytest.raises(ValueError, match="reports must be of one kind of run"):
        merge([whole, other])
    path = tmp_path / "zoo.json"
    write(path, whole)
    assert read(path) == json.loads(json.dumps(whole))
    assert os.listdir(tmp_path) == ["zoo.json"]
    for text in ("{", "[]", '{"schema": "edgeweave-bench/1"}', '{"schema": "edgeweave-zoo/1"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="must be a report of schema edgeweave-zoo/1"):
            read(path)


def test_the_command(tmp_path, capsys, monkeypatch) -> None:
    def one(task: Task, limit: float) -> Result:
        assert limit == 5.0
        assert task.settings.rounds == 2
        return result_of(task, status="ok" if task.entry.name != "T5" else "error", message="why")

    monkeypatch.setattr(zoo_runs, "run_one", one)
    paths = [tmp_path / "1.json", tmp_path / "2.json"]
    words = ["bench", "zoo", "--quick", "--filter", "/(SAGEConv|T5)$", "--engine", "eager"]
    words += ["--precision", "fp32,bf16", "--time-limit", "5", "--repeat", "2"]
    assert main([*words, "--shard", "1/2", "--json", str(paths[0])]) == 1
    assert main([*words, "--shard", "2/2", "--json", str(paths[1])]) == 1
    assert main([*words, "--families", "pyg"]) == 0
    captured = capsys.readouterr()
    assert "PyG layers and models" in captured.out
    assert "error: hf/T5 fp32: why" in captured.out
    page, whole = tmp_path / "zoo.md", tmp_path / "zoo.json"
    words = ["bench", "zoo", "--merge", *map(str, paths), "--json", str(whole)]
    assert main([*words, "--markdown", str(page)]) == 1
    assert len(read(whole)["results"]) == 4
    assert "| SAGEConv |" in page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--filter", "nobody"], "--filter must match a model"),
        (["--resume"], "--resume needs --json"),
        (["--merge", "nowhere.json"], "nowhere.json"),
    ],
)
def test_refusals(words, message, capsys) -> None:
    assert main(["bench", "zoo", *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--shard", "3/2"], ["--shard", "x"], ["--families", "birds"], ["--precision", ""]]
)
def test_senseless_command_lines(words) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "zoo", *words])
    assert stopped.value.code == 2
