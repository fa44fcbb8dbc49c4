"""What runs a module: one registry, by the name that a model's configuration gives.

The only place of the server that reaches into other rooms, each when it is first asked for.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from ._errors import ModelConfigError

__all__ = ["ENGINES", "Engine", "prepare"]

Prepared = Callable[..., Any]


@dataclass(frozen=True)
class Engine:
    """One way to run a module.

    Attributes:
        name: As configurations give it.
        missing: Says what this installation lacks for it; "" if nothing.
        build: From the module and example arguments to what is called.
    """

    name: str
    missing: Callable[[], str]
    build: Callable[[nn.Module, Sequence[Any]], Prepared]


def _nothing() -> str:
    return ""


def _module_missing(name: str, remedy: str) -> Callable[[], str]:
    def missing() -> str:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{name} ({error}); {remedy}"
        return ""

    return missing


def _compiler_missing() -> str:
    if any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        return ""
    return "a C++ compiler; install g++ or use another engine"


def _eager(module: nn.Module, examples: Sequence[Any]) -> Prepared:
    return module


def _inductor(module: nn.Module, examples: Sequence[Any]) -> Prepared:
    # Batches come in every size: one compilation for all of them.
    compiled: Prepared = torch.compile(module, dynamic=True)
    return compiled


def _onednn(module: nn.Module, examples: Sequence[Any]) -> Prepared:
    graphfuse = importlib.import_module("edgeweave.graphfuse")
    fused: Prepared = graphfuse.fuse(module, tuple(examples))
    return fused


def _accelerate(module: nn.Module, examples: Sequence[Any]) -> Prepared:
    # Patches PyG's classes, so it holds for every PyG model of the process.
    importlib.import_module("edgeweave.pyg").accelerate()
    return module


ENGINES: Final[dict[str, Engine]] = {
    engine.name: engine
    for engine in (
        Engine("eager", _nothing, _eager),
        Engine("inductor", _compiler_missing, _inductor),
        Engine(
            "onednn",
            _module_missing("edgeweave.graphfuse", "install an edgeweave that has it"),
            _onednn,
        ),
        Engine(
            "accelerate",
            _module_missing("torch_geometric", 'pip install "edgeweave[pyg]"'),
            _accelerate,
        ),
    )
}


def prepare(name: str, precision: str, module: nn.Module, examples: Sequence[Any]) -> Prepared:
    """Make a module ready to be called.

    Args:
        name: The engine.
        precision: `fp32`, or `bf16` for autocast: matrix products in bf16, sums in fp32.
        module: The module, in evaluation mode.
        examples: Arguments of a typical call.

    Returns:
        What is called with the module's arguments, from any thread.

    Raises:
        ModelConfigError: There is no such engine, or this installation lacks what it needs.
    """
    engine = ENGINES.get(name)
    if engine is None:
        raise ModelConfigError(f"config: engine must be one of {', '.join(ENGINES)}, got {name!r}")
    missing = engine.missing()
    if missing:
        raise ModelConfigError(f"config: engine {name} needs {missing}")
    call = engine.build(module, examples)
    if precision == "fp32":
        return call

    def in_bf16(*args: Any, **kwargs: Any) -> Any:
        # Autocast is a setting of the thread, so it is entered by whoever calls.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(*args, **kwargs)

    return in_bf16
