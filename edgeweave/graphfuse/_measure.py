"""Decides on the example what stays fused: nothing that eager does faster."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._fx import map_refs
from .._fx._simplify import operator_of
from ._engine import Engine
from ._packed import PackedCall
from ._plan import LENIENT, Plan, bind_nodes
from ._segment import GuardTripped

__all__ = ["Measured", "choose", "time_sides", "time_units"]

_BUDGET_S = 0.6  # of one comparison
_MOST_ROUNDS = 60
_MOST_REPEATS = 15
# Gains and losses below these are noise.
_FLOOR_US = 3.0
_WORTH = 1.02


@dataclass
class Measured:
    """Times on the example.

    Attributes:
        fused_ms: Of the graph as it is now.
        eager_ms: Of the model itself.
        fused_us: Of each partition, by its nodes.
        eager_us: Of each captured call in ATen.
        packed_us: Of each product in torch's own oneDNN, with what follows it.
    """

    fused_ms: float
    eager_ms: float
    fused_us: dict[tuple[str, ...], float]
    eager_us: dict[str, float]
    packed_us: dict[str, float] = field(default_factory=dict)


def time_sides(sides: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of each side, run in turn so that both meet the same machine."""
    for side in sides.values():
        side()
    times: dict[str, list[float]] = {name: [] for name in sides}
    end = time.perf_counter() + _BUDGET_S
    for round_ in range(_MOST_ROUNDS):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            times[name].append(1e3 * (time.perf_counter() - start))
        if round_ >= 2 and time.perf_counter() > end:
            break
    return {name: statistics.median(found) for name, found in times.items()}


def run_nodes(
    engine: Engine, symbols: Mapping[str, int], tensors: Sequence[Tensor], repeats: int
) -> tuple[dict[str, Any], dict[str, float]]:
    """Run the captured calls one by one in ATen.

    Returns:
        Every value, and the microseconds of each call.
    """
    values: dict[str, Any] = dict(engine.weights.tensors)
    values.update(zip(engine.input_names(), tensors, strict=True))
    times: dict[str, list[float]] = {}
    nodes = bind_nodes(engine.nodes, symbols)
    # All in turn, as in a call: the cache holds what the last one needed, not this one.
    for _ in range(repeats):
        for node in nodes:
            function = operator_of(LENIENT.get(node.target, node.target))
            args = map_refs(node.args, lambda ref: values[ref.name])
            kwargs = map_refs(node.kwargs, lambda ref: values[ref.name])
            start = time.perf_counter()
            values[node.name] = function(*args, **kwargs)
            times.setdefault(node.name, []).append(1e6 * (time.perf_counter() - start))
    return values, {name: statistics.median(found) for name, found in times.items()}


def time_units(plan: Plan, values: Mapping[str, Any], repeats: int) -> dict[tuple[str, ...], float]:
    """Microseconds of each partition, in its place in the graph."""
    found: dict[tuple[str, ...], float] = {}
    for segment in plan.segments:
        inputs = [values[name] for name in segment.reads]
        for unit, nanoseconds in segment.profile(inputs, repeats):
            assert unit.partition is not None
            found[unit.partition.nodes] = nanoseconds / 1e3
    return found


def choose(
    engine: Engine,
    leaves: Sequence[Any],
    symbols: Mapping[str, int],
    eager: Callable[[], object],
) -> Measured:
    """Leave to ATen what ATen does faster, and the whole model to eager if nothing is gained.

    Args:
        engine: Whose `forced`, `packed` and `fused` are decided.
        leaves: The flat example.
        symbols: Their sizes.
        eager: Runs the model itself on the example.
    """
    try:
        return _choose(engine, leaves, symbols, eager)
    except GuardTripped:
        # Such an example runs in eager, and tells nothing about others.
        engine.fused = True
        return Measured(float("nan"), time_sides({"eager": eager})["eager"], {}, {})


