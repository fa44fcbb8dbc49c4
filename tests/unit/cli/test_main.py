"""The `edgeweave` command itself: subcommands, wrong command lines, missing extras."""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import NoReturn

import pytest

import edgeweave
from edgeweave import cli
from edgeweave.cli import _doctor


@pytest.mark.parametrize("module", ["edgeweave", "edgeweave.cli"])
def test_both_modules_are_the_command(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"edgeweave {edgeweave.__version__}\n"


def test_help_lists_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["--help"])
    assert done.value.code == 0
    out = capsys.readouterr().out
    for name in ("demo", "bench", "doctor"):
        assert f"\n    {name} " in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: command"),
        (["explode"], "invalid choice: 'explode'"),
        (["doctor", "--yaml"], "edgeweave doctor: error: unrecognized arguments: --yaml"),
    ],
)
def test_wrong_command_lines(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(argv)
    assert done.value.code == 2
    assert message in capsys.readouterr().err


def _missing(name: str) -> object:
    def run(args: argparse.Namespace) -> NoReturn:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    return run


@pytest.mark.parametrize(
    ("module", "extra"), [("torch_geometric.nn", "pyg"), ("psutil", "bench"), ("rich", "demo")]
)
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str, extra: str
) -> None:
    monkeypatch.setattr(_doctor, "run", _missing(module))
    assert cli.main(["doctor"]) == 1
    top = module.partition(".")[0]
    assert capsys.readouterr().err == (
        f'edgeweave doctor: needs {top}; pip install "edgeweave[{extra}]"\n'
    )


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_demo_and_bench_name_their_own_extra(command: str) -> None:
    error = ModuleNotFoundError("No module named 'rich'", name="rich")
    assert cli._missing_extra(error, command) == (
        f'edgeweave {command}: needs rich; pip install "edgeweave[{command}]"'
    )


def test_a_module_that_no_extra_brings_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "run", _missing("no_such_thing"))
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        cli.main(["doctor"])


def test_the_command_line_loads_no_extra() -> None:
    """`doctor` must run where nothing but the core is installed."""
    code = """
import sys
from edgeweave.cli import main
try:
    main(["--help"])
except SystemExit:
    pass
extras = {"torch_geometric", "rich", "matplotlib", "pandas", "graphdatascience", "psutil"}
print(sorted(extras & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
