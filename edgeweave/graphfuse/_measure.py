"""Decides on the example what stays fused: nothing that eager does faster."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._fx import Ref, map_refs, refs_of
from .._fx._simplify import drop_unused, operator_of
from ._engine import Engine
from ._packed import PackedCall
from ._plan import LENIENT, bind_nodes
from ._segment import GuardTripped, Segment
from ._tile_ops import OWN

__all__ = ["Measured", "Option", "choose", "time_sides", "time_units"]

_BUDGET_S = 0.4  # of one comparison, in calls that are timed
_LONG = 3  # budgets after which two rounds are enough, or one where it is clear who is fastest
_CLEAR = 1.15  # times the fastest: clear where calls are long
_FAR = 2.0  # times the fastest: clear where calls are short
_MOST_ROUNDS = 60
_REPEATS_S = 0.3  # of running the captured calls one by one
_COLD_S = 0.9  # of the same: a first time that takes longer is not told from a second
_MOST_REPEATS = 15
# What a graph has more often is timed only so often: its layers do the same.
_SAMPLES = 4
_ENOUGH_US = 6e4  # in eager, of the samples of one kind
_FIRST_US = 2e5  # of a product: making its kernel is nothing beside it
_COLD_BYTES = 64 << 20  # read and written: fewer would stay in caches from round to round
_Item = TypeVar("_Item")
_Nodes = tuple[str, ...]
# Gains and losses below these are noise.
_FLOOR_US = 3.0
_WORTH = 1.02
_TELLING = 0.01  # of the graph's time, what all such gains together must be
_CLOSE = 0.85  # of eager's time, from where on long models are called as a whole to compare


@dataclass
class Measured:
    """Times on the example.

    Attributes:
        fused_ms: Of the graph as it is now.
        eager_ms: Of the model itself, in bfloat16 of the captured graph in ATen; where that takes
            long and is clearly slower, the lesser of one call and the sum of `eager_us`.
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


