"""`bench models --device cuda`: one layer's step on a GPU, by four sides in turn.

A step is forward and backward, with gradients for features and weights. Sides: the layer compiled
by `edgeweave.optimize`, the same under `edgeweave.accelerated()`, `torch.compile` of stock PyG,
and stock PyG itself. All in one dtype, float32 or bfloat16 throughout.

Times are those between two CUDA events around some steps in a row, so they hold what the GPU waits
for Python too. Outputs, and gradients where they fit the memory, are compared with the stock layer
in float64 before anything is timed (of layers with a kink, the best 99 of a hundred rows). A peer
that runs out of memory is left out and named.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import edgeweave
from edgeweave.bench.generators import ARXIV_NODES, ARXIV_PAIRS, GraphData, block_model
from edgeweave.bench.harness import (
    CheckFailedError,
    check_distances,
    compare,
    distance_to_reference,
    summarise,
)
from edgeweave.bench.model_runs import ModelRun
from edgeweave.bench.models import HEADS
from edgeweave.bench.records import CaseResult, Reference, Settings, Speedup

OPTIMIZED = "edgeweave.optimize"
ACCELERATED = "edgeweave.accelerate"
COMPILED = "torch.compile"
STOCK = "stock PyG"

CHANNELS = 128
SUM_LAYERS = ("GCN", "GraphSAGE", "GIN")
ATTENTION_LAYERS = ("GAT", "GATv2", "Transformer")
GRAPHS = {"arxiv": 1, "23M": 10}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# A step shorter than this is repeated within a sample, so that the launch of the first one is not
# all that is measured.
_SAMPLE_S = 0.02
_MOST_STEPS = 20
# Layers with a kink (ReLU, leaky ReLU): where rounding puts a value on its other side, a whole row
# of gradients changes by its own size, in every way to compute it. That happens to some rows in a
# thousand; the others must be right.
_KINKED = ("GIN", "GAT", "GATv2")
_KINKED_SHARE = 0.99
# A float64 copy of the larger graph's attention layers may not fit: a float32 one is within this.
_SINGLE_EPS = 1e-5


@dataclass
class _Side:
    """One way to run the layer."""

    name: str
    module: Callable[..., Tensor]
    parameters: list[nn.Parameter]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def step(self, x: Tensor, edge_index: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Output and gradient of the features."""
        x.grad = None
        for parameter in self.parameters:
            parameter.grad = None
        out = self.module(x, edge_index)
        torch.autograd.backward(out, grad)
        assert x.grad is not None, "features of a middle layer need a gradient"
        return out.detach(), x.grad


