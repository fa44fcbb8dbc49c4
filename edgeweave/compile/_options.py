"""The choices of `optimize` and of the backend, checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from .._checks import describe
from ._passes import PASSES

__all__ = ["ENGINES", "Engine", "Options", "Precision", "check_engine", "read_options"]

Engine = Literal["auto", "onednn", "inductor", "eager"]
Precision = Literal["fp32", "bf16"]
ENGINES: Final = ("auto", "onednn", "inductor", "eager")
PRECISIONS: Final = ("fp32", "bf16")


@dataclass(frozen=True)
class Options:
    """How graphs are compiled.

    Attributes:
        engine: Which engine runs what the passes leave.
        without: Passes to leave out.
    """

    engine: Engine = "auto"
    without: Collection[str] = field(default_factory=tuple)


def check_engine(op: str, engine: object) -> Engine:
    """`engine` must name one.

    Raises:
        ValueError: If it does not.
    """
    if engine not in ENGINES:
        raise ValueError(f"{op}: engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    return engine


def check_precision(op: str, precision: object) -> Precision:
    """`precision` must be one that there is.

    Raises:
        ValueError: If it is not.
    """
    if precision not in PRECISIONS:
        names = ", ".join(PRECISIONS)
        raise ValueError(f"{op}: precision must be one of {names}, got {precision!r}")
    return precision


def read_options(op: str, options: Mapping[str, Any] | None) -> Options:
    """The `options` of `torch.compile` as checked choices.

    Args:
        op: Who asks, for messages.
        options: May hold `engine` and `without`.

    Raises:
        ValueError: If a name is not known.
        TypeError: If a value has the wrong type.
    """
    given = dict(options or {})
    unknown = sorted(set(given) - {"engine", "without"})
    if unknown:
        raise ValueError(f"{op}: options must be among engine, without, got {unknown}")
    engine = check_engine(op, given.get("engine", "auto"))
    without = given.get("without", ())
    if isinstance(without, str) or not isinstance(without, Collection):
        raise TypeError(
            f"{op}: without must be a collection of pass names, got {describe(without)}"
        )
    known = [each.name for each in PASSES]
    wrong = [name for name in without if name not in known]
    if wrong:
        raise ValueError(f"{op}: without must name passes among {', '.join(known)}, got {wrong}")
    return Options(engine, tuple(without))
