"""One pass over a suite's cases, with a progress bar, in this process or a tuned one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from edgeweave.bench.environment import describe_environment, measure_stream_gb_s
from edgeweave.bench.model_runs import model_runs
from edgeweave.bench.op_runs import guard, op_specs, run_spec
from edgeweave.bench.records import CaseResult, Settings
from edgeweave.bench.results import read_report, run_record
from edgeweave.bench.targets import summarise_groups

_NamedCase = tuple[str, Callable[[Settings], CaseResult]]


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line.

    Attributes:
        suite: `"ops"`, `"models"` or `"inference"`.
        quick: Small graphs or models, few cases.
        everything: All training rows.
        pattern: Regular expression on the names of the cases.
        peer: `"eager"` or `"sparse"`, see `edgeweave.bench.model_runs.model_runs`; `"compile"`, see
            `edgeweave.bench.compiled_runs`.
        threads: Threads of torch, or None to leave them.
        repeats: Rounds per case (training steps per row), or None for the suite's default.
        engines: Of the inference suite, ours first; none for all.
        device: Where the models suite runs, `"cpu"` or `"cuda"`.
    """

    suite: str
    quick: bool = False
    everything: bool = False
    pattern: str = ""
    peer: str = "eager"
    threads: int | None = None
    repeats: int | None = None
    engines: tuple[str, ...] = ()
    device: str = "cpu"

    @property
    def settings(self) -> Settings:
        """How long each case is measured."""
        repeats = self.repeats or (5 if self.quick else 9)
        least = min(repeats, 3)
        # A full-batch step of the slowest peers takes seconds; on a GPU it is warm after one.
        long = self.suite == "models" and self.device == "cpu"
        budget_s = (60.0 if long else 6.0) / (4 if self.quick else 1)
        return Settings(repeats=repeats, min_repeats=least, budget_s=budget_s)


def run_pass(options: Options, allocator: str, console: Console) -> dict[str, Any]:
    """Measures all chosen cases in this process.

    Args:
        options: The command line.
        allocator: How this process's allocator is set, `"default"` or `"tuned"`.
        console: Shows progress.

    Returns:
        An entry of the report's `runs`.

    Raises:
        ValueError: If no case matches the pattern.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    stream_gb_s = measure_stream_gb_s() if options.suite == "ops" else None
    cases = _run_all(_list_cases(options), options.settings, console, allocator)
    groups = summarise_groups(cases, tuned=allocator == "tuned")
    environment = describe_environment(options.device)
    return run_record(allocator, environment, stream_gb_s, cases, groups)


def run_tuned_pass(options: Options) -> dict[str, Any]:
    """Measures all chosen cases in a process of its own, whose allocator is tuned first.

    Args:
        options: The command line.

    Returns:
        An entry of the report's `runs`.

    Raises:
        RuntimeError: If the process leaves no report.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuned.json"
        words = [sys.executable, "-m", "edgeweave.cli", "bench", options.suite]
        words += ["--allocator", "tuned", "--json", str(path), "--peer", options.peer]
        words += ["--filter", options.pattern]
        words += ["--quick"] if options.quick else []
        words += ["--all"] if options.everything else []
        words += ["--threads", str(options.threads)] if options.threads else []
        words += ["--repeat", str(options.repeats)] if options.repeats else []
        words += ["--engines", ",".join(options.engines)] if options.engines else []
        done = subprocess.run(words, stdout=subprocess.DEVNULL, check=False)
        try:
            (run,) = read_report(path)["runs"]
        except (OSError, json.JSONDecodeError) as error:
            raise RuntimeError(
                f"bench: tuned pass must leave a report, got exit status {done.returncode}; "
                "see its messages above"
            ) from error
    tuned_run: dict[str, Any] = run
    return tuned_run


def _list_cases(options: Options) -> list[_NamedCase]:
    try:
        re.compile(options.pattern)
    except re.error as error:
        raise ValueError(
            f"bench: --filter must be a regular expression, got {options.pattern!r} ({error})"
        ) from error
    cases: list[_NamedCase]
    if options.suite == "ops":
        specs = op_specs(options.quick, options.pattern)
        cases = [(spec.case_id, partial(run_spec, spec)) for spec in specs]
    elif options.suite == "inference":
        cases = _inference_cases(options)
    elif options.device != "cpu":
        # Imported here: it loads what the other suites do not need.
        from edgeweave.bench.device_runs import device_runs

        cases = [
            (run.case_id, run.run)
            for run in device_runs(options.device, options.quick)
            if re.search(options.pattern, run.case_id)
        ]
    elif options.peer == "compile":
        # Imported here: it loads torch's compiler.
        from edgeweave.bench.compiled_runs import compiled_runs

        cases = [
            (run.case_id, run.run)
            for run in compiled_runs(options.quick)
            if re.search(options.pattern, run.case_id)
        ]
    else:
        cases = [
            (run.case_id, run.run)
            for run in model_runs(options.everything, options.quick, options.peer)
            if re.search(options.pattern, run.case_id)
        ]
    if not cases:
        raise ValueError(
            f"bench: --filter must match the name of a case, got {options.pattern!r}; "
            "names look like mm-forward/molecules/sum/F64 and half-arxiv/GCN (docs/benchmarks.md)"
        )
    return cases


def _inference_cases(options: Options) -> list[_NamedCase]:
    # Imported here: it needs transformers, which the other suites do not.
    from edgeweave.bench.inference import inference_runs

    return [
        (run.case_id, run.run)
        for run in inference_runs(options.quick, options.engines)
        if re.search(options.pattern, run.case_id)
    ]


def _run_all(
    cases: list[_NamedCase],
    settings: Settings,
    console: Console,
    allocator: str,
) -> list[CaseResult]:
    results = []
    columns = (
        TextColumn(f"allocator {allocator}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(cases))
        # Cases hold their graph: drop each when it is done, so that one graph is alive at a time.
        for case_id, run in _consume(cases):
            progress.update(task, description=case_id)
            group = case_id.split("/", 1)[0]
            result = guard(group, case_id, partial(run, settings))
            if result.status != "ok":
                progress.console.print(f"{result.status}: {result.message}", style="red")
            results.append(result)
            progress.advance(task)
    return results


def _consume(cases: list[_NamedCase]) -> Iterator[_NamedCase]:
    """Yields the cases in order, forgetting each."""
    cases.reverse()
    while cases:
        yield cases.pop()
