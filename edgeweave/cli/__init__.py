"""The `edgeweave` command: one module for each subcommand."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from edgeweave._version import __version__

__all__ = ["main"]

# Each module has `add_parser(subparsers)`, which sets `run`, a function from the parsed arguments
# to an exit status. The modules load what a subcommand needs inside `run`, so that `doctor` works
# where everything else is missing.
_COMMAND_MODULES = ("_demo", "_bench", "_export", "_serve", "_explain", "_doctor")

# Which extra brings a module that may be absent.
_EXTRA_OF_MODULE = {
    "google": "server",
    "graphdatascience": "demo",
    "grpc": "server",
    "matplotlib": "demo",
    "pandas": "demo",
    "prometheus_client": "server",
    "psutil": "bench",
    "pyarrow": "demo",
    "rich": "demo",
    "safetensors": "server",
    "torch_geometric": "pyg",
    "transformers": "bench",
}


def _build_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the command's parser, and those of the subcommands by name."""
    parser = argparse.ArgumentParser(
        prog="edgeweave",
        description="Fast graph reductions for PyTorch and PyTorch Geometric on CPUs.",
    )
    parser.add_argument("--version", action="version", version=f"edgeweave {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name in _COMMAND_MODULES:
        importlib.import_module(f"edgeweave.cli.{name}").add_parser(subparsers)
    return parser, subparsers.choices


def _missing_extra(error: ModuleNotFoundError, command: str) -> str | None:
    """Return what to install for a missing module, or None where no extra brings it."""
    module = (error.name or "").partition(".")[0]
    extra = _EXTRA_OF_MODULE.get(module)
    if extra is None:
        return None
    if command in ("demo", "bench"):
        extra = command
    return f'edgeweave {command}: needs {module}; pip install "edgeweave[{extra}]"'


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: The words after the program's name; `sys.argv[1:]` if None.

    Returns:
        The exit status: 0 for success, 1 for a failure that the subcommand reports. A command line
        that makes no sense leaves with status 2 through `SystemExit`, as argparse does.

    Raises:
        SystemExit: After `--help`, `--version`, or a wrong command line.

    Example:
        >>> try:
        ...     main(["--version"])
        ... except SystemExit as done:
        ...     print(done.code)
        edgeweave ...
        0
    """
    parser, of_command = _build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # said with the usage of the subcommand, which argparse alone does not do
        of_command[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status: int = args.run(args)
    except ModuleNotFoundError as error:
        message = _missing_extra(error, args.command)
        if message is None:
            raise
        print(message, file=sys.stderr)
        return 1
    return status
