"""Putting the wrappers into PyG and taking them out again.

Four places are patched: functions that PyG's modules import by name (`scatter`, `spmm`,
`gcn_norm`), `Aggregation.reduce`, the `propagate` that PyG generates for each layer class from a
template, and the method that generates it, so that classes first built while accelerated are
covered. Instances are never touched, nor is what somebody else has put in PyG's place: it stays in
effect while accelerated and after.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_geometric.utils
from torch_geometric.nn import (
    FastRGCNConv,
    GATConv,
    GATv2Conv,
    MessagePassing,
    PNAConv,
    RGCNConv,
    TransformerConv,
)
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.aggr.fused import FusedAggregation
from torch_geometric.nn.conv import gcn_conv
from torch_geometric.nn.dense.linear import Linear

from edgeweave.pyg import _functions
from edgeweave.pyg._aggregations import fused_aggregations
from edgeweave.pyg._attention import fused_gat, fused_gatv2, fused_transformer
from edgeweave.pyg._fused_layers import FORWARDS, fused_linear
from edgeweave.pyg._layers import rule_for, site_of
from edgeweave.pyg._norm import cached_gcn_norm
from edgeweave.pyg._pna import fused_pna
from edgeweave.pyg._propagate import fused_propagate
from edgeweave.pyg._propagate import propagate_wrappers as _propagates
from edgeweave.pyg._rebind import comes_from, rebind, replace_in_modules
from edgeweave.pyg._report import record_fallback
from edgeweave.pyg._rgcn import fused_rgcn


class _Switch(threading.local):
    """Whether wrappers do anything; some may outlive `uninstall` in closures and instances."""

    installed = False  # of the class: for all threads
    opted_out = 0  # of this thread: inside how many layers that want PyG's own code

    @property
    def on(self) -> bool:
        return _Switch.installed and not self.opted_out

    def leave_out(self, original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run PyG's own method of a layer, and all that it calls, if the layer asks for it.

        Returns:
            What the method returns, or `NotImplemented` if the layer does not ask.
        """
        asked = layer.__dict__.get("edgeweave", True) is False
        if not asked and getattr(type(layer), "edgeweave", True) is not False:
            return NotImplemented
        record_fallback(site_of(type(layer)), "edgeweave = False is set on the layer or its class")
        self.opted_out += 1
        try:
            return original(layer, *args, **kwargs)
        finally:
            self.opted_out -= 1

    def run_layer(self, fused: Any, original: Any, layer: Any, *args: Any) -> Any:
        """Run the `forward` of a layer: the fused one where it is wanted and covers the call."""
        if self.on:
            out = self.leave_out(original, layer, *args)
            if out is not NotImplemented:
                return out
            out = fused(layer, *args)
            if out is not NotImplemented:
                return out
        return original(layer, *args)


_switch = _Switch()
_lock = threading.RLock()
_CLASS_ATTRIBUTES = ("propagate", "_jinja_propagate", "_orig_propagate")


def _reset_after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the parent's may be held by a thread that does not exist here


os.register_at_fork(after_in_child=_reset_after_fork)


def _wrap_scatter(original: Any) -> Any:
    switch, fused = _switch, _functions.fused_scatter

    def wrapper(src, index, dim=0, dim_size=None, reduce="sum"):  # type: ignore[no-untyped-def]
        if switch.on:
            out = fused(src, index, dim, dim_size, reduce)
            if out is not NotImplemented:
                return out
        return original(src, index, dim, dim_size, reduce)

    return rebind(wrapper, original)


def _wrap_spmm(original: Any) -> Any:
    switch, fused = _switch, _functions.fused_spmm

    def wrapper(src, other, reduce="sum"):  # type: ignore[no-untyped-def]
        if switch.on:
            out = fused(src, other, reduce)
            if out is not NotImplemented:
                return out
        return original(src, other, reduce)

    return rebind(wrapper, original)


