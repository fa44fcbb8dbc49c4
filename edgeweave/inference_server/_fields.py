"""Strict reading of configuration tables: every key typed, none unknown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, overload

from ._errors import ModelConfigError

__all__ = ["Fields"]

T = TypeVar("T")
_MISSING: Any = object()


class Fields:
    """A table whose keys are taken one by one.

    Args:
        where: What the table is, for errors.
        table: What was read.

    Raises:
        ModelConfigError: `table` is no table.
    """

    def __init__(self, where: str, table: object) -> None:
        if not isinstance(table, Mapping):
            raise ModelConfigError(f"{where}: must be a table, got {_show(table)}")
        self.where = where
        self._left = dict(table)

    @overload
    def take(self, key: str, kind: type[T]) -> T: ...
    @overload
    def take(self, key: str, kind: type[T], default: T) -> T: ...
    def take(self, key: str, kind: type[T], default: Any = _MISSING) -> T:
        """Take a value of one type.

        Args:
            key: Its key.
            kind: `bool`, `int`, `float` (takes integers), `str`, `list` or `dict`.
            default: Where the key is absent; without it the key must be there.

        Returns:
            The value.

        Raises:
            ModelConfigError: The key is absent or of another type.
        """
        if key not in self._left:
            if default is _MISSING:
                raise ModelConfigError(f"{self.where}: {key} must be given")
            value: T = default
            return value
        found = self._left.pop(key)
        if kind is float and isinstance(found, int) and not isinstance(found, bool):
            found = float(found)
        # A bool is an int to isinstance, but not to whoever writes a configuration.
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            raise ModelConfigError(
                f"{self.where}: {key} must be of type {kind.__name__}, got {_show(found)}"
            )
        return found

    def count(self, key: str, default: int, *, least: int = 0, most: int = 1 << 40) -> int:
        """Take an integer from a range."""
        value = self.take(key, int, default)
        if not least <= value <= most:
            raise ModelConfigError(f"{self.where}: {key} must be in [{least}, {most}], got {value}")
        return value

    def choice(self, key: str, options: Iterable[str], default: str | None = None) -> str:
        """Take one of some words."""
        value = self.take(key, str) if default is None else self.take(key, str, default)
        names = tuple(options)
        if value not in names:
            raise ModelConfigError(
                f"{self.where}: {key} must be one of {', '.join(names)}, got {_show(value)}"
            )
        return value

    def table(self, key: str) -> Fields:
        """Take a table; an empty one where it is absent."""
        return Fields(f"{self.where}.{key}", self._left.pop(key, {}))

    def tables(self, key: str) -> list[Fields]:
        """Take a list of tables; an empty one where it is absent."""
        return [
            Fields(f"{self.where}.{key}[{i}]", item)
            for i, item in enumerate(self.take(key, list, []))
        ]

    def integers(self, key: str) -> tuple[int, ...]:
        """Take a list of integers."""
        values = self.take(key, list)
        if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise ModelConfigError(
                f"{self.where}: {key} must be a list of integers, got {_show(values)}"
            )
        return tuple(values)

    def strings(self, key: str, default: Iterable[str] = ()) -> tuple[str, ...]:
        """Take a list of strings."""
        values = self.take(key, list, list(default))
        if any(not isinstance(v, str) for v in values):
            raise ModelConfigError(
                f"{self.where}: {key} must be a list of strings, got {_show(values)}"
            )
        return tuple(values)

    def rest_keys(self) -> tuple[str, ...]:
        """The keys that were not taken yet."""
        return tuple(self._left)

    def end(self) -> None:
        """Refuse what is left."""
        if self._left:
            raise ModelConfigError(
                f"{self.where}: keys must be known, got {', '.join(sorted(map(str, self._left)))}"
            )


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."
