"""Models on small graphs that come with the request, batched block-diagonally.

A batch is one graph made of all graphs of all its requests: features one below the other, edge
indices moved on by the nodes before them. No edge crosses from one to another, so each result is
that of the graph alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import _engines
from ._batch import Work
from ._config import GraphConfig, ModelConfig
from ._dense import COMMON_PARAMETERS
from ._errors import InvalidArgumentError, ModelConfigError, ResourceExhaustedError
from ._tensors import check_inputs, pick_outputs, to_output_array
from ._types import InferRequest, InferResult, Limits, OutputTensor, TensorSpec

__all__ = ["GraphsRunner", "check_edges", "graph_arguments"]

OUTPUT = "OUTPUT"


@dataclass(slots=True)
class _Graphs:
    """The graphs of one request."""

    x: np.ndarray[Any, Any]
    edge_index: np.ndarray[Any, Any]
    edge_attr: np.ndarray[Any, Any] | None
    sizes: np.ndarray[Any, Any]


@dataclass(slots=True)
class _Batch:
    arguments: list[Tensor]
    batch: Tensor
    graphs: int


def check_edges(name: str, edges: np.ndarray[Any, Any], nodes: int) -> None:
    """Refuse an edge whose end is no node.

    Args:
        name: Of the input.
        edges: int64 `[2, E]`.
        nodes: Number of nodes.

    Raises:
        InvalidArgumentError: An index is out of range; names the first.
    """
    if not edges.size or (edges.min() >= 0 and edges.max() < nodes):
        return
    row, column = np.argwhere((edges < 0) | (edges >= nodes))[0]
    raise InvalidArgumentError(
        f"input {name!r}: indices must be in [0, {nodes}), got {edges[row, column]} at "
        f"[{row}, {column}]"
    )


def graph_arguments(
    call: Sequence[str],
    x: Tensor,
    edge_index: Tensor,
    batch: Tensor | None = None,
    edge_attr: Tensor | None = None,
) -> list[Any]:
    """The module's arguments, in the order of its configuration."""
    values = {"x": x, "edge_index": edge_index, "batch": batch, "edge_attr": edge_attr}
    return [values[name] for name in call]


