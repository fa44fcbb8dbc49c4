"""Updates and descriptions of resident graphs, between messages and arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._errors import InvalidArgumentError
from ._messages import message_class
from ._resident_graph import GraphUpdate, ResidentGraph

__all__ = ["describe", "read_update"]


def read_update(message: Any, features: int) -> GraphUpdate:
    """Read an update.

    Args:
        message: A `GraphUpdateRequest`.
        features: Of a node of the graph.

    Returns:
        The update.

    Raises:
        InvalidArgumentError: A field is not whole, or two do not fit each other.
    """

    def ids(name: str) -> np.ndarray[Any, Any]:
        return _from_bytes(name, getattr(message, name), "<i8", 8).reshape(-1)

    def pairs(name: str) -> np.ndarray[Any, Any]:
        return _from_bytes(name, getattr(message, name), "<i8", 16).reshape(2, -1)

    def rows(name: str) -> np.ndarray[Any, Any]:
        values = _from_bytes(name, getattr(message, name), "<f4", 4 * features)
        return values.reshape(-1, features)

    update = GraphUpdate(
        add_features=rows("add_node_features"),
        set_ids=ids("set_node_ids"),
        set_features=rows("set_node_features"),
        remove_nodes=ids("remove_node_ids"),
        remove_edges=pairs("remove_edges"),
        add_edges=pairs("add_edges"),
    )
    if len(update.set_ids) != len(update.set_features):
        raise InvalidArgumentError(
            f"update: set_node_features must have a row for each of {len(update.set_ids)} ids, "
            f"got {len(update.set_features)}"
        )
    return update


def _from_bytes(name: str, data: bytes, dtype: str, unit: int) -> np.ndarray[Any, Any]:
    if len(data) % unit:
        raise InvalidArgumentError(
            f"update: {name} must be a multiple of {unit} bytes, got {len(data)}"
        )
    return np.frombuffer(data, dtype)


def describe(name: str, version: str, graph: ResidentGraph) -> Any:
    """A graph's `GraphDescription`.

    Args:
        name: The model.
        version: Its version.
        graph: Its graph.

    Returns:
        The message.
    """
    return message_class("edgeweave.GraphDescription")(
        model_name=name,
        model_version=version,
        graph_version=graph.version,
        nodes=graph.nodes,
        edges=graph.edges,
        removed_nodes=int(graph.removed.sum()),
        features=int(graph.x.shape[1]),
    )
