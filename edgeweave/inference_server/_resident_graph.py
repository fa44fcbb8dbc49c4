"""A model's own graph: immutable, so that a request keeps the version it was admitted on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ._errors import InvalidArgumentError, ModelConfigError, ResourceExhaustedError

__all__ = ["GraphUpdate", "ResidentGraph"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class GraphUpdate:
    """What is to change, applied in this order.

    Attributes:
        add_features: fp32 `[n, F]` of nodes that take the next numbers.
        set_ids: int64 `[m]` nodes that get new features.
        set_features: fp32 `[m, F]`.
        remove_nodes: int64 `[k]` nodes that lose their edges and are refused from then on.
        remove_edges: int64 `[2, r]`; one copy of each goes.
        add_edges: int64 `[2, a]`.
    """

    add_features: Array
    set_ids: Array
    set_features: Array
    remove_nodes: Array
    remove_edges: Array
    add_edges: Array


@dataclass(frozen=True)
class ResidentGraph:
    """Features and edges of one version.

    Attributes:
        x: fp32 `[N, F]`.
        rowptr: int64 `[N + 1]`: where each node's incoming edges begin.
        col: int64 `[E]`: sources of the edges, ordered by destination.
        removed: bool `[N]`.
        version: 1 as loaded, one more with each update.
    """

    x: Array
    rowptr: Array
    col: Array
    removed: Array
    version: int

    @property
    def nodes(self) -> int:
        """Number of nodes, the removed ones included."""
        return int(self.x.shape[0])

    @property
    def edges(self) -> int:
        """Number of edges."""
        return int(self.col.shape[0])

    def edge_index(self) -> Array:
        """The edges as int64 `[2, E]`: row 0 the sources, row 1 the destinations."""
        return np.stack([self.col, np.repeat(np.arange(self.nodes), np.diff(self.rowptr))])

    @classmethod
    def build(cls, x: Array, edge_index: Array, removed: Array, version: int) -> ResidentGraph:
        """Sort edges by destination; those of one node keep their order."""
        order = np.argsort(edge_index[1], kind="stable")
        rowptr = np.zeros(x.shape[0] + 1, np.int64)
        np.cumsum(np.bincount(edge_index[1], minlength=x.shape[0]), out=rowptr[1:])
        return cls(x, rowptr, edge_index[0][order], removed, version)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], features: int) -> ResidentGraph:
        """Make version 1 from the tensors of a file.

        Args:
            tensors: `x` fp32 `[N, features]` and `edge_index` int64 `[2, E]`.
            features: As configured.

        Returns:
            The graph.

        Raises:
            ModelConfigError: They are missing or wrong.
        """
        if set(tensors) != {"x", "edge_index"}:
            raise ModelConfigError(
                f"graph: tensors must be x and edge_index, got {', '.join(sorted(tensors))}"
            )
        x, edges = tensors["x"].numpy(), tensors["edge_index"].numpy()
        if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != features:
            raise ModelConfigError(
                f"graph: x must be fp32 [N, {features}], got {x.dtype} {list(x.shape)}"
            )
        if edges.dtype != np.int64 or edges.ndim != 2 or edges.shape[0] != 2:
            raise ModelConfigError(
                f"graph: edge_index must be int64 [2, E], got {edges.dtype} {list(edges.shape)}"
            )
        if edges.size and not 0 <= edges.min() <= edges.max() < x.shape[0]:
            raise ModelConfigError(f"graph: edge_index must lie in [0, {x.shape[0]})")
        return cls.build(x, edges, np.zeros(x.shape[0], bool), 1)

    def check_nodes(self, name: str, ids: Array, extra: int = 0) -> None:
        """Refuse ids that are no node, or a removed one.

        Args:
            name: Where they come from.
            ids: int64 of any shape.
            extra: Nodes beyond the graph's own that exist for this request.

        Raises:
            InvalidArgumentError: Names the first such id.
        """
        count = self.nodes + extra
        outside = (ids < 0) | (ids >= count)
        if outside.any():
            raise InvalidArgumentError(
                f"{name}: node ids must be in [0, {count}), got {ids[outside].reshape(-1)[0]}"
            )
        own = ids[ids < self.nodes]
        gone = self.removed[own]
        if gone.any():
            raise InvalidArgumentError(
                f"{name}: nodes must not be removed ones, got {own[gone][0]}"
            )

    def updated(self, update: GraphUpdate, max_nodes: int, max_edges: int) -> ResidentGraph:
        """The next version.

        Args:
            update: What changes.
            max_nodes: Nodes the graph may have.
            max_edges: Edges it may have.

        Returns:
            A new graph; this one stays as it is.

        Raises:
            InvalidArgumentError: The update names what does not exist.
            ResourceExhaustedError: The graph would be too large.
        """
        if self.nodes + len(update.add_features) > max_nodes:
            raise ResourceExhaustedError(f"update: graph must have at most {max_nodes} nodes")
        x = np.concatenate([self.x, update.add_features])
        removed = np.concatenate([self.removed, np.zeros(len(update.add_features), bool)])
        grown = ResidentGraph(x, self.rowptr, self.col, removed, self.version)
        for name, ids in (
            ("set_node_ids", update.set_ids),
            ("remove_node_ids", update.remove_nodes),
            ("remove_edges", update.remove_edges),
        ):
            grown.check_nodes(name, ids)
        x[update.set_ids] = update.set_features
        removed[update.remove_nodes] = True
        grown.check_nodes("add_edges", update.add_edges)
        edges = self.edge_index()
        edges = edges[:, ~_matched(edges, update.remove_edges, len(x))]
        edges = edges[:, ~removed[edges].any(axis=0)]
        if edges.shape[1] + update.add_edges.shape[1] > max_edges:
            raise ResourceExhaustedError(f"update: graph must have at most {max_edges} edges")
        edges = np.concatenate([edges, update.add_edges], axis=1)
        return ResidentGraph.build(x, edges, removed, self.version + 1)


def _matched(edges: Array, wanted: Array, nodes: int) -> Array:
    """Mark one edge for each wanted one, the first that is left."""
    marks = np.zeros(edges.shape[1], bool)
    if not wanted.shape[1]:
        return marks
    # Nodes are fewer than 2^31, so that a pair fits one number.
    have = edges[0] * nodes + edges[1]
    keys, counts = np.unique(wanted[0] * nodes + wanted[1], return_counts=True)
    order = np.argsort(have, kind="stable")
    first = np.searchsorted(have[order], keys)
    there = np.searchsorted(have[order], keys, side="right") - first
    if (there < counts).any():
        key = int(keys[there < counts][0])
        raise InvalidArgumentError(
            f"remove_edges: edges must exist, got ({key // nodes}, {key % nodes})"
        )
    for start, count in zip(first, counts, strict=True):
        marks[order[start : start + count]] = True
    return marks
