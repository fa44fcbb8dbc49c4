"""Networks of edges as programs: the calls behind the sum of two gathered ends, read backwards.

Each call must be known to treat the rows of edges one by one; what else it uses is the same for all
of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from .._plan._edge_program import ProgramWriter
from .._plan._edge_program_steps import BINARY, UNARY
from ._messages import find_pair
from ._patterns import Gather, find_gather
from ._reading import arguments, name_of, same_size, shape_of, value_users

__all__ = ["Network", "Start", "UnknownError", "read_network"]

# They give back their argument, or a copy of it.
_IDENTITIES = ("contiguous", "dropout")
# Functions that are called by two names.
_SAME = {"log_sigmoid": "logsigmoid"}


@dataclass(frozen=True)
class _Weight:
    """A tensor that is the same for all edges."""

    node: fx.Node


class UnknownError(Exception):
    """A message is not what this pass knows."""


@dataclass
class Start:
    """What the network is given: rows of one end or both, and values of edges.

    Attributes:
        node: The sum, whose value the network begins with.
        ends: One gather or two.
        edges: `[E, D]` values of edges, or None.
        weight: `[H, D]` that they are multiplied by, or None.
        inner: The calls up to the sum, which are not needed behind it.
    """

    node: fx.Node
    ends: tuple[Gather, ...]
    edges: fx.Node | None = None
    weight: fx.Node | None = None
    inner: tuple[fx.Node, ...] = ()


@dataclass
class Network:
    """The program that is read from the graph, backwards from its result.

    Attributes:
        start: Once it is found.
        writer: The steps.
        values: The number of the value that each call makes.
        tensors: What the steps use that is not of edges.
        width: Numbers per edge at the widest place.
    """

    start: Start | None = None
    writer: ProgramWriter = field(default_factory=ProgramWriter)
    values: dict[fx.Node, int] = field(default_factory=dict)
    tensors: list[fx.Node] = field(default_factory=list)
    width: int = 0


def read_network(network: Network, node: fx.Node) -> int:
    """The number of the value that a call makes; adds the steps that make it.

    Raises:
        UnknownError: If the call is none of a row, or a second beginning.
    """
    if node in network.values:
        return network.values[node]
    shape = shape_of(node)
    if shape is None or len(shape) != 2 or type(shape[1]) is not int:
        raise UnknownError
    network.width = max(network.width, shape[1])
    start = _find_start(node)
    if start is not None:
        if network.start is not None and network.start.node is not node:
            raise UnknownError
        network.start = start
        network.values[node] = 0
        return 0
    name, args, options = _call_of(node)
    if name in _IDENTITIES:
        value = read_network(network, args[0])
    else:
        given = [_given(network, arg) for arg in args]
        if not any(isinstance(arg, tuple) and arg[0] == "v" for arg in given):
            raise UnknownError
        value = network.writer.add(name, given, options)
    network.values[node] = value
    return value


def _given(network: Network, arg: Any) -> Any:
    """An argument of a step: a value of edges, a tensor of none, or a number.

    Raises:
        UnknownError: If it is neither.
    """
    if isinstance(arg, _Weight):
        network.tensors.append(arg.node)
        return ("t", len(network.tensors) - 1)
    if not isinstance(arg, fx.Node):
        if isinstance(arg, tuple):
            return ("shape", *arg)
        if arg is not None and type(arg) not in (int, float):
            raise UnknownError
        return arg
    shape = shape_of(arg)
    if shape is None:
        raise UnknownError
    # The same for all edges, whose rows it is repeated for.
    if len(shape) < 2 or (len(shape) == 2 and type(shape[0]) is int and shape[0] == 1):
        return _given(network, _Weight(arg))
    return ("v", read_network(network, arg))


def _call_of(node: fx.Node) -> tuple[str, list[Any], dict[str, Any]]:
    """A call as a step: its name, arguments, and options as they are written in a program.

    Raises:
        UnknownError: If it is not known to treat each row by itself.
    """
    name = name_of(node).rstrip("_") if _may_write(node) else name_of(node)
    name = _SAME.get(name, name)
    args, kwargs = list(node.args), dict(node.kwargs)
    if name in UNARY:
        names = ("input", *UNARY[name])
        bound = dict(zip((*names, "inplace"), args, strict=False)) | kwargs
        in_place = bound.pop("inplace", False)
        rows = bound.pop("input", bound.pop("self", None))
        if (in_place and not _may_write(node)) or not set(bound) <= set(names):
            raise UnknownError
        if any(type(v) not in (int, float, str) for v in bound.values()):
            raise UnknownError
        return name, [rows], bound
    if name == "linear":
        bound = arguments(node, name)
        rows, weight, bias = (bound.get(key) for key in ("input", "weight", "bias"))
        if len(shape_of(weight) or ()) != 2 or not isinstance(weight, fx.Node):
            raise UnknownError
        more = [_Weight(t) for t in (weight, bias) if isinstance(t, fx.Node)]
        return name, [rows, *more], {}
    if name == "layer_norm":
        names = ("input", "normalized_shape", "weight", "bias", "eps")
        bound = dict(zip(names, args, strict=False)) | kwargs
        given: Any = bound.get("normalized_shape")
        sizes = tuple(given or ())
        if len(sizes) != 1 or type(sizes[0]) is not int:
            raise UnknownError
        tensors: list[Any] = [bound.get(key) for key in names[2:4]]
        own = [None if t is None else _Weight(t) for t in tensors]
        return name, [bound.get("input"), sizes, *own], {"eps": bound.get("eps", 1e-5)}
    if name == "dropout":
        names = ("input", "p", "training", "inplace")
        bound = dict(zip(names, args, strict=False)) | kwargs
        if bound.get("training", True) is not False and bound.get("p", 0.5) != 0:
            raise UnknownError
        return name, [bound.get("input")], {}
    if name == "contiguous" and len(args) == 1 and not kwargs:
        return name, args, {}
    if name in BINARY and len(args) == 2 and not kwargs:
        if not isinstance(args[0], fx.Node):  # functions of torch take a number second
            if name not in ("add", "mul"):
                raise UnknownError
            args.reverse()
        return name, args, {}
    raise UnknownError


def _may_write(node: fx.Node) -> bool:
    """Whether a call that writes to its argument may as well make a new tensor.

    Nobody else reads the argument, and it is not another tensor by another name.
    """
    rows = node.args[0] if node.args else None
    if not isinstance(rows, fx.Node) or rows.op == "placeholder":
        return False
    return value_users(rows) == [node] and name_of(rows) not in _IDENTITIES


def _find_start(node: fx.Node) -> Start | None:
    """Rows of one end or of both, with or without values of edges added."""
    pair = find_pair(node)
    if pair is not None:
        ends = (pair.first, pair.second)
        return Start(node, ends, inner=(pair.first.node, pair.second.node))
    gather = find_gather(node)
    if gather is not None:
        return Start(node, (gather,))
    if name_of(node) != "add" or len(node.args) != 2 or node.kwargs:
        return None
    for rows, values in (node.args, node.args[::-1]):
        inner = _inner_start(rows)
        if inner is None or not isinstance(values, fx.Node):
            continue
        if not all(map(same_size, shape_of(values) or (), shape_of(node) or ())):
            return None
        if len(shape_of(values) or ()) != 2 or find_gather(values) is not None:
            return None
        made = (*inner.inner, inner.node)
        edges, weight = _product_of(values)
        if weight is not None:
            made = (*made, values)
        return Start(node, inner.ends, edges, weight, made)
    return None


def _inner_start(node: Any) -> Start | None:
    if not isinstance(node, fx.Node):
        return None
    pair = find_pair(node)
    if pair is not None:
        return Start(node, (pair.first, pair.second), inner=(pair.first.node, pair.second.node))
    gather = find_gather(node)
    return None if gather is None else Start(node, (gather,))


def _product_of(values: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """`(rows, weight)` of a linear layer without a bias that nobody else reads."""
    if name_of(values) == "linear" and len(values.users) == 1:
        bound = arguments(values)
        rows, weight = bound.get("input"), bound.get("weight")
        plain = bound.get("bias") is None and len(shape_of(rows) or ()) == 2
        if plain and isinstance(rows, fx.Node) and isinstance(weight, fx.Node):
            return rows, weight
    return values, None
