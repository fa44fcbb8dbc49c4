"""Graphs captured from PyTorch models, in a form of our own that can be saved and lowered."""

from __future__ import annotations

from ._capture import CaptureError, capture, nodes_from_module
from ._graph import (
    Captured,
    Meta,
    Node,
    Ref,
    Source,
    Sym,
    Symbol,
    map_refs,
    readers_of,
    refs_of,
    row_strides,
)
from ._sizes import SizeError, evaluate_size
from ._structure import (
    Structure,
    flatten,
    flatten_call,
    structure_from_json,
    structure_to_json,
    unflatten,
)

__all__ = [
    "CaptureError",
    "Captured",
    "Meta",
    "Node",
    "Ref",
    "SizeError",
    "Source",
    "Structure",
    "Sym",
    "Symbol",
    "capture",
    "evaluate_size",
    "flatten",
    "flatten_call",
    "map_refs",
    "nodes_from_module",
    "readers_of",
    "refs_of",
    "row_strides",
    "structure_from_json",
    "structure_to_json",
    "unflatten",
]
