"""`edgeweave demo`: accuracy on the real Cora graph, time on a large one, in under four minutes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from edgeweave.cli._arguments import positive

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Trains GCN and GraphSAGE on the Cora citation graph with stock PyTorch Geometric and with edgeweave,
then full-batch epochs of GCN, GraphSAGE and GIN on a graph of 1.2 million edges. Then it exports a
GCN trained on Cora, serves it over gRPC and asks it. Ends with a table and a chart. The exit status
tells whether accuracies, losses and served predictions of both sides agree."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `demo` subcommand.

    Args:
        subparsers: Of the `edgeweave` command's parser.
    """
    parser = subparsers.add_parser(
        "demo",
        help="train on Cora and on a large graph, with and without edgeweave",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        metavar="DIR",
        help="where demo.png and demo.json go (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="a small graph and few epochs")
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="threads of both sides on the large graph"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the record to stdout, all else to stderr"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo.

    Args:
        args: The parsed command line.

    Returns:
        0, or 1 if the sides disagree or the data is missing.
    """
    import torch
    from rich.console import Console

    from edgeweave.bench.cora import CoraUnavailableError
    from edgeweave.bench.environment import describe_environment
    from edgeweave.cli import _demo_report, _demo_serving, _demo_stages
    from edgeweave.pyg import report as pyg_report
    from edgeweave.pyg import reset_report

    start = time.perf_counter()
    terminal = sys.stderr if args.json else sys.stdout
    console = Console(file=terminal, width=None if terminal.isatty() else 120)
    size = _demo_stages.QUICK_SIZE if args.quick else _demo_stages.FULL_SIZE
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    reset_report()
    try:
        cora = _demo_stages.run_cora(size, console)
    except CoraUnavailableError as error:
        print(error, file=sys.stderr)
        return 1
    left_s = size.budget_s - (time.perf_counter() - start)
    large = _demo_stages.run_large(size, console, left_s)
    sites = pyg_report().sites
    try:
        serving = _demo_serving.run_serving(console)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    report = _demo_report.DemoReport(
        cora,
        large,
        {site.site: site.fused for site in sites if site.fused},
        {site.site: site.fell_back for site in sites if site.fell_back},
        describe_environment(),
        time.perf_counter() - start,
        serving,
    )
    _demo_report.print_report(report, console)
    args.output.mkdir(parents=True, exist_ok=True)
    chart, record = args.output / "demo.png", args.output / "demo.json"
    _demo_report.draw_report(report, chart)
    record.write_text(json.dumps(report.record(), indent=1) + "\n", encoding="utf-8")
    console.print(f"chart: {chart}, record: {record}, {report.elapsed_s:.0f} s", soft_wrap=True)
    if args.json:
        print(json.dumps(report.record()))
    for problem in report.problems:
        print(f"demo: {problem}", file=sys.stderr)
    return int(bool(report.problems))
