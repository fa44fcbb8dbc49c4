"""What all layers that are fused as a whole `forward` must fulfil, and how their input is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch_geometric.nn import MessagePassing

from edgeweave.pyg._arguments import read_edges
from edgeweave.pyg._eligibility import (
    autocast_is_on,
    devices_refusal,
    features_refusal,
    mode_refusal,
)
from edgeweave.pyg._propagate import runs_our_propagate
from edgeweave.pyg._rebind import comes_from
from edgeweave.pyg._report import record_fallback

__all__ = ["fell_back", "read_pair", "whole_layer_refusal"]

# What must be PyG's own for the layer, on the class and on the instance.
_METHODS = ("message", "aggregate", "update", "edge_update", "message_and_aggregate")
_HOOKS = tuple(
    f"_{what}_forward_{when}hooks"
    for what in ("propagate", "message", "aggregate", "edge_update", "message_and_aggregate")
    for when in ("pre_", "")
)


def whole_layer_refusal(layer: Any, homes: Mapping[type, str]) -> str | None:
    """Why this layer needs PyG's own code whatever the data, or None.

    Args:
        layer: The layer.
        homes: The module that PyG's own methods are written in, for each class that is known.
    """
    cls = type(layer)
    home = homes.get(cls)
    if home is None:
        return "it is a subclass"
    state = layer.__dict__
    if any(state[name] for name in _HOOKS if name in state):
        return "a message-passing hook is registered"
    if any(name in state for name in (*_METHODS, "propagate", "edge_updater")):
        return "a method is set on the layer"
    for name in _METHODS:
        found = getattr(cls, name)
        if not comes_from(found, home) and found is not getattr(MessagePassing, name):
            return f"{name} was replaced on the class"
    if not runs_our_propagate(layer) or not _is_generated(cls.edge_updater, cls):
        return "propagate or edge_updater is not the generated one"
    if layer.explain or layer.decomposed_layers > 1:
        return "explain or decomposed_layers is on"
    if layer.node_dim not in (0, -2):
        return "node_dim is not that of rows"
    if autocast_is_on():
        return "autocast is on"
    return mode_refusal()


def _is_generated(function: Any, cls: Any) -> bool:
    if function is MessagePassing.edge_updater:
        return True
    return str(getattr(function, "__module__", "")).startswith(f"{cls.__module__}_{cls.__name__}")


def read_pair(
    layer: Any, x: Any, edge_index: Any, size: Any
) -> tuple[Tensor, Tensor, Tensor] | str:
    """(features of the sources, features of the destinations, edges `[2, E]`), or why not.

    Args:
        layer: The layer.
        x: `[N, F]`, or a pair of such for the two sides.
        edge_index: What the layer was given as edges.
        size: What it was given as size.
    """
    pair = x if type(x) in (tuple, list) else (x, x)
    if len(pair) != 2:
        return "x is not a pair"
    for part in pair:
        if part is None:
            return "x has no destinations"
        reason = features_refusal(part, "x")
        if reason is not None:
            return reason
        if part.dim() != 2:
            return "x is not [N, F]"
    if pair[0].dtype is not pair[1].dtype:
        return "the two parts of x differ in dtype"
    read = read_edges(layer, edge_index, size)
    if isinstance(read, str):
        return read
    if type(edge_index) is not Tensor:
        return "edge_index is an EdgeIndex"
    edges, rows, cols = read
    reason = devices_refusal(pair[0], pair[1], edges)
    if reason is not None:
        return reason
    forward = layer.flow == "source_to_target"
    if not forward and pair[0].size(0) != pair[1].size(0):
        return "x is a pair of different lengths and flow='target_to_source'"
    counts = (pair[0].size(0), pair[1].size(0))
    if rows not in (None, counts[0]) or cols not in (None, counts[1]):
        return "size does not match x"
    return pair[0], pair[1], edges


def fell_back(layer: Any, reason: str) -> Any:
    """Counts a call that PyG's own code runs, and says so to the wrapper."""
    record_fallback(type(layer).__name__, reason)
    return NotImplemented
