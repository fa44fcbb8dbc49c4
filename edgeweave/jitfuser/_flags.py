"""`fuser`: torch's fuser flags as a context that always puts them back.

The flags that matter belong to the process (only the executor's optimisation flag belongs to the
thread). `torch.jit.fuser` saves and restores them last in, first out; two threads whose contexts
overlap otherwise leave the flags of one of them on for good. Here all open contexts stand in one
list: when one that is not the youngest ends, the younger one inherits what it had saved. So when
the last context ends, the flags are what they were before the first.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from edgeweave._errors import EdgeweaveWarning
from edgeweave.jitfuser._availability import missing_flags

__all__ = ["FUSERS", "flags", "fuser"]

# Flags of each name, as `torch.jit.fuser` documents them. nvFuser left torch in 2.0; its name is
# kept because old code says it, and turns every fuser off as it does in torch.
_OFF: Final = {"cpu": False, "gpu": False, "nnc": False, "onednn": False}
FUSERS: Final[Mapping[str, Mapping[str, bool]]] = {
    "fuser0": _OFF | {"cpu": True, "gpu": True},
    "fuser1": _OFF | {"cpu": True, "gpu": True, "nnc": True},
    "fuser2": _OFF,
    "fuser3": _OFF | {"cpu": True, "nnc": True, "onednn": True},
    "none": _OFF,
}
# NNC and oneDNN need shapes, so the profiling executor and its optimisations.
_NEED_PROFILING: Final = ("fuser1", "fuser3")

_GETTERS: Final = {
    "cpu": "_jit_can_fuse_on_cpu",
    "gpu": "_jit_can_fuse_on_gpu",
    "nnc": "_jit_texpr_fuser_enabled",
    "onednn": "_jit_llga_enabled",
}
_SETTERS: Final = {
    "cpu": "_jit_override_can_fuse_on_cpu",
    "gpu": "_jit_override_can_fuse_on_gpu",
    "nnc": "_jit_set_texpr_fuser_enabled",
    "onednn": "_jit_set_llga_enabled",
}


@dataclass(eq=False)
class _Open:
    """An open context and the process's flags from before it."""

    saved: dict[str, bool]


_lock = threading.RLock()
_open: list[_Open] = []
_warned = False


def flags() -> dict[str, bool]:
    """Returns the fuser flags in force.

    Returns:
        `cpu` and `gpu` (fusion allowed there), `nnc`, `onednn`, `profiling` (process-wide) and
        `optimize` (of this thread). Empty if this torch has no such flags.

    Example:
        >>> from edgeweave.jitfuser import flags, fuser
        >>> with fuser("fuser3"):
        ...     flags()["onednn"]
        True
    """
    if missing_flags() is not None:
        return {}
    with _lock:
        return _read() | {"optimize": torch._C._get_graph_executor_optimize()}


@contextmanager
def fuser(name: str) -> Iterator[None]:
    """Chooses TorchScript's fuser, and puts every flag back at the end.

    The same names as `torch.jit.fuser`, and a drop-in for it. A flag acts when a graph is first
    optimised, so both the second call of a traced module and its first must be inside the context;
    later calls need not be. The flags belong to the process: modules that other threads run for
    the first time meanwhile see them too. Contexts may nest, overlap between threads and end by
    exception; when the last one has ended, the flags are what they were before the first. (A
    `torch.jit.fuser` context that overlaps from another thread can still undo that.)

    If this torch has no fuser flags any more, the first use warns and nothing else happens.

    Args:
        name: `"fuser0"` (legacy), `"fuser1"` (NNC), `"fuser2"` (nvFuser, gone from torch: all
            off), `"fuser3"` (oneDNN Graph), or `"none"`.

    Yields:
        None.

    Raises:
        ValueError: If the name is none of these.

    Example:
        >>> import torch
        >>> from edgeweave.jitfuser import fuser
        >>> with fuser("fuser3"):
        ...     torch.jit.onednn_fusion_enabled()
        True
        >>> torch.jit.onednn_fusion_enabled()
        False
    """
    if name not in FUSERS:
        raise ValueError(f"fuser: name must be one of {', '.join(FUSERS)}, got {name!r}")
    reason = missing_flags()
    if reason is not None:
        _warn_once(reason)
        yield
        return
    optimize = torch._C._get_graph_executor_optimize()
    entry = _enter(name)
    try:
        if name in _NEED_PROFILING:
            torch._C._get_graph_executor_optimize(True)
        yield
    finally:
        torch._C._get_graph_executor_optimize(optimize)
        _leave(entry)


def _enter(name: str) -> _Open:
    with _lock:
        entry = _Open(_read())
        _open.append(entry)
        try:
            wanted = dict(FUSERS[name])
            if name in _NEED_PROFILING:
                wanted["profiling"] = True
            _write(wanted)
        except BaseException:
            _leave(entry)
            raise
        return entry


def _leave(entry: _Open) -> None:
    with _lock:
        place = _open.index(entry)
        del _open[place]
        if place == len(_open):
            _write(entry.saved)
        else:
            _open[place].saved = entry.saved


def _read() -> dict[str, bool]:
    found = {flag: bool(_call(getter)) for flag, getter in _GETTERS.items()}
    # There is no getter: setting returns the old value.
    profiling = bool(_call("_jit_set_profiling_executor", True))
    _call("_jit_set_profiling_executor", profiling)
    return found | {"profiling": profiling}


def _write(values: Mapping[str, bool]) -> None:
    for flag, value in values.items():
        _call("_jit_set_profiling_executor" if flag == "profiling" else _SETTERS[flag], value)


def _call(name: str, *args: bool) -> Any:
    function: Callable[..., Any] = getattr(torch._C, name)
    return function(*args)


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"fuser: {reason}; models run unfused here, use edgeweave.jitfuser.optimize or "
            "edgeweave.graphfuse.fuse instead",
            EdgeweaveWarning,
            stacklevel=4,
        )
