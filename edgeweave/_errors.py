"""The errors that edgeweave raises beyond Python's own.

Wrong indices raise `IndexError`, wrong shapes and values `ValueError`, wrong dtypes and types
`TypeError`, each naming the argument, what was expected and what came. What remains::

    EdgeweaveError
    +-- NativeLibraryError    the compiled library is missing or does not load
    EdgeweaveWarning
    +-- UntestedVersionWarning   a package version that edgeweave was not tested with
"""

from __future__ import annotations

__all__ = ["EdgeweaveError", "EdgeweaveWarning", "NativeLibraryError", "UntestedVersionWarning"]


class EdgeweaveError(Exception):
    """Base of the errors that are edgeweave's own."""


class NativeLibraryError(EdgeweaveError, ImportError):
    """The compiled library is missing or does not load."""


class EdgeweaveWarning(UserWarning):
    """Base of edgeweave's warnings."""


class UntestedVersionWarning(EdgeweaveWarning):
    """A package is there in a version that edgeweave was not tested with."""
