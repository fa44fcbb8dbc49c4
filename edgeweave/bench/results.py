"""The JSON form of a benchmark report, and the check that a file has it.

::

    {"schema": "edgeweave-bench/1", "suite": "ops" | "models" | "inference", "settings": {...},
     "runs": [{"allocator": "default" | "tuned", "environment": {...}, "stream_gb_s": 38.1 | null,
               "cases": [...], "groups": [...]}]}

Times are seconds per call, ratios are time of the peer over our time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgeweave.bench.records import CaseResult
from edgeweave.bench.targets import GroupSummary

SCHEMA = "edgeweave-bench/1"

_NUMBER = (int, float)
_REPORT_FIELDS: dict[str, Any] = {"schema": str, "suite": str, "settings": dict, "runs": list}
_RUN_FIELDS: dict[str, Any] = {
    "allocator": str,
    "environment": dict,
    "stream_gb_s": (*_NUMBER, type(None)),
    "cases": list,
    "groups": list,
}
_ENVIRONMENT_FIELDS: dict[str, Any] = {
    "date": str,
    "commit": (str, type(None)),
    "cpu": str,
    "isa": str,
    "threads": int,
    "versions": dict,
    "allocator": dict,
    "transparent_huge_pages": str,
}
_CASE_FIELDS: dict[str, Any] = {
    "group": str,
    "case_id": str,
    "params": dict,
    "status": str,
    "message": str,
    "distances": dict,
    "timings": list,
    "speedups": list,
    "bandwidth_gb_s": (*_NUMBER, type(None)),
    "compulsory_fraction": (*_NUMBER, type(None)),
}
_TIMING_FIELDS: dict[str, Any] = {
    "name": str,
    "median_s": _NUMBER,
    "q25_s": _NUMBER,
    "q75_s": _NUMBER,
    "min_s": _NUMBER,
    "max_s": _NUMBER,
    "samples": int,
}
_SPEEDUP_FIELDS: dict[str, Any] = {"peer": str, "ratio": _NUMBER, "q25": _NUMBER, "q75": _NUMBER}
_GROUP_FIELDS: dict[str, Any] = {
    "group": str,
    "peer": str,
    "cases": int,
    "geomean": _NUMBER,
    "worst": _NUMBER,
    "worst_case": str,
    "verdict": str,
}


def run_record(
    allocator: str,
    environment: Mapping[str, Any],
    stream_gb_s: float | None,
    cases: Sequence[CaseResult],
    groups: Sequence[GroupSummary],
) -> dict[str, Any]:
    """Puts one pass over the cases into its JSON form.

    Args:
        allocator: `"default"` or `"tuned"`, for both sides.
        environment: From `edgeweave.bench.environment.describe_environment`.
        stream_gb_s: Measured memory bandwidth, or None where it was not measured.
        cases: All results.
        groups: Their summary.

    Returns:
        An entry of `runs`.
    """
    return {
        "allocator": allocator,
        "environment": dict(environment),
        "stream_gb_s": stream_gb_s,
        "cases": [_case_record(case, stream_gb_s) for case in cases],
        "groups": [asdict(group) for group in groups],
    }


def report(suite: str, settings: Mapping[str, Any], runs: Sequence[Any]) -> dict[str, Any]:
    """Puts passes together to a report.

    Args:
        suite: `"ops"`, `"models"` or `"inference"`.
        settings: What was asked for on the command line.
        runs: From `run_record`.

    Returns:
        The report.
    """
    return {"schema": SCHEMA, "suite": suite, "settings": dict(settings), "runs": list(runs)}


def write_report(record: Mapping[str, Any], path: Path) -> None:
    """Checks a report and writes it.

    Args:
        record: The report.
        path: Where; folders are made.

    Raises:
        ValueError: If the report does not have the form described in this module.
    """
    validate_report(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_report(path: Path) -> dict[str, Any]:
    """Reads a report and checks it.

    Args:
        path: The file.

    Returns:
        The report.

    Raises:
        ValueError: If the file does not hold a report.
    """
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    validate_report(record)
    return record


def validate_report(record: Mapping[str, Any]) -> None:
    """Checks the form of a report.

    Args:
        record: The report.

    Raises:
        ValueError: At the first field that is missing or has the wrong type, naming its place.

    Example:
        >>> from edgeweave.bench.results import report, validate_report
        >>> validate_report(report("ops", {}, []))
    """
    _require(record, _REPORT_FIELDS, "report")
    if record["schema"] != SCHEMA:
        raise ValueError(f"report: schema must be {SCHEMA!r}, got {record['schema']!r}")
    for i, run in enumerate(record["runs"]):
        _require(run, _RUN_FIELDS, f"runs[{i}]")
        _require(run["environment"], _ENVIRONMENT_FIELDS, f"runs[{i}].environment")
        for j, case in enumerate(run["cases"]):
            place = f"runs[{i}].cases[{j}]"
            _require(case, _CASE_FIELDS, place)
            for timing in case["timings"]:
                _require(timing, _TIMING_FIELDS, f"{place}.timings")
            for speedup in case["speedups"]:
                _require(speedup, _SPEEDUP_FIELDS, f"{place}.speedups")
        for group in run["groups"]:
            _require(group, _GROUP_FIELDS, f"runs[{i}].groups")


def _require(record: Any, fields: Mapping[str, Any], place: str) -> None:
    if not isinstance(record, Mapping):
        raise ValueError(f"report: {place} must be an object, got {type(record).__name__}")
    for name, kind in fields.items():
        if name not in record:
            raise ValueError(f"report: {place} must have {name}, got {sorted(record)}")
        if not isinstance(record[name], kind):
            raise ValueError(
                f"report: {place}.{name} must have another type, "
                f"got {type(record[name]).__name__} {record[name]!r}"
            )


def _case_record(case: CaseResult, stream_gb_s: float | None) -> dict[str, Any]:
    record = asdict(case)
    # JSON knows no infinity: a side that returned NaN is infinitely far from its reference.
    record["distances"] = {
        name: value if math.isfinite(value) else None for name, value in case.distances.items()
    }
    record["timings"], record["speedups"] = list(record["timings"]), list(record["speedups"])
    record["bandwidth_gb_s"] = case.bandwidth_gb_s
    record["compulsory_fraction"] = (
        case.compulsory_fraction(stream_gb_s) if stream_gb_s is not None else None
    )
    return record
