"""Pass `fuse_network`: a network per edge, reduced, becomes one op that runs it on tiles of edges.

`reduce(network(a[i] + b[j] + values[e]))` (EdgeConv, GINEConv, code by hand): tiles of edges stay in
the cache, and backward computes them again. Nothing of size `[E, H]` is left but the gradient of
the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from .._plan import _edge_network
from .._plan._edge_program import ProgramWriter
from .._plan._edge_program_steps import BINARY, UNARY
from ._fuse_mm import edges_of
from ._indices import index_key
from ._messages import find_pair, is_at_least, on_cpu
from ._patterns import Gather, find_gather
from ._reading import (
    Positions,
    changed_between,
    name_of,
    same_size,
    shape_of,
    value_users,
)
from ._record import Rewrite, source_of
from ._writing import Refused, Writer, erase_dead

__all__ = ["fuse_network"]

_REDUCES = ("sum", "mean", "amax", "amin")
# They give back their argument, or a copy of it.
_IDENTITIES = ("contiguous", "dropout")


@dataclass(frozen=True)
class _Weight:
    """A tensor that is the same for all edges."""

    node: fx.Node


class _Unknown(Exception):
    """A message is not what this pass knows."""


@dataclass
class _Start:
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
class _Network:
    """The program that is read from the graph, backwards from its result.

    Attributes:
        start: Once it is found.
        writer: The steps.
        values: The number of the value that each call makes.
        tensors: What the steps use that is not of edges.
        width: Numbers per edge at the widest place.
    """

    start: _Start | None = None
    writer: ProgramWriter = field(default_factory=ProgramWriter)
    values: dict[fx.Node, int] = field(default_factory=dict)
    tensors: list[fx.Node] = field(default_factory=list)
    width: int = 0


def fuse_network(module: fx.GraphModule) -> list[Rewrite]:
    """Replace reductions of networks of edges by `edgeweave::edge_network`.

    Only where there are more edges than one tile holds: of fewer, Inductor's code keeps what
    backward needs.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    done = []
    stacks: dict[tuple[object, ...], fx.Node] = {}
    for node in list(module.graph.nodes):
        if name_of(node) != "edgeweave.scatter" or not node.users:
            continue
        if node.args[3] not in _REDUCES or node.args[4] != "even":
            continue
        try:
            rewrite = _replace(module.graph, node, stacks)
        except _Unknown:
            continue
        if rewrite is not None:
            done.append(rewrite)
    return done


def _replace(
    graph: fx.Graph, node: fx.Node, stacks: dict[tuple[object, ...], fx.Node]
) -> Rewrite | None:
    src, index, num = node.args[:3]
    if not isinstance(src, fx.Node) or not isinstance(index, fx.Node) or not on_cpu(src):
        return None
    network = _Network()
    last = _read(network, src)
    start = network.start
    if start is None or last == 0 or last != len(network.writer.steps):
        return None
    if not _is_read_within(network, start, node):
        return None
    ends = _directed(start, index)
    if ends is None:
        return None
    own, other = ends
    if own is not None and not same_size((shape_of(own.x) or (0,))[0], (shape_of(node) or (0,))[0]):
        return None
    tensors = [end.x for end in start.ends]
    more = [t for t in (start.edges, start.weight, *network.tensors) if t is not None]
    if not on_cpu(src, *tensors, *more):
        return None
    positions = Positions(graph)
    first = min(
        (*(end.node for end in start.ends), *start.inner), key=lambda n: positions.of[n]
    )
    read = [*tensors, *more, index, *(end.index for end in start.ends)]
    if changed_between(positions, first, node, read):
        return None
    if not is_at_least((shape_of(src) or (0,))[0], _edge_network._MOST_EDGES + 1):
        return None
    writer, source = Writer(graph, node), source_of(node)
    said = " -> ".join(name for name, _, _ in network.writer.steps)
    behind = _take_last(network, node)
    try:
        edges, flip = edges_of(writer, other.index, index, stacks)
        result = writer.call(
            torch.ops.edgeweave.edge_network.default,
            edges,
            None if own is None else own.x,
            other.x,
            start.edges,
            start.weight,
            network.tensors,
            num,
            flip,
            node.args[3],
            network.writer.text(),
            network.width,
        )
        if behind is not None:
            rows = writer.call("size", other.x, 0)
            op: Any = torch.ops.edgeweave.in_degree.default
            degree = writer.call(op, edges, rows, num, flip, result.meta["example_value"].dtype)
            result = behind.write(writer, result, degree)
        writer.put_in_place(result)
    except Refused:
        writer.undo()
        return None
    _erase(graph, network)
    what = f"{said} -> {node.args[3]} => edgeweave::edge_network"
    return Rewrite("fuse_network", what, *source)


