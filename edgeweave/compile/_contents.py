"""What a graph holds: by which it is decided who could run it."""

from __future__ import annotations

import torch
from torch import fx

from ._reading import name_of

__all__ = ["dense_chain", "first_foreign_op", "foreign_op", "tells_zeros_apart"]

_CONVOLUTIONS = {f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)}
_PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm"}
# What may stand between two products of one chain.
_BETWEEN = {
    "relu", "gelu", "silu", "sigmoid", "tanh", "hardtanh", "relu6", "elu", "leaky_relu", "mish",
    "hardswish", "hardsigmoid", "dropout", "add", "mul", "layer_norm", "batch_norm", "softmax",
    "view", "reshape", "flatten", "relu_", "clamp",
}  # fmt: skip
_OF_SIGNS = {"atan2", "arctan2", "copysign", "signbit", "angle"}


def dense_chain(module: fx.GraphModule) -> str:
    """What in a graph oneDNN is good at; empty if there is nothing."""
    for node in module.graph.nodes:
        name = name_of(node)
        if name in _CONVOLUTIONS:
            return f"a convolution ({node.name})"
        if name not in _PRODUCTS:
            continue
        todo, seen = list(node.users), set()
        while todo:
            user = todo.pop()
            if user in seen:
                continue
            seen.add(user)
            if name_of(user) in _PRODUCTS:
                return f"a chain of products ({node.name}, {user.name})"
            if name_of(user) in _BETWEEN:
                todo.extend(user.users)
    return ""


def first_foreign_op(module: fx.GraphModule) -> str:
    """The first op in a graph that is not ATen's; empty if there is none."""
    return next(filter(None, map(foreign_op, module.graph.nodes)), "")


def tells_zeros_apart(module: fx.GraphModule) -> bool:
    """Whether a graph has a function that is not continuous between -0.0 and 0.0."""
    return any(name_of(node).removesuffix("_") in _OF_SIGNS for node in module.graph.nodes)


def foreign_op(node: fx.Node) -> str:
    """The name of a call's op if it is not ATen's, edgeweave's own among them; else empty."""
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        name = name_of(node)
        return name if "." in name else ""
    return ""
