"""The engines that run a model faster, reachable by name without importing each other's rooms.

An engine is a function ``(model, example_inputs, *, dtype, nan) -> callable``. Rooms that must not
know each other (`jitfuser` and `graphfuse`) meet here: this module holds dotted names and loads
them at first use.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["ENGINES", "find_engine"]

Engine = Callable[..., Any]

ENGINES: dict[str, str] = {
    "graphfuse": "edgeweave.graphfuse:fuse",
    "jitfuser": "edgeweave.jitfuser:optimize",
}
"""From the engine's name to `module:function`."""


def find_engine(name: str) -> Engine | None:
    """Loads an engine.

    Args:
        name: A key of `ENGINES`.

    Returns:
        Its function, or None if the room is not part of this installation. An error inside an
        existing room is raised, not taken for absence.

    Raises:
        ValueError: If there is no engine of that name.

    Example:
        >>> from edgeweave._engines import find_engine
        >>> find_engine("jitfuser").__name__
        'optimize'
    """
    if name not in ENGINES:
        raise ValueError(f"find_engine: name must be one of {sorted(ENGINES)}, got {name!r}")
    module, _, function = ENGINES[name].partition(":")
    if importlib.util.find_spec(module) is None:
        return None
    engine: Engine = getattr(import_module(module), function)
    return engine