def _wrap_gcn_norm(original: Any) -> Any:
    switch, cached = _switch, cached_gcn_norm

    def wrapper(  # type: ignore[no-untyped-def]
        edge_index,
        edge_weight=None,
        num_nodes=None,
        improved=False,
        add_self_loops=True,
        flow="source_to_target",
        dtype=None,
    ):
        options = (edge_weight, num_nodes, improved, add_self_loops, flow, dtype)
        if switch.on:
            out = cached(edge_index, *options)
            if out is not NotImplemented:
                return out
        return original(edge_index, *options)

    return rebind(wrapper, original)


def _wrap_reduce(original: Any) -> Any:
    switch, fused = _switch, _functions.fused_reduce

    def wrapper(  # type: ignore[no-untyped-def]
        self, x, index=None, ptr=None, dim_size=None, dim=-2, reduce="sum"
    ):
        if switch.on:
            out = fused(self, x, index, ptr, dim_size, dim, reduce)
            if out is not NotImplemented:
                return out
        return original(self, x, index, ptr, dim_size, dim, reduce)

    return rebind(wrapper, original)


def _wrap_gather(original: Any) -> Any:
    switch, fused = _switch, _functions.fused_gather

    def wrapper(self, src, index):  # type: ignore[no-untyped-def]
        if switch.on:
            out = fused(self, src, index)
            if out is not NotImplemented:
                return out
        return original(self, src, index)

    return rebind(wrapper, original)


