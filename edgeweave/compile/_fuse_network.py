"""Pass `fuse_network`: a network per edge, reduced, becomes one op that runs it on tiles of edges.

`reduce(network(a[i] + b[j] + values[e]))` (EdgeConv, GINEConv, code by hand): tiles of edges stay
in the cache, and backward computes them again. Nothing of size `[E, H]` is left but the gradient of
the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from .._plan import _edge_network
from ._fuse_mm import edges_of
from ._indices import index_key
from ._messages import is_at_least, on_cpu
from ._network_reading import Network, Start, UnknownError, read_network
from ._patterns import Gather
from ._reading import (
    Positions,
    changed_between,
    name_of,
    same_size,
    shape_of,
    value_users,
)
from ._record import Rewrite, rewrite_each, source_of
from ._writing import Refused, Writer, erase_dead

__all__ = ["fuse_network"]

# Edges per node from which on it pays to make the values of a tile's edges twice.
_LEAST_DEGREE = 3
_REDUCES = ("sum", "mean", "amax", "amin")


def fuse_network(module: fx.GraphModule) -> list[Rewrite]:
    """Replace reductions of networks of edges by `edgeweave::edge_network`.

    Only where there are more edges than one tile holds: of fewer, Inductor's code keeps what
    backward needs.

    Args:
        module: The graph, changed in place.

    Returns:
        What was replaced.
    """
    stacks: dict[tuple[object, ...], fx.Node] = {}

    def replace(graph: fx.Graph, node: fx.Node) -> Rewrite | None:
        if name_of(node) != "edgeweave.scatter":
            return None
        if node.args[3] not in _REDUCES or node.args[4] != "even":
            return None
        try:
            return _replace(graph, node, stacks)
        except UnknownError:
            return None

    return rewrite_each(module, replace)


def _replace(
    graph: fx.Graph, node: fx.Node, stacks: dict[tuple[object, ...], fx.Node]
) -> Rewrite | None:
    src, index, num = node.args[:3]
    if not isinstance(src, fx.Node) or not isinstance(index, fx.Node) or not on_cpu(src):
        return None
    network = Network()
    last = read_network(network, src)
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
    first = min((*(end.node for end in start.ends), *start.inner), key=lambda n: positions.of[n])
    read = [*tensors, *more, index, *(end.index for end in start.ends)]
    if changed_between(positions, first, node, read):
        return None
    rows, slots = (shape_of(src) or (0,))[0], (shape_of(node) or (0,))[0]
    enough = is_at_least(rows, _edge_network._MOST_EDGES + 1)
    if not enough or not is_at_least(rows, _LEAST_DEGREE * slots):
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


def _take_last(network: Network, node: fx.Node) -> _Behind | None:
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


def _erase(graph: fx.Graph, network: Network) -> None:
    """Take the calls of the network out, those too that wrote to a value of its own."""
    positions = Positions(graph)
    calls = [n for n in network.values if n in positions.of]
    for call in sorted(calls, key=lambda n: positions.of[n], reverse=True):
        inputs = call.all_input_nodes
        if not call.users and not getattr(call, "_erased", False):
            graph.erase_node(call)
            erase_dead(graph, inputs)


def _directed(start: Start, index: fx.Node) -> tuple[Gather | None, Gather] | None:
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


def _is_read_within(network: Network, start: Start, reduction: fx.Node) -> bool:
    """Whether nobody needs a value of edges but the network and its reduction."""
    within = {*network.values, *start.inner, *(end.node for end in start.ends), reduction}
    made = [n for n in (*network.values, *start.inner) if n is not reduction]
    return all(set(value_users(n)) <= within for n in made)
