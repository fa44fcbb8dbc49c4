"""`MessagePassing.propagate` without the `[E, F]` tensor of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from edgeweave._plan import Plan
from edgeweave._plan._edge_multi import plan_edge_multi
from edgeweave.pyg._aggregations import aggregate, edge_reductions, multi_names
from edgeweave.pyg._arguments import find_plan, node_axis, read_edges, read_features, weight_refusal
from edgeweave.pyg._edge_networks import fused_network
from edgeweave.pyg._eligibility import devices_refusal, may_trace, mode_refusal
from edgeweave.pyg._layers import REDUCE_OF_AGGREGATION, LayerRule, MessageForm, site_of
from edgeweave.pyg._norm import find_norm
from edgeweave.pyg._report import record_fallback, record_fused
from edgeweave.sparse._mm import mm, mm_plan

propagate_wrappers: dict[Any, Any] = {}
"""Original of each wrapper of `propagate` that is installed; functions compare by identity."""

_is_compiling = torch.compiler.is_compiling
_has_any_global_hook: Callable[[], bool] = torch.nn.modules.module._has_any_global_hook


def fused_propagate(
    rule: LayerRule, layer: Any, edge_index: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run one `propagate` call on edgeweave's kernels if it is covered.

    Args:
        rule: Decision about the class whose `propagate` was called.
        layer: The layer.
        edge_index: First argument of `propagate`.
        args: Further positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The output of `propagate`, or `NotImplemented` if PyG's own code must run; the reason is
        then in the report.
    """
    if _is_compiling():
        return _traced_propagate(rule, layer, edge_index, args, kwargs)
    reason = layer_refusal(rule, layer)
    if reason is None:
        reason = "positional arguments to propagate" if args else mode_refusal()
    if reason is None:
        form: Any = rule.form
        if form is None:
            reduce = aggregation_of(layer)
            result = fused_network(rule.network, layer, edge_index, kwargs, reduce)
        else:
            result = _run(form, layer, edge_index, kwargs)
        if not isinstance(result, str):
            record_fused(rule.site)
            return result
        reason = result
    site = rule.site if type(layer) is rule.layer else site_of(type(layer))
    record_fallback(site, reason)
    return NotImplemented


