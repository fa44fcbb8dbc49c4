"""Runs the zoo: each model in a process of its own, with a time limit, and all results kept."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from edgeweave.bench.environment import describe_environment
from edgeweave.bench.zoo import Result, Settings
from edgeweave.bench.zoo_models import FAMILIES, Entry, zoo
from edgeweave.bench.zoo_report import read, report, write

__all__ = ["Options", "Task", "run", "run_one", "tasks"]

_LAST_WORDS = 300


@dataclass(frozen=True)
class Task:
    """One model in one precision."""

    entry: Entry
    settings: Settings


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line.

    Attributes:
        settings: How each model is run; its precision is set for each task.
        precisions: "fp32", "bf16" or both.
        families: Of `FAMILIES`.
        pattern: Regular expression on `family/name`.
        shard: (k, n): only every n-th task, from the k-th on, counted from 1.
        time_limit_s: Of each model.
        json: Where the report goes after each model; None for nowhere.
        resume: Leave out what that file has.
    """

    settings: Settings = field(default_factory=Settings)
    precisions: Sequence[str] = ("fp32",)
    families: Sequence[str] = FAMILIES
    pattern: str = ""
    shard: tuple[int, int] = (1, 1)
    time_limit_s: float = 600.0
    json: Path | None = None
    resume: bool = False


def tasks(options: Options) -> list[Task]:
    """What is to be run, in order.

    Args:
        options: What was asked for.

    Returns:
        The tasks of this shard.

    Raises:
        ValueError: If the pattern is none, or no model matches.
    """
    try:
        pattern = re.compile(options.pattern)
    except re.error as error:
        raise ValueError(
            f"bench zoo: --filter must be a regular expression, got {options.pattern!r} ({error})"
        ) from error
    found = [
        Task(entry, dataclasses.replace(options.settings, precision=precision))
        for entry in zoo().values()
        if entry.family in options.families and pattern.search(f"{entry.family}/{entry.name}")
        for precision in options.precisions
    ]
    if not found:
        raise ValueError(
            f"bench zoo: --filter must match a model, got {options.pattern!r}; names look like "
            "pyg/GCNConv, hf/T5 and vision/ResNet-50"
        )
    position, count = options.shard
    return found[position - 1 :: count]


def run_one(task: Task, time_limit_s: float) -> Result:
    """Run one model in a process of its own.

    Args:
        task: The model and how.
        time_limit_s: After which the process is ended.

    Returns:
        Its result, of status `timeout` or `crash` if it left none.
    """
    name, family = task.entry.name, task.entry.family
    failed = Result(name, family, task.settings.precision, "crash")
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "result.json", Path(folder) / "log"
        words = [sys.executable, "-W", "ignore", "-m", "edgeweave.bench.zoo", name]
        words += ["--settings", json.dumps(dataclasses.asdict(task.settings)), "--json", str(path)]
        with log.open("wb") as out:
            process = subprocess.Popen(
                words,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_environment(task.settings, folder)},
                # Inductor starts processes too: all of them end together.
                start_new_session=True,
            )
            try:
                status = process.wait(time_limit_s)
            except subprocess.TimeoutExpired:
                text = f"not done after {time_limit_s:g} s"
                return dataclasses.replace(failed, status="timeout", message=text)
            finally:
                _end(process)
        if path.is_file():
            record = json.loads(path.read_text(encoding="utf-8"))
            sequences = {key: tuple(record[key]) for key in ("engines", "left")}
            return Result(**{**record, **sequences})
        last = log.read_text(encoding="utf-8", errors="replace").strip()[-_LAST_WORDS:]
    return dataclasses.replace(failed, message=" ".join(f"exit status {status}: {last}".split()))


def _environment(settings: Settings, folder: str) -> dict[str, str]:
    # A cold start for each, or the second of two runs compiles in no time.
    found = {"TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor")}
    if settings.threads is not None:
        found["OMP_NUM_THREADS"] = str(settings.threads)
        found["TORCHINDUCTOR_COMPILE_THREADS"] = str(settings.threads)
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):  # all of them are gone
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(options: Options, console: Console) -> list[Result]:
    """Run what was asked for, and keep the report up to date on disk.

    Args:
        options: What was asked for.
        console: Shows progress, and what went wrong.

    Returns:
        The results, those that were there before among them.

    Raises:
        ValueError: If nothing matches, or the report to go on with is none, or of other settings.
        OSError: If the report cannot be written.
    """
    todo = tasks(options)
    results = _known(options)
    known = {(result.name, result.precision) for result in results}
    todo = [t for t in todo if (t.entry.name, t.settings.precision) not in known]
    environment = describe_environment()
    environment["threads"] = options.settings.threads or environment["threads"]
    columns = (
        TextColumn("zoo"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(todo))
        for task in todo:
            text = f"{task.entry.family}/{task.entry.name} {task.settings.precision}"
            progress.update(bar, description=text)
            results.append(run_one(task, options.time_limit_s))
            for line in _complaints(results[-1]):
                progress.console.print(f"{text}: {line}", style="red", markup=False)
            if options.json is not None:
                write(options.json, report(options.settings, environment, results))
            progress.advance(bar)
    return results


def _known(options: Options) -> list[Result]:
    if not options.resume or options.json is None or not options.json.exists():
        return []
    record = read(options.json)
    if record["settings"] != report(options.settings, {}, [])["settings"]:
        raise ValueError(
            f"bench zoo: --resume needs the settings of the report, {record['settings']}, "
            "got others; name another file with --json"
        )
    return [Result(**result) for result in record["results"]]


def _complaints(result: Result) -> Iterator[str]:
    if result.status != "ok":
        yield f"{result.status} {result.message}"
        if result.status == "wrong" and not result.message:
            yield f"error {result.error}, eager {result.eager_error}"
