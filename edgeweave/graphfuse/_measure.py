"""Decides on the example what stays fused: nothing that eager does faster."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .._fx import map_refs
from .._fx._simplify import operator_of
from ._engine import Engine
from ._packed import PackedCall
from ._plan import LENIENT, Plan, bind_nodes
from ._segment import GuardTripped
from ._tile_ops import OWN

__all__ = ["Measured", "Option", "choose", "time_sides", "time_units"]

_BUDGET_S = 0.6  # of one comparison
_LONG = 4  # budgets after which two rounds are enough
_MOST_ROUNDS = 60
_MOST_REPEATS = 15
# Gains and losses below these are noise.
_FLOOR_US = 3.0
_WORTH = 1.02
_CLOSE = 0.7  # of eager's time, from where on it is measured beside the last choice


@dataclass
class Measured:
    """Times on the example.

    Attributes:
        fused_ms: Of the graph as it is now.
        eager_ms: Of the model itself.
        fused_us: Of each partition, by its nodes.
        eager_us: Of each captured call in ATen.
        packed_us: Of each chosen call outside of partitions, by the product's name.
    """

    fused_ms: float
    eager_ms: float
    fused_us: dict[tuple[str, ...], float]
    eager_us: dict[str, float]
    packed_us: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Option:
    """A way to run a product outside of partitions, and its microseconds."""

    call: PackedCall
    how: str
    us: float


def time_sides(sides: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of each side, run in turn so that all meet the same machine.

    Each begins a round as often as the others, and each turn with a call that is not timed: what
    ran before leaves the caches and the allocator's free memory behind, while a program calls one
    of the sides again and again.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    begin = time.perf_counter()
    for round_ in range(_MOST_ROUNDS):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            sides[name]()
            start = time.perf_counter()
            sides[name]()
            times[name].append(1e3 * (time.perf_counter() - start))
        spent = time.perf_counter() - begin
        least = 1 if spent > _LONG * _BUDGET_S else 2
        if round_ >= least and first == len(names) - 1 and spent > _BUDGET_S:
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
    found: dict[tuple[str, ...], list[float]] = {}
    # All in turn here too; the first round packs weights.
    for round_ in range(repeats + 1):
        for segment in plan.segments:
            inputs = [values[name] for name in segment.reads]
            for unit, nanoseconds in segment.profile(inputs):
                assert unit.partition is not None
                if round_:
                    found.setdefault(unit.partition.nodes, []).append(nanoseconds / 1e3)
    return {nodes: statistics.median(times) for nodes, times in found.items()}


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
    options = _time_packed(engine, symbols, values, repeats)
    fused_us, eager_us, options = _pooled(_kinds(engine, symbols), fused_us, eager_us, options)
    slower, packed = _leave_out(fused_us, eager_us, options)
    if slower:
        before, forced = engine.plan(symbols), dict(engine.forced)

        def undo() -> None:
            engine.forced, engine.packed = forced, {}
            engine.drop_plans()

        engine.forced = {**slower, **forced}
        engine.packed = packed
        engine.drop_plans()
        try:
            chosen_us = time_units(engine.plan(symbols), values, repeats)
            # With every value of the graph alive, a call finds no free memory that it used before.
            del values
            with torch.no_grad():
                sides = {"fused": fused, "all": lambda: before.run(*tensors)}
                if best["fused"] > _CLOSE * best["eager"]:  # else it is clear, and eager is slow
                    sides["eager"] = eager
                again = time_sides(sides)
                best["eager"] = again.get("eager", best["eager"])
        except GuardTripped:
            undo()
            raise
        if again["all"] < again["fused"]:
            undo()
            fused()
            best["fused"] = again["all"]
        else:
            best["fused"], fused_us = again["fused"], chosen_us
    if best["fused"] * _WORTH > best["eager"]:
        engine.fused = False
        engine.drop_plans()
    packed_us = {
        name: option.us
        for name, found in options.items()
        for option in found
        if option.how == engine.packed.get(name)
    }
    return Measured(best["fused"], best["eager"], fused_us, eager_us, packed_us)


def _time_packed(
    engine: Engine, symbols: Mapping[str, int], values: Mapping[str, Any], repeats: int
) -> dict[str, list[Option]]:
    """The ways to run each product outside of partitions, by its name."""
    found: dict[str, list[Option]] = {}
    for tiles in (False, True):
        calls = engine.packed_calls(symbols, tiles=tiles)
        for how in OWN if tiles else ("inside", "apart", "mkl"):
            times: dict[str, list[float]] = {}
            # The first call of each makes its kernel.
            for round_ in range(repeats + 1):
                for name, call in calls.items():
                    if how not in call.variants:
                        continue
                    args = list(call.variant(how).args)
                    if call.weight:
                        args[1] = None
                    arguments = map_refs(args, lambda ref: values[ref.name])
                    if call.weight:
                        arguments[1] = engine.packed_weight(call, how)
                    function = operator_of(call.node.target)
                    start = time.perf_counter()
                    function(*arguments)
                    if round_:
                        times.setdefault(name, []).append(1e6 * (time.perf_counter() - start))
            engine.forget_packed()  # or each weight lies there once for every way to multiply it
            for name, found_us in times.items():
                option = Option(calls[name], how, statistics.median(found_us))
                found.setdefault(name, []).append(option)
    return found


def _kinds(engine: Engine, symbols: Mapping[str, int]) -> dict[str, Any]:
    """What a call does and to what, by its name: equal for the same call in each layer."""
    nodes = bind_nodes(engine.nodes, symbols)
    metas = {name: meta.bind(symbols) for name, meta in engine.metas.items()}
    return {
        node.name: (
            node.target,
            node.meta,
            repr(map_refs((node.args, node.kwargs), lambda ref: metas.get(ref.name))),
        )
        for node in nodes
    }


def _pooled(
    kinds: Mapping[str, Any],
    fused_us: Mapping[tuple[str, ...], float],
    eager_us: Mapping[str, float],
    options: Mapping[str, Sequence[Option]],
) -> tuple[dict[tuple[str, ...], float], dict[str, float], dict[str, list[Option]]]:
    """The times with the median over all calls of a kind for each of them.

    A model repeats its layers, and what is best for one is best for all; a single call's time is
    too uncertain to decide by.
    """

    def kind(names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(kinds.get(name, name) for name in names)

    pools: dict[Any, list[float]] = {}
    for part, us in fused_us.items():
        pools.setdefault(("fused", kind(part)), []).append(us)
    for name, us in eager_us.items():
        pools.setdefault(("eager", kind([name])), []).append(us)
    for found in options.values():
        for option in found:
            pools.setdefault((option.how, kind(option.call.nodes)), []).append(option.us)
    median = {key: statistics.median(times) for key, times in pools.items()}
    return (
        {part: median["fused", kind(part)] for part in fused_us},
        {name: median["eager", kind([name])] for name in eager_us},
        {
            name: [replace(o, us=median[o.how, kind(o.call.nodes)]) for o in found]
            for name, found in options.items()
        },
    )


_WHERE = {
    "inside": "in torch's own oneDNN",
    "apart": "in torch's own oneDNN",
    "mkl": "in torch's MKL",
    "tiles": "on AMX tiles",
    "vectors": "on edgeweave's vectors",
}


def _leave_out(
    fused_us: Mapping[tuple[str, ...], float],
    eager_us: Mapping[str, float],
    options: Mapping[str, Sequence[Option]],
) -> tuple[dict[str, str], dict[str, str]]:
    """Nodes that are faster outside of partitions, with reasons; how products run that are."""
    reasons: dict[str, str] = {}
    packed: dict[str, str] = {}
    for nodes, products in _groups(fused_us, options):
        inside = [part for part in fused_us if not nodes.isdisjoint(part)]
        fused = sum(fused_us[part] for part in inside)
        in_parts = {name for part in inside for name in part}
        now = fused + sum(eager_us.get(name, 0.0) for name in nodes - in_parts)
        eager = sum(eager_us.get(name, 0.0) for name in nodes)
        best, chosen = _best_options([options[name] for name in products], nodes, eager_us)
        if chosen and best < eager and now > best * _WORTH + _FLOOR_US:
            covered = {name for option in chosen for name in _covers(option)}
            where = " and ".join(dict.fromkeys(_WHERE[option.how] for option in chosen))
            text = f"faster {where}: {best:.0f} us against {now:.0f} us"
            reasons.update(dict.fromkeys(in_parts | covered, text))
            packed.update((option.call.product, option.how) for option in chosen)
        elif inside and now > eager * _WORTH + _FLOOR_US:
            text = f"slower than eager on the example: {now:.0f} us against {eager:.0f} us"
            reasons.update(dict.fromkeys(in_parts, text))
    return reasons, packed


def _covers(option: Option) -> tuple[str, ...]:
    """Nodes that do not run where a product runs in this way."""
    return option.call.nodes + option.call.spares


def _groups(
    fused_us: Mapping[tuple[str, ...], float], options: Mapping[str, Sequence[Option]]
) -> list[tuple[set[str], list[str]]]:
    """Nodes that must be decided on together, with the products among them.

    Those of a partition are, and those that one call could cover.
    """
    group_of: dict[str, set[str]] = {}
    sets = [set(part) for part in fused_us]
    sets += [set(_covers(option)) for found in options.values() for option in found]
    for names in sets:
        joined = set(names)
        for name in names:
            joined |= group_of.get(name, set())
        group_of.update(dict.fromkeys(joined, joined))
    found: list[tuple[set[str], list[str]]] = []
    for nodes in {id(group): group for group in group_of.values()}.values():
        found.append((nodes, [name for name in options if name in nodes]))
    return found


def _best_options(
    products: Sequence[Sequence[Option]], nodes: set[str], eager_us: Mapping[str, float]
) -> tuple[float, list[Option]]:
    """Microseconds of a group's nodes with its products outside of partitions, and how those run.

    What no call covers runs in ATen.
    """
    taken: set[str] = set()
    chosen: list[Option] = []
    for found in products:
        usable = [option for option in found if taken.isdisjoint(option.call.nodes)]
        if not usable:
            continue
        saved = {
            id(option): sum(eager_us.get(name, 0.0) for name in _covers(option)) - option.us
            for option in usable
        }
        best = max(usable, key=lambda option: saved[id(option)])
        chosen.append(best)
        taken |= set(_covers(best))
    total = sum(option.us for option in chosen)
    return total + sum(eager_us.get(name, 0.0) for name in nodes - taken), chosen
