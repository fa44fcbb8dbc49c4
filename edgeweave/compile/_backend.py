"""`torch.compile(model, backend="edgeweave")`: passes, then an engine."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch._dynamo.backends.registry import register_backend

from .._checks import INDEX_DTYPES
from .._plan._cache import note_graph_inputs
from ._engine import build_with_inductor, choose_engine, hand_over, records_gradients
from ._measured import CAPTURED, REGIONS, REWRITTEN, Picked, pick_fastest, real_inputs
from ._options import Options, read_options
from ._outcome import outcome_of
from ._passes import count_ops, run_passes
from ._record import GraphRecord, add_record, is_recorded
from ._snapshots import Snapshots

__all__ = ["edgeweave_backend"]

_ENGINE_OF = {CAPTURED: "eager", REWRITTEN: "eager", REGIONS: "onednn"}
_CALLS = ("call_function", "call_method", "call_module")


def edgeweave_backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Backend of `torch.compile`, for training and inference.

    Args:
        graph: From Dynamo.
        example_inputs: Weights, sizes and inputs.
        options: `engine`: "auto", "onednn", "inductor" or "eager", see `optimize`; `without`: names
            of passes to leave out.

    Returns:
        What runs in the graph's place.

    Raises:
        ValueError: If an option, an engine or a pass has no such name.
        TypeError: If an option has the wrong type.

    Example:
        >>> import torch
        >>> import edgeweave.compile
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> compiled = torch.compile(model, backend="edgeweave", options={"engine": "eager"})
        >>> x = torch.randn(3, 4)
        >>> bool(torch.allclose(compiled(x), model(x)))
        True
    """
    chosen = read_options("edgeweave", options)
    record = GraphRecord(
        calls_before=_calls(graph), records_gradients=records_gradients(example_inputs)
    )
    if is_recorded():
        record.snapshots = Snapshots(graph.graph)
    inputs = real_inputs(graph, example_inputs) if chosen.engine == "auto" else "asked for"
    captured = graph if isinstance(inputs, str) else _copy(graph)
    start = time.perf_counter()
    record.rewrites = tuple(run_passes(graph, chosen.without, record.snapshots))
    record.passes_s = time.perf_counter() - start
    record.calls_after, record.ops = _calls(graph), count_ops(graph)
    rule = choose_engine(graph, example_inputs, chosen)
    start = time.perf_counter()
    if isinstance(inputs, str):
        record.engine, record.reason = rule
        compiled = _compile(record, graph, example_inputs, chosen)
    else:
        picked = pick_fastest(rule, captured, graph, example_inputs, chosen, inputs=inputs)
        compiled = _note(record, picked, captured)
    record.engine_s = time.perf_counter() - start
    if record.snapshots is not None:
        ours = sum(record.ops.values())
        record.compiled = compiled
        record.ask = functools.partial(
            outcome_of, record.engine, compiled, record.calls_after, ours, record.reason
        )
    add_record(record)
    return _on_device(compiled) if _reads_device_indices(example_inputs) else compiled


def _compile(
    record: GraphRecord, graph: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> Callable[..., Any]:
    """Hand a graph to the engine of its record, or to ATen if that is Inductor and cannot."""
    if record.engine == "inductor":
        built = build_with_inductor(graph, example_inputs, options)
        if not isinstance(built, str):
            return built
        record.engine, record.reason = "eager", built
    return hand_over(record.engine, graph, example_inputs, options)


def _copy(graph: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own that shares the weights."""
    return fx.GraphModule(graph, copy.deepcopy(graph.graph))


def _note(record: GraphRecord, picked: Picked, captured: fx.GraphModule) -> Callable[..., Any]:
    """Write into a record what a measurement has picked."""
    record.engine = _ENGINE_OF.get(picked.name, picked.name)
    record.reason, record.times_ms = picked.reason, picked.times_ms
    if picked.name == CAPTURED:
        # The passes have gained nothing: what runs is the graph as it was.
        record.rewrites, record.ops, record.calls_after = (), {}, record.calls_before
        if record.snapshots is not None:
            record.snapshots = Snapshots(captured.graph)
    return picked.compiled


def _reads_device_indices(example_inputs: Sequence[Any]) -> bool:
    return any(
        isinstance(value, Tensor) and value.is_cuda and value.dtype in INDEX_DTYPES
        for value in example_inputs
    )


def _on_device(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What runs in a graph's place, after the plan cache was told of its inputs."""

    def run(*inputs: Any) -> Any:
        note_graph_inputs(inputs)
        return compiled(*inputs)

    return run


def _calls(graph: fx.GraphModule) -> int:
    return sum(node.op in _CALLS for node in graph.graph.nodes)


register_backend(edgeweave_backend, name="edgeweave")
