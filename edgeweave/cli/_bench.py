"""`edgeweave bench`: speed against torch, PyG, MKL and scipy."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeweave.cli import _bench_zoo
from edgeweave.cli._arguments import positive

if TYPE_CHECKING:
    from edgeweave.bench.passes import Options

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Measures this machine. Every result is checked against a float64 reference before it is timed; all
sides run in one process in turn, with the same threads and the same allocator setting."""

_EPILOG = """\
examples:
  edgeweave bench ops --quick                      small graphs, a few minutes
  edgeweave bench ops --filter 'mm-forward/.*sum'  one kernel
  edgeweave bench models --tuned --json models.json --plot models.png
  edgeweave bench models --device cuda --json gpu.json   layers on a GPU against torch.compile
  edgeweave bench serving --soak 100000            the server against an echo and LitServe
  edgeweave bench inference --quick                small models, two minutes
  edgeweave bench inference --filter 'conv.*/b1/'  conv models at batch 1
  edgeweave bench inference                        every model, about an hour on two cores
  edgeweave bench zoo --quick --families vision    small models, one process each
  edgeweave bench zoo --precision fp32,bf16 --json zoo.json --resume --markdown docs/zoo.md"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `bench` subcommand.

    Args:
        subparsers: Of the `edgeweave` command's parser.
    """
    parser = subparsers.add_parser(
        "bench",
        help="measure speed against torch, PyG, MKL and scipy",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "suite",
        choices=("ops", "models", "inference", "serving", "zoo"),
        help="kernels, training steps, inference, the server, or every model through optimize",
    )
    parser.add_argument("--quick", action="store_true", help="small graphs and fewer cases")
    parser.add_argument(
        "--filter",
        default="",
        metavar="REGEX",
        help="only cases whose name matches somewhere; serving: names with commas between",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="models: where they run; on cuda one layer's step against torch.compile",
    )
    parser.add_argument("--all", action="store_true", help="models: every training row")
    parser.add_argument(
        "--peer",
        choices=("eager", "sparse", "compile"),
        default="eager",
        help="models: also compare with PyG on torch_sparse.SparseTensor; or compile: training "
        "under optimize against accelerate(), torch.compile and stock PyG",
    )
    parser.add_argument(
        "--engines",
        default="",
        metavar="A,B",
        help="inference: only these engines, ours first (default: all that are installed)",
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of every side")
    parser.add_argument(
        "--repeat", type=positive, metavar="N", help="rounds per case, training steps per row"
    )
    parser.add_argument(
        "--tuned",
        action="store_true",
        help="a second pass in a process with edgeweave.runtime.tune_allocator(), for both sides",
    )
    parser.add_argument(
        "--soak",
        type=positive,
        default=0,
        metavar="N",
        help="serving: also N requests that look for lost answers and for memory growth",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a chart (PNG)")
    _bench_zoo.add_arguments(parser)
    # How the process of the tuned pass is told what it is.
    parser.add_argument("--allocator", choices=("default", "tuned"), help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print tables, write the report.

    Args:
        args: The parsed command line.

    Returns:
        0, or 1 if a case was wrong or raised. A missed target is shown, but no failure.
    """
    if args.device != "cpu" and (args.suite != "models" or args.tuned or args.peer != "eager"):
        print(
            "bench: --device cuda must go with models, without --tuned and --peer; got "
            f"{args.suite}",
            file=sys.stderr,
        )
        return 1
    if args.suite == "serving":
        from edgeweave.cli import _bench_serving

        return _bench_serving.run(args)
    if args.suite == "zoo":
        return _bench_zoo.run(args)
    if args.allocator == "tuned":
        # Before torch is loaded: blocks that exist already stay where they are.
        from edgeweave.runtime import tune_allocator

        tune_allocator()
    from rich.console import Console

    from edgeweave.bench.passes import run_pass, run_tuned_pass
    from edgeweave.bench.results import report, write_report

    options = _options(args)
    allocator = args.allocator or _current_allocator()
    try:
        runs = [run_pass(options, allocator, Console(stderr=True))]
        if args.tuned:
            runs.append(run_tuned_pass(options))
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    settings = {**vars(options), **vars(options.settings)}
    record = report(args.suite, settings, runs)
    # Tables need room; a file or a pipe has no width of its own.
    _print_tables(record, Console(width=None if sys.stdout.isatty() else 160))
    if args.json is not None:
        write_report(record, args.json)
    if args.plot is not None:
        from edgeweave.bench.plots import plot_report

        plot_report(record, args.plot)
    return int(any(case["status"] != "ok" for run_ in runs for case in run_["cases"]))


def _options(args: argparse.Namespace) -> Options:
    from edgeweave.bench.passes import Options

    return Options(
        suite=args.suite,
        quick=args.quick,
        everything=args.all,
        pattern=args.filter,
        peer=args.peer,
        threads=args.threads,
        repeats=args.repeat,
        device=args.device,
        engines=tuple(name.strip() for name in args.engines.split(",") if name.strip()),
    )


def _current_allocator() -> str:
    from edgeweave.runtime import allocator_info

    # The environment may have tuned it before the process began.
    return "tuned" if allocator_info().tuned else "default"


def _print_tables(record: dict[str, Any], console: Any) -> None:
    from edgeweave.bench.tables import case_table, environment_line, group_table

    for run_ in record["runs"]:
        for group in dict.fromkeys(case["group"] for case in run_["cases"]):
            console.print(case_table(run_, group))
        console.print(group_table(run_, record["settings"]["quick"]))
        console.print(environment_line(run_))
