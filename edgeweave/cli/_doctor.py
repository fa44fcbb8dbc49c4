"""`edgeweave doctor`: what is there, what is missing, and the command that mends it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from edgeweave.cli._probes import PROBES, Finding

_MARKS = {"ok": " ", "advice": "~", "missing": "-", "broken": "!"}
_COLOURS = {"ok": "green", "advice": "yellow", "missing": "cyan", "broken": "bold red"}


def add_parser(subparsers: Any) -> None:
    """Add `doctor` to the command line.

    Args:
        subparsers: What `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "doctor",
        help="report versions, ISA, threads, libraries, and what is missing",
        description="Exits with 0 if the core works, with 1 if it does not.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def _shown(value: object) -> str:
    if value is None:
        return "not installed"
    return ", ".join(value) or "none" if isinstance(value, list) else str(value)


def _as_json(findings: Sequence[Finding], *, works: bool) -> str:
    sections: dict[str, dict[str, dict[str, Any]]] = {}
    for finding in findings:
        sections.setdefault(finding.section, {})[finding.name] = {
            "value": finding.value,
            "status": finding.status,
            "remedy": finding.remedy or None,
        }
    return json.dumps({"ok": works, "findings": sections}, indent=2)


def _as_text(findings: Sequence[Finding]) -> str:
    width = max(len(finding.name) for finding in findings)
    lines = []
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines.append(section)
        mark = _MARKS[finding.status]
        lines.append(f"{mark} {finding.name:<{width}}  {_shown(finding.value)}")
        if finding.remedy:
            lines.append(f"  {'':<{width}}  -> {finding.remedy}")
    return "\n".join(lines)


def _print_table(findings: Sequence[Finding]) -> None:
    """Print in colour; raises ModuleNotFoundError where rich is not installed."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found", "what mends it"):
        table.add_column(heading, overflow="fold")
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            table.add_row("", Text(section, style="bold"))
        table.add_row(
            Text(_MARKS[finding.status], style=_COLOURS[finding.status]),
            finding.name,
            Text(_shown(finding.value), style=_COLOURS[finding.status]),
            Text(finding.remedy),
        )
    Console().print(table)


def run(args: argparse.Namespace) -> int:
    """Run every probe and print the report.

    Returns:
        0 if the core works, 1 otherwise.
    """
    findings = [finding for probe in PROBES for finding in probe()]
    works = all(finding.status != "broken" for finding in findings)
    if args.json:
        print(_as_json(findings, works=works))
        return 0 if works else 1
    # A pipe gets plain lines, which grep finds whole.
    pretty = sys.stdout.isatty()
    if pretty:
        try:
            _print_table(findings)
        except ModuleNotFoundError:  # rich comes with an extra, the doctor with the core
            pretty = False
    if not pretty:
        print(_as_text(findings))
    print("\nThe core works." if works else "\nThe core does not work: see the lines marked '!'.")
    return 0 if works else 1