def _choose(
    engine: Engine,
    leaves: Sequence[Any],
    symbols: Mapping[str, int],
    eager: Callable[[], object],
) -> Measured:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def fused() -> object:
        return engine.run(leaves, symbols)

    fused()
    with torch.no_grad():
        best = time_sides({"fused": fused, "eager": eager})
    repeats = max(3, min(_MOST_REPEATS, int(1e3 * _BUDGET_S / max(best.values()))))
    values, eager_us = run_nodes(engine, symbols, tensors, repeats)
    fused_us = time_units(engine.plan(symbols), values, repeats)
    products = _time_packed(engine, symbols, values, repeats)
    slower, packed = _leave_out(fused_us, eager_us, products)
    if slower:
        before, forced = engine.plan(symbols), dict(engine.forced)

        def undo() -> None:
            engine.forced, engine.packed = forced, {}
            engine.drop_plans()

        engine.forced = {**slower, **forced}
        engine.packed = packed
        engine.drop_plans()
        try:
            with torch.no_grad():
                again = time_sides(
                    {"fused": fused, "all": lambda: before.run(*tensors), "eager": eager}
                )
        except GuardTripped:
            undo()
            raise
        if again["all"] < again["fused"]:
            undo()
            fused()
            best = {"fused": again["all"], "eager": again["eager"]}
        else:
            best = again
            fused_us = time_units(engine.plan(symbols), values, repeats)
    if best["fused"] * _WORTH > best["eager"]:
        engine.fused = False
        engine.drop_plans()
    packed_us = {name: us for name, (_, _, us) in products.items()}
    return Measured(best["fused"], best["eager"], fused_us, eager_us, packed_us)


def _time_packed(
    engine: Engine, symbols: Mapping[str, int], values: Mapping[str, Any], repeats: int
) -> dict[str, tuple[PackedCall, bool, float]]:
    """Best variant of each product in torch's own oneDNN and its microseconds, by its name."""
    calls = engine.packed_calls(symbols)
    times: dict[tuple[str, bool], list[float]] = {}
    for apart in (False, True):
        for _ in range(repeats + 1):
            for name, call in calls.items():
                if apart not in call.variants:
                    continue
                args = list(call.variant(apart).args)
                args[1] = engine.packed_weight(call)
                arguments = map_refs(args, lambda ref: values[ref.name])
                function = operator_of(call.node.target)
                start = time.perf_counter()
                function(*arguments)
                found = times.setdefault((name, apart), [])
                found.append(1e6 * (time.perf_counter() - start))
    best = {}
    for name, call in calls.items():
        # The first call of each makes its kernel.
        medians = {apart: statistics.median(times[name, apart][1:]) for apart in call.variants}
        apart = min(medians, key=lambda each: medians[each])
        best[name] = (call, apart, medians[apart])
    return best


def _leave_out(
    fused_us: Mapping[tuple[str, ...], float],
    eager_us: Mapping[str, float],
    packed_us: Mapping[str, tuple[PackedCall, bool, float]],
) -> tuple[dict[str, str], dict[str, bool]]:
    """Nodes that are faster outside of partitions, with reasons; the products to be packed."""
    reasons: dict[str, str] = {}
    packed: dict[str, bool] = {}
    for nodes, fused in fused_us.items():
        eager = sum(eager_us.get(name, 0.0) for name in nodes)
        calls = [packed_us[name] for name in nodes if name in packed_us]
        calls = [entry for entry in calls if set(entry[0].nodes) <= set(nodes)]
        covered = {name for call, _, _ in calls for name in call.nodes}
        rest = sum(eager_us.get(name, 0.0) for name in nodes if name not in covered)
        best = rest + sum(us for _, _, us in calls)
        if calls and best < eager and fused > best * _WORTH + _FLOOR_US:
            text = f"faster in torch's own oneDNN: {best:.0f} us against {fused:.0f} us"
            reasons.update(dict.fromkeys(nodes, text))
            packed.update((call.product, apart) for call, apart, _ in calls)
        elif fused > eager * _WORTH + _FLOOR_US:
            text = f"slower than eager on the example: {fused:.0f} us against {eager:.0f} us"
            reasons.update(dict.fromkeys(nodes, text))
    fused_nodes = {name for nodes in fused_us for name in nodes}
    for name, (call, apart, us) in packed_us.items():
        if fused_nodes.isdisjoint(call.nodes) and us * _WORTH + _FLOOR_US < sum(
            eager_us.get(node, 0.0) for node in call.nodes
        ):
            reasons.update(dict.fromkeys(call.nodes, f"in torch's own oneDNN: {us:.0f} us"))
            packed[name] = apart
    return reasons, packed
