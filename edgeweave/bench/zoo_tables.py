"""Tables of the zoo: a summary by family, and all models, for the terminal and for Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeweave.bench.zoo_models import FAMILIES

__all__ = ["Summary", "markdown", "put_between_markers", "summaries", "summary_rows"]

TITLES = {
    "pyg": "PyG layers and models",
    "hf": "Hugging Face: text, speech, series",
    "vision": "Vision",
    "tabular": "Tables",
}
HEADINGS = (
    "family", "precision", "models", "right", "not eager", "whole in eager", "breaks", "geomean",
    "least", "compile s",
)  # fmt: skip
_START, _END = "<!-- zoo:start -->", "<!-- zoo:end -->"
_NOTHING = "-"

Summary = dict[str, Any]


def summaries(record: Mapping[str, Any]) -> list[Summary]:
    """What became of each family in each precision.

    Args:
        record: A report.

    Returns:
        For each family and precision: `models`, `right` (how many), `share` (mean share of calls
        not left to eager, of those that are right), `whole` (how many are wholly in eager),
        `breaks`, `geomean` and `least` of the speed-ups with `least_name` (None if none was
        timed), `compile_s` (median).

    Example:
        >>> from edgeweave.bench.zoo import Result, Settings
        >>> from edgeweave.bench.zoo_report import report
        >>> from edgeweave.bench.zoo_tables import summaries
        >>> pair = [Result("a", "hf", "fp32", "ok", speedup=s, share=1.0) for s in (1.0, 4.0)]
        >>> summaries(report(Settings(), {}, pair))[0]["geomean"]
        2.0
    """
    found = []
    for family in FAMILIES:
        for precision in ("fp32", "bf16"):
            mine = [
                r
                for r in record["results"]
                if r["family"] == family
                and r["precision"] == precision
                and r["status"] != "no eager"
            ]
            if mine:
                found.append(_summary(family, precision, mine))
    return found


def _summary(family: str, precision: str, results: Sequence[Mapping[str, Any]]) -> Summary:
    good = [r for r in results if r["status"] == "ok"]
    timed = [r for r in good if r["speedup"] is not None]
    least = min(timed, key=lambda r: r["speedup"], default=None)
    logs = [math.log(r["speedup"]) for r in timed]
    return {
        "family": family,
        "precision": precision,
        "models": len(results),
        "right": len(good),
        "share": statistics.fmean(r["share"] for r in good) if good else None,
        "whole": sum(not r["share"] for r in good),
        "breaks": sum(r["breaks"] > 0 for r in good),
        "geomean": math.exp(statistics.fmean(logs)) if logs else None,
        "least": None if least is None else least["speedup"],
        "least_name": None if least is None else least["name"],
        "compile_s": statistics.median(r["compile_s"] for r in good) if good else None,
    }


def summary_rows(record: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The cells below `HEADINGS`.

    Args:
        record: A report.

    Returns:
        One row for each family and precision.
    """
    for each in summaries(record):
        least = _NOTHING
        if each["least"] is not None:
            least = f"{each['least']:.2f}x ({each['least_name']})"
        yield (
            TITLES[each["family"]],
            each["precision"],
            str(each["models"]),
            str(each["right"]),
            _percent(each["share"]),
            str(each["whole"]),
            str(each["breaks"]),
            _times(each["geomean"]),
            least,
            _number(each["compile_s"], ".1f"),
        )


def markdown(record: Mapping[str, Any]) -> str:
    """The report as Markdown: environment, summary, what is not right, a table for each family.

    Args:
        record: A report.

    Returns:
        The text.
    """
    return "\n".join(_lines(record)) + "\n"


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
    settings = record["settings"]
    mode = "forward and backward" if settings["train"] else "inference"
    size = "small inputs" if settings["quick"] else "full inputs"
    machines = (record["environment"], *record.get("other_environments", ()))
    yield (
        f"{'; or '.join(map(_machine, machines))}. "
        f'`engine="{settings["engine"]}"`, {mode}, {size}, '
        + (f"{settings['rounds']} rounds." if settings["rounds"] else "not timed.")
    )
    yield ""
    yield from _table(HEADINGS, summary_rows(record), right_from=2)
    bad = [r for r in record["results"] if r["status"] != "ok"]
    if bad:
        yield ""
        yield "Not right:"
        yield ""
        for r in bad:
            text = r["message"] or f"error {r['error']}, eager {r['eager_error']}"
            yield f"- {r['name']}, {r['precision']}: {r['status']}. {_plain(text)}"
    for family in FAMILIES:
        mine = [r for r in record["results"] if r["family"] == family]
        if mine:
            yield ""
            yield f"### {TITLES[family]}"
            yield ""
            yield from _family(mine)


def _machine(environment: Mapping[str, Any]) -> str:
    versions = environment.get("versions", {})
    return (
        f"{environment.get('cpu', '?')}, {environment.get('threads', '?')} threads, "
        f"torch {versions.get('torch')}, torch_geometric {versions.get('torch_geometric')}, "
        f"transformers {versions.get('transformers')}, commit {environment.get('commit')}, "
        f"{str(environment.get('date', '?'))[:10]}"
    )


def _family(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    precisions = [p for p in ("fp32", "bf16") if any(r["precision"] == p for r in results)]
    headings = ["model", "engine", "not eager", "breaks"]
    for precision in precisions:
        headings += [f"{precision} error (eager)", precision]
    headings.append("compile s")
    rows = []
    for name in dict.fromkeys(r["name"] for r in results):
        mine = {r["precision"]: r for r in results if r["name"] == name}
        first = next(iter(mine.values()))
        row = [name, ", ".join(first["engines"]) or _NOTHING, _percent(first["share"])]
        row.append(str(first["breaks"]))
        for precision in precisions:
            row += _cells(mine.get(precision))
        row.append(_number(first["compile_s"], ".1f"))
        rows.append(row)
    yield from _table(headings, rows, right_from=2)


def _cells(result: Mapping[str, Any] | None) -> list[str]:
    if result is None:
        return [_NOTHING, _NOTHING]
    errors = f"{_number(result['error'], '.0e')} ({_number(result['eager_error'], '.0e')})"
    if result["status"] != "ok":
        return [errors, result["status"]]
    return [errors, _times(result["speedup"])]


def _table(
    headings: Sequence[str], rows: Iterator[tuple[str, ...]] | list[list[str]], *, right_from: int
) -> Iterator[str]:
    yield "| " + " | ".join(headings) + " |"
    yield "|" + "|".join("---" if k < right_from else "---:" for k in range(len(headings))) + "|"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def _percent(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0%}"


def _times(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.2f}x"


def _number(value: float | None, form: str) -> str:
    return _NOTHING if value is None else format(value, form)


def _plain(text: str) -> str:
    """A message without what Markdown, or a reader of the page, has no use for."""
    return text.replace("`", "'").replace("<", "&lt;").replace("|", "\\|")[:200]


def put_between_markers(path: Path, text: str) -> None:
    """Write a text between the markers of a Markdown file.

    Args:
        path: The file; one that is not there is made of the markers and the text.
        text: Of `markdown`.

    Raises:
        ValueError: If the file has no such markers.
    """
    page = path.read_text(encoding="utf-8") if path.exists() else f"{_START}\n{_END}\n"
    before, start, rest = page.partition(_START)
    _, end, after = rest.partition(_END)
    if not start or not end:
        raise ValueError(f"bench zoo: {path} must hold {_START} and {_END}, got none")
    path.write_text(f"{before}{_START}\n{text}{_END}{after}", encoding="utf-8")
