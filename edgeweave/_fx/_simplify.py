"""Removes what computes nothing, and computes what depends on weights alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ._graph import Meta, Node, Ref, Sym, map_refs, refs_of

__all__ = [
    "OWN_OPERATORS",
    "PADDED_CONVOLUTIONS",
    "Derived",
    "drop_open_masks",
    "drop_unused",
    "fold_batch_norm",
    "fold_padding",
    "lift_constants",
    "number_padding",
    "remove_identities",
    "share_equal",
]

_LARGEST = 2**62
_BATCH_NORM = "aten._native_batch_norm_legit_no_training.default"
_ATTENTION = "aten.scaled_dot_product_attention.default"
# Bytes of a tensor that is kept rather than made at each call, though no weight enters it.
_LARGEST_LIFTED = 16 << 20
_PADS = ("aten.pad.default", "aten.constant_pad_nd.default")
# A convolution after a `pad` that torch's own cannot express, since it pads both ends alike; the
# last argument is what `pad` took. Runs as the two calls where it has to run in ATen.
PADDED_CONVOLUTIONS = {
    f"aten.conv{n}d.default": f"edgeweave.padded_conv{n}d.default" for n in (1, 2, 3)
}
_CONVOLUTIONS = {
    "aten.conv1d.default": 0,
    "aten.conv2d.default": 0,
    "aten.conv3d.default": 0,
    "aten.conv_transpose1d.default": 1,
    "aten.conv_transpose2d.input": 1,
    "aten.conv_transpose3d.input": 1,
    "aten.linear.default": 0,
    **dict.fromkeys(PADDED_CONVOLUTIONS.values(), 0),
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
    if node.target in _PADS:
        amounts = _amounts(node)
        return amounts is not None and not any(amounts)
    return node.target in ("aten.view.default", "aten.expand.default", "aten.reshape.default")


def _amounts(node: Node) -> list[int] | None:
    """What a `pad` with zeros adds at each end, last dimension first; None for any other."""
    args = dict(enumerate(node.args))
    names = ("input", "pad", "mode", "value") if "aten.pad" in node.target else ("", "pad", "value")
    given = {name: args.get(i, node.kwargs.get(name)) for i, name in enumerate(names)}
    if given.get("mode") not in (None, "constant") or given["value"] not in (None, 0, 0.0):
        return None
    amounts = given["pad"]
    if not isinstance(amounts, list | tuple) or not all(type(a) is int for a in amounts):
        return None
    return list(amounts)


def fold_padding(nodes: list[Node], outputs: list[Any]) -> list[Node]:
    """Put a `pad` with zeros that only convolutions read into the convolutions' own padding."""
    returned = set(refs_of(outputs))
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for name in dict.fromkeys(refs_of(node)):
            readers.setdefault(name, []).append(node)
    replaced: dict[str, Node] = {}
    removed: set[str] = set()
    for pad in nodes:
        if pad.target not in _PADS or pad.name in returned:
            continue
        amounts = _amounts(pad)
        if amounts is None or min(amounts, default=0) < 0 or not isinstance(pad.args[0], Ref):
            continue
        folded = [_fold_pad(node, pad, amounts) for node in readers.get(pad.name, [])]
        if all(folded):
            replaced.update({node.name: node for node in folded if node is not None})
            removed.add(pad.name)
    return [replaced.get(node.name, node) for node in nodes if node.name not in removed]


def _defaults(rank: int) -> list[Any]:
    """Of a convolution's arguments from its bias on."""
    return [None, [1] * rank, [0] * rank, [1] * rank, 1]


def _fold_pad(conv: Node, pad: Node, amounts: list[int]) -> Node | None:
    if conv.target not in PADDED_CONVOLUTIONS or list(refs_of(conv)).count(pad.name) != 1:
        return None
    if conv.args[0] != Ref(pad.name) or conv.kwargs:
        return None
    rank = int(conv.target[len("aten.conv")])
    # Only spatial dimensions, and with a batch: else the last dimensions mean something else.
    if any(amounts[2 * rank :]) or conv.meta is None or len(conv.meta.shape) != rank + 2:
        return None
    amounts = (amounts + [0] * (2 * rank))[: 2 * rank]
    source = pad.args[0]
    begin, end = amounts[-2::-2], amounts[::-2]
    args = list(conv.args) + _defaults(rank)[len(conv.args) - 2 :]
    if begin != end:
        target = PADDED_CONVOLUTIONS[conv.target]
        return replace(conv, target=target, args=(source, *args[1:], amounts))
    # The capture gives one entry per dimension.
    if not all(type(p) is int for p in args[4]):
        return None
    args[4] = [a + b for a, b in zip(args[4], begin, strict=True)]
    return replace(conv, args=(source, *args[1:]))


