"""A graph before and after the passes, light enough to keep: what `Report.draw` shows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor, fx

from ._reading import name_of

__all__ = ["Call", "Snapshots", "readable"]

_CALLS = ("call_function", "call_method", "call_module")


@dataclass(frozen=True)
class Call:
    """One node of a graph.

    Attributes:
        name: Of the node.
        op: What it calls; `input` for an input that is data and no weight.
        text: The shape of its result, empty if it is no tensor.
        layer: Dotted path of the innermost module around it.
        reads: Names of the nodes that it reads, weights left out.
    """

    name: str
    op: str
    text: str
    layer: str
    reads: tuple[str, ...]


class Snapshots:
    """The graph as captured, the graph after the passes, and which pass took or made what.

    Args:
        graph: As captured.

    Attributes:
        before: Nodes as captured, in order.
        after: Nodes after the last pass, in order.
        taken: From a node of `before` to the pass that took it out.
        made: From a node of `after` to the pass that put it in.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.before = _calls(graph)
        self.after = self.before
        self.taken: dict[str, str] = {}
        self.made: dict[str, str] = {}
        self._names = {node.name for node in graph.nodes}

    def after_pass(self, name: str, graph: fx.Graph) -> None:
        """Note what a pass has changed.

        Args:
            name: Of the pass; empty for what is taken out because nobody reads it.
            graph: As it is now.
        """
        names = {node.name for node in graph.nodes}
        gone, new = self._names - names, names - self._names
        for each in gone:
            # What an earlier pass made for a later one was never there.
            if self.made.pop(each, None) is None:
                self.taken[each] = name
        self.made.update(dict.fromkeys(new, name))
        self._names = names
        if gone or new:
            self.after = _calls(graph)


def _calls(graph: fx.Graph) -> tuple[Call, ...]:
    found: list[Call] = []
    known: set[str] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if not _is_data(node):
                continue
            op = "input"
        elif node.op in _CALLS:
            op = name_of(node) or str(node.target)
        else:
            continue
        reads = tuple(each.name for each in node.all_input_nodes if each.name in known)
        found.append(Call(node.name, op, _shape(node), _layer(node), reads))
        known.add(node.name)
    return tuple(found)


def _is_data(node: fx.Node) -> bool:
    """Whether an input is given at each call: no weight, no size."""
    value = node.meta.get("example_value")
    static = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
    weight = static is not None or "_parameters_" in node.name or "_buffers_" in node.name
    return isinstance(value, Tensor) and not weight


def _shape(node: fx.Node) -> str:
    value = node.meta.get("example_value")
    return str(list(value.shape)) if isinstance(value, Tensor) else ""


def _layer(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = readable(list(stack.values())[-1][0]) if stack else ""
    return "" if path == "model" else path


def readable(path: str) -> str:
    """Dynamo's `L['self']._modules['first']` as `first`."""
    parts = re.findall(r"_modules\['([^']+)'\]|\.(\w+)", path.removeprefix("L['self']"))
    names = [a or b for a, b in parts]
    return ".".join(name for name in names if name != "_modules") or "model"
