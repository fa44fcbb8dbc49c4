"""Reading the arguments of `propagate`, as PyG's `_check_input` and `collect` do.

Nothing here raises: what is not understood, or is wrong, goes to PyG's own code, which knows the
layers better and has its own errors. So each function returns a reason in words (`str`) for that,
without sizes or values: the report counts by reason, and must not grow with the data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from edgeweave._plan import Plan, plan_for_edges
from edgeweave._plan._device import has_kernels
from edgeweave.pyg._eligibility import INDEX_DTYPES, features_refusal, leave_error_to_stock
from edgeweave.pyg._layers import MessageForm


def read_edges(layer: Any, edge_index: Any, size: Any) -> tuple[Tensor, Any, Any] | str:
    """Return the edges as a plain `[2, E]` tensor, and the sizes that are known beforehand.

    Args:
        layer: The layer.
        edge_index: First argument of `propagate`.
        size: The `size` argument of `propagate`.

    Returns:
        (edges, number of nodes of row 0 or None, number of nodes of row 1 or None), or why not.
    """
    if type(edge_index) is EdgeIndex:
        size = (edge_index.num_rows, edge_index.num_cols)
        if layer.SUPPORTS_FUSED_EDGE_INDEX and edge_index.is_sorted_by_col:
            # Here PyG calls `message_and_aggregate`, which takes sizes from the edges alone.
            if None in size:
                return "edge_index is a sorted EdgeIndex without sizes"
            state = layer.__dict__
            if (
                state["_message_and_aggregate_forward_pre_hooks"]
                or state["_message_and_aggregate_forward_hooks"]
            ):
                return "a message-passing hook is registered"
        edge_index = edge_index.as_tensor()
    elif type(edge_index) is not Tensor:
        return f"edge_index is a {type(edge_index).__name__}"
    if edge_index.layout is not torch.strided:
        return "edge_index is a sparse matrix: PyG calls utils.spmm"
    if edge_index.dtype not in INDEX_DTYPES:
        return f"edge_index has dtype {edge_index.dtype}"
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        return "edge_index is not [2, E]"
    if not has_kernels(edge_index):
        return f"edge_index is on {edge_index.device.type}"
    if size is None:
        return edge_index, None, None
    if type(size) not in (tuple, list) or len(size) != 2:
        return "size is not a pair"
    return edge_index, size[0], size[1]


def node_axis(layer: Any, x: Tensor) -> int:
    """Return `layer.node_dim` counted from the front, -1 if `x` has no such dimension.

    Args:
        layer: The layer.
        x: Node features.

    Returns:
        The dimension that counts nodes.
    """
    axis: int = layer.node_dim
    if axis < 0:
        axis += x.dim()
    return axis if 0 <= axis < x.dim() else -1


def read_features(
    form: MessageForm, layer: Any, kwargs: dict[str, Any], rows: Any, cols: Any
) -> tuple[Tensor, int, int] | str:
    """Return the features that messages are made of, and the number of nodes on each side.

    Args:
        form: How the layer computes messages.
        layer: The layer.
        kwargs: Keyword arguments of `propagate`.
        rows: Number of nodes that row 0 of the edges counts, None if not known yet.
        cols: The same for row 1.

    Returns:
        (features, rows, cols), or why not.
    """
    name = form.features
    features: Any = kwargs.get(name)
    expected = 1 + ("size" in kwargs) + (form.weight is not None and form.weight in kwargs)
    if len(kwargs) != expected:
        return "propagate was given other arguments than the layer's own"
    forward = layer.flow == "source_to_target"
    pair = type(features) in (tuple, list)
    if pair and len(features) != 2:
        return f"{name} is not a pair"
    first: Any
    second: Any
    first, second = features if pair else (features, None)
    reason = features_refusal(first, name)
    if reason is not None:
        return reason
    axis = node_axis(layer, first)
    found = first.size(axis)
    matches = True
    if pair or forward:
        matches = rows is None or rows == found
        rows = found
    if second is first or not (pair or forward):
        matches = matches and (cols is None or cols == found)
        cols = found
    elif isinstance(second, Tensor):
        other = second.size(node_axis(layer, second))
        matches = matches and (cols is None or cols == other)
        cols = other
    if rows is None:
        rows = cols
    elif cols is None:
        cols = rows
    if not matches or type(rows) is not int or type(cols) is not int:
        return f"size does not match {name}"
    if pair and not forward and rows != cols:
        # PyG's generated code gathers the first of the pair by the second row of the edges, which
        # is what a pair with flow='target_to_source' means only if both sides count the same.
        return f"{name} is a pair of different lengths and flow='target_to_source'"
    if axis < 0 or first.dim() > 3:
        return f"{name} has more than 3 dimensions, or none that is node_dim"
    return first, rows, cols


def weight_refusal(form: MessageForm, weight: Any, x: Tensor, axis: int, edges: int) -> str | None:
    """Return why PyG's product of weights and features is not one that `mm` computes, or None.

    Args:
        form: How the layer computes messages.
        weight: The weight argument of `propagate`.
        x: Node features, at most 3 dimensions.
        axis: Dimension of `x` that counts nodes.
        edges: Number of edges.

    Returns:
        The reason in words, or None.
    """
    reason = features_refusal(weight, str(form.weight))
    if reason is not None:
        return reason
    if form.per_head:
        if axis != 0 or x.dim() != 3 or weight.shape != (edges, x.size(1)):
            return f"{form.weight} is not [E, H]"
    elif weight.numel() != edges or axis != x.dim() - 2:
        # `weight.view(-1, 1) * x_j` lines the edges up with the second to last dimension.
        return f"the shape of {form.weight} does not go with {form.features}"
    return None


def find_plan(edges: Tensor, sources: int, destinations: int, flip: bool) -> Plan | None:
    """Return the plan of a layer's edges, None if they are not such.

    PyG's own code raises its own error about those; see the tests. On CUDA it is raised here.

    Args:
        edges: `[2, E]`.
        sources: Number of nodes that messages come from.
        destinations: Number of nodes that they go to.
        flip: Whether row 1 of the edges holds the sources.
    """
    try:
        return plan_for_edges(edges, sources, destinations, flip=flip)
    except (IndexError, ValueError, TypeError):
        if leave_error_to_stock(edges):
            return None
        raise


def own_copy(x: Tensor) -> Tensor:
    """Return features that backward may need, though somebody edits them in place after the layer.

    For layers whose messages are copies in PyG's code.

    Args:
        x: Node features.
    """
    return x.clone() if torch.is_grad_enabled() else x