class GraphsRunner:
    """Runs a module on graphs.

    Args:
        call: The module or what an engine made of it.
        graph: Its configuration.
        limits: What one request may ask for.
    """

    def __init__(self, call: Callable[..., Any], graph: GraphConfig, limits: Limits) -> None:
        self._call = call
        self._graph = graph
        self._limits = limits
        self.budget: tuple[int, ...] = (graph.max_nodes, graph.max_edges)
        self.parameters = COMMON_PARAMETERS
        self.inputs: tuple[TensorSpec, ...] = (
            TensorSpec("NODE_FEATURES", "FP32", (-1, graph.features)),
            TensorSpec("EDGE_INDEX", "INT64", (2, -1)),
        )
        if graph.edge_features:
            self.inputs += (TensorSpec("EDGE_FEATURES", "FP32", (-1, graph.edge_features)),)
        self.optional_inputs: tuple[TensorSpec, ...] = (TensorSpec("PTR", "INT64", (-1,)),)
        self.outputs: tuple[TensorSpec, ...] = (TensorSpec(OUTPUT, "FP32", (-1, graph.channels)),)

    @classmethod
    def build(cls, config: ModelConfig, module: nn.Module, limits: Limits) -> GraphsRunner:
        """Make a runner from a configuration and a module."""
        if config.graph is None:
            raise ModelConfigError("config: kind graphs must have a graph table")
        graph = config.graph
        examples = graph_arguments(
            graph.call,
            torch.zeros(2, graph.features),
            torch.tensor([[0, 1], [1, 0]]),
            torch.zeros(2, dtype=torch.int64),
            torch.zeros(2, graph.edge_features),
        )
        call = _engines.prepare(config.engine, config.precision, module, examples)
        return cls(call, graph, limits)

    def admit(self, request: InferRequest) -> Work:
        """Hold a request against the model.

        Args:
            request: The request.

        Returns:
            What the scheduler queues.

        Raises:
            InvalidArgumentError: It does not fit, or an edge leaves its graph.
            ResourceExhaustedError: It has too many nodes or edges.
        """
        check_inputs(request, self.inputs, self.optional_inputs)
        pick_outputs(request, self.outputs)
        x = request.inputs["NODE_FEATURES"].array
        edges = request.inputs["EDGE_INDEX"].array
        nodes, count = x.shape[0], edges.shape[1]
        for what, size, most in (
            ("nodes", nodes, min(self._limits.nodes, self._graph.max_nodes)),
            ("edges", count, min(self._limits.edges, self._graph.max_edges)),
        ):
            if size > most:
                raise ResourceExhaustedError(f"request: {what} must be at most {most}, got {size}")
        if not nodes:
            raise InvalidArgumentError("input 'NODE_FEATURES': must have at least one node, got 0")
        check_edges("EDGE_INDEX", edges, nodes)
        sizes = self._sizes(request, nodes)
        if len(sizes) > 1:
            _check_no_crossing(edges, sizes)
        attributes = None
        if self._graph.edge_features:
            attributes = request.inputs["EDGE_FEATURES"].array
            if attributes.shape[0] != count:
                raise InvalidArgumentError(
                    f"input 'EDGE_FEATURES': must have a row for each of {count} edges, "
                    f"got {attributes.shape[0]}"
                )
        payload = _Graphs(x, edges, attributes, sizes)
        return Work(None, (nodes, count), len(sizes), request.nbytes, payload, request.id)

    def _sizes(self, request: InferRequest, nodes: int) -> np.ndarray[Any, Any]:
        """Nodes of each graph."""
        given = request.inputs.get("PTR")
        if given is None:
            return np.array([nodes])
        ptr = given.array
        # Compared, not subtracted: differences of hostile numbers may wrap.
        if len(ptr) < 2 or ptr[0] != 0 or ptr[-1] != nodes or not bool((ptr[1:] > ptr[:-1]).all()):
            raise InvalidArgumentError(
                f"input 'PTR': must rise from 0 to {nodes}, the number of nodes, with at least "
                "one node per graph"
            )
        return np.diff(ptr)

    def collate(self, works: Sequence[Work]) -> _Batch:
        """Make one graph of all; see `Runner`."""
        graphs: list[_Graphs] = [work.payload for work in works]
        x = torch.empty(sum(g.x.shape[0] for g in graphs), self._graph.features)
        np.concatenate([g.x for g in graphs], out=x.numpy())
        edges = torch.empty(2, sum(g.edge_index.shape[1] for g in graphs), dtype=torch.int64)
        view = edges.numpy()
        first_node = first_edge = 0
        for g in graphs:
            end = first_edge + g.edge_index.shape[1]
            np.add(g.edge_index, first_node, out=view[:, first_edge:end])
            first_edge, first_node = end, first_node + g.x.shape[0]
        sizes = np.concatenate([g.sizes for g in graphs])
        batch = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
        attributes = None
        if self._graph.edge_features:
            attributes = torch.empty(edges.shape[1], self._graph.edge_features)
            np.concatenate(
                [g.edge_attr for g in graphs if g.edge_attr is not None], out=(attributes.numpy())
            )
        arguments = graph_arguments(self._graph.call, x, edges, batch, attributes)
        return _Batch(arguments, batch, len(sizes))

    def infer(self, batch: _Batch) -> Tensor:
        """Run the module and the readout; see `Runner`."""
        out: Tensor = self._call(*batch.arguments)
        if not self._graph.readout:
            return out
        groups = batch.batch.unsqueeze(1).expand_as(out)
        zeros = torch.zeros(batch.graphs, out.shape[1], dtype=out.dtype)
        return zeros.scatter_reduce(0, groups, out, self._graph.readout, include_self=False)

    def split(self, raw: Tensor, works: Sequence[Work]) -> list[InferResult]:
        """Hand each request its graphs or nodes; see `Runner`."""
        array = to_output_array(raw, "FP32")
        per_graph = self._graph.level == "graph"
        rows = [len(work.payload.sizes) if per_graph else work.payload.x.shape[0] for work in works]
        if array.shape != (sum(rows), self._graph.channels):
            raise ValueError(
                f"model: output must have shape {[sum(rows), self._graph.channels]}, "
                f"got {list(array.shape)}"
            )
        stops = np.cumsum(rows)
        return [
            InferResult([OutputTensor(OUTPUT, "FP32", array[stop - count : stop])])
            for stop, count in zip(stops.tolist(), rows, strict=True)
        ]


def _check_no_crossing(edges: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]) -> None:
    graph_of = np.repeat(np.arange(len(sizes)), sizes)
    crossing = graph_of[edges[0]] != graph_of[edges[1]]
    if crossing.any():
        raise InvalidArgumentError(
            f"input 'EDGE_INDEX': edges must stay inside one graph, got one at column "
            f"{int(crossing.argmax())} that crosses"
        )
