"""Turning the drop-in on and off: `accelerate`, `accelerated`, `restore`."""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from edgeweave._errors import UntestedVersionWarning

TESTED_SERIES = ((2, 7), (2, 8))
"""Series of torch_geometric that the drop-in is tested with."""

_OFF_VALUES = frozenset({"", "0", "false", "no", "off"})

# One lock for the whole life cycle: patches are process-wide, so two threads must not install and
# remove them at once. Re-entrant because a layer built inside `accelerate()` takes it again.
_lock = threading.RLock()
_pinned = False
_contexts: set[object] = set()
_installed = False
_version_checked = False


def _reset_after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the parent's may be held by a thread that does not exist here


os.register_at_fork(after_in_child=_reset_after_fork)


def accelerate() -> None:
    """Run PyG's layers, aggregations, `utils.scatter` and `utils.spmm` on edgeweave's kernels.

    Process-wide, idempotent and thread-safe. Layers built before and after the call are both
    covered. Does nothing if the environment variable `EDGEWEAVE_DISABLE` is set to `1`.

    Raises:
        ImportError: If torch_geometric is not installed.

    Warns:
        UntestedVersionWarning: Once, if torch_geometric is not of a tested series.

    Example:
        >>> import edgeweave.pyg
        >>> edgeweave.pyg.accelerate()
        >>> edgeweave.pyg.is_accelerated()
        True
        >>> edgeweave.pyg.restore()
    """
    global _pinned
    with _lock:
        _pinned = True
        _apply()


def restore() -> None:
    """Put PyG's original functions and methods back.

    Also ends every open `accelerated()` block, in all threads. Idempotent and thread-safe.

    Example:
        >>> import edgeweave.pyg
        >>> edgeweave.pyg.restore()
        >>> edgeweave.pyg.is_accelerated()
        False
    """
    global _pinned
    with _lock:
        _pinned = False
        _contexts.clear()
        _apply()


@contextmanager
def accelerated() -> Iterator[None]:
    """Do as `accelerate()` inside a `with` block, then return to what was before.

    Blocks nest. Patches are process-wide: while one thread is inside a block, PyG is accelerated
    for the others too, and the last block to end puts the originals back.

    Yields:
        Nothing.

    Raises:
        ImportError: If torch_geometric is not installed.

    Example:
        >>> import edgeweave.pyg
        >>> with edgeweave.pyg.accelerated():
        ...     edgeweave.pyg.is_accelerated()
        True
        >>> edgeweave.pyg.is_accelerated()
        False
    """
    token = object()
    with _lock:
        _contexts.add(token)
        try:
            # One frame more than `accelerate`: contextlib's, between the user and this generator.
            _apply(stacklevel=5)
        except BaseException:
            _contexts.discard(token)
            raise
    try:
        yield
    finally:
        with _lock:
            _contexts.discard(token)
            _apply()


def is_accelerated() -> bool:
    """Return whether PyG currently runs on edgeweave's kernels.

    Example:
        >>> import edgeweave.pyg
        >>> edgeweave.pyg.is_accelerated()
        False
    """
    return _installed


def is_disabled() -> bool:
    """Return whether the environment variable `EDGEWEAVE_DISABLE` turns the drop-in off."""
    return os.environ.get("EDGEWEAVE_DISABLE", "").strip().lower() not in _OFF_VALUES


def _apply(stacklevel: int = 4) -> None:
    """Make the installed patches match `_pinned` and `_contexts`; the caller holds the lock."""
    global _installed, _pinned
    wanted = (_pinned or bool(_contexts)) and not is_disabled()
    if wanted == _installed:
        return
    try:
        # Imported here so that `import edgeweave` neither needs nor pays for torch_geometric.
        from edgeweave.pyg import _install
    except ModuleNotFoundError as error:
        _pinned = False
        if (error.name or "").partition(".")[0] != "torch_geometric":
            raise
        raise ImportError(
            "accelerate: torch_geometric must be installed, got none; "
            "run `pip install edgeweave[pyg]`"
        ) from error
    if wanted:
        _check_version(stacklevel)
        _install.install()
    else:
        _install.uninstall()
    _installed = wanted


def _check_version(stacklevel: int) -> None:
    """Warn, once per process, about a torch_geometric of an untested series."""
    global _version_checked
    if _version_checked:
        return
    _version_checked = True
    import torch_geometric

    version = str(torch_geometric.__version__)
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) not in TESTED_SERIES:
        tested = ", ".join(f"{major}.{minor}" for major, minor in TESTED_SERIES)
        warnings.warn(
            f"accelerate: torch_geometric must be of a tested series ({tested}), got {version}; "
            "layers it does not recognise keep PyG's own code, set EDGEWEAVE_DISABLE=1 to turn "
            "the drop-in off",
            UntestedVersionWarning,
            stacklevel=stacklevel,
        )