def _wrap_templates(original: Any) -> Any:
    after = _adopt

    def wrapper(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        out = original(self, *args, **kwargs)
        after(type(self))
        return out

    return rebind(wrapper, original)


def _wrap_collect(original: Any) -> Any:
    """Wrap the part of PyG's generic `propagate` that its templates do not have, to count it."""
    switch, record = _switch, _record_generic

    def wrapper(self, args, edge_index, size, kwargs):  # type: ignore[no-untyped-def]
        if switch.on:
            record(self, args)
        return original(self, args, edge_index, size, kwargs)

    return rebind(wrapper, original)


def _record_generic(layer: Any, args: Any) -> None:
    """Count a call that PyG's generic `propagate` handles, past the wrapped one."""
    if torch.compiler.is_compiling() or args is layer._edge_user_args:
        return
    cls = type(layer)
    if layer.explain:
        reason = "explain is on"
    elif layer.decomposed_layers > 1:
        reason = "decomposed_layers > 1 (counted once per chunk)"
    elif "propagate" in layer.__dict__:
        reason = "propagate is set on the layer"
    elif cls.propagate is MessagePassing.propagate:
        reason = "PyG could not generate a propagate for this class"
    elif cls.propagate not in _propagates:
        reason = "propagate is overridden"
    else:
        return  # Counted by the wrapper that called it.
    record_fallback(site_of(cls), reason)


def _wrap_propagate(cls: type, original: Any) -> Any:
    switch, fused, rule = _switch, fused_propagate, rule_for(cls)

    def wrapper(self, edge_index, *args, **kwargs):  # type: ignore[no-untyped-def]
        if switch.on:
            out = switch.leave_out(original, self, edge_index, *args, **kwargs)
            if out is not NotImplemented:
                return out
            out = fused(rule, self, edge_index, args, kwargs)
            if out is not NotImplemented:
                return out
        return original(self, edge_index, *args, **kwargs)

    return rebind(wrapper, original)


def _wrap_forward(by_rule: Any, original: Any) -> Any:
    """Wrap the `forward` of a layer whose fused form asks for the decision about its class."""
    switch, rule_of = _switch, rule_for
    rules: dict[type, Any] = {}

    def fused(layer: Any, x: Any, edge_index: Any, size: Any) -> Any:
        cls = type(layer)
        rule = rules.get(cls)
        if rule is None:
            rule = rules[cls] = rule_of(cls)
        return by_rule(rule, layer, x, edge_index, size)

    def wrapper(self, x, edge_index, size=None):  # type: ignore[no-untyped-def]
        return switch.run_layer(fused, original, self, x, edge_index, size)

    return rebind(wrapper, original)


def _wrap_gat(original: Any) -> Any:
    switch, fused = _switch, fused_gat

    def wrapper(  # type: ignore[no-untyped-def]
        self, x, edge_index, edge_attr=None, size=None, return_attention_weights=None
    ):
        return switch.run_layer(
            fused, original, self, x, edge_index, edge_attr, size, return_attention_weights
        )

    return rebind(wrapper, original)


def _wrap_attention(fused: Any, original: Any) -> Any:
    """Wrap the `forward` of an attention layer that takes no size."""
    switch = _switch

    def wrapper(  # type: ignore[no-untyped-def]
        self, x, edge_index, edge_attr=None, return_attention_weights=None
    ):
        return switch.run_layer(
            fused, original, self, x, edge_index, edge_attr, return_attention_weights
        )

    return rebind(wrapper, original)


def _wrap_pna(original: Any) -> Any:
    switch, fused = _switch, fused_pna

    def wrapper(self, x, edge_index, edge_attr=None):  # type: ignore[no-untyped-def]
        return switch.run_layer(fused, original, self, x, edge_index, edge_attr)

    return rebind(wrapper, original)


def _wrap_rgcn(original: Any) -> Any:
    switch, fused = _switch, fused_rgcn

    def wrapper(self, x, edge_index, edge_type=None):  # type: ignore[no-untyped-def]
        return switch.run_layer(fused, original, self, x, edge_index, edge_type)

    return rebind(wrapper, original)


def _wrap_aggregations(original: Any) -> Any:
    switch, fused = _switch, fused_aggregations

    def wrapper(  # type: ignore[no-untyped-def]
        self, x, index=None, ptr=None, dim_size=None, dim=-2
    ):
        if switch.on:
            out = fused(self, x, index, ptr, dim_size, dim)
            if out is not NotImplemented:
                return out
        return original(self, x, index, ptr, dim_size, dim)

    return rebind(wrapper, original)


def _wrap_softmax(original: Any) -> Any:
    switch, fused = _switch, _functions.fused_softmax

    def wrapper(src, index=None, ptr=None, num_nodes=None, dim=0):  # type: ignore[no-untyped-def]
        if switch.on:
            out = fused(src, index, ptr, num_nodes, dim)
            if out is not NotImplemented:
                return out
        return original(src, index, ptr, num_nodes, dim)

    return rebind(wrapper, original)


def _wrap_linear(original: Any) -> Any:
    switch, fused = _switch, fused_linear

    def wrapper(self, x):  # type: ignore[no-untyped-def]
        if switch.on:
            out = fused(self, x)
            if out is not NotImplemented:
                return out
        return original(self, x)

    return rebind(wrapper, original)


def _layer_classes() -> Iterator[type]:
    """Yield every loaded subclass of `MessagePassing`, once."""
    seen: set[type] = set()
    todo = list(MessagePassing.__subclasses__())
    while todo:
        cls = todo.pop()
        if cls not in seen:
            seen.add(cls)
            todo.extend(cls.__subclasses__())
            yield cls


def _adopt(cls: Any) -> None:
    """Wrap the `propagate` that PyG generated for a class, if it is not wrapped yet."""
    with _lock:
        if not _Switch.installed:
            return
        generated = cls.__dict__.get("_jinja_propagate")
        # PyG stores whatever `propagate` a class has under this name if it could not generate one;
        # its own test for a generated one is the module name.
        prefix = f"{cls.__module__}_{cls.__name__}"
        if (
            generated is not None
            and generated not in _propagates
            and generated.__module__.startswith(prefix)
            and cls.__dict__.get("propagate") is generated
        ):
            wrapper = _wrap_propagate(cls, generated)
            _propagates[wrapper] = generated
            cls._jinja_propagate = wrapper
            cls.propagate = wrapper
        # A class derived from a wrapped one took the wrapper for PyG's generic `propagate`.
        generic = cls.__dict__.get("_orig_propagate")
        if generic in _propagates:
            cls._orig_propagate = _propagates[generic]


def _release(cls: Any) -> None:
    """Put the originals of a class back."""
    for name in _CLASS_ATTRIBUTES:
        value = cls.__dict__.get(name)
        if value in _propagates:
            setattr(cls, name, _propagates[value])


# (module or class, name, module that PyG's own is written in, wrapper maker)
_FUNCTIONS: tuple[tuple[Any, str, str, Callable[[Any], Any]], ...] = (
    (torch_geometric.utils, "scatter", "torch_geometric.utils._scatter", _wrap_scatter),
    (torch_geometric.utils, "spmm", "torch_geometric.utils._spmm", _wrap_spmm),
    (torch_geometric.utils, "softmax", "torch_geometric.utils._softmax", _wrap_softmax),
    (gcn_conv, "gcn_norm", gcn_conv.__name__, _wrap_gcn_norm),
)
_METHODS: tuple[tuple[Any, str, str, Callable[[Any], Any]], ...] = (
    (Aggregation, "reduce", Aggregation.__module__, _wrap_reduce),
    (MessagePassing, "_index_select", MessagePassing.__module__, _wrap_gather),
    (MessagePassing, "_set_jittable_templates", MessagePassing.__module__, _wrap_templates),
    (MessagePassing, "_collect", MessagePassing.__module__, _wrap_collect),
    (Linear, "forward", Linear.__module__, _wrap_linear),
    *(
        (cls, "forward", cls.__module__, functools.partial(_wrap_forward, fused))
        for cls, fused in FORWARDS
    ),
    (GATConv, "forward", GATConv.__module__, _wrap_gat),
    (PNAConv, "forward", PNAConv.__module__, _wrap_pna),
    (RGCNConv, "forward", RGCNConv.__module__, _wrap_rgcn),
    (FastRGCNConv, "forward", FastRGCNConv.__module__, _wrap_rgcn),
    (FusedAggregation, "forward", FusedAggregation.__module__, _wrap_aggregations),
    *(
        (cls, "forward", cls.__module__, functools.partial(_wrap_attention, fused))
        for cls, fused in ((GATv2Conv, fused_gatv2), (TransformerConv, fused_transformer))
    ),
)
# Original and wrapper of each of these. A wrapper is built once: `install` after `uninstall` must
# not stack them.
_built: dict[tuple[Any, str], tuple[Any, Any]] = {}


def _build(owner: Any, name: str, home: str, wrap: Callable[[Any], Any]) -> tuple[Any, Any] | None:
    """Return PyG's own function and its wrapper; None if somebody put another in its place."""
    current = vars(owner).get(name)
    if not comes_from(current, home):
        return None
    built = _built.get((owner, name))
    if built is not None and current in built:
        return built
    built = _built[owner, name] = (current, wrap(current))
    return built


def install() -> None:
    """Patch PyG, except where somebody else has; either all of the rest is patched or nothing."""
    with _lock:
        _Switch.installed = True
        try:
            functions = [_build(*entry) for entry in _FUNCTIONS]
            replace_in_modules(dict(filter(None, functions)), everywhere=False)
            for entry in _METHODS:
                built = _build(*entry)
                if built is not None:
                    setattr(entry[0], entry[1], built[1])
            for layer in _layer_classes():
                _adopt(layer)
        except BaseException:
            uninstall()
            raise


def uninstall() -> None:
    """Put every original back where its wrapper is, in modules imported since then too."""
    with _lock:
        _Switch.installed = False
        for layer in _layer_classes():
            _release(layer)
        _propagates.clear()
        functions = {}
        for (owner, name), (original, wrapper) in _built.items():
            if isinstance(owner, type):
                if owner.__dict__.get(name) is wrapper:
                    setattr(owner, name, original)
            else:
                functions[wrapper] = original
        replace_in_modules(functions, everywhere=True)
