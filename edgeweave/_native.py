"""The one place that loads the shared library.

The library holds the ops `torch.ops.edgeweave.*`. It uses torch's stable ABI only, so the same file
loads on torch 2.10 and every later release.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ._errors import NativeLibraryError

__all__ = ["active_isa", "library_path", "ops", "release", "supported_isas"]


def library_path() -> Path:
    """Path of the shared library, whether or not it exists.

    Returns:
        `_C.so` beside this file, or beside the files of an editable install.
    """
    import edgeweave

    for folder in (Path(__file__).parent, *map(Path, edgeweave.__path__)):
        path = folder / "_C.so"
        if path.exists():
            return path
    return Path(__file__).parent / "_C.so"


def _load() -> None:
    path = library_path()
    if not path.exists():
        raise NativeLibraryError(
            f"edgeweave: the compiled library must exist, got nothing at {path}; "
            "reinstall with `pip install --no-build-isolation edgeweave`, "
            "or build in a checkout with `make build`"
        )
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise NativeLibraryError(
            f"edgeweave: {path.name} must load on torch {torch.__version__} "
            f"(2.10 or later is needed), got: {error}"
        ) from error


_load()
ops = torch.ops.edgeweave
# Fails here, at import, if EDGEWEAVE_ISA names an instruction set that this CPU cannot run.
_ACTIVE_ISA: str = ops.active_isa()


def release(operator: Any, handle: int) -> None:
    """Call an operator that gives up a handle, from a finalizer.

    The collector may run in the middle of somebody's capture: no mode must see the call, or it
    fails and the handle is held for ever.

    Args:
        operator: Of `ops`; takes the handle.
        handle: The handle.
    """
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        operator(handle)


def active_isa() -> str:
    """Name of the instruction set that the kernels were picked for.

    Returns:
        `"avx512"`, `"avx2"` or `"baseline"` on x86-64, `"neon"` on aarch64. The environment
        variable `EDGEWEAVE_ISA`, read once at import, forces one.

    Example:
        >>> import edgeweave
        >>> edgeweave.active_isa() in ("avx512", "avx2", "baseline", "neon")
        True
    """
    return _ACTIVE_ISA


def supported_isas() -> tuple[str, ...]:
    """Instruction sets that this build has kernels for and this CPU can run, best first.

    Example:
        >>> from edgeweave import _native
        >>> _native.active_isa() in _native.supported_isas()
        True
    """
    return tuple(ops.supported_isas().split(","))
