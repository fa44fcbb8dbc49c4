"""`edgeweave bench serving`: options and output."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Measure, print, write the report.

    Args:
        args: The parsed command line of `edgeweave bench`.

    Returns:
        0, or 1 if a server did not start or answered wrongly.
    """
    from rich.console import Console

    from edgeweave.bench.serving import ServingOptions
    from edgeweave.bench.serving import run as measure

    only = tuple(filter(None, args.filter.split(",")))
    options = ServingOptions(soak=args.soak, only=only)
    if args.quick:
        options = dataclasses.replace(options, requests=600, seconds=2.0)
    try:
        record = measure(options)
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    _print(record, Console(width=None if sys.stdout.isatty() else 120))
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    soak = record["results"].get("soak", {})
    return int(bool(soak.get("lost") or soak.get("wrong")))


def _print(record: dict[str, Any], console: Any) -> None:
    from rich.table import Table

    for name, result in record["results"].items():
        table = Table(title=name, show_header=False)
        for key, value in result.items():
            if isinstance(value, dict) and "rate" not in value:
                text = ", ".join(f"{k} {v:,.2f}" for k, v in value.items())
            elif isinstance(value, dict):
                text = (
                    f"{value['rate']:,.0f}/s, p50 {value['p50_ms']:.2f} ms, "
                    f"p95 {value['p95_ms']:.2f} ms, p99 {value['p99_ms']:.2f} ms, "
                    f"{value['requests']} answers, {value['failures']} failures, "
                    f"server {value['server_cpu_ms']:.2f} ms of processor each"
                )
            else:
                text = f"{value:,.3f}" if isinstance(value, float) else str(value)
            table.add_row(key, text)
        console.print(table)
    environment = record["environment"]
    console.print(f"{environment['cpu']}, {environment['cpus']} processors, client included")
