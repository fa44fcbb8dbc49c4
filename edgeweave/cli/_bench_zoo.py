"""`edgeweave bench zoo`: options and output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from edgeweave.cli._arguments import positive

__all__ = ["add_arguments", "run"]

_ROUNDS = 15


def _shard(text: str) -> tuple[int, int]:
    """`K/N` with K from 1 to N."""
    first, _, second = text.partition("/")
    if not (first.isdigit() and second.isdigit() and 1 <= int(first) <= int(second)):
        raise argparse.ArgumentTypeError(f"must be K/N with K from 1 to N, got {text!r}")
    return int(first), int(second)


def _words(known: tuple[str, ...], text: str) -> tuple[str, ...]:
    """Names with commas between, each of them known."""
    found = tuple(filter(None, text.split(",")))
    wrong = [word for word in found if word not in known]
    if wrong or not found:
        raise argparse.ArgumentTypeError(f"must be among {','.join(known)}, got {text!r}")
    return found


def _precisions(text: str) -> tuple[str, ...]:
    return _words(("fp32", "bf16"), text)


def _families(text: str) -> tuple[str, ...]:
    return _words(("pyg", "hf", "vision", "tabular"), text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that only the zoo has.

    Args:
        parser: Of `edgeweave bench`.
    """
    group = parser.add_argument_group("zoo")
    group.add_argument(
        "--families",
        type=_families,
        metavar="A,B",
        help="only these of pyg, hf, vision, tabular",
    )
    group.add_argument(
        "--precision",
        type=_precisions,
        default=("fp32",),
        metavar="A,B",
        help="fp32, bf16 or both (default: fp32)",
    )
    group.add_argument(
        "--engine",
        choices=("auto", "onednn", "inductor", "eager"),
        default="auto",
        help="as of edgeweave.optimize (default: %(default)s)",
    )
    group.add_argument("--train", action="store_true", help="forward and backward")
    group.add_argument("--no-timing", action="store_true", help="only whether results are right")
    group.add_argument(
        "--shard",
        type=_shard,
        default=(1, 1),
        metavar="K/N",
        help="only every N-th model, from the K-th on: N runs make one",
    )
    group.add_argument(
        "--time-limit",
        type=positive,
        default=600,
        metavar="S",
        help="seconds of each model, which has a process of its own (default: %(default)s)",
    )
    group.add_argument(
        "--resume", action="store_true", help="go on with the report that --json names"
    )
    group.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="run nothing: read these reports as one, for --json and --markdown",
    )
    group.add_argument(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="put the tables between the markers of this file, as of docs/zoo.md",
    )


def run(args: argparse.Namespace) -> int:
    """Run the models, or read reports; print the table, write what was asked for.

    Args:
        args: The parsed command line of `edgeweave bench`.

    Returns:
        0, or 1 if a model was wrong or failed, or the command line makes no sense.
    """
    from rich.console import Console

    from edgeweave.bench import zoo_report
    from edgeweave.bench.zoo_tables import markdown, put_between_markers

    try:
        record = _merged(args) if args.merge else _run(args, Console(stderr=True))
        if args.json is not None:
            zoo_report.write(args.json, record)
        if args.markdown is not None:
            put_between_markers(args.markdown, markdown(record))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    _print(record, Console(width=None if sys.stdout.isatty() else 160))
    return int(any(result["status"] not in ("ok", "no eager") for result in record["results"]))


def _merged(args: argparse.Namespace) -> dict[str, Any]:
    from edgeweave.bench.zoo_report import merge, read

    return merge([read(path) for path in args.merge])


def _run(args: argparse.Namespace, console: Any) -> dict[str, Any]:
    from edgeweave.bench.environment import describe_environment
    from edgeweave.bench.zoo import Settings
    from edgeweave.bench.zoo_models import FAMILIES
    from edgeweave.bench.zoo_report import merge, report
    from edgeweave.bench.zoo_runs import Options
    from edgeweave.bench.zoo_runs import run as run_all

    if args.resume and args.json is None:
        raise ValueError("bench zoo: --resume needs --json, the report to go on with, got none")
    settings = Settings(
        engine=args.engine,
        train=args.train,
        quick=args.quick,
        rounds=0 if args.no_timing else (args.repeat or (3 if args.quick else _ROUNDS)),
        threads=args.threads,
    )
    options = Options(
        settings=settings,
        precisions=args.precision,
        families=args.families or FAMILIES,
        pattern=args.filter,
        shard=args.shard,
        time_limit_s=float(args.time_limit),
        json=args.json,
        resume=args.resume,
    )
    results = run_all(options, console)
    environment = describe_environment()
    environment["threads"] = args.threads or environment["threads"]
    return merge([report(settings, environment, results)])


def _print(record: dict[str, Any], console: Any) -> None:
    from rich.table import Table

    from edgeweave.bench.zoo_tables import HEADINGS, summary_rows

    table = Table(title="the zoo, against eager of the same precision")
    for position, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if position < 2 else "right")
    for row in summary_rows(record):
        table.add_row(*row)
    console.print(table)
    for result in record["results"]:
        if result["status"] != "ok":
            name = f"{result['family']}/{result['name']} {result['precision']}"
            console.print(f"{result['status']}: {name}: {result['message']}", markup=False)
