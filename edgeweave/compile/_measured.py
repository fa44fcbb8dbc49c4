"""`engine="auto"` where the rule is not enough: the ways to run a graph, timed on its inputs.

The rule of `choose_engine` knows what an engine is good at, not whether it gains anything here. In
inference on the CPU a backend is given the real inputs of the first call, so that it can ask: it
runs each candidate a few times, and keeps the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import tracing
from torch._subclasses.fake_tensor import FakeTensor

from ..graphfuse._measure import time_sides
from ._engine import (
    Compiled,
    build_with_inductor,
    hand_over,
    has_compiler,
    has_onednn,
    records_gradients,
)
from ._options import Options
from ._passes import count_ops
from ._reading import writes_to_inputs
from ._regions import cut_for_onednn

__all__ = ["CAPTURED", "REGIONS", "REWRITTEN", "WORTH", "Picked", "pick_fastest", "real_inputs"]

CAPTURED = "eager"
"""The graph as it was captured, run by ATen: what the model does without being compiled."""
REWRITTEN = "passes + ATen"
"""The graph after the passes, run by ATen."""
REGIONS = "passes + onednn"
"""The graph after the passes, with oneDNN between edgeweave's ops."""

# oneDNN is not asked to compete with Inductor, which takes tens of seconds to compile, where it
# gains as much as this over eager.
_SURE = 1.25
WORTH = 1.03
"""A candidate must be this much faster than the one that the rule prefers: less is noise."""


@dataclass(frozen=True)
class Picked:
    """The candidate that a measurement found.

    Attributes:
        name: `onednn`, `inductor`, `CAPTURED`, `REWRITTEN` or `REGIONS`.
        reason: Why, with the times.
        compiled: What runs in the graph's place.
        times_ms: Median of each candidate.
    """

    name: str
    reason: str
    compiled: Compiled
    times_ms: dict[str, float] = field(default_factory=dict)


def real_inputs(module: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any] | str:
    """The inputs with which a graph can be run while it is compiled.

    Args:
        module: The graph as captured.
        example_inputs: What Dynamo gave for it.

    Returns:
        The inputs, symbols replaced by the numbers that they stand for now; or why the graph cannot
        be run, or must not be.
    """
    if records_gradients(example_inputs):
        return "it records gradients"
    found: list[Any] = []
    for value in example_inputs:
        if isinstance(value, Tensor) and (
            isinstance(value, FakeTensor) or value.device.type != "cpu"
        ):
            return "its inputs are not there, or not on the CPU"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            if not value.node.has_hint():
                return "it is given a size that is not known"
            value = value.node.hint
        found.append(value)
    return "it writes to its inputs" if writes_to_inputs(module) else found


def pick_fastest(
    rule: tuple[str, str],
    captured: fx.GraphModule,
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    *,
    inputs: Sequence[Any],
) -> Picked:
    """Time the ways to run a graph, in turn, and take the fastest.

    oneDNN, if the rule wants it, is timed against eager first; Inductor is compiled only where that
    gains less than a quarter. Where two are equal the rule's preference stays.

    Args:
        rule: Engine and reason of `choose_engine`.
        captured: The graph before the passes.
        module: The graph after them.
        example_inputs: As Dynamo gave them.
        options: What was asked for.
        inputs: Of `real_inputs`.

    Returns:
        The fastest candidate. If a candidate raises on these inputs, the rule's, untimed: the call
        itself will raise it.
    """
    preferred, why = rule
    failed = ""
    sides: dict[str, Compiled] = {}

    def add(name: str) -> str:
        """Compile a candidate; what is to be said with the reason where that fails."""
        if name != "inductor":
            sides[name] = hand_over(name, module, example_inputs, options)
            return ""
        built = build_with_inductor(module, example_inputs, options)
        if isinstance(built, str):
            return f"; {built}"
        sides[name] = built
        return ""

    try:
        if preferred == "onednn":
            add("onednn")
            times = _times({**sides, CAPTURED: captured.forward}, inputs)
            if times[CAPTURED] >= _SURE * times["onednn"]:
                return Picked("onednn", _reason("onednn", why, times), sides["onednn"], times)
        if preferred != "eager" and has_compiler("cpu"):
            failed = add("inductor")
        if count_ops(module):
            regions = cut_for_onednn(module, inputs) if has_onednn() else None
            if regions is not None:
                sides[REGIONS] = regions
            sides[REWRITTEN] = hand_over("eager", module, example_inputs, options)
        sides[CAPTURED] = captured.forward
        times = _times(sides, inputs)
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
        text = f"{why}; not measured, since a call raises {type(error).__name__}"
        if preferred not in sides:
            text += add(preferred)
        if preferred not in sides:
            return Picked(CAPTURED, text, captured.forward)
        return Picked(preferred, text, sides[preferred])
    best = _fastest(times)
    return Picked(best, _reason(best, why, times) + failed, sides[best], times)


def _times(sides: Mapping[str, Compiled], inputs: Sequence[Any]) -> dict[str, float]:
    """Median milliseconds of each side; nothing that a program can see is changed by it."""

    def call(side: Compiled) -> Callable[[], object]:
        return lambda: side(*inputs)

    # A graph may draw random numbers. Its engines look for no compilation that is going on.
    with torch.random.fork_rng(devices=[]), tracing(None):
        return time_sides({name: call(side) for name, side in sides.items()})


def _fastest(times: Mapping[str, float]) -> str:
    """The first of the sides that none of the later ones beats by more than noise."""
    best, *others = times
    for name in others:
        if times[name] * WORTH < times[best]:
            best = name
    return best


def _reason(best: str, why: str, times: Mapping[str, float]) -> str:
    said = ", ".join(f"{name} {ms:.3g} ms" for name, ms in times.items())
    return f"measured: {said}" if best == CAPTURED else f"{why}; measured: {said}"
