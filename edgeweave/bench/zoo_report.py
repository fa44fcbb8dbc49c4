"""The JSON form of a run of the zoo: written after each model, read to go on, merged from shards.

::

    {"schema": "edgeweave-zoo/1", "environment": {...}, "settings": {...}, "results": [...]}

Each result has the fields of `edgeweave.bench.zoo.Result`. A report that was merged from runs on
several machines has `other_environments`, a list.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeweave.bench.zoo import Result, Settings
from edgeweave.bench.zoo_models import FAMILIES

__all__ = ["SCHEMA", "merge", "read", "report", "write"]

SCHEMA = "edgeweave-zoo/1"
# The same in all runs that are read as one; each result has a precision of its own.
_COMPARED = tuple(f.name for f in dataclasses.fields(Settings) if f.name != "precision")


def report(
    settings: Settings, environment: Mapping[str, Any], results: Iterable[Result]
) -> dict[str, Any]:
    """A report as JSON-ready data.

    Args:
        settings: How the models were run.
        environment: Of `describe_environment`.
        results: In the order in which they are shown.

    Returns:
        The report.
    """
    kept = dataclasses.asdict(settings)
    return {
        "schema": SCHEMA,
        "environment": dict(environment),
        "settings": {name: kept[name] for name in _COMPARED},
        "results": [dataclasses.asdict(result) for result in results],
    }


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a report so that a reader, or a run that is interrupted, never sees half of one.

    Args:
        path: The file.
        record: Of `report`.
    """
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def read(path: Path) -> dict[str, Any]:
    """Read a report.

    Args:
        path: The file.

    Returns:
        The report.

    Raises:
        ValueError: If the file holds anything else.
        OSError: If it cannot be read.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        known = record["schema"] == SCHEMA
        for result in record["results"]:
            Result(**result)
    except (KeyError, TypeError, ValueError):
        known = False
    if not known:
        raise ValueError(f"bench zoo: {path} must be a report of schema {SCHEMA}, got another file")
    found: dict[str, Any] = record
    return found


def merge(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report of several: the shards of a run, or a run for each precision.

    Where two hold the same model in the same precision, the later one counts.

    Args:
        records: At least one.

    Returns:
        The report, with the environment of the first, and those of others if they differ in more
        than the time.

    Raises:
        ValueError: If they were run with other settings.

    Example:
        >>> from edgeweave.bench.zoo import Result, Settings
        >>> from edgeweave.bench.zoo_report import merge, report
        >>> parts = [report(Settings(), {}, [Result(name, "hf", "fp32", "ok")]) for name in "ab"]
        >>> [result["name"] for result in merge(parts)["results"]]
        ['a', 'b']
    """
    first = records[0]
    for other in records[1:]:
        if other["settings"] != first["settings"]:
            raise ValueError(
                f"bench zoo: reports must be of one kind of run, got settings "
                f"{first['settings']} and {other['settings']}"
            )
    found = {(r["name"], r["precision"]): r for record in records for r in record["results"]}
    ordered = sorted(
        found.values(),
        key=lambda r: (FAMILIES.index(r["family"]), r["name"].lower(), r["precision"] != "fp32"),
    )
    known = [_undated(first["environment"])]
    others = []
    for record in records:
        for each in (record["environment"], *record.get("other_environments", ())):
            if _undated(each) not in known:
                known.append(_undated(each))
                others.append(each)
    apart = {"other_environments": others} if others else {}
    return {**first, **apart, "results": ordered}


def _undated(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in environment.items() if name != "date"}