def _traced_propagate(
    rule: LayerRule, layer: Any, edge_index: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Do the same for `torch.compile`: no plan, no report, and only what `mm` takes by itself."""
    if args or not may_trace() or layer_refusal(rule, layer) is not None or rule.form is None:
        return NotImplemented
    form: Any = rule.form
    read = _read(form, layer, edge_index, kwargs)
    if isinstance(read, str):
        return NotImplemented
    edges, rows, cols, x, weight, reduce, axis = read
    if rows != cols or axis != 0:
        return NotImplemented
    return mm(edges, x, reduce, weight, flow=layer.flow)


def runs_our_propagate(layer: Any) -> bool:
    """Return whether `layer.propagate` is the wrapper made for exactly the layer's class."""
    return (
        type(layer).__dict__.get("propagate") in propagate_wrappers
        and "propagate" not in layer.__dict__
    )


def layer_refusal(rule: LayerRule, layer: Any) -> str | None:
    """Return why this layer needs PyG's own code, or None."""
    if type(layer) is not rule.layer:
        # PyG gives each class it builds its own `propagate`, so one that arrives here through
        # inheritance comes from `super().propagate()` or from a class PyG has no template for.
        return "propagate is overridden"
    if rule.reason is not None:
        return rule.reason
    state = layer.__dict__
    if (
        state["_propagate_forward_pre_hooks"]
        or state["_propagate_forward_hooks"]
        or state["_message_forward_pre_hooks"]
        or state["_message_forward_hooks"]
        or state["_aggregate_forward_pre_hooks"]
        or state["_aggregate_forward_hooks"]
    ):
        return "a message-passing hook is registered"
    if "message" in state or "aggregate" in state or "update" in state:
        return "message, aggregate or update is set on the layer"
    if not rule.is_current():
        return "message, aggregate or update was replaced on the class"
    return None


def _run(form: MessageForm, layer: Any, edge_index: Any, kwargs: dict[str, Any]) -> Tensor | str:
    """Return the output of `propagate`, or why it cannot be computed here."""
    several = None
    plain = form.weight is None or (form.weight_optional and kwargs.get(form.weight, 0) is None)
    if plain and aggregation_of(layer) is None:
        several = edge_reductions(layer.__dict__["_modules"].get("aggr_module"))
    read = _read(form, layer, edge_index, kwargs, "sum" if several else None)
    if isinstance(read, str):
        return read
    edges, rows, cols, x, weight, reduce, axis = read
    if several is not None:
        return _reduce_several(edges, rows, cols, x, axis, layer.flow, *several)
    if axis != 0:
        x = x.movedim(axis, 0)
    out = _multiply(edges, rows, cols, x, weight, reduce, layer.flow)
    return out if axis == 0 or isinstance(out, str) else out.movedim(0, axis)


def _reduce_several(
    edges: Tensor,
    rows: int,
    cols: int,
    x: Tensor,
    axis: int,
    flow: str,
    names: list[str],
    combine: Callable[[list[Tensor]], Tensor],
) -> Tensor | str:
    """Look the plan up and run several reductions of the same messages in one pass."""
    if x.dim() != 2 or axis != 0:
        return "several aggregations of features that are not [N, F]"
    plan = _plan_of(edges, rows, cols, flow)
    if plan is None:
        return "edge_index was rejected"
    asked, correction = multi_names(names)
    made = plan_edge_multi(plan, x.contiguous(), asked, correction)
    return combine(aggregate(dict(zip(asked, made, strict=True)), names))


def _plan_of(edges: Tensor, rows: int, cols: int, flow: str) -> Plan | None:
    if flow == "source_to_target":
        return find_plan(edges, rows, cols, False)
    return find_plan(edges, cols, rows, True)


def _read(
    form: MessageForm, layer: Any, edge_index: Any, kwargs: dict[str, Any], given: str | None = None
) -> tuple[Tensor, int, int, Tensor, Tensor | None, str, int] | str:
    """Return what to compute, or why it cannot be computed here.

    Args:
        form: How the layer computes messages.
        layer: The layer.
        edge_index: First argument of `propagate`.
        kwargs: Its keyword arguments.
        given: The reduction, if it is not to be read from the layer.

    Returns:
        (edges `[2, E]`, nodes of row 0, nodes of row 1, features, weights, reduction, dimension of
        the features that counts nodes).
    """
    reduce = given or aggregation_of(layer)
    if reduce is None:
        # A list or a module says how long it is or what it holds: its class is enough.
        aggr = repr(layer.aggr) if type(layer.aggr) is str else type(layer.aggr).__name__
        return f"aggr={aggr} is not a plain sum, mean, max or min"
    read = read_edges(layer, edge_index, kwargs.get("size"))
    if isinstance(read, str):
        return read
    edges, rows, cols = read
    sides = read_features(form, layer, kwargs, rows, cols)
    if isinstance(sides, str):
        return sides
    x, rows, cols = sides
    axis = node_axis(layer, x)
    weight: Any = None
    if form.weight is not None:
        weight = kwargs.get(form.weight, NotImplemented)
        if weight is not None or not form.weight_optional:
            reason = weight_refusal(form, weight, x, axis, edges.size(1))
            if reason is not None:
                return reason
            if not form.per_head and weight.dim() != 1:
                weight = weight.view(-1)
    reason = devices_refusal(x, edges, weight)
    if reason is not None:
        return reason
    return edges, rows, cols, x, weight, reduce, axis


def _multiply(
    edges: Tensor,
    rows: int,
    cols: int,
    x: Tensor,
    weight: Tensor | None,
    reduce: str,
    flow: str,
) -> Tensor | str:
    """Look the plan up and call the kernel; the arguments have been checked."""
    scale: Tensor | None = None
    norm = None if weight is None else find_norm(edges, weight)
    if (
        norm is not None
        and weight is not None
        and weight.dtype is x.dtype
        and norm.scale.size(0) == rows == cols
        and norm.flow == flow
        and (reduce == "sum" or reduce == "mean")
    ):
        scale, weight = norm.scale, None
    else:
        norm = None
    plan = norm.plan(edges) if norm is not None else _plan_of(edges, rows, cols, flow)
    if plan is None:
        return "edge_index was rejected"
    out: Tensor = mm_plan(
        plan, x, reduce, weight=weight, row_scale=scale, col_scale=scale, ties="even"
    )
    return out


def aggregation_of(layer: Any) -> str | None:
    """Return the reduction of the layer's aggregation module, None if `mm` has no such one."""
    aggregation = layer.__dict__["_modules"].get("aggr_module")
    reduce = REDUCE_OF_AGGREGATION.get(type(aggregation))
    if reduce is None:
        return None
    state = aggregation.__dict__
    # Hooks on the module (torch_geometric.nn.summary sets some) expect it to be called.
    if (
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or _has_any_global_hook()
        or "forward" in state
        or "reduce" in state
    ):
        return None
    return reduce
