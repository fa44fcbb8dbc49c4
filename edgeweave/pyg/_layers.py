"""Which PyG layers send messages that `mm` can compute, and what their arguments mean."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch_geometric.nn import (
    CGConv,
    EdgeConv,
    GINEConv,
    MessagePassing,
    NNConv,
    PointNetConv,
    aggr,
)

REDUCE_OF_AGGREGATION: dict[type, str] = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MaxAggregation: "amax",
    aggr.MinAggregation: "amin",
}
"""Aggregation modules that `mm` can stand in for; exact types, since subclasses may differ."""

# Methods of which the fused path takes the place, or which it relies on. All of them must be what
# PyG defines for the layer; the first four are checked again at each call, because replacing a
# public method of a class after the first call is something people do.
_PUBLIC = ("message", "aggregate", "update", "message_and_aggregate")
_PRIVATE = ("_check_input", "_set_size", "_lift", "_index_select", "_index_select_safe")


@dataclass(frozen=True)
class MessageForm:
    """How a layer computes the message of an edge.

    Attributes:
        owner: Class that defines `message`.
        features: Argument of `propagate` that holds the node features.
        weight: Argument of `propagate` that holds the edge weights; None: messages are `x_j`.
        weight_optional: Whether the weight may be None.
        per_head: False: `weight.view(-1, 1) * x_j`; True: `weight.unsqueeze(-1) * x_j` with
            weights `[E, H]` and features `[N, H, C]`.
    """

    owner: type
    features: str = "x"
    weight: str | None = None
    weight_optional: bool = False
    per_head: bool = False


# (module, class, features, weight, weight_optional, per_head), read from PyG 2.7 and 2.8.
_KNOWN: tuple[tuple[str, str, str, str | None, bool, bool], ...] = (
    ("nn.conv.message_passing", "MessagePassing", "x", None, False, False),
    ("nn.conv.sage_conv", "SAGEConv", "x", None, False, False),
    ("nn.conv.gin_conv", "GINConv", "x", None, False, False),
    ("nn.conv.signed_conv", "SignedConv", "x", None, False, False),
    ("nn.conv.mf_conv", "MFConv", "x", None, False, False),
    ("nn.conv.gcn_conv", "GCNConv", "x", "edge_weight", True, False),
    ("nn.conv.graph_conv", "GraphConv", "x", "edge_weight", True, False),
    ("nn.conv.lg_conv", "LGConv", "x", "edge_weight", True, False),
    ("nn.conv.simple_conv", "SimpleConv", "x", "edge_weight", True, False),
    ("nn.conv.appnp", "APPNP", "x", "edge_weight", True, False),
    ("nn.conv.tag_conv", "TAGConv", "x", "edge_weight", True, False),
    ("nn.conv.gcn2_conv", "GCN2Conv", "x", "edge_weight", True, False),
    ("nn.conv.gated_graph_conv", "GatedGraphConv", "x", "edge_weight", True, False),
    ("nn.conv.mixhop_conv", "MixHopConv", "x", "edge_weight", True, False),
    ("nn.conv.wl_conv_continuous", "WLConvContinuous", "x", "edge_weight", True, False),
    ("nn.models.label_prop", "LabelPropagation", "x", "edge_weight", True, False),
    ("nn.models.linkx", "SparseLinear", "weight", "edge_weight", True, False),
    ("nn.conv.sg_conv", "SGConv", "x", "edge_weight", False, False),
    ("nn.conv.ssg_conv", "SSGConv", "x", "edge_weight", False, False),
    ("nn.conv.cluster_gcn_conv", "ClusterGCNConv", "x", "edge_weight", False, False),
    ("nn.conv.arma_conv", "ARMAConv", "x", "edge_weight", False, False),
    ("nn.conv.pdn_conv", "PDNConv", "x", "edge_weight", False, False),
    ("nn.conv.cheb_conv", "ChebConv", "x", "norm", False, False),
    ("nn.conv.gat_conv", "GATConv", "x", "alpha", False, True),
    ("nn.conv.gatv2_conv", "GATv2Conv", "x", "alpha", False, True),
)


def _load_forms() -> dict[Any, MessageForm]:
    """Return the form of every known `message` function of the installed PyG."""
    forms: dict[Any, MessageForm] = {}
    for module_name, class_name, features, weight, optional, per_head in _KNOWN:
        module = importlib.import_module(f"torch_geometric.{module_name}")
        owner = getattr(module, class_name, None)
        if owner is None:
            continue  # An older or newer PyG: the layer is not there to be recognised.
        expected = ["self", f"{features}_j"] + ([weight] if weight else [])
        message = owner.__dict__.get("message")
        # Another signature or an own `aggregate`/`update` means another PyG than the table was
        # read from: leave the layer to PyG.
        if (
            message is not None
            and list(inspect.signature(message).parameters) == expected
            and owner.aggregate is MessagePassing.aggregate
            and owner.update is MessagePassing.update
        ):
            forms[message] = MessageForm(owner, features, weight, optional, per_head)
    return forms


_FORMS = _load_forms()

# Layers whose messages go through a network of their own, by `message`.
_NETWORKS: dict[Any, type] = {
    cls.message: cls for cls in (EdgeConv, CGConv, GINEConv, NNConv, PointNetConv)
}


# What people write. The names may be theirs: compared is what the functions do.
def _plain(self: Any, x_j: Any) -> Any:
    return x_j


def _weight_first(self: Any, x_j: Any, edge_weight: Any) -> Any:
    return edge_weight.view(-1, 1) * x_j


def _weight_last(self: Any, x_j: Any, edge_weight: Any) -> Any:
    return x_j * edge_weight.view(-1, 1)


# Arguments of another kind, generators and coroutines; not what a `__future__` import sets.
_KINDS = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)


def _body(function: FunctionType) -> tuple[object, ...]:
    code = function.__code__
    # Without a docstring, None stands in its place.
    # With their types: 1 == 1.0 == True.
    constants = tuple(
        (type(c), c) for c in code.co_consts if c is not None and c != function.__doc__
    )
    kinds = code.co_flags & _KINDS
    return code.co_code, constants, code.co_names, code.co_argcount, code.co_kwonlyargcount, kinds


def _recognise(cls: Any) -> MessageForm | None:
    """Return the form of a layer that is not PyG's own, if its `message` is one of the above."""
    message = cls.message
    if not isinstance(message, FunctionType):
        return None
    code = message.__code__
    if code.co_freevars or message.__defaults__ or message.__kwdefaults__:
        return None
    templates: tuple[tuple[Any, bool], ...] = (
        (_plain, False),
        (_weight_first, True),
        (_weight_last, True),
    )
    for template, weighted in templates:
        if _body(message) != _body(template):
            continue
        names = code.co_varnames[1 : code.co_argcount]
        if not names[0].endswith("_j") or (weighted and names[1].endswith(("_i", "_j"))):
            return None
        if any(name in MessagePassing.special_args for name in names):
            return None  # PyG gives these its own values, whatever the caller passes
        rest = (name for name in (*_PUBLIC, *_PRIVATE) if name != "message")
        if any(getattr(cls, name) is not getattr(MessagePassing, name) for name in rest):
            return None
        owner = next(base for base in cls.__mro__ if "message" in base.__dict__)
        return MessageForm(owner, names[0][:-2], names[1] if weighted else None)
    return None


