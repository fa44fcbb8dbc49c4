"""The part of a resident graph that some nodes' predictions depend on.

With a fan-out, each node keeps the incoming edges with the smallest hashes of (seed, source,
destination): one fixed sparser graph per seed. So a node's sampled neighbours depend on nothing but
the seed, and requests may share a subgraph without changing each other's answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ._errors import ResourceExhaustedError
from ._resident_graph import ResidentGraph

__all__ = ["NewNodes", "Subgraph", "extract"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class NewNodes:
    """Nodes and edges that exist for one request only.

    Attributes:
        x: fp32 `[m, F]`; the nodes are numbered from the resident count on.
        edges: int64 `[2, k]`.
    """

    x: Array
    edges: Array


@dataclass(frozen=True)
class Subgraph:
    """A part of a graph with nodes numbered anew.

    Attributes:
        x: fp32 `[n, F]`.
        edge_index: int64 `[2, e]` in the new numbers.
        ids: int64 `[n]` old numbers, rising.
    """

    x: Array
    edge_index: Array
    ids: Array

    def rows(self, ids: Array) -> Array:
        """New numbers of nodes that are in it."""
        return np.searchsorted(self.ids, ids)


def extract(
    graph: ResidentGraph,
    seeds: Array,
    hops: int,
    *,
    fan_out: int = 0,
    seed: int = 0,
    new: NewNodes | None = None,
    max_nodes: int,
    max_edges: int,
) -> Subgraph:
    """Take the incoming edges of all nodes up to `hops - 1` steps away.

    Args:
        graph: The resident graph.
        seeds: int64 node ids.
        hops: How many steps a prediction looks back.
        fan_out: Incoming edges that a node keeps; 0 for all.
        seed: Chooses them.
        new: Nodes and edges of this request.
        max_nodes: Most nodes of the result.
        max_edges: Most edges that may be looked at.

    Returns:
        The subgraph.

    Raises:
        ResourceExhaustedError: It is too large.
    """
    frontier = np.unique(seeds)
    seen = frontier
    sources: list[Array] = []
    targets: list[Array] = []
    looked_at = 0
    for _ in range(hops):
        if not frontier.size:
            break
        source, target = _incoming(graph, frontier, new, max_edges - looked_at)
        looked_at += len(source)
        if fan_out:
            source, target = _sample(source, target, fan_out, seed)
        sources.append(source)
        targets.append(target)
        frontier = np.setdiff1d(source, seen)
        seen = np.union1d(seen, frontier)
        if len(seen) > max_nodes:
            raise ResourceExhaustedError(
                f"request: nodes within reach must be at most {max_nodes}, got {len(seen)}; "
                "ask for fewer nodes or pass fan_out"
            )
    empty = np.empty(0, np.int64)
    source = np.concatenate([empty, *sources])
    target = np.concatenate([empty, *targets])
    edges = np.stack([np.searchsorted(seen, source), np.searchsorted(seen, target)])
    return Subgraph(_features(graph, new, seen), edges, seen)


def _features(graph: ResidentGraph, new: NewNodes | None, ids: Array) -> Array:
    if new is None:
        return graph.x[ids]
    own = ids < graph.nodes
    return np.concatenate([graph.x[ids[own]], new.x[ids[~own] - graph.nodes]])


def _incoming(
    graph: ResidentGraph, nodes: Array, new: NewNodes | None, room: int
) -> tuple[Array, Array]:
    """All edges into `nodes`; their number is known before they are gathered."""
    own = nodes[nodes < graph.nodes]
    starts = graph.rowptr[own]
    degrees = graph.rowptr[own + 1] - starts
    total = int(degrees.sum())
    if total > room:
        raise ResourceExhaustedError(
            f"request: edges within reach must be at most the limit, got {total} where {room} "
            "are left; ask for fewer nodes"
        )
    firsts = np.cumsum(degrees) - degrees
    positions = np.repeat(starts - firsts, degrees) + np.arange(total)
    source, target = graph.col[positions], np.repeat(own, degrees)
    if new is not None:
        into = np.isin(new.edges[1], nodes)
        source = np.concatenate([source, new.edges[0][into]])
        target = np.concatenate([target, new.edges[1][into]])
    return source, target


def _sample(source: Array, target: Array, fan_out: int, seed: int) -> tuple[Array, Array]:
    """Keep `fan_out` incoming edges of each node, those with the smallest hashes."""
    key = _mix(
        _mix(np.uint64(seed % (1 << 64)) ^ source.astype(np.uint64)) ^ target.astype(np.uint64)
    )
    order = np.lexsort((key, target))
    sorted_target = target[order]
    starts = np.flatnonzero(np.r_[True, sorted_target[1:] != sorted_target[:-1]])
    lengths = np.diff(np.r_[starts, len(sorted_target)])
    rank = np.arange(len(sorted_target)) - np.repeat(starts, lengths)
    kept = order[rank < fan_out] if len(order) else order
    kept.sort()
    return source[kept], target[kept]


def _mix(value: Any) -> Any:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every bit depends on all."""
    with np.errstate(over="ignore"):
        value = value + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))