@dataclass(frozen=True)
class _Behind:
    """What of the last linear layer is done for nodes, behind the reduction.

    Attributes:
        reduce: The reduction.
        weight: `[O, H]`, or None if the product stays with the edges.
        bias: `[O]` or None.
    """

    reduce: str
    weight: fx.Node | None
    bias: fx.Node | None

    def write(self, writer: Writer, reduced: fx.Node, degree: fx.Node) -> fx.Node:
        """The result for nodes."""
        call = writer.call
        degree = call("unsqueeze", degree, 1)
        if self.weight is not None:
            reduced = call(functional.linear, reduced, self.weight, None)
        if self.bias is None:
            return reduced
        own = call(torch.mul, degree, self.bias) if self.reduce == "sum" else self.bias
        # No edges, no bias.
        return call("masked_fill", call(torch.add, reduced, own), call(torch.eq, degree, 0), 0.0)


def _take_last(network: _Network, node: fx.Node) -> _Behind | None:
    """Take what commutes with the reduction out of the last step.

    The bias does, also with max and min; the product does with sum and mean, and is worth it if
    there are more edges than nodes.
    """
    steps, reduce = network.writer.steps, str(node.args[3])
    name, args, _ = steps[-1]
    if name != "linear":
        return None
    weight, *more = network.tensors[-(len(args) - 1) :]
    src, out = shape_of(node.args[0]) or (0,), shape_of(node) or (0,)
    moves = reduce in ("sum", "mean") and len(steps) > 1 and is_at_least(src[0], out[0])
    if moves and args[0] == ("v", len(steps) - 1):
        steps.pop()
        del network.tensors[-(len(args) - 1) :]
        return _Behind(reduce, weight, more[0] if more else None)
    if not more:
        return None
    steps[-1] = (name, args[:2], {})
    network.tensors.pop()
    return _Behind(reduce, None, more[0])


def _erase(graph: fx.Graph, network: _Network) -> None:
    """Take the calls of the network out, those too that wrote to a value of its own."""
    positions = Positions(graph)
    calls = [n for n in network.values if n in positions.of]
    for call in sorted(calls, key=lambda n: positions.of[n], reverse=True):
        inputs = call.all_input_nodes
        if not call.users and not getattr(call, "_erased", False):
            graph.erase_node(call)
            erase_dead(graph, inputs)


def _directed(start: _Start, index: fx.Node) -> tuple[Gather | None, Gather] | None:
    """The rows at the node that is reduced into (if it has any), and at the other one."""
    if len(start.ends) == 1:
        (only,) = start.ends
        # A function of one node's row alone is a value per node, not per edge.
        alone = start.edges is None or index_key(only.index) == index_key(index)
        return None if alone else (None, only)
    for own, other in (start.ends, start.ends[::-1]):
        if index_key(own.index) == index_key(index):
            return own, other
    return None


def _is_read_within(network: _Network, start: _Start, reduction: fx.Node) -> bool:
    """Whether nobody needs a value of edges but the network and its reduction."""
    within = {*network.values, *start.inner, *(end.node for end in start.ends), reduction}
    made = [n for n in (*network.values, *start.inner) if n is not reduction]
    return all(set(value_users(n)) <= within for n in made)


# ---- reading a network ---------------------------------------------------------------------------


def _read(network: _Network, node: fx.Node) -> int:
    """The number of the value that a call makes; adds the steps that make it.

    Raises:
        _Unknown: If the call is none of a row, or a second beginning.
    """
    if node in network.values:
        return network.values[node]
    shape = shape_of(node)
    if shape is None or len(shape) != 2 or type(shape[1]) is not int:
        raise _Unknown
    network.width = max(network.width, shape[1])
    start = _find_start(node)
    if start is not None:
        if network.start is not None and network.start.node is not node:
            raise _Unknown
        network.start = start
        network.values[node] = 0
        return 0
    name, args, options = _call_of(node)
    if name in _IDENTITIES:
        value = _read(network, args[0])
    else:
        given = [_given(network, arg) for arg in args]
        if not any(isinstance(arg, tuple) and arg[0] == "v" for arg in given):
            raise _Unknown
        value = network.writer.add(name, given, options)
    network.values[node] = value
    return value