@dataclass(frozen=True)
class LayerRule:
    """Decision about one layer class, made once when its `propagate` is wrapped.

    Attributes:
        layer: The class, exactly; subclasses have rules of their own.
        site: Name in the report.
        form: How messages are computed; None if the class cannot be fused.
        reason: Why it cannot be, or None.
        methods: The methods that the decision was based on.
        network: For layers whose messages go through a network of their own (see
            `edgeweave.pyg._edge_networks`): PyG's class; None for other layers.
    """

    layer: type
    site: str
    form: MessageForm | None
    reason: str | None
    methods: tuple[object, ...] = ()
    network: type | None = None

    def is_current(self) -> bool:
        """Return whether the class still has the methods that the decision was based on."""
        return self.methods == _methods_of(self.layer)


def _methods_of(layer: Any) -> tuple[object, ...]:
    """Return what a decision about a class is based on, to be compared by identity."""
    message = layer.message
    return (
        message,
        getattr(message, "__code__", None),
        layer.aggregate,
        layer.update,
        layer.message_and_aggregate,
    )


def site_of(layer: type) -> str:
    """Return the name of a layer or aggregation class in the report.

    Args:
        layer: The class.

    Returns:
        The bare class name for PyG's own classes, the dotted path for others.
    """
    if layer.__module__.startswith("torch_geometric."):
        return layer.__name__
    return f"{layer.__module__}.{layer.__qualname__}"


def rule_for(layer: type) -> LayerRule:
    """Decide whether a layer class computes something that `mm` computes too.

    Args:
        layer: Subclass of `MessagePassing`.

    Returns:
        The decision, with the reason if the class cannot be fused.
    """
    site = site_of(layer)
    cls: Any = layer
    form = _FORMS.get(cls.message) or _recognise(cls)
    network = _NETWORKS.get(cls.message)
    owner = network if form is None else form.owner
    if owner is None:
        return LayerRule(layer, site, None, "message is not one that edgeweave knows")
    for name in (*_PUBLIC, *_PRIVATE):
        if getattr(cls, name) is not getattr(owner, name):
            return LayerRule(layer, site, None, f"{name} is overridden")
    return LayerRule(layer, site, form, None, _methods_of(layer), network)
