"""Changing graphs: new calls that carry shapes and sources, and dead ones removed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ._reading import name_of, same_size, shape_of, tensor_of, value_users

__all__ = ["Refused", "Writer", "erase_dead"]


class Refused(Exception):
    """A pass looked at a place and leaves it as it is; the text says why."""


# What may go once nobody uses its result: no effect, and no random numbers drawn.
_PURE = {
    "index_select", "gather", "getitem", "view", "reshape", "expand", "expand_as", "unsqueeze",
    "squeeze", "size", "Size", "sym_size", "new_zeros", "new_ones", "new_full", "zeros", "ones",
    "full", "zeros_like", "ones_like", "full_like", "mul", "add", "sub", "div", "exp", "detach",
    "clamp", "clamp_min", "pow", "eq", "ne", "masked_fill", "arange", "repeat", "cat", "select",
    "unbind", "flatten", "unflatten", "sym_sum", "item", "stack", "getattr", "to", "view_as",
    "scatter_add", "scatter_reduce", "index_add", "index_reduce", "broadcast_to", "dim", "numel",
    "sym_min", "sym_max", "repeat_interleave", "sum", "leaky_relu",
    "segment_reduce", "contiguous", "_subtract", "linear", "matmul", "mm", "t", "neg", "mean",
    "nan_to_num", "square", "sqrt", "nanmedian",
}  # fmt: skip
_PURE_IN_PLACE = {
    "scatter_add_", "scatter_reduce_", "index_add_", "index_reduce_", "clamp_", "pow_", "add_",
    "masked_fill_", "mul_", "div_", "clamp_min_",
}  # fmt: skip
_FRESH = {"new_zeros", "new_ones", "new_full", "zeros", "ones", "full", "zeros_like", "ones_like"}


class Writer:
    """Puts calls before a node, in that node's name: its source line and its module.

    Args:
        graph: What is changed.
        at: The call whose place the new ones take.
    """

    def __init__(self, graph: fx.Graph, at: fx.Node) -> None:
        self.graph, self.at = graph, at
        self.made: list[fx.Node] = []

    def call(
        self,
        target: Callable[..., Any] | str,
        *args: Any,
        after: fx.Node | None = None,
        example: Any = None,
    ) -> fx.Node:
        """Add a call of a function, or of the method that a string names.

        Args:
            target: The function or method.
            args: Nodes, numbers and lists of them.
            after: Where to put it, if not before `at`.
            example: The fake result, if it is known.

        Raises:
            Refused: If its result cannot be worked out from the shapes that are known.
        """
        place = self.graph.inserting_before(self.at)
        if after is not None:
            place = self.graph.inserting_after(after)
        with place:
            if isinstance(target, str):
                node = self.graph.call_method(target, args)
            else:
                node = self.graph.call_function(target, args)
        self.made.append(node)
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self.at.meta:
                node.meta[key] = self.at.meta[key]
        node.meta["example_value"] = self._result(target, args) if example is None else example
        return node

    def _result(self, target: Callable[..., Any] | str, args: Sequence[Any]) -> Any:
        values = [_value(arg) for arg in args]
        fake = next((v for v in values if isinstance(v, FakeTensor)), None)
        mode: Any = nullcontext() if fake is None else fake.fake_mode
        try:
            with mode:
                if isinstance(target, str):
                    return getattr(values[0], target)(*values[1:])
                return target(*values)
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            raise Refused(f"the shapes do not allow it: {error}") from error

    def fold(self, rows: fx.Node, trailing: Sequence[Any]) -> fx.Node:
        """`[E, ...]` as the `[E, F]` that edgeweave's ops take."""
        if len(trailing) == 1:
            return rows
        return self.call("reshape", rows, [-1, math.prod(trailing)])

    def unfold(self, result: fx.Node, trailing: Sequence[Any]) -> fx.Node:
        """`[N, F]` with the features' own sizes again."""
        return result if len(trailing) == 1 else self.call("reshape", result, [-1, *trailing])

    def count(self, num: Any) -> Any:
        """A number of slots that may be given as a tensor with so many rows."""
        if isinstance(num, fx.Node) and tensor_of(num) is not None:
            return self.call("size", num, 0)
        return num

    def undo(self) -> None:
        """Take the new calls out again."""
        for node in reversed(self.made):
            if not node.users:
                self.graph.erase_node(node)

    def put_in_place(self, new: fx.Node) -> None:
        """Let everybody who used `at` use `new`, and remove what nobody needs any more.

        Raises:
            Refused: If the two differ in shape or dtype.
        """
        mine, theirs = tensor_of(new), tensor_of(self.at)
        if mine is None or theirs is None:
            raise Refused("the shape of the result is not known")
        shapes = (shape_of(new) or (), shape_of(self.at) or ())
        alike = len(shapes[0]) == len(shapes[1]) and all(map(same_size, *shapes))
        if not alike or mine.dtype is not theirs.dtype:
            raise Refused(f"the result would be {mine.dtype} {shapes[0]}, not {theirs.dtype}")
        new.meta.update({k: v for k, v in self.at.meta.items() if k != "example_value"})
        self.at.replace_all_uses_with(new)
        erase_dead(self.graph, [self.at])


def _value(arg: Any) -> Any:
    if isinstance(arg, fx.Node):
        if "example_value" not in arg.meta:
            raise Refused(f"the shape of {arg.name} is not known")
        return arg.meta["example_value"]
    if isinstance(arg, (list, tuple)):
        return type(arg)(_value(a) for a in arg)
    return arg


def erase_dead(graph: fx.Graph, seeds: Sequence[fx.Node]) -> None:
    """Remove calls that nobody uses, and what was there for them alone.

    torch's own `eliminate_dead_code` takes a method for pure even if it writes; here a call goes
    only if it is known to do nothing else, or writes into a fresh tensor of its own.
    """
    todo = list(seeds)
    while todo:
        node = todo.pop()
        if node.graph is not graph or node.users or getattr(node, "_erased", False):
            continue
        name = name_of(node)
        if name in _PURE_IN_PLACE:
            if not _writes_to_its_own(node):
                continue
        elif not _is_ours(name) and (name not in _PURE or _asks_to_write(node, name)):
            continue
        inputs = list(node.all_input_nodes)
        graph.erase_node(node)
        todo.extend(inputs)


def _is_seen_by(target: fx.Node, node: fx.Node) -> bool:
    """Whether a tensor's values reach one call alone, at most through one that feeds it."""
    return all(user is node or set(user.users) == {node} for user in value_users(target))


def _asks_to_write(node: fx.Node, name: str) -> bool:
    """Whether an argument of a call that is pure otherwise makes it write."""
    in_place = name == "leaky_relu" and (*node.args, False)[2:3] not in ((False,), ())
    return in_place or bool(node.kwargs.get("inplace")) or node.kwargs.get("out") is not None


def _is_ours(name: str) -> bool:
    """Whether a call is of an op of edgeweave's: they write to nothing."""
    return name.startswith("edgeweave.")


def _writes_to_its_own(node: fx.Node) -> bool:
    """Whether what an in-place call writes to is fresh and seen by nobody else."""
    target = node.args[0]
    while isinstance(target, fx.Node) and _is_seen_by(target, node):
        if name_of(target) in _FRESH:
            return True
        name = name_of(target)
        if name not in _PURE_IN_PLACE and name not in ("reshape", "view"):
            # The result of a call that makes a new tensor, and not a view of an old one.
            return _is_ours(name) or name in ("scatter_add", "index_add")
        node, target = target, target.args[0]
    return False
