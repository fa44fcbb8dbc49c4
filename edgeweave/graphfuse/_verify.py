"""Compares each partition, and the whole, with ATen in float64."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .._fx import Ref, map_refs
from .._fx._simplify import operator_of
from ._engine import Engine
from ._lowering import Lowered
from ._partition import Unit
from ._plan import LENIENT, Plan, bind_nodes
from ._report import Verification
from ._segment import GuardTripped, Segment

__all__ = ["verify_engine"]

# A partition may be this many times as far from float64 as ATen is: it adds in another order. And
# it may always be this many roundings of its dtype away, for a result on which ATen is exact.
_TIMES = 4.0
_ROUNDINGS = 64.0


def _inputs(kind: str, shape: tuple[int, ...], dtype: torch.dtype, made: torch.Generator) -> Tensor:
    if kind == "zero":
        return torch.zeros(shape, dtype=dtype)
    scale = {"random": 1.0, "large": 1e3, "tiny": 1e-3}[kind]
    return (torch.randn(shape, generator=made) * scale).to(dtype)


def _reference(
    engine: Engine,
    nodes: Collection[str],
    symbols: Mapping[str, int],
    inputs: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> dict[str, Any]:
    """These calls in ATen, in `dtype` if one is given."""

    def cast(value: Any) -> Any:
        if dtype is None:
            return value
        if isinstance(value, torch.dtype):
            return dtype if value.is_floating_point else value
        if isinstance(value, list | tuple):
            return type(value)(cast(item) for item in value)
        if isinstance(value, dict):
            return {key: cast(item) for key, item in value.items()}
        wide = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if wide else value

    values: dict[str, Any] = {n: cast(t) for n, t in inputs.items()}
    for node in bind_nodes(engine.nodes, symbols):
        if node.name not in nodes:
            continue

        def read(ref: Any) -> Any:
            if ref.name in values:
                return values[ref.name]
            return engine.weights.tensors[ref.name]

        function = operator_of(LENIENT.get(node.target, node.target))
        # What a call makes by itself, such as a constant, is widened too.
        args, kwargs = map_refs(node.args, read), map_refs(node.kwargs, read)
        values[node.name] = cast(function(*cast(args), **cast(kwargs)))
    return values


def verify_engine(engine: Engine, symbols: Mapping[str, int], seed: int) -> list[Verification]:
    """One line for each partition and kind of input, and one for the whole."""
    plan = engine.plan(symbols)
    lines = [
        line for unit in _units(plan) for line in _verify_unit(engine, plan, unit, symbols, seed)
    ]
    return lines + _verify_whole(engine, plan, symbols, seed)


def _verify_whole(
    engine: Engine, plan: Plan, symbols: Mapping[str, int], seed: int
) -> list[Verification]:
    """All partitions together, in the layouts in which they hand values on."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {}
    for name in engine.input_names():
        meta = engine.metas[name].bind(symbols)
        # Integers are indices as a rule: zero is one that everything takes.
        kind = "random" if meta.dtype.is_floating_point else "zero"
        inputs[name] = _inputs(kind, meta.sizes, meta.dtype, generator)
    try:
        found = plan.run(*inputs.values())
    except GuardTripped:
        return []
    names = tuple(node.name for node in engine.nodes)
    exact = _reference(engine, names, symbols, inputs, torch.float64)
    eager = _reference(engine, names, symbols, inputs, None)
    worst = [0.0, 0.0, 0.0]
    for value, output in zip(found, engine.captured.outputs, strict=True):
        if not isinstance(output, Ref) or not isinstance(exact.get(output.name), Tensor):
            continue
        if not value.is_floating_point():
            continue
        error = _distance(value, exact[output.name])
        eager_error = _distance(eager[output.name], exact[output.name])
        roundings = _ROUNDINGS * torch.finfo(value.dtype).eps
        worst = max(worst, [error / max(_TIMES * eager_error, roundings), error, eager_error])
    return [Verification(names, "whole", worst[1], worst[2], worst[0] <= 1)]


def _units(plan: Plan) -> Iterator[Unit]:
    for segment in plan.segments:
        for unit in segment.units:
            if unit.partition is not None:
                yield unit


def _verify_unit(
    engine: Engine, plan: Plan, unit: Unit, symbols: Mapping[str, int], seed: int
) -> Iterator[Verification]:
    assert unit.partition is not None
    assert plan.cut is not None
    _, lowered = engine.lowered(symbols, engine.refused)
    constants = {**engine.weights.tensors, **lowered.literals}
    # A value between two calls of one captured node has no counterpart in ATen to compare with.
    captured = {node.name for node in engine.nodes}
    if not (set(unit.writes) | set(unit.reads)) <= captured | set(engine.input_names()):
        return
    segment = Segment([unit], plan.cut, lowered, constants, set(unit.writes))
    generator = torch.Generator().manual_seed(seed)
    for kind in ("random", "large", "tiny", "zero"):
        inputs = {n: _inputs(kind, *_shape(lowered, n), generator) for n in segment.reads}
        found = dict(zip(segment.writes, segment.run(list(inputs.values())), strict=True))
        exact = _reference(engine, unit.partition.nodes, symbols, inputs, torch.float64)
        eager = _reference(engine, unit.partition.nodes, symbols, inputs, None)
        for name, value in found.items():
            error, eager_error = _distance(value, exact[name]), _distance(eager[name], exact[name])
            roundings = _ROUNDINGS * torch.finfo(value.dtype).eps
            good = error <= max(_TIMES * eager_error, roundings)
            yield Verification(unit.partition.nodes, kind, error, eager_error, good)


def _shape(lowered: Lowered, name: str) -> tuple[tuple[int, ...], torch.dtype]:
    meta = lowered.metas[name]
    return meta.sizes, meta.dtype


def _distance(value: Tensor, exact: Tensor) -> float:
    scale = float(exact.abs().max()) if exact.numel() else 0.0
    return float((value.double() - exact.double()).abs().max()) / max(scale, 1e-30)
