"""`__all__` is the public surface: complete, and every object in it documented."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types

import pytest

import edgeweave

# `edgeweave.bench` is the harness behind a command, and the command line is used by its name.
_NOT_A_LIBRARY = {"edgeweave.bench", "edgeweave.cli"}


def _public_modules() -> list[str]:
    names = ["edgeweave"]
    for module in pkgutil.walk_packages(edgeweave.__path__, "edgeweave."):
        parts = module.name.split(".")
        if any(part.startswith("_") for part in parts):
            continue
        if any(module.name == top or module.name.startswith(f"{top}.") for top in _NOT_A_LIBRARY):
            continue
        names.append(module.name)
    return names


@pytest.fixture(params=_public_modules())
def module(request: pytest.FixtureRequest) -> types.ModuleType:
    return importlib.import_module(request.param)


def test_all_is_sorted_unique_and_resolves(module: types.ModuleType) -> None:
    names = module.__all__
    assert len(set(names)) == len(names)
    for name in names:
        assert hasattr(module, name), f"{module.__name__}.__all__ names {name}, which is not there"


def test_nothing_public_is_left_out(module: types.ModuleType) -> None:
    visible = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and str(getattr(value, "__module__", "")).startswith("edgeweave")
    }
    assert visible <= set(module.__all__)


def _documented_members(owner: type) -> list[tuple[str, object]]:
    return [
        (name, value)
        for name, value in vars(owner).items()
        if not name.startswith("_")
        and (callable(value) or isinstance(value, property | classmethod | staticmethod))
    ]


def test_every_public_object_is_documented(module: types.ModuleType) -> None:
    assert (module.__doc__ or "").strip()
    undocumented = []
    for name in module.__all__:
        value = getattr(module, name)
        if not (inspect.isclass(value) or callable(value)):
            continue
        if not (inspect.getdoc(value) or "").strip():
            undocumented.append(name)
        if inspect.isclass(value):
            undocumented += [
                f"{name}.{member}"
                for member, item in _documented_members(value)
                if not (inspect.getdoc(item) or "").strip()
            ]
    assert not undocumented


def test_every_public_function_shows_an_example(module: types.ModuleType) -> None:
    without = [
        name
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
        and "Example" not in (inspect.getdoc(getattr(module, name)) or "")
    ]
    assert not without