def number_padding(nodes: list[Node], metas: Mapping[str, Meta]) -> list[Node]:
    """Convolutions with `padding="same"` or `"valid"`, with the numbers that these words mean."""
    return [_with_numbers(node, metas) for node in nodes]


def _with_numbers(node: Node, metas: Mapping[str, Meta]) -> Node:
    name, _, overload = node.target.removeprefix("aten.").partition(".")
    if overload != "padding" or not name.startswith("conv") or node.kwargs:
        return node
    weight = metas.get(node.args[1].name) if isinstance(node.args[1], Ref) else None
    if weight is None or not weight.static:
        return node
    kernel = weight.sizes[2:]
    args = list(node.args) + _defaults(len(kernel))[len(node.args) - 2 :]
    dilation = args[5]
    if len(node.args) < 5 or args[4] == "valid":
        total = [0] * len(kernel)
    elif args[4] == "same" and all(type(d) is int for d in dilation):
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    else:
        return node
    args[4] = [amount // 2 for amount in total]
    target = f"aten.{name}.default"
    if not any(amount % 2 for amount in total):
        return replace(node, target=target, args=tuple(args))
    # One more at the end, as torch does it.
    more = [part for amount in reversed(total) for part in (0, amount % 2)]
    return replace(node, target=PADDED_CONVOLUTIONS[target], args=(*args, more))


def _padded(rank: int) -> Callable[..., Tensor]:
    convolution = (torch.conv1d, torch.conv2d, torch.conv3d)[rank - 1]

    def run(value: Tensor, *args: Any) -> Tensor:
        padded = torch.nn.functional.pad(value, args[-1])
        return convolution(padded, *args[:-1])

    return run


OWN_OPERATORS: dict[str, Callable[..., Any]] = {
    target: _padded(n + 1) for n, target in enumerate(PADDED_CONVOLUTIONS.values())
}
"""What passes put in place of ATen's operators."""


def _may_alias(node: Node) -> bool:
    """Whether the result may lie in the memory of an argument."""
    if node.target == "getitem":
        return True
    schema = getattr(operator_of(node.target), "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _behind(nodes: list[Node], outputs: list[Any]) -> set[str]:
    """The outputs, and what they may be views of: memory that the caller will own."""
    found = set(refs_of(outputs))
    for node in reversed(nodes):
        if node.name in found and _may_alias(node):
            found.update(refs_of(node))
    return found


def _leave_out(nodes: list[Node], stand_in: Callable[[Node], str | None]) -> list[Node]:
    """Without the calls for whose result another value stands in, which its readers get instead.

    Args:
        nodes: In order.
        stand_in: From a call, its arguments renamed already, to the name of that value; or None.
    """
    renamed: dict[str, str] = {}

    def change(value: Ref | Sym) -> Ref | Sym:
        return Ref(renamed.get(value.name, value.name)) if isinstance(value, Ref) else value

    kept = []
    for node in nodes:
        node = replace(node, args=map_refs(node.args, change), kwargs=map_refs(node.kwargs, change))
        name = stand_in(node)
        if name is None:
            kept.append(node)
        else:
            renamed[node.name] = name
    return kept


def remove_identities(nodes: list[Node], outputs: list[Any], metas: dict[str, Meta]) -> list[Node]:
    """Without copies and views of the same sizes; those that are outputs, or behind them, stay.

    The graph is functional: nothing is written in place, so a copy equals its source.
    """
    returned, owned = set(refs_of(outputs)), _behind(nodes, outputs)

    def source(node: Node) -> str | None:
        stays = returned if _may_alias(node) else owned
        identity = node.name not in stays and _is_identity(node, metas)
        return node.args[0].name if identity else None

    return _leave_out(nodes, source)


def share_equal(nodes: list[Node], outputs: list[Any]) -> list[Node]:
    """Every call once: autocast, for one, casts a value anew for each layer that reads it.

    The graph is functional, so equal calls give equal results. Results of the whole stay apart.
    """
    owned = _behind(nodes, outputs)
    seen: dict[Any, str] = {}

    def earlier(node: Node) -> str | None:
        if not _is_pure(node) or node.name in owned:
            return None
        key = (node.target, _hashable(node.args), _hashable(node.kwargs))
        first = seen.setdefault(key, node.name)
        return None if first == node.name else first

    return _leave_out(nodes, earlier)


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple(sorted((key, _hashable(item)) for key, item in value.items()))
    # 1, 1.0, True and -0.0 are equal to others as keys, but not as arguments.
    return value if isinstance(value, Ref | Sym) else (type(value).__name__, repr(value))


def _call(node: Node, tensors: dict[str, Any]) -> Any:
    function = operator_of(node.target)
    args = map_refs(node.args, lambda ref: tensors[ref.name])
    return function(*args, **map_refs(node.kwargs, lambda ref: tensors[ref.name]))


def operator_of(target: str) -> Callable[..., Any]:
    """The function that a node's target names.

    Raises:
        ValueError: If it is no operator of torch's own libraries, nor one of `OWN_OPERATORS`.
    """
    if target == "getitem":
        return lambda value, index: value[index]
    if target in OWN_OPERATORS:
        return OWN_OPERATORS[target]
    namespace, name, overload = target.split(".")
    if namespace not in ("aten", "prims", "torchvision"):
        raise ValueError(f"graph: operator must be of ATen, got {target!r}")
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, overload)  # type: ignore[no-any-return]


def _is_pure(node: Node) -> bool:
    """Whether a call gives the same whenever it is made."""
    if any(word in node.target for word in _RANDOM):
        return False
    if "scaled_dot_product" in node.target:
        dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(dropout == 0)
    return torch.Tag.nondeterministic_seeded not in getattr(operator_of(node.target), "tags", ())


def _has_symbols(value: Any) -> bool:
    found = []

    def note(item: Ref | Sym) -> Ref | Sym:
        found.append(isinstance(item, Sym))
        return item

    map_refs(value, note)
    return any(found)


def _is_small(node: Node, metas: Mapping[str, Meta]) -> bool:
    """Whether a tensor that no weight enters is worth its memory."""
    meta = metas.get(node.name)
    if meta is None or not meta.static:
        return False
    return meta.nbytes <= _LARGEST_LIFTED


def lift_constants(
    nodes: list[Node], outputs: list[Any], constants: set[str], metas: Mapping[str, Meta]
) -> tuple[list[Node], dict[str, Derived]]:
    """Take out calls that depend on weights alone, or on nothing; they become derived constants.

    What is returned stays: the caller owns it, and may write to it.
    """
    owned = _behind(nodes, outputs)
    derived: dict[str, Derived] = {}
    known = set(constants)
    unweighted: set[str] = set()
    kept = []
    for node in nodes:
        names = tuple(dict.fromkeys(refs_of(node)))
        made = unweighted.issuperset(names)  # of sizes and numbers alone
        if (
            node.name in owned
            or not _is_pure(node)
            or not known.issuperset(names)
            or _has_symbols((node.args, node.kwargs))
            or (made and not _is_small(node, metas))
        ):
            kept.append(node)
            continue
        known.add(node.name)
        if made:
            unweighted.add(node.name)
        derived[node.name] = Derived(names, _recompute(node, names))
    return kept, derived


def drop_open_masks(nodes: list[Node], derived: Mapping[str, Derived]) -> list[Node]:
    """Attention without a mask that lets every key through, whatever the weights."""
    values: dict[str, Tensor | None] = {}

    def value_of(name: str) -> Tensor | None:
        if name not in values:
            found = derived.get(name)
            inputs = [] if found is None else [value_of(n) for n in found.inputs]
            fixed = found is not None and all(value is not None for value in inputs)
            values[name] = found.compute(*inputs) if found is not None and fixed else None
        return values[name]

    by_name = {node.name: node for node in nodes}

    def is_open(mask: object) -> bool:
        while isinstance(mask, Ref) and mask.name in by_name:  # to a batch of open size
            if by_name[mask.name].target != "aten.expand.default":
                return False
            mask = by_name[mask.name].args[0]
        value = value_of(mask.name) if isinstance(mask, Ref) else None
        if not isinstance(value, Tensor):
            return False
        return bool(value.all()) if value.dtype == torch.bool else not bool(value.any())

    changed = []
    for node in nodes:
        if node.target == _ATTENTION:
            if is_open(node.kwargs.get("attn_mask")):
                node = replace(node, kwargs={**node.kwargs, "attn_mask": None})
            elif len(node.args) > 3 and is_open(node.args[3]):
                node = replace(node, args=(*node.args[:3], None, *node.args[4:]))
        changed.append(node)
    return changed


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