def time_sides(
    sides: Mapping[str, Callable[[], object]], *, made: bool = False
) -> dict[str, float]:
    """Median milliseconds of each side, run in turn so that all meet the same machine.

    They begin a round in turn, and short ones each turn with a call that is not timed: what ran
    before leaves the caches and the allocator's free memory behind, while a program calls one of
    the sides again and again. Calls longer than the budget begin so once at most, and a side that
    is clearly slower is left out of later rounds.

    Args:
        sides: By name.
        made: Whether first calls compile nothing worth mentioning, so that long ones count. The
            shorter of two calls does, and no side is left out by its first alone.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for round_ in range(_MOST_ROUNDS):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            if not times[name] or times[name][-1] < 1e3 * _BUDGET_S:
                settled = _time(sides[name])
                if made and not times[name] and settled > 1e3 * _BUDGET_S:
                    times[name].append(settled)
                    continue
            times[name].append(_time(sides[name]))
        medians = {name: statistics.median_low(times[name]) for name in names}
        # Of timed calls alone, and as if none had been disturbed: others may have compiled.
        spent = sum(len(times[name]) * medians[name] for name in names) / 1e3
        long = spent > _LONG * _BUDGET_S
        # One round tells where calls are long, and some where they are far apart; of fewer short
        # ones, noise can be twice the time.
        if (long and not made) or (round_ and spent > _BUDGET_S / 2):
            limit = (_CLEAR if long else _FAR) * min(medians.values())
            names = [name for name in names if medians[name] <= limit]
        # What has nothing to be compared with is timed to be reported.
        decided = len(names) == 1 and (len(sides) > 1 or round_ > 1)
        all_began = round_ >= len(sides) - 1
        if decided or (long and round_) or (spent > _BUDGET_S and all_began):
            break
    return {name: statistics.median_low(found) for name, found in times.items()}


def _time(call: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def run_nodes(
    engine: Engine,
    symbols: Mapping[str, int],
    tensors: Sequence[Tensor],
    keep: Collection[str],
    *,
    alone: bool = False,
) -> tuple[dict[str, Any], dict[str, float], int]:
    """Run the captured calls one by one in ATen, again where that takes no time to speak of.

    Args:
        engine: Of the graph.
        symbols: Their values.
        tensors: The inputs.
        keep: The values to return; others are freed after their last use, as in a model.
        alone: Whether only those values are wanted: what they need runs, once.

    Returns:
        The values, the microseconds of each call, and how often others are to run to be timed.
    """
    inputs = dict(zip(engine.input_names(), tensors, strict=True))
    times: dict[str, list[float]] = {}
    nodes = bind_nodes(engine.nodes, symbols)
    if alone:
        nodes = drop_unused(nodes, [Ref(name) for name in keep])
    last = {name: node.name for node in nodes for name in (node.name, *refs_of(node))}
    dead: dict[str, list[str]] = {}
    for name, reader in last.items():
        if name not in keep and name not in engine.weights.tensors:
            dead.setdefault(reader, []).append(name)
    # All in turn, as in a call: the cache holds what the last one needed, not this one.
    values: dict[str, Any] = {}
    fastest, rounds, repeats = math.inf, 0, 1
    while rounds < repeats or (rounds == 1 and fastest < _COLD_S and not alone):
        began = time.perf_counter()
        rounds += 1
        values.clear()
        values.update(engine.weights.tensors)
        values.update(inputs)
        for node in nodes:
            function = operator_of(LENIENT.get(node.target, node.target))
            args = map_refs(node.args, lambda ref: values[ref.name])
            kwargs = map_refs(node.kwargs, lambda ref: values[ref.name])
            start = time.perf_counter()
            values[node.name] = function(*args, **kwargs)
            times.setdefault(node.name, []).append(1e6 * (time.perf_counter() - start))
            del args, kwargs
            for name in dead.get(node.name, ()):
                del values[name]
        fastest = min(fastest, time.perf_counter() - began)
        fits = int(_REPEATS_S / max(fastest, 1e-9))
        repeats = 1 if alone else min(_MOST_REPEATS, max(fits, 3 if fits else 1))
    return values, {n: statistics.median_low(found) for n, found in times.items()}, repeats


def time_units(
    segments: Sequence[Segment], values: Mapping[str, Any], repeats: int
) -> dict[tuple[str, ...], float]:
    """Microseconds of each of their partitions."""
    found: dict[tuple[str, ...], list[float]] = {}
    # The first round packs weights.
    for round_ in range(repeats + 1):
        for segment in segments:
            inputs = [values[name] for name in segment.reads]
            for unit, nanoseconds in segment.profile(inputs):
                assert unit.partition is not None
                if round_:
                    found.setdefault(unit.partition.nodes, []).append(nanoseconds / 1e3)
    return {nodes: statistics.median_low(times) for nodes, times in found.items()}


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
        eager: Runs on the example what runs where nothing is gained: the model itself, or in
            bfloat16 its calls in ATen.
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
    kinds = _Kinds(engine, symbols)
    plan = engine.plan(symbols)
    segments = kinds.some(plan.segments, _partitions_of)
    calls = [engine.packed_calls(symbols, tiles=tiles).values() for tiles in (False, True)]
    some = [kinds.some(found, _ways_of) for found in calls]
    keep = _read_by(segments, some)
    values, eager_us, repeats = run_nodes(engine, symbols, tensors, keep)
    alone: dict[_Nodes, float] = {(name,): us for name, us in eager_us.items()}
    eager_us = {name: us for (name, *_), us in kinds.spread(alone, alone).items()}
    segments = kinds.enough(segments, _partitions_of, eager_us)
    some = [kinds.enough(found, _ways_of, eager_us) for found in some]
    for name in keep - _read_by(segments, some) - engine.weights.tensors.keys():
        del values[name]
    fused_us = kinds.spread(
        time_units(segments, values, repeats),
        [nodes for segment in plan.segments for nodes in _partitions_of(segment)],
    )
    options: dict[str, list[Option]] = {}
    for found, timed in zip(calls, some, strict=True):
        taken = _time_packed(engine, kinds, timed, values, repeats)
        for name, more in kinds.offer(taken, found).items():
            options.setdefault(name, []).extend(more)
    # With many values of the graph alive, a call finds no free memory that it used before.
    del values
    slower, packed = _leave_out(fused_us, eager_us, options)
    sides = {"fused": fused}
    decided = engine.decided()
    if slower:
        engine.forced = {**slower, **engine.forced}
        engine.packed = packed
        engine.drop_plans()
        sides["all"] = lambda: plan.run(*tensors)
    parts, whole = _whole(fused_us, eager_us), sum(eager_us.values())
    # Its calls have been timed: it is called once, and more often only if that could tell.
    if whole < 1e6 * _BUDGET_S or parts > _CLOSE * whole:
        sides["eager"] = eager
    try:
        if slower:
            fused()
        with torch.no_grad():
            best = {"eager": whole / 1e3, **time_sides(sides, made=True)}
            if "eager" not in sides:
                # Its code may know a shorter way than the one that was captured.
                best["eager"] = min(best["eager"], _time(eager))
                if best["fused"] > _CLOSE * best["eager"]:
                    best.update(time_sides({"eager": eager}, made=True))
    except GuardTripped:
        engine.restore(decided)
        raise
    if best.get("all", math.inf) < best["fused"]:
        engine.restore(decided)
        best["fused"] = best["all"]
    elif slower:
        fused_us = _time_again(engine, symbols, tensors, kinds, fused_us)
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


def _partitions_of(segment: Segment) -> list[_Nodes]:
    """The nodes of each of its partitions."""
    return [unit.partition.nodes for unit in segment.units if unit.partition is not None]


def _ways_of(call: PackedCall) -> list[_Nodes]:
    """What tells calls apart: their nodes, and how they can run."""
    return [call.nodes, call.variants]


def _read_by(segments: Iterable[Segment], calls: Iterable[Iterable[PackedCall]]) -> set[str]:
    """The values that these need to run."""
    keep = {name for segment in segments for name in segment.reads}
    return keep | {name for found in calls for call in found for name in refs_of(call.node.args)}


def _time_again(
    engine: Engine,
    symbols: Mapping[str, int],
    tensors: Sequence[Tensor],
    kinds: _Kinds,
    known: Mapping[_Nodes, float],
) -> dict[_Nodes, float]:
    """Microseconds of the partitions that are left; those of a kind that is known keep its time."""
    segments = engine.plan(symbols).segments
    every = [nodes for segment in segments for nodes in _partitions_of(segment)]
    found = kinds.spread(known, every)
    new = [s for s in segments if not found.keys() >= set(_partitions_of(s))]
    if new:
        new = kinds.first(new, _partitions_of)
        keep = {name for segment in new for name in segment.reads}
        values, _, _ = run_nodes(engine, symbols, tensors, keep, alone=True)
        found = kinds.spread({**time_units(new, values, 2), **found}, every)
    return found


def _time_packed(
    engine: Engine,
    kinds: _Kinds,
    calls: Sequence[PackedCall],
    values: Mapping[str, Any],
    repeats: int,
) -> list[Option]:
    """Each way to run each of these products outside of partitions."""
    found: list[Option] = []
    for how in ("inside", "apart", "mkl", *OWN):
        times: dict[PackedCall, list[float]] = {call: [] for call in calls if how in call.variants}
        # The first call of each makes its kernel; where calls are long, that of each kind does.
        makers = set({kinds.of(call.nodes): call for call in times}.values())
        for round_ in range(repeats + 1):
            for call in times:
                if repeats == 1 and times[call]:
                    continue
                args = list(call.variant(how).args)
                if call.weight:
                    args[1] = None
                arguments = map_refs(args, lambda ref: values[ref.name])
                if call.weight:
                    arguments[1] = engine.packed_weight(call, how)
                if not round_ and repeats == 1 and call not in makers:
                    continue  # with its weight packed, and out of the caches again
                function = operator_of(call.node.target)
                start = time.perf_counter()
                function(*arguments)
                us = 1e6 * (time.perf_counter() - start)
                if round_ or us > _FIRST_US:
                    times[call].append(us)
        engine.forget_packed()  # or each weight lies there once for every way to multiply it
        found += [Option(call, how, statistics.median_low(own)) for call, own in times.items()]
    return found


class _Kinds:
    """What calls do and to what: a model repeats its layers, and equal calls take equal times.

    What is best for one is best for all, and a single call's time is too uncertain to decide by.
    """

    def __init__(self, engine: Engine, symbols: Mapping[str, int]) -> None:
        metas = {name: meta.bind(symbols) for name, meta in engine.metas.items()}
        self._of: dict[str, Any] = {
            node.name: (
                node.target,
                node.meta,
                repr(
                    map_refs(
                        (node.args, node.kwargs),
                        lambda ref: (ref.name in engine.weights.tensors, metas.get(ref.name)),
                    )
                ),
            )
            for node in bind_nodes(engine.nodes, symbols)
        }
        self._bytes = {
            node.name: sum(
                metas[name].nbytes for name in (node.name, *refs_of(node)) if name in metas
            )
            for node in engine.nodes
        }

    def of(self, nodes: _Nodes) -> tuple[Any, ...]:
        """The kind of nodes that run together; names of no node stand for themselves."""
        return tuple(self._of.get(name, name) for name in nodes)

    def some(
        self, items: Iterable[_Item], nodes_of: Callable[[_Item], Sequence[_Nodes]]
    ) -> list[_Item]:
        """At most `_SAMPLES` items of each kind, in order and from all over the graph.

        All of them where so few take less than caches hold: they would stay there between rounds.
        """
        every = list(items)
        some = self._at_most(every, nodes_of, lambda _: _SAMPLES)
        names = [name for item in some for nodes in nodes_of(item) for name in nodes]
        cold = sum(self._bytes.get(name, 0) for name in names) >= _COLD_BYTES
        return some if cold else every

    def enough(
        self,
        items: Iterable[_Item],
        nodes_of: Callable[[_Item], Sequence[_Nodes]],
        eager_us: Mapping[str, float],
    ) -> list[_Item]:
        """As many of each kind as tell its time: two where they take long."""

        def most(item: _Item) -> int:
            us = sum(eager_us.get(name, 0.0) for nodes in nodes_of(item) for name in nodes)
            return max(2, math.ceil(_ENOUGH_US / max(us, 1.0)))

        return self._at_most(list(items), nodes_of, most)

    def first(
        self, items: Iterable[_Item], nodes_of: Callable[[_Item], Sequence[_Nodes]]
    ) -> list[_Item]:
        """The first of each kind."""
        return self._at_most(list(items), nodes_of, lambda _: 1)

    def _at_most(
        self,
        items: list[_Item],
        nodes_of: Callable[[_Item], Sequence[_Nodes]],
        most: Callable[[_Item], int],
    ) -> list[_Item]:
        """So many items of each kind, in order and from all over the graph."""
        members: dict[Any, list[_Item]] = {}
        for item in items:
            members.setdefault(tuple(map(self.of, nodes_of(item))), []).append(item)
        taken = {
            id(found[index * len(found) // count])
            for found in members.values()
            for count in [min(most(found[0]), len(found))]
            for index in range(count)
        }
        return [item for item in items if id(item) in taken]

    def spread(self, times: Mapping[_Nodes, float], every: Iterable[_Nodes]) -> dict[_Nodes, float]:
        """The median of its kind for each of these; nothing for a kind that was not timed."""
        pools: dict[Any, list[float]] = {}
        for nodes, us in times.items():
            pools.setdefault(self.of(nodes), []).append(us)
        median = {kind: statistics.median(found) for kind, found in pools.items()}
        return {nodes: median[self.of(nodes)] for nodes in every if self.of(nodes) in median}

    def offer(
        self, timed: Iterable[Option], calls: Iterable[PackedCall]
    ) -> dict[str, list[Option]]:
        """The ways to run each of these calls with the medians of its kind, by its product."""
        pools: dict[Any, dict[str, list[float]]] = {}
        for option in timed:
            ways = pools.setdefault(self.of(option.call.nodes), {})
            ways.setdefault(option.how, []).append(option.us)
        return {
            call.product: [
                Option(call, how, statistics.median(found))
                for how, found in pools.get(self.of(call.nodes), {}).items()
                if how in call.variants
            ]
            for call in calls
        }


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
    """Nodes that are faster outside of partitions, with reasons; how products run that are.

    None where all of that together is less than a comparison of the whole graph can tell.
    """
    reasons: dict[str, str] = {}
    packed: dict[str, str] = {}
    total = _whole(fused_us, eager_us)
    gain = 0.0
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
            gain += now - best
            reasons.update(dict.fromkeys(in_parts | covered, text))
            packed.update((option.call.product, option.how) for option in chosen)
        elif inside and now > eager * _WORTH + _FLOOR_US:
            text = f"slower than eager on the example: {now:.0f} us against {eager:.0f} us"
            gain += now - eager
            reasons.update(dict.fromkeys(in_parts, text))
    return (reasons, packed) if gain > total * _TELLING else ({}, {})


def _whole(fused_us: Mapping[_Nodes, float], eager_us: Mapping[str, float]) -> float:
    """Microseconds of the graph: of its partitions, and in ATen of what is in none."""
    inside = {name for part in fused_us for name in part}
    return sum(fused_us.values()) + sum(us for name, us in eager_us.items() if name not in inside)


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
