"""Removes what computes nothing, and computes what depends on weights alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ._graph import Meta, Node, Ref, Sym, map_refs, refs_of

__all__ = ["Derived", "drop_unused", "fold_batch_norm", "lift_constants", "remove_identities"]

_LARGEST = 2**62
_BATCH_NORM = "aten._native_batch_norm_legit_no_training.default"
_CONVOLUTIONS = {
    "aten.conv1d.default": 0,
    "aten.conv2d.default": 0,
    "aten.conv3d.default": 0,
    "aten.conv_transpose1d.default": 1,
    "aten.conv_transpose2d.input": 1,
    "aten.conv_transpose3d.input": 1,
    "aten.linear.default": 0,
}
# They give other numbers at each call, or depend on more than their arguments.
_RANDOM = ("rand", "bernoulli", "dropout", "multinomial", "normal", "empty", "seed")


@dataclass(frozen=True)
class Derived:
    """A constant that is computed from others, and again when they change.

    Attributes:
        inputs: Names of the constants that it needs, derived ones included.
        compute: From their tensors to this one.
    """

    inputs: tuple[str, ...]
    compute: Callable[..., Tensor]


def drop_unused(nodes: list[Node], outputs: list[Any]) -> list[Node]:
    """Without the calls whose result nothing reads."""
    wanted = set(refs_of(outputs))
    kept = []
    for node in reversed(nodes):
        if node.name in wanted:
            kept.append(node)
            wanted.update(refs_of(node))
    return kept[::-1]


def _is_identity(node: Node, metas: dict[str, Meta]) -> bool:
    first = node.args[0] if node.args else None
    if not isinstance(first, Ref) or node.meta is None:
        return False
    source = metas.get(first.name)
    if source is None or source.shape != node.meta.shape or source.dtype != node.meta.dtype:
        return False
    if node.target in ("aten.detach.default", "aten.alias.default"):
        return True
    if source.stride != node.meta.stride:
        return False
    if node.target in ("aten.clone.default", "aten.dropout.default"):
        return True
    if node.target == "aten._to_copy.default":
        return node.kwargs.get("device") in (None, torch.device("cpu"))
    if node.target == "aten.slice.Tensor":
        given = list(node.args[2:])
        start, stop, step = given + [None, None, 1][len(given) :]
        whole = stop is None or (isinstance(stop, int) and stop >= _LARGEST)
        return start in (None, 0) and whole and step == 1
    return node.target in ("aten.view.default", "aten.expand.default", "aten.reshape.default")


def remove_identities(nodes: list[Node], outputs: list[Any], metas: dict[str, Meta]) -> list[Node]:
    """Without copies and views of the same sizes; those that are outputs stay.

    The graph is functional: nothing is written in place, so a copy equals its source.
    """
    returned = set(refs_of(outputs))
    renamed: dict[str, str] = {}

    def change(value: Ref | Sym) -> Ref | Sym:
        return Ref(renamed.get(value.name, value.name)) if isinstance(value, Ref) else value

    kept = []
    for node in nodes:
        node = replace(node, args=map_refs(node.args, change), kwargs=map_refs(node.kwargs, change))
        if node.name not in returned and _is_identity(node, metas):
            renamed[node.name] = node.args[0].name
        else:
            kept.append(node)
    return kept


def _call(node: Node, tensors: dict[str, Any]) -> Any:
    function = operator_of(node.target)
    args = map_refs(node.args, lambda ref: tensors[ref.name])
    return function(*args, **map_refs(node.kwargs, lambda ref: tensors[ref.name]))


def operator_of(target: str) -> Callable[..., Any]:
    """The function that a node's target names.

    Raises:
        ValueError: If it is no operator of torch's own libraries.
    """
    if target == "getitem":
        return lambda value, index: value[index]
    namespace, name, overload = target.split(".")
    if namespace not in ("aten", "prims", "torchvision"):
        raise ValueError(f"graph: operator must be of ATen, got {target!r}")
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, overload)  # type: ignore[no-any-return]


def _has_symbols(value: Any) -> bool:
    found = []

    def note(item: Ref | Sym) -> Ref | Sym:
        found.append(isinstance(item, Sym))
        return item

    map_refs(value, note)
    return any(found)


def lift_constants(nodes: list[Node], constants: set[str]) -> tuple[list[Node], dict[str, Derived]]:
    """Take out the calls that depend on weights alone; they become derived constants."""
    derived: dict[str, Derived] = {}
    known = set(constants)
    kept = []
    for node in nodes:
        names = tuple(dict.fromkeys(refs_of(node)))
        pure = not any(word in node.target for word in _RANDOM)
        if not pure or not names or not known.issuperset(names) or _has_symbols(node.args):
            kept.append(node)
            continue
        known.add(node.name)
        derived[node.name] = Derived(names, _recompute(node, names))
    return kept, derived


def _recompute(node: Node, names: tuple[str, ...]) -> Callable[..., Tensor]:
    def compute(*tensors: Tensor) -> Any:
        return _call(node, dict(zip(names, tensors, strict=True)))

    return compute


def _folded(
    axis: int, groups: int, eps: float, which: str, has: tuple[bool, ...]
) -> Callable[..., Tensor]:
    """Weight or bias of a convolution with the batch norm after it, in float64, rounded once."""

    def compute(weight: Tensor, mean: Tensor, variance: Tensor, *rest: Tensor) -> Tensor:
        remaining = iter(rest)
        bias, gamma, beta = (next(remaining).double() if here else None for here in has)
        scale = (variance.double() + eps).rsqrt()
        if gamma is not None:
            scale = scale * gamma
        if which == "weight":
            shape = [1] * weight.dim()
            if axis == 1 and groups > 1:  # [groups * in, out / groups, ...]
                per_group = scale.view(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1)
                shape[0], shape[1] = weight.shape[0], weight.shape[1]
                return (weight.double() * per_group.reshape(shape)).to(weight.dtype)
            shape[axis] = -1
            return (weight.double() * scale.view(shape)).to(weight.dtype)
        shift = -mean.double() if bias is None else bias - mean.double()
        folded = shift * scale
        return (folded if beta is None else folded + beta).to(weight.dtype)

    return compute


def fold_batch_norm(
    nodes: list[Node], outputs: list[Any], constants: set[str]
) -> tuple[list[Node], dict[str, Derived]]:
    """Fold batch norms with fixed statistics into the convolution or linear layer before them."""
    readers = Counter(name for node in nodes for name in refs_of(node))
    readers.update(refs_of(outputs))
    by_name = {node.name: node for node in nodes}
    first_result = {
        node.args[0].name: node for node in nodes if node.target == "getitem" and node.args[1] == 0
    }
    derived: dict[str, Derived] = {}
    replaced: dict[str, Node] = {}
    removed: set[str] = set()
    for norm in nodes:
        if norm.target != _BATCH_NORM or not isinstance(norm.args[0], Ref):
            continue
        layer = by_name.get(norm.args[0].name)
        result = first_result.get(norm.name)
        if layer is None or layer.target not in _CONVOLUTIONS or result is None:
            continue
        if readers[layer.name] != 1 or readers[norm.name] != 1:
            continue
        made = _fold_pair(layer, norm, result, constants)
        if made is None:
            continue
        node, weights = made
        derived.update(weights)
        replaced[result.name] = node
        removed |= {layer.name, norm.name}
    kept = [replaced.get(node.name, node) for node in nodes if node.name not in removed]
    return kept, derived


def _fold_pair(
    layer: Node, norm: Node, result: Node, constants: set[str]
) -> tuple[Node, dict[str, Derived]] | None:
    axis = _CONVOLUTIONS[layer.target]
    is_linear = layer.target == "aten.linear.default"
    if is_linear and (layer.meta is None or len(layer.meta.shape) != 2):
        return None  # channels of the norm are dimension 1, those of a linear layer the last
    weight, bias = layer.args[1], layer.args[2] if len(layer.args) > 2 else None
    _, gamma, beta, mean, variance, _, eps = norm.args
    parts = [weight, mean, variance, *[x for x in (bias, gamma, beta) if x is not None]]
    if not all(isinstance(part, Ref) and part.name in constants for part in parts):
        return None
    groups = layer.args[6] if axis == 1 and len(layer.args) > 6 else 1
    names = tuple(part.name for part in parts)
    has = (bias is not None, gamma is not None, beta is not None)
    folded = {
        f"{result.name}_{which}": Derived(names, _folded(axis, groups, eps, which, has))
        for which in ("weight", "bias")
    }
    args = (layer.args[0], Ref(f"{result.name}_weight"), Ref(f"{result.name}_bias"))
    return (
        Node(result.name, layer.target, (*args, *layer.args[3:]), layer.kwargs, result.meta),
        folded,
    )
