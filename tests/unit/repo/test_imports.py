"""The direction of imports: a room knows the rooms below it and no other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[3] / "edgeweave"

_GROUND = {"_version", "_errors", "_checks", "runtime"}
_CORE = _GROUND | {"_native", "_plan", "scatter", "sparse"}

# What each room may import from the rest of the package. A new room needs a line here.
ALLOWED: dict[str, set[str]] = {
    "_version": set(),
    "runtime": set(),
    "_errors": set(),
    "_engines": {"_errors"},
    "_checks": {"_errors"},
    "_native": _GROUND | {"__init__"},  # the package itself, for its `__path__`
    "_triton": set(),
    "_plan": _GROUND | {"_native", "_triton"},
    "scatter": _GROUND | {"_native", "_plan"},
    "sparse": _GROUND | {"_native", "_plan", "scatter"},
    "pyg": _CORE,
    "_fx": _GROUND | {"_native"},
    "graphfuse": _GROUND | {"_native", "_fx"},
    "jitfuser": _GROUND | {"_native", "_fx", "_engines"},
    "compile": _CORE | {"pyg", "_fx", "graphfuse", "jitfuser"},
    "inference_server": _GROUND,
}
# These stand above all rooms. `bench` and `__init__` must not need the command line.
ABOVE_ALL = {"bench": {"cli"}, "__init__": {"cli", "bench"}, "cli": set(), "__main__": set()}


def room_of(module: str) -> str:
    """Return the room that a dotted module name below `edgeweave` belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported_rooms(source: str, module: str, *, is_package: bool) -> set[str]:
    """Return the rooms that a module imports from, wherever in the file it does so."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names = [origin]
            if origin == "edgeweave":  # `from edgeweave import sparse`: the names are the rooms
                names = [f"edgeweave.{alias.name}" for alias in node.names]
        else:
            continue
        rooms |= {room_of(name) for name in names if name.split(".")[0] == "edgeweave"}
    return rooms


def _modules() -> list[tuple[str, Path]]:
    modules = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["edgeweave", *path.relative_to(PACKAGE).with_suffix("").parts]
        modules.append((".".join(part for part in parts if part != "__init__"), path))
    return modules


@pytest.mark.parametrize(("module", "path"), _modules(), ids=[name for name, _ in _modules()])
def test_a_room_imports_only_from_below(module: str, path: Path) -> None:
    room = room_of(module)
    found = imported_rooms(path.read_text(), module, is_package=path.name == "__init__.py") - {room}
    if room in ABOVE_ALL:
        forbidden = found & ABOVE_ALL[room]
    else:
        assert room in ALLOWED, f"edgeweave.{room} is a room without a line in ALLOWED"
        forbidden = found - ALLOWED[room]
    assert not forbidden, f"{module} must not import {sorted(forbidden)}"


@pytest.mark.parametrize(
    ("source", "rooms"),
    [
        ("import edgeweave.sparse", {"sparse"}),
        ("import edgeweave", {"__init__"}),
        ("from edgeweave import scatter, _native", {"scatter", "_native"}),
        ("from edgeweave.sparse._mm import mm_plan", {"sparse"}),
        ("from ._graph import Graph", {"sparse"}),
        ("from .. import _plan", {"_plan"}),
        ("from .._plan import Plan", {"_plan"}),
        ("def f():\n    from edgeweave.pyg import accelerate", {"pyg"}),
        ("import torch, numpy.linalg", set()),
    ],
)
def test_every_way_to_import_is_seen(source: str, rooms: set[str]) -> None:
    assert imported_rooms(source, "edgeweave.sparse._mm", is_package=False) == rooms


def test_relative_import_from_a_package_init() -> None:
    found = imported_rooms("from ._graph import Graph", "edgeweave.sparse", is_package=True)
    assert found == {"sparse"}
