"""How arguments and results nest: dict, list, tuple, dataclass. JSON-ready, without pickle."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

__all__ = [
    "Structure",
    "flatten",
    "flatten_call",
    "structure_from_json",
    "structure_to_json",
    "unflatten",
]


@dataclass(frozen=True)
class Structure:
    """A nest of containers.

    Attributes:
        kind: `leaf`, `tuple`, `list`, `dict`, `mapping` (a class of dicts, such as the outputs of
            transformers) or `dataclass`.
        keys: Of a dict, or the field names of a dataclass or named tuple.
        children: Structures inside, in the order of the keys.
        type: The class to rebuild; None after loading from a file, where a plain dict takes its
            place.
    """

    kind: str
    keys: tuple[str, ...] = ()
    children: tuple[Structure, ...] = ()
    type: type | None = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure):
            return NotImplemented
        return (self.kind, self.keys, self.children) == (other.kind, other.keys, other.children)

    def __hash__(self) -> int:
        return hash((self.kind, self.keys, self.children))


LEAF = Structure("leaf")


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Leaves in order, and how they nest.

    Example:
        >>> flatten({"a": 1, "b": (2, 3)})[0]
        [1, 2, 3]
    """
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves)


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Structure]:
    """`flatten((args, kwargs))`, quicker where all are tensors.

    A small model's weights push everything else out of the cache at each call, so that what is not
    touched here is time saved.
    """
    leaves = [*args, *kwargs.values()] if kwargs else list(args)
    for leaf in leaves:
        if type(leaf) is not Tensor:
            return flatten((args, kwargs))
    return leaves, _call_structure(len(args), tuple(kwargs))


@lru_cache(maxsize=256)
def _call_structure(count: int, keys: tuple[str, ...]) -> Structure:
    return flatten(((None,) * count, dict.fromkeys(keys)))[1]


def _flatten(value: Any, leaves: list[Any]) -> Structure:
    if isinstance(value, Mapping):
        keys = tuple(value)
        children = tuple(_flatten(value[key], leaves) for key in keys)
        kind = "dict" if type(value) is dict else "mapping"
        return Structure(kind, keys, children, type(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        keys = tuple(value._fields)
        return Structure("named", keys, tuple(_flatten(v, leaves) for v in value), type(value))
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return Structure(kind, (), tuple(_flatten(v, leaves) for v in value), type(value))
    if _is_dataclass(value):
        keys = tuple(f.name for f in dataclasses.fields(value))
        children = tuple(_flatten(getattr(value, key), leaves) for key in keys)
        return Structure("dataclass", keys, children, type(value))
    leaves.append(value)
    return LEAF


def unflatten(structure: Structure, leaves: list[Any]) -> Any:
    """Rebuild what `flatten` took apart.

    Example:
        >>> leaves, structure = flatten({"a": 1, "b": (2, 3)})
        >>> unflatten(structure, [4, 5, 6])
        {'a': 4, 'b': (5, 6)}
    """
    iterator = iter(leaves)
    return _unflatten(structure, iterator)


def _unflatten(structure: Structure, leaves: Any) -> Any:
    if structure.kind == "leaf":
        return next(leaves)
    values = [_unflatten(child, leaves) for child in structure.children]
    if structure.kind == "list":
        return values
    if structure.kind == "tuple":
        return tuple(values)
    fields = dict(zip(structure.keys, values, strict=True))
    if structure.kind == "dict" or structure.type is None:
        return fields
    if structure.kind == "mapping" and not dataclasses.is_dataclass(structure.type):
        made = structure.type()
        made.update(fields)
        return made
    if structure.kind == "mapping" and issubclass(structure.type, OrderedDict):
        # A dict that is a dataclass too: only the fields that were set are keys.
        return structure.type(**fields)
    return structure.type(**fields)


def structure_to_json(structure: Structure) -> Any:
    """As nested lists, for a file."""
    return [
        structure.kind,
        list(structure.keys),
        [structure_to_json(c) for c in structure.children],
    ]


def structure_from_json(data: Any) -> Structure:
    """Back from nested lists; classes become plain dicts."""
    kind, keys, children = data
    return Structure(kind, tuple(keys), tuple(structure_from_json(c) for c in children))
