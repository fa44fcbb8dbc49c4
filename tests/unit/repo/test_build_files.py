"""The files that build, test and ship the project agree with each other."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import edgeweave
from scripts.check_wheel import check_contents

ROOT = Path(__file__).resolve().parents[3]


def _pyproject() -> dict:
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads((ROOT / "pyproject.toml").read_text())
    from pip._vendor import tomli

    return tomli.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize(
    "target",
    [
        "demo",
        "test",
        "check",
        "bench",
        "wheel",
        "sanitize",
        "test-kernels",
        "test-aarch64",
        "clean",
    ],
)
def test_the_makefile_has_the_target(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    phony = re.search(r"^\.PHONY:(.*)$", makefile, re.MULTILINE)
    assert phony is not None
    assert target in phony.group(1).split()


def test_ci_checks_builds_and_ends_with_the_tests() -> None:
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    steps = [line for line in text.splitlines() if line.startswith("make ")]
    assert steps == [
        "make check",
        "make wheel",
        "make test-kernels",
        "make test",
    ]


def test_the_changelog_speaks_of_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert edgeweave.__version__ in headings


def test_the_extras_are_those_that_messages_name() -> None:
    extras = _pyproject()["project"]["optional-dependencies"]
    assert set(extras) >= {"pyg", "onednn", "server", "demo", "bench", "dev"}
    named = set()
    for path in (ROOT / "edgeweave").rglob("*.py"):
        named |= set(re.findall(r"edgeweave\[(\w+)\]", path.read_text()))
    assert named <= set(extras)


def test_pip_is_asked_for_the_oldest_torch_that_the_library_loads_on() -> None:
    assert "torch>=2.10" in _pyproject()["project"]["dependencies"]
    cmake = (ROOT / "CMakeLists.txt").read_text()
    # TORCH_TARGET_VERSION of torch/csrc/stable/version.h: major, minor and patch, a byte each.
    assert re.search(r"TORCH_TARGET 0x020a0{12}\)", cmake)


_GOOD_WHEEL = [
    "edgeweave/__init__.py",
    "edgeweave/_C.so",
    "edgeweave/py.typed",
    "edgeweave-0.1.0.dist-info/entry_points.txt",
    "edgeweave-0.1.0.dist-info/licenses/LICENSE",
]


def test_a_good_wheel_has_no_fault() -> None:
    assert list(check_contents(_GOOD_WHEEL)) == []


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        (_GOOD_WHEEL[1:], "must hold edgeweave/__init__.py once, holds it 0 times"),
        ([*_GOOD_WHEEL, "edgeweave/_C.so"], "must hold edgeweave/_C.so once, holds it 2 times"),
        (_GOOD_WHEEL[:-1], r"must hold *.dist-info/licenses/LICENSE"),
        ([*_GOOD_WHEEL, "tests/conftest.py"], "holds tests/conftest.py, which would land beside"),
    ],
)
def test_a_bad_wheel_is_told(names: list[str], fault: str) -> None:
    (found,) = check_contents(names)
    assert fault in found
