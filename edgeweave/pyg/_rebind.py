"""Wrappers that TorchScript and dynamo still see as the functions they wrap."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

_PYG = "torch_geometric"


def rebind(template: Any, original: Any) -> Any:
    """Return `template` with the name, module and globals of `original`.

    `torch.jit.script` follows `__wrapped__` to the source of the original, but resolves the names
    in it through the globals of the function it was given. Giving the wrapper the original's
    globals makes a layer scripted while accelerated compile PyG's own code. So `template` must
    reach everything through its closure and use no global name except builtins.

    Args:
        template: Python function, usually a closure.
        original: Python function to stand in for.

    Returns:
        A new function; `original` is its `__wrapped__`.
    """
    wrapper = FunctionType(
        template.__code__,
        original.__globals__,
        original.__name__,
        template.__defaults__,
        template.__closure__,
    )
    wrapper.__kwdefaults__ = template.__kwdefaults__
    return functools.update_wrapper(wrapper, original)


def is_own_method(cls: type, name: str) -> bool:
    """Return whether a method of a class is the one written in the class, or our wrapper of it.

    Somebody's replacement is told by the module it was written in, which `functools.wraps` does not
    forge: wrappers made by `rebind` have the original's globals, others do not.

    Args:
        cls: A class of torch or PyG.
        name: Name of the method.

    Returns:
        False also if the class itself does not define it.
    """
    return comes_from(cls.__dict__.get(name), cls.__module__)


def comes_from(function: Any, module: str) -> bool:
    """Return whether a plain function was written in a module, whatever it says of itself.

    Args:
        function: Anything.
        module: Full name of the module.

    Returns:
        False also for what is no Python function.
    """
    return isinstance(function, FunctionType) and function.__globals__.get("__name__") == module


def _modules(everywhere: bool) -> Iterator[ModuleType]:
    # A copy, since another thread may be importing.
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (
            everywhere or name == _PYG or name.startswith(f"{_PYG}.")
        ):
            yield module


def replace_in_modules(replacements: Mapping[Any, Any], *, everywhere: bool) -> None:
    """Replace module attributes which *are* one of the given functions.

    PyG's modules import `scatter`, `spmm` and `gcn_norm` by name, so each has an attribute of its
    own.

    Args:
        replacements: New function of each old one.
        everywhere: False: only modules of torch_geometric. True: all loaded modules, so that user
            modules which imported a wrapper by name get the original back.
    """
    by_id = {id(old): new for old, new in replacements.items()}
    for module in _modules(everywhere):
        # vars(), not getattr: a lazy module must not be made to load.
        for attribute, value in list(vars(module).items()):
            new = by_id.get(id(value))
            if new is not None:
                vars(module)[attribute] = new
