"""Functions of rows as text: what a message's network does to a row behind its first linear layer.

A graph that Inductor has compiled and kept on disk calls its ops with constants, and may be loaded
by another process. So a function is given to an op as what it does, and not as a name for what some
process has registered: two programs are the same text exactly if they are the same function.

A program is a list of steps as JSON. Step k takes earlier values, tensors and numbers, and makes
value k + 1; value 0 is the row, and the last value is the result:

    [["relu", [["v", 0]], {}], ["linear", [["v", 1], ["t", 0], ["t", 1]], {}]]

Every function here treats each row by itself, so that a program may run on any tile of rows. An op
runs beneath autograd, so each has its derivative here (`_edge_program_steps`).
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ._edge_program_steps import STEPS, Step

__all__ = ["Program", "ProgramWriter", "Scratch", "load_program"]


@dataclass
class ProgramWriter:
    """Puts a program together.

    Attributes:
        steps: So far.
    """

    steps: list[tuple[str, list[Any], dict[str, Any]]] = field(default_factory=list)

    def add(self, name: str, args: Sequence[Any], options: dict[str, Any]) -> int:
        """Add a step.

        Args:
            name: Of `STEPS`.
            args: `("v", k)` for a value, `("t", k)` for a tensor, numbers and None.
            options: Keyword arguments: numbers and strings.

        Returns:
            The number of the value that the step makes.
        """
        self.steps.append((name, list(args), options))
        return len(self.steps)

    def text(self) -> str:
        """The program."""
        return json.dumps(self.steps, separators=(",", ":"), sort_keys=True)


class Scratch:
    """Buffers of a tile, used again by the next one: fresh ones would be page faults each time.

    Args:
        rows: Of the largest tile.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def take(self, what: str, k: int, like: Tensor, width: int) -> Tensor:
        """A buffer `[rows of like, width]`, the same at each call with the same names."""
        buffer = self._buffers.get((what, k))
        if buffer is None:
            buffer = self._buffers[what, k] = like.new_empty(self.rows, width)
        return buffer[: like.size(0)]


@dataclass(frozen=True)
class _Line:
    """A step of a program.

    Attributes:
        step: What it does.
        args: Its arguments, as in the text.
        options: Its options.
        in_place: Whether it may write over its first argument, which nobody needs behind it.
        first: Whether it alone takes the rows.
    """

    step: Step
    args: tuple[Any, ...]
    options: dict[str, Any]
    in_place: bool
    first: bool


@dataclass(frozen=True)
class Program:
    """A function of rows, with its derivative.

    Attributes:
        lines: Its steps in order.
    """

    lines: tuple[_Line, ...]

    def __call__(self, rows: Tensor, *tensors: Tensor) -> Tensor:
        """The result for rows `[edges, H]`: `[edges, O]`. May write over the rows."""
        return self.values(rows, tensors)[-1]

    def values(
        self, rows: Tensor, tensors: Sequence[Tensor], scratch: Scratch | None = None
    ) -> list[Tensor]:
        """The rows, and what each step makes of them.

        Args:
            rows: `[edges, H]`; may be written over.
            tensors: What the program uses.
            scratch: Where values may lie, until the next call with it.
        """
        values = [rows]
        for k, line in enumerate(self.lines):
            given = [_given(arg, values, tensors) for arg in line.args]
            if line.in_place:
                assert line.step.over is not None, "it has been asked for"
                values.append(line.step.over(given[0]))
            elif scratch is not None and line.step.into is not None:
                width = line.step.width(given)
                values.append(line.step.into(scratch.take("value", k, rows, width), *given))
            else:
                values.append(line.step.run(*given, **line.options))
        return values

    def pull(
        self,
        values: list[Tensor],
        tensors: Sequence[Tensor],
        grad: Tensor,
        sums: list[Tensor | None],
        scratch: Scratch | None = None,
        out: Tensor | None = None,
    ) -> Tensor | None:
        """The gradient of the rows, from that of the result.

        Args:
            values: Of `values`; emptied on the way.
            tensors: As of `values`.
            grad: Of the last value.
            sums: For each tensor, where its gradient is added to; None: it is not needed.
            scratch: Where gradients may lie, until the next call with it.
            out: `[edges, H]`, where the gradient may be written.

        Returns:
            `[edges, H]`; None if the rows have no part in the result.
        """
        grads: list[Tensor | None] = [None] * len(values)
        grads[-1] = grad
        for k in range(len(self.lines) - 1, -1, -1):
            result, above = values.pop(), grads.pop()
            if above is None:
                continue
            line = self.lines[k]
            given = [_given(arg, values, tensors) for arg in line.args]
            need = [_needs(arg, sums) for arg in line.args]
            if line.first and out is not None and line.step.slope_into is not None:
                grads[0] = line.step.slope_into(above, given[0], result, line.options, out)
                continue
            made: Sequence[Tensor | None]
            if scratch is not None and line.step.pull_into is not None:
                buffer = scratch.take("grad", k, above, given[0].size(1))
                own = [sums[arg[1]] if arg[0] == "t" else None for arg in line.args]
                made = [line.step.pull_into(above, given, own, buffer)] + [None] * len(own)
            else:
                made = line.step.pull(above, result, given, need, line.options)
            for arg, part in zip(line.args, made, strict=False):
                if part is not None and isinstance(arg, list):
                    _add(grads if arg[0] == "v" else sums, arg, part)
        return grads[0]


def _add(place: list[Tensor | None], arg: list[Any], part: Tensor) -> None:
    kind, k = arg
    before = place[k]
    if kind == "t":
        assert before is not None, "only what is needed has a gradient"
        before.add_(part)
    else:
        place[k] = part if before is None else before + part


def _given(arg: Any, values: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
    if not isinstance(arg, list):
        return arg
    kind, k = arg
    if kind == "shape":
        return (k,)
    return values[k] if kind == "v" else tensors[k]


def _needs(arg: Any, sums: Sequence[Tensor | None]) -> bool:
    if not isinstance(arg, list) or arg[0] == "shape":
        return False
    return arg[0] == "v" or sums[arg[1]] is not None


@functools.lru_cache(maxsize=256)
def load_program(text: str) -> Program:
    """The function that a program describes.

    Args:
        text: Of `ProgramWriter.text`.

    Raises:
        ValueError: If a step calls anything but a function of rows.
    """
    steps = json.loads(text)
    uses = Counter(arg[1] for _, args, _ in steps for arg in args if _is_value(arg))
    lines = []
    for name, args, options in steps:
        if name not in STEPS:
            raise ValueError(
                f"edge_network: program must call functions of rows ({', '.join(sorted(STEPS))}), "
                f"got {name!r}"
            )
        first = args[0] if args and _is_value(args[0]) else None
        alone = first is not None and uses[first[1]] == 1
        # What made the argument must not need it for its own derivative: a linear layer, or none.
        spare = first is not None and (first[1] == 0 or steps[first[1] - 1][0] == "linear")
        step = STEPS[name]
        in_place = alone and spare and step.over is not None
        lines.append(_Line(step, tuple(args), options, in_place, alone and first == ["v", 0]))
    return Program(tuple(lines))


def _is_value(arg: Any) -> bool:
    return isinstance(arg, list) and arg[0] == "v"
