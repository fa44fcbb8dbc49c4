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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ._edge_program_steps import STEPS, Step

__all__ = ["Program", "ProgramWriter", "load_program"]


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


@dataclass(frozen=True)
class Program:
    """A function of rows, with its derivative.

    Attributes:
        steps: Function, arguments and options of each.
    """

    steps: tuple[tuple[Step, tuple[Any, ...], dict[str, Any]], ...]

    def __call__(self, rows: Tensor, *tensors: Tensor) -> Tensor:
        """The result for rows `[edges, H]`: `[edges, O]`."""
        return self.values(rows, tensors)[-1]

    def values(self, rows: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The rows, and what each step makes of them."""
        values = [rows]
        for step, args, options in self.steps:
            given = [_given(arg, values, tensors) for arg in args]
            values.append(step.run(*given, **options))
        return values

    def pull(
        self,
        values: list[Tensor],
        tensors: Sequence[Tensor],
        grad: Tensor,
        sums: list[Tensor | None],
    ) -> Tensor | None:
        """The gradient of the rows, from that of the result.

        Args:
            values: Of `values`; emptied on the way.
            tensors: As of `values`.
            grad: Of the last value.
            sums: For each tensor, where its gradient is added to; None: it is not needed.

        Returns:
            `[edges, H]`; None if the rows have no part in the result.
        """
        grads: list[Tensor | None] = [None] * len(values)
        grads[-1] = grad
        for k in range(len(self.steps) - 1, -1, -1):
            out, above = values.pop(), grads.pop()
            if above is None:
                continue
            step, args, options = self.steps[k]
            given = [_given(arg, values, tensors) for arg in args]
            need = [_needs(arg, sums) for arg in args]
            made = step.pull(above, out, given, need, options)
            for arg, part in zip(args, made, strict=True):
                if part is None or not isinstance(arg, list):
                    continue
                place = grads if arg[0] == "v" else sums
                before = place[arg[1]]
                if place is sums:
                    assert before is not None, "only what is needed has a gradient"
                    before.add_(part)
                else:
                    place[arg[1]] = part if before is None else before + part
        return grads[0]


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
    steps = []
    for name, args, options in json.loads(text):
        if name not in STEPS:
            raise ValueError(
                f"edge_network: program must call functions of rows ({', '.join(sorted(STEPS))}), "
                f"got {name!r}"
            )
        steps.append((STEPS[name], tuple(args), options))
    return Program(tuple(steps))