def make_layer(name: str) -> nn.Module:
    """The stock layer of a row, 128 channels in and out, with weights that depend on the name only.

    Args:
        name: One of `SUM_LAYERS` or `ATTENTION_LAYERS`.
    """
    from torch_geometric import nn as layers

    torch.manual_seed(0)
    if name == "GCN":
        layer: nn.Module = layers.GCNConv(CHANNELS, CHANNELS)
    elif name == "GraphSAGE":
        layer = layers.SAGEConv(CHANNELS, CHANNELS)
    elif name == "GIN":
        mlp = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.ReLU(), nn.Linear(CHANNELS, CHANNELS))
        layer = layers.GINConv(mlp)
    else:
        kind = {"GAT": "GATConv", "GATv2": "GATv2Conv", "Transformer": "TransformerConv"}[name]
        layer = getattr(layers, kind)(CHANNELS, CHANNELS // HEADS, heads=HEADS)
    return layer


def device_runs(device: str, quick: bool) -> Iterator[ModelRun]:
    """Lists the rows.

    Args:
        device: `"cuda"`.
        quick: A graph of a sixteenth of arxiv's size in place of both.

    Yields:
        Two runs per graph, dtype and layer, one for each of our two ways.

    Raises:
        RuntimeError: If torch sees no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("bench models: --device cuda must find a CUDA device, got none")
    graphs = {"arxiv/16": 1 / 16} if quick else GRAPHS
    for graph_name, scale in graphs.items():
        graph = cache(partial(_graph, graph_name, scale))
        for dtype in DTYPES:
            for kind, names in (("sum", SUM_LAYERS), ("attention", ATTENTION_LAYERS)):
                for layer in names:
                    measure = cache(partial(_measure, device, graph, dtype, layer))
                    for way in (OPTIMIZED, ACCELERATED):
                        group = f"{way.split('.')[1]}-{kind}-{graph_name.replace('/', '-')}-{dtype}"
                        case_id = f"{group}/{layer}"
                        params: dict[str, str | int] = {
                            "graph": graph_name,
                            "dtype": dtype,
                            "layer": layer,
                        }
                        run = partial(_result, group, case_id, params, way, measure)
                        yield ModelRun(case_id, run)


def _graph(name: str, scale: float) -> GraphData:
    """The size of ogbn-arxiv times `scale`, in random order."""
    nodes, pairs = int(ARXIV_NODES * scale), int(ARXIV_PAIRS * scale)
    return block_model(nodes, pairs, order="random", name=name)


@dataclass
class _Measured:
    distances: dict[str, float]
    samples: dict[str, list[float]]
    left_out: list[str]
    wrong: dict[str, str]


def _result(
    group: str,
    case_id: str,
    params: dict[str, str | int],
    way: str,
    measure: Callable[[Settings], _Measured],
    settings: Settings,
) -> CaseResult:
    """The row of one of our ways, out of what was measured of all sides together."""
    found = measure(settings)
    if found.left_out:
        params = {**params, "out of memory": ", ".join(found.left_out)}
    if way in found.wrong:
        return CaseResult(group, case_id, params, "wrong", found.wrong[way], found.distances)
    peers = [name for name in (COMPILED, STOCK) if name in found.samples]
    ours = found.samples[way]
    speedups: list[Speedup] = [compare(peer, ours, found.samples[peer]) for peer in peers]
    return CaseResult(
        group,
        case_id,
        params,
        distances={name: found.distances[name] for name in (way, *peers)},
        timings=[summarise(name, found.samples[name]) for name in (way, *peers)],
        speedups=speedups,
    )


def _measure(
    device: str, graph: Callable[[], GraphData], dtype_name: str, name: str, settings: Settings
) -> _Measured:
    dtype = DTYPES[dtype_name]
    torch._dynamo.reset()
    edgeweave.sparse.cache_clear()
    _empty(device)
    data = graph()
    edge_index = data.edge_index.to(device)
    generator = torch.Generator().manual_seed(0)
    x, grad = (
        torch.randn(data.num_nodes, CHANNELS, generator=generator).to(device, dtype)
        for _ in range(2)
    )
    layer = make_layer(name).to(device, dtype)
    reference, eps = _reference(layer, x, edge_index, grad, device, dtype)
    sides = _sides(layer)
    distances: dict[str, float] = {}
    left_out: list[str] = []
    for side in list(sides):
        try:
            # Once more: some of a first step's memory and time is the compiler's.
            with side.context():
                for _ in range(2):
                    outputs = side.step(_leaf(x), edge_index, grad)[: len(reference.values)]
            distances[side.name] = distance_to_reference(
                outputs, reference, _KINKED_SHARE if name in _KINKED else 1.0
            )
            del outputs
        except torch.cuda.OutOfMemoryError:
            if side.name in (OPTIMIZED, ACCELERATED):
                raise
            left_out.append(side.name)
            sides.remove(side)
        _empty(device)
    wrong = {}
    # In bf16 stock itself is far from float64, by a network's roundings and by atomic additions.
    peers = [name for name in (STOCK, COMPILED) if name in distances]
    limit = math.inf if dtype is torch.bfloat16 else None
    for way in (OPTIMIZED, ACCELERATED):
        try:
            check_distances(name, distances, way, peers, eps, limit)
        except CheckFailedError as error:
            wrong[way] = str(error)
    samples = {} if wrong else _time_sides(sides, x, edge_index, grad, device, settings)
    _empty(device)
    return _Measured(distances, samples, left_out, wrong)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _sides(layer: nn.Module) -> list[_Side]:
    def copied() -> tuple[nn.Module, list[nn.Parameter]]:
        twin = copy.deepcopy(layer)
        return twin, list(twin.parameters())

    own, own_parameters = copied()
    plain, plain_parameters = copied()
    compiled, compiled_parameters = copied()
    stock, stock_parameters = copied()
    return [
        _Side(OPTIMIZED, edgeweave.optimize(own), own_parameters),
        _Side(ACCELERATED, plain, plain_parameters, edgeweave.accelerated),
        _Side(COMPILED, torch.compile(compiled), compiled_parameters),
        _Side(STOCK, stock, stock_parameters),
    ]


def _reference(
    layer: nn.Module, x: Tensor, edge_index: Tensor, grad: Tensor, device: str, dtype: torch.dtype
) -> tuple[Reference, float]:
    """The stock layer's output and feature gradient in float64, or as much of it as fits."""
    eps = float(torch.finfo(dtype).eps)
    for wide, backward in ((torch.float64, True), (torch.float64, False), (torch.float32, False)):
        try:
            exact = copy.deepcopy(layer).to(wide)
            side = _Side(STOCK, exact, list(exact.parameters()))
            values: tuple[Tensor, ...]
            if backward:
                values = side.step(_leaf(x.to(wide)), edge_index, grad.to(wide))
            else:
                with torch.no_grad():
                    values = (exact(x.to(wide), edge_index),)
            return Reference(tuple(v.double() for v in values), eps=eps), (
                eps if wide is torch.float64 else max(eps, _SINGLE_EPS)
            )
        except torch.cuda.OutOfMemoryError:
            _empty(device)
    raise RuntimeError("bench models: the stock layer must fit the device in float32, got no room")


def _time_sides(
    sides: list[_Side],
    x: Tensor,
    edge_index: Tensor,
    grad: Tensor,
    device: str,
    settings: Settings,
) -> dict[str, list[float]]:
    leaf = _leaf(x)
    counts = {}
    round_s = 0.0
    for side in sides:
        seconds = _seconds(side, leaf, edge_index, grad, 1, device)
        counts[side.name] = max(1, min(_MOST_STEPS, int(_SAMPLE_S / max(seconds, 1e-9))))
        round_s += seconds * counts[side.name]
    samples: dict[str, list[float]] = {side.name: [] for side in sides}
    for _ in range(settings.rounds(round_s)):
        for side in sides:
            taken = _seconds(side, leaf, edge_index, grad, counts[side.name], device)
            samples[side.name].append(taken)
    return samples


def _seconds(
    side: _Side, x: Tensor, edge_index: Tensor, grad: Tensor, count: int, device: str
) -> float:
    """Seconds per step over `count` steps."""
    if device != "cuda":
        raise RuntimeError(f"bench models: no clock for device {device!r}")
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    with side.context():
        # The first may have to ask for memory that another side's steps left in pieces.
        side.step(x, edge_index, grad)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(count):
            side.step(x, edge_index, grad)
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


def _empty(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
