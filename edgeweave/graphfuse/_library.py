"""Finds libdnnl and has the native side load it, once in a process."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .._errors import EdgeweaveError
from .._native import ops

__all__ = ["Library", "OneDnnUnavailableError", "find_library", "load_library"]

SONAME = "libdnnl.so.3"
# Runtimes that would bring a second pool of threads into a process where torch uses GNU OpenMP.
_FOREIGN_RUNTIMES = ("libiomp5.so", "libomp.so", "libomp.so.5", "libtbb.so", "libtbb.so.12")
_SYSTEM_FOLDERS = ("/usr/local/lib", "/usr/local/lib64", "/usr/lib64", "/usr/lib", "/lib64", "/lib")


class OneDnnUnavailableError(EdgeweaveError, ImportError):
    """No usable libdnnl: it is missing, too old, or bound to another OpenMP runtime."""


@dataclass(frozen=True)
class Library:
    """The libdnnl in use.

    Attributes:
        path: Its file.
        version: Its version, such as `"3.2.0"`.
    """

    path: Path
    version: str


_lock = threading.Lock()
_loaded: Library | None = None


def _remedy() -> str:
    if platform.machine() in ("x86_64", "AMD64"):
        return '`pip install "edgeweave[onednn]"` brings one'
    return (
        f"there is no wheel of it for {platform.machine()}: build oneDNN 3.2 or later with GNU "
        "OpenMP and set EDGEWEAVE_DNNL to its libdnnl.so.3"
    )


def _loader_folders() -> Iterator[Path]:
    for name in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if name:
            yield Path(name)
    yield Path(f"/usr/lib/{platform.machine()}-linux-gnu")
    for name in _SYSTEM_FOLDERS:
        yield Path(name)


def find_library() -> Path:
    """Find libdnnl: `EDGEWEAVE_DNNL`, then the pip wheel, then the loader's folders.

    Raises:
        OneDnnUnavailableError: If there is none, naming the command that installs one.
    """
    explicit = os.environ.get("EDGEWEAVE_DNNL")
    if explicit is not None:
        path = Path(explicit)
        if not path.is_file():
            raise OneDnnUnavailableError(
                f"graphfuse: EDGEWEAVE_DNNL must name a file, got {explicit!r}; unset it"
            )
        return path.resolve()
    for folder in (Path(sys.prefix) / "lib", *_loader_folders()):
        if (folder / SONAME).is_file():
            return (folder / SONAME).resolve()
    raise OneDnnUnavailableError(
        f"graphfuse: {SONAME} must be installed, got nothing in {Path(sys.prefix) / 'lib'} or the "
        f"loader's folders; {_remedy()}"
    )


def foreign_runtime(path: Path) -> str | None:
    """Name of another OpenMP or TBB runtime that the library is linked with, or None.

    Looks before anything is loaded: the names of needed libraries stand in the file as strings
    between zero bytes.
    """
    content = path.read_bytes()
    for name in _FOREIGN_RUNTIMES:
        if b"\0" + name.encode() + b"\0" in content:
            return name
    return None


def load_library() -> Library:
    """Load libdnnl, or return the one that is loaded.

    It is `EDGEWEAVE_DNNL` if that is set, then the one of the `onednn-cpu-gomp` wheel, then the
    first in the loader's folders.

    Returns:
        Its path and version.

    Raises:
        OneDnnUnavailableError: If there is none, or none that can live beside torch.

    Example:
        >>> from edgeweave import graphfuse
        >>> graphfuse.load_library().version.startswith("3.")
        True
    """
    global _loaded
    with _lock:
        if _loaded is not None:
            return _loaded
        if not ops.onednn_built():
            raise OneDnnUnavailableError(
                f"graphfuse: this build of edgeweave for {platform.machine()} has no oneDNN "
                "bridge; build it with -DEDGEWEAVE_DNNL_INCLUDE=<folder of oneapi/dnnl/dnnl.h>"
            )
        path = find_library()
        foreign = foreign_runtime(path)
        if foreign is not None:
            raise OneDnnUnavailableError(
                f"graphfuse: libdnnl must use GNU OpenMP as torch does, got {path}, which would "
                f"bring a second runtime, {foreign}; {_remedy()}"
            )
        try:
            version = ops.onednn_load(str(path))
        except (RuntimeError, ValueError) as error:
            text = str(error).splitlines()[0]
            raise OneDnnUnavailableError(f"graphfuse: {text}; {_remedy()}") from error
        _loaded = Library(path, version)
        return _loaded