def _given(network: _Network, arg: Any) -> Any:
    """An argument of a step: a value of edges, a tensor of none, or a number.

    Raises:
        _Unknown: If it is neither.
    """
    if isinstance(arg, _Weight):
        network.tensors.append(arg.node)
        return ("t", len(network.tensors) - 1)
    if not isinstance(arg, fx.Node):
        if isinstance(arg, tuple):
            return ("shape", *arg)
        if arg is not None and type(arg) not in (int, float):
            raise _Unknown
        return arg
    shape = shape_of(arg)
    if shape is None:
        raise _Unknown
    # The same for all edges, whose rows it is repeated for.
    if len(shape) < 2 or (len(shape) == 2 and type(shape[0]) is int and shape[0] == 1):
        return _given(network, _Weight(arg))
    return ("v", _read(network, arg))


def _call_of(node: fx.Node) -> tuple[str, list[Any], dict[str, Any]]:
    """A call as a step: its name, arguments, and options as they are written in a program.

    Raises:
        _Unknown: If it is not known to treat each row by itself.
    """
    name = name_of(node).rstrip("_") if _may_write(node) else name_of(node)
    args, kwargs = list(node.args), dict(node.kwargs)
    if name in UNARY:
        names = ("input", *UNARY[name])
        bound = dict(zip((*names, "inplace"), args, strict=False)) | kwargs
        in_place = bound.pop("inplace", False)
        rows = bound.pop("input", bound.pop("self", None))
        if (in_place and not _may_write(node)) or not set(bound) <= set(names):
            raise _Unknown
        if any(type(v) not in (int, float, str) for v in bound.values()):
            raise _Unknown
        return name, [rows], bound
    if name == "linear":
        bound = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        rows, weight, bias = (bound.get(key) for key in ("input", "weight", "bias"))
        if len(shape_of(weight) or ()) != 2 or not isinstance(weight, fx.Node):
            raise _Unknown
        more = [_Weight(t) for t in (weight, bias) if isinstance(t, fx.Node)]
        return name, [rows, *more], {}
    if name == "layer_norm":
        names = ("input", "normalized_shape", "weight", "bias", "eps")
        bound = dict(zip(names, args, strict=False)) | kwargs
        sizes = tuple(bound.get("normalized_shape") or ())
        if len(sizes) != 1 or type(sizes[0]) is not int:
            raise _Unknown
        own = [None if (t := bound.get(key)) is None else _Weight(t) for key in names[2:4]]
        return name, [bound.get("input"), sizes, *own], {"eps": bound.get("eps", 1e-5)}
    if name == "dropout":
        names = ("input", "p", "training", "inplace")
        bound = dict(zip(names, args, strict=False)) | kwargs
        if bound.get("training", True) is not False and bound.get("p", 0.5) != 0:
            raise _Unknown
        return name, [bound.get("input")], {}
    if name == "contiguous" and len(args) == 1 and not kwargs:
        return name, args, {}
    if name in BINARY and len(args) == 2 and not kwargs:
        if not isinstance(args[0], fx.Node):  # functions of torch take a number second
            if name not in ("add", "mul"):
                raise _Unknown
            args.reverse()
        return name, args, {}
    raise _Unknown


def _may_write(node: fx.Node) -> bool:
    """Whether a call that writes to its argument may as well make a new tensor.

    Nobody else reads the argument, and it is not another tensor by another name.
    """
    rows = node.args[0] if node.args else None
    if not isinstance(rows, fx.Node) or rows.op == "placeholder":
        return False
    return value_users(rows) == [node] and name_of(rows) not in _IDENTITIES


def _find_start(node: fx.Node) -> _Start | None:
    """Rows of one end or of both, with or without values of edges added."""
    pair = find_pair(node)
    if pair is not None:
        ends = (pair.first, pair.second)
        return _Start(node, ends, inner=(pair.first.node, pair.second.node))
    gather = find_gather(node)
    if gather is not None:
        return _Start(node, (gather,))
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
        return _Start(node, inner.ends, edges, weight, made)
    return None


def _inner_start(node: Any) -> _Start | None:
    if not isinstance(node, fx.Node):
        return None
    pair = find_pair(node)
    if pair is not None:
        return _Start(node, (pair.first, pair.second), inner=(pair.first.node, pair.second.node))
    gather = find_gather(node)
    return None if gather is None else _Start(node, (gather,))


def _product_of(values: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """`(rows, weight)` of a linear layer without a bias that nobody else reads."""
    if name_of(values) == "linear" and len(values.users) == 1:
        bound = dict(zip(("input", "weight", "bias"), values.args, strict=False)) | values.kwargs
        rows, weight = bound.get("input"), bound.get("weight")
        plain = bound.get("bias") is None and len(shape_of(rows) or ()) == 2
        if plain and isinstance(rows, fx.Node) and isinstance(weight, fx.Node):
            return rows, weight
    return values, None


