"""Models that own a graph: a request names nodes and gets their predictions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from . import _engines
from ._batch import Work
from ._config import GraphConfig, ModelConfig
from ._dense import COMMON_PARAMETERS
from ._errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ModelConfigError,
    ResourceExhaustedError,
)
from ._graphs import OUTPUT, graph_arguments
from ._resident_graph import GraphUpdate, ResidentGraph
from ._subgraph import NewNodes, Subgraph, extract
from ._tensors import check_inputs, pick_outputs, to_output_array
from ._types import InferRequest, InferResult, Limits, OutputTensor, TensorSpec

__all__ = ["ResidentRunner"]

Array = np.ndarray[Any, Any]
# Of the whole graph; a pair of node ids must fit 64 bits.
MAX_GRAPH_NODES: Final = 1 << 31
MAX_GRAPH_EDGES: Final = 1 << 33


@dataclass(slots=True)
class _Ask:
    """One request: nodes of one version of the graph."""

    graph: ResidentGraph
    cached: Array | None
    ids: Array
    fan_out: int
    seed: int
    new: NewNodes | None


@dataclass(slots=True)
class _Batch:
    """Blocks side by side, and where each request finds its rows: (-1, rows) is the cache."""

    arguments: list[Any]
    rows: list[Array | None]


class ResidentRunner:
    """Runs a module on parts of its graph.

    Args:
        call: The module or what an engine made of it.
        config: Its configuration.
        graph: The graph as loaded.
        limits: What one request may ask for.
    """

    def __init__(
        self, call: Callable[..., Any], config: GraphConfig, graph: ResidentGraph, limits: Limits
    ) -> None:
        self._call = call
        self._config = config
        self._limits = limits
        self._update_lock = threading.Lock()
        # Replaced together: an answer must not mix versions.
        self._current = (graph, self._predict_all(graph))
        self.budget: tuple[int, ...] = (config.max_seeds,)
        self.parameters = COMMON_PARAMETERS | {"fan_out", "seed"}
        self.inputs: tuple[TensorSpec, ...] = (TensorSpec("NODE_IDS", "INT64", (-1,)),)
        self.optional_inputs: tuple[TensorSpec, ...] = (
            TensorSpec("NEW_FEATURES", "FP32", (-1, config.features)),
            TensorSpec("NEW_EDGES", "INT64", (2, -1)),
        )
        self.outputs: tuple[TensorSpec, ...] = (TensorSpec(OUTPUT, "FP32", (-1, config.channels)),)

    @classmethod
    def build(
        cls, config: ModelConfig, module: nn.Module, graph: ResidentGraph, limits: Limits
    ) -> ResidentRunner:
        """Make a runner from a configuration, a module and a graph."""
        if config.graph is None:
            raise ModelConfigError("config: kind resident_graph must have a graph table")
        if set(config.graph.call) - {"x", "edge_index"}:
            raise ModelConfigError("config: call must list x and edge_index for a resident graph")
        examples = graph_arguments(
            config.graph.call, torch.zeros(2, config.graph.features), torch.tensor([[0], [1]])
        )
        call = _engines.prepare(config.engine, config.precision, module, examples)
        return cls(call, config.graph, graph, limits)

    @property
    def graph(self) -> ResidentGraph:
        """The current version."""
        return self._current[0]

    # --- requests ---

    def admit(self, request: InferRequest) -> Work:
        """Hold a request against the model and its graph.

        Args:
            request: The request.

        Returns:
            What the scheduler queues.

        Raises:
            InvalidArgumentError: It does not fit, or an id is no node.
            ResourceExhaustedError: It asks for too much.
        """
        check_inputs(request, self.inputs, self.optional_inputs)
        pick_outputs(request, self.outputs)
        graph, cached = self._current
        ids = request.inputs["NODE_IDS"].array
        if len(ids) > self._config.max_seeds:
            raise ResourceExhaustedError(
                f"request: node ids must be at most {self._config.max_seeds}, got {len(ids)}"
            )
        fan_out = _integer(request, "fan_out", 0)
        if fan_out < 0:
            raise InvalidArgumentError(f"request: fan_out must be 0 or more, got {fan_out}")
        if fan_out > self._limits.fan_out:
            raise ResourceExhaustedError(
                f"request: fan_out must be at most {self._limits.fan_out}, got {fan_out}"
            )
        new = self._new_nodes(request, graph)
        graph.check_nodes("input 'NODE_IDS'", ids, 0 if new is None else len(new.x))
        ask = _Ask(graph, cached, ids, fan_out, _integer(request, "seed", 0), new)
        return Work(None, (len(ids),), 1, request.nbytes, ask, request.id)

    def _new_nodes(self, request: InferRequest, graph: ResidentGraph) -> NewNodes | None:
        features = request.inputs.get("NEW_FEATURES")
        edges = request.inputs.get("NEW_EDGES")
        if features is None and edges is None:
            return None
        none = np.empty((0, self._config.features), np.float32)
        x = none if features is None else features.array
        pairs = np.empty((2, 0), np.int64) if edges is None else edges.array
        for what, size, most in (
            ("new nodes", len(x), self._limits.nodes),
            ("new edges", pairs.shape[1], self._limits.edges),
        ):
            if size > most:
                raise ResourceExhaustedError(f"request: {what} must be at most {most}, got {size}")
        graph.check_nodes("input 'NEW_EDGES'", pairs, len(x))
        return NewNodes(x, pairs)

    def collate(self, works: Sequence[Work]) -> _Batch:
        """Cut out what the requests need; see `Runner`.

        Requests on one version with one fan-out and seed share a subgraph; one with new nodes has
        its own.
        """
        asks: list[_Ask] = [work.payload for work in works]
        groups: dict[Any, list[int]] = {}
        for i, ask in enumerate(asks):
            if ask.new is not None:
                groups[i] = [i]
            elif ask.cached is None or ask.fan_out:
                key = (ask.graph.version, ask.fan_out, ask.seed if ask.fan_out else 0)
                groups.setdefault(key, []).append(i)
        blocks: list[Subgraph] = []
        rows: list[Array | None] = [None] * len(asks)
        offset = 0
        for members in groups.values():
            first = asks[members[0]]
            block = extract(
                first.graph,
                np.concatenate([asks[i].ids for i in members]),
                self._config.hops,
                fan_out=first.fan_out,
                seed=first.seed,
                new=first.new,
                max_nodes=min(self._limits.nodes, self._config.max_nodes),
                max_edges=min(self._limits.edges, self._config.max_edges),
            )
            for i in members:
                rows[i] = block.rows(asks[i].ids) + offset
            offset += len(block.ids)
            blocks.append(block)
        return _Batch(self._side_by_side(blocks), rows)

    def _side_by_side(self, blocks: Sequence[Subgraph]) -> list[Any]:
        if not blocks:
            return []
        firsts = np.cumsum([0, *(len(block.ids) for block in blocks[:-1])])
        x = np.concatenate([block.x for block in blocks])
        edges = np.concatenate(
            [b.edge_index + first for b, first in zip(blocks, firsts, strict=True)], axis=1
        )
        return graph_arguments(
            self._config.call, torch.from_numpy(x), torch.from_numpy(np.ascontiguousarray(edges))
        )

    def infer(self, batch: _Batch) -> tuple[Tensor | None, _Batch]:
        """Run the module unless all is in the cache; see `Runner`."""
        return (self._call(*batch.arguments) if batch.arguments else None), batch

    def split(self, raw: tuple[Tensor | None, _Batch], works: Sequence[Work]) -> list[InferResult]:
        """Hand each request its nodes' rows; see `Runner`."""
        out, batch = raw
        array = None if out is None else self._checked(out)
        results = []
        for work, rows in zip(works, batch.rows, strict=True):
            ask: _Ask = work.payload
            source, index = (ask.cached, ask.ids) if rows is None else (array, rows)
            if source is None:
                raise RuntimeError("runner: rows without a result")
            results.append(
                InferResult(
                    [OutputTensor(OUTPUT, "FP32", source[index])],
                    {"graph_version": ask.graph.version},
                )
            )
        return results

    def _checked(self, out: Tensor) -> Array:
        array = to_output_array(out, "FP32")
        if array.ndim != 2 or array.shape[1] != self._config.channels:
            raise ValueError(
                f"model: output must have {self._config.channels} columns, "
                f"got shape {list(array.shape)}"
            )
        return array

    # --- the graph ---

    def _predict_all(self, graph: ResidentGraph) -> Array | None:
        if not self._config.cache:
            return None
        with torch.inference_mode():
            out = self._call(
                *graph_arguments(
                    self._config.call,
                    torch.tensor(graph.x),
                    torch.from_numpy(graph.edge_index()),
                )
            )
            return self._checked(out)

    def update(self, update: GraphUpdate, expected_version: int = 0) -> ResidentGraph:
        """Make and install the next version; requests on the old one finish on it.

        Args:
            update: What changes.
            expected_version: The version it is meant for; 0 for any.

        Returns:
            The new version.

        Raises:
            FailedPreconditionError: Updates are off for the model, or the version is another.
            InvalidArgumentError: The update names what does not exist.
            ResourceExhaustedError: The graph would be too large.
        """
        if not self._config.updates:
            raise FailedPreconditionError("update: the model's graph must allow updates")
        with self._update_lock:
            graph = self.graph
            if expected_version and expected_version != graph.version:
                raise FailedPreconditionError(
                    f"update: expected_graph_version must be {graph.version}, "
                    f"got {expected_version}"
                )
            following = graph.updated(update, MAX_GRAPH_NODES, MAX_GRAPH_EDGES)
            self._current = (following, self._predict_all(following))
            return following


def _integer(request: InferRequest, name: str, default: int) -> int:
    value = request.parameters.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentError(f"request: {name} must be an integer, got {value!r}")
    return value
