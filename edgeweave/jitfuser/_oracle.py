"""The oracle: is a candidate as right as eager?

A candidate passes if it is within a few roundings of eager; if it is not, both are compared with a
float64 run of the model on the same inputs, and it must be about as close as eager is: under
autocast, eager's own roundings are those of bfloat16, whatever dtype the results have. On edge
inputs (NaN, infinities, other integers) it must also have NaN and infinities where eager has them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgeweave.jitfuser._capture import Capture

__all__ = ["Oracle", "distance"]

Run = Callable[..., tuple[Tensor, ...]]

# Two correct orders of summation differ by about this in their distance to the right result.
_FACTOR = 8.0
# Roundings that are always allowed, in units of the dtype's epsilon: a result of fp32 sums over
# some hundred layers of a few thousand terms is off by up to a hundred.
_FLOOR_EPS = 128.0
# Without a float64 run there is eager only, whose own error comes on top.
_FLOOR_EPS_EAGER = 4096.0


@dataclass(frozen=True)
class _Trial:
    """Inputs and what eager makes of them."""

    name: str
    inputs: tuple[Tensor, ...]
    eager: tuple[Tensor, ...]


class Oracle:
    """Eager's results on the examples and on edge inputs made of them.

    Args:
        capture: The model.
        inputs: Flat example inputs.
        eager: Runs the model as it would be run without us.
        keep_nan: Whether NaN must come where eager has it. If not, NaN inputs are not tried, and
            anything may stand where eager has NaN, which infinite inputs bring about inside.
    """

    def __init__(
        self, capture: Capture, inputs: Sequence[Tensor], eager: Run, *, keep_nan: bool
    ) -> None:
        self._capture = capture
        self._keep_nan = keep_nan
        self._exact: dict[str, tuple[Tensor, ...] | None] = {}
        self._trials = [_Trial("example", tuple(inputs), eager(*inputs))]
        again = eager(*inputs)
        self.repeatable = all(
            torch.equal(_bits(a), _bits(b))
            for a, b in zip(self._trials[0].eager, again, strict=True)
        )
        for name, edge in _edges(inputs, keep_nan=keep_nan):
            try:
                self._trials.append(_Trial(name, edge, eager(*edge)))
            except (RuntimeError, IndexError, ValueError):
                continue  # not an input of this model: eager refuses it

    def complaint(self, candidate: Run) -> str | None:
        """Compares a candidate with eager.

        Args:
            candidate: Runs flat inputs.

        Returns:
            Where it is wrong, or None.
        """
        for trial in self._trials:
            found = candidate(*trial.inputs)
            if _shared(found, trial.inputs) != _shared(trial.eager, trial.inputs):
                return f"{trial.name} inputs: other results share memory with inputs than in eager"
            for number, (ours, eager) in enumerate(zip(found, trial.eager, strict=True)):
                why = self._compare(trial, ours, eager, number)
                if why is not None:
                    return f"{trial.name} inputs: result {number} {why}"
        return None

    def _compare(self, trial: _Trial, ours: Tensor, eager: Tensor, number: int) -> str | None:
        if (ours.dtype, ours.shape) != (eager.dtype, eager.shape):
            return (
                f"is {ours.dtype} of shape {tuple(ours.shape)}, in eager {eager.dtype} of "
                f"shape {tuple(eager.shape)}"
            )
        if not eager.is_floating_point():
            return None if torch.equal(ours, eager) else "has other values than in eager"
        if not self._keep_nan:
            ours = torch.where(eager.isnan(), eager, ours)
        for what in ("isnan", "isposinf", "isneginf"):
            mine, theirs = getattr(torch, what)(ours), getattr(torch, what)(eager)
            if not torch.equal(mine, theirs):
                return (
                    f"has {what[2:]} in {int(mine.sum())} places, in eager in {int(theirs.sum())}"
                )
        eps = torch.finfo(eager.dtype).eps
        off, limit = distance(ours, eager), _FLOOR_EPS * eps
        if off <= limit:
            return None
        exact = self._exact_results(trial)
        if exact is None:
            limit = _FLOOR_EPS_EAGER * eps
        else:
            off = distance(ours, exact[number])
            limit = max(_FACTOR * distance(eager, exact[number]), limit)
        # Written so that a NaN fails.
        return None if off <= limit else f"is off by {off:.1e}, {limit:.1e} is allowed"

    def _exact_results(self, trial: _Trial) -> tuple[Tensor, ...] | None:
        """The float64 results; they cost several runs, so only where there is a doubt."""
        if trial.name not in self._exact:
            self._exact[trial.name] = _float64_results(self._capture, trial.inputs)
        return self._exact[trial.name]


def _shared(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[bool]:
    """Which results live in an input's memory: who writes into them would see it there."""
    held = {x.untyped_storage().data_ptr() for x in inputs if x.numel()}
    return [y.untyped_storage().data_ptr() in held for y in results]


def distance(actual: Tensor, expected: Tensor) -> float:
    """Largest error, relative to the size of its row; places that are not finite do not count.

    Args:
        actual: What came.
        expected: What is right, of the same shape.

    Returns:
        The distance.
    """
    if expected.numel() == 0:
        return 0.0
    ours, right = actual.double(), expected.double()
    right_finite = torch.where(right.isfinite(), right, 0.0)
    size = right_finite.abs()
    row = size.amax(dim=-1, keepdim=True) if size.dim() else size
    scale = (row + size.mean()).clamp(min=torch.finfo(torch.float32).tiny)
    error = torch.where(right.isfinite(), (ours - right_finite).abs(), 0.0) / scale
    worst = float(error.max())
    return worst if not math.isnan(worst) else math.inf


def _float64_results(capture: Capture, inputs: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """The model's results in float64, or None if it does not run in it."""
    try:
        model: nn.Module = copy.deepcopy(capture).double()
        wide = [x.double() if x.is_floating_point() else x.clone() for x in inputs]
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            results: tuple[Tensor, ...] = model(*wide)
    except (RuntimeError, TypeError, ValueError):
        return None  # fp32 constants in its code, or parts that cannot be copied
    return results


def _edges(inputs: Sequence[Tensor], *, keep_nan: bool) -> list[tuple[str, tuple[Tensor, ...]]]:
    """Inputs with one odd value, or with the integers in another order."""
    edges = []
    if any(x.is_floating_point() and x.numel() for x in inputs):
        if keep_nan:
            edges.append(("NaN", _poison(inputs, math.nan)))
        edges.append(("infinite", _poison(inputs, math.inf)))
        edges.append(("-infinite", _poison(inputs, -math.inf)))
        edges.append(("zero", tuple(x * 0 if x.is_floating_point() else x for x in inputs)))
    if any(not x.is_floating_point() and x.numel() for x in inputs):
        edges.append(
            (
                "integer",
                tuple(x if x.is_floating_point() else _other_integers(x) for x in inputs),
            )
        )
    return edges


def _poison(inputs: Sequence[Tensor], value: float) -> tuple[Tensor, ...]:
    poisoned = []
    for x in inputs:
        y = x
        if x.is_floating_point() and x.numel():
            y = x.clone()
            y[(0,) * x.dim()] = value
        poisoned.append(y)
    return tuple(poisoned)


def _other_integers(x: Tensor) -> Tensor:
    """The same numbers elsewhere, so that they stay in range of what they index."""
    if x.dim() == 0:
        return x
    return x.flip(tuple(range(x.dim())))


def _bits(x: Tensor) -> Tensor:
    """NaN does not equal itself; its bits do."""
    return x.contiguous().view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)
