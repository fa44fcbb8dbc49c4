"""Reading the graphs that Dynamo makes: one view of methods, functions and ATen operators.

The graphs are from before AOTAutograd: they hold views, in-place calls and Python numbers. So every
reader here answers "not known" where a graph does not prove something, and a pass then refuses.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "Positions",
    "arguments",
    "boundary_between",
    "changed_between",
    "changes_mode",
    "features_of",
    "follow_writes",
    "is_shape_only",
    "mutated_between",
    "name_of",
    "same_size",
    "shape_of",
    "tensor_of",
    "value_users",
    "writes",
    "writes_to_inputs",
]

# Their results do not depend on the values of argument 0, or 1 for the second set.
_SHAPE_OF_FIRST = {
    "size", "dim", "numel", "sym_size", "getattr", "new_zeros", "new_ones", "new_full", "new_empty",
    "zeros_like", "ones_like", "empty_like", "full_like",
}  # fmt: skip
_SHAPE_OF_SECOND = {"expand_as", "view_as", "reshape_as"}

# Calls after which tensors behave differently: what a region computes must not straddle one.
_BOUNDARIES = {
    "_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode",
    "_exit_inference_mode", "set_grad_enabled",
}  # fmt: skip

_SIGNATURES: dict[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    "matmul": ("input", "other"),
    "mm": ("input", "mat2"),
    "index_select": ("input", "dim", "index"),
    "gather": ("input", "dim", "index"),
    "scatter_add": ("input", "dim", "index", "src"),
    "scatter_reduce": ("input", "dim", "index", "src", "reduce", "include_self"),
    "index_add": ("input", "dim", "index", "source", "alpha"),
    "index_reduce": ("input", "dim", "index", "source", "reduce", "include_self"),
    "segment_reduce": (
        "data",
        "reduce",
        "lengths",
        "indices",
        "offsets",
        "axis",
        "unsafe",
        "initial",
    ),
    "clamp": ("input", "min", "max"),
    "clamp_min": ("input", "min"),
    "full": ("size", "fill_value"),
    "new_full": ("input", "size", "fill_value"),
    "full_like": ("input", "fill_value"),
    "unsqueeze": ("input", "dim"),
    "select": ("input", "dim", "index"),
    "unbind": ("input", "dim"),
    "add": ("input", "other", "alpha"),
    "sub": ("input", "other", "alpha"),
    "mul": ("input", "other"),
    "div": ("input", "other", "rounding_mode"),
    "exp": ("input",),
    "detach": ("input",),
    "cat": ("tensors", "dim"),
    "ne": ("input", "other"),
    "eq": ("input", "other"),
    "pow": ("input", "exponent"),
    "masked_fill": ("input", "mask", "value"),
    "getitem": ("input", "key"),
    "edgeweave.scatter": ("src", "index", "dim_size", "reduce", "ties"),
    "edgeweave.gather": ("x", "index"),
}
_SAME = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub",
    "concat": "cat", "concatenate": "cat", "not_equal": "ne",
}  # fmt: skip


def name_of(node: Any) -> str:
    """The name of what a node calls, the same for methods, functions and ATen operators.

    In-place methods keep their underscore; edgeweave's own ops are `edgeweave.<name>`; empty for
    what is no call.
    """
    if not isinstance(node, fx.Node):
        return ""
    if node.op == "call_method":
        name = _as_function(str(node.target))
    elif node.op == "call_function":
        target: Any = node.target
        if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            packet: Any = getattr(target, "overloadpacket", target)
            space, _, name = packet._qualified_op_name.partition("::")
            if space != "aten":
                return f"{space}.{name}"
        else:
            name = getattr(target, "__name__", "")
            # In-place operators are named like functions: `iadd` must not pass for `add`.
            if getattr(target, "__module__", "") == "_operator" and name in _IN_PLACE_OPERATORS:
                name = name.removeprefix("i") + "_"
    else:
        return ""
    return _SAME.get(name, name)


_IN_PLACE_OPERATORS = {
    name for name in dir(operator) if name.startswith("i") and name[1:] in dir(operator)
} | {"iand", "ior"}


def _as_function(method: str) -> str:
    """The name of the function that an operator's method is: Dynamo of torch 2.11 calls `__eq__`.

    Reflected methods keep their name unless the order of their two operands is the same.
    """
    if not (method.startswith("__") and method.endswith("__")):
        return method
    bare = method[2:-2]
    if bare in _IN_PLACE_OPERATORS:
        return bare.removeprefix("i") + "_"
    if bare in ("radd", "rmul"):
        return bare[1:]
    return bare if hasattr(operator, bare) else method


def arguments(node: fx.Node, name: str | None = None) -> dict[str, Any]:
    """The arguments of a call by name; `self` of a method is `input`.

    Args:
        node: A call that `_SIGNATURES` knows.
        name: Its name, without a trailing underscore.
    """
    key = name or name_of(node)
    names = _SIGNATURES.get(key) or _SIGNATURES[key.rstrip("_")]
    bound = dict(zip(names, node.args, strict=False))
    renamed = {"self": "input", "tensor": "input"}
    bound.update({renamed.get(k, k): v for k, v in node.kwargs.items()})
    return bound


def tensor_of(node: Any) -> Tensor | None:
    """The fake tensor that stands for a node's result; None if it is none or not known."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """The shape of a node's result, with symbols; None if it is not known."""
    value = tensor_of(node)
    return None if value is None else tuple(map(_known, value.shape))


def _known(size: Any) -> Any:
    """A size that Dynamo wrapped and then found to be one number, as that number."""
    if type(size) is int:
        return size
    value = size.node.maybe_as_int()
    return size if value is None else value


def features_of(node: Any) -> tuple[Any, ...] | None:
    """The sizes behind the first; None if they cannot be made one dimension and back again.

    A single one may be a symbol, for then nothing has to be reshaped.
    """
    shape = shape_of(node)
    if not shape:
        return None
    sizes = shape[1:]
    numbers = [size for size in sizes if type(size) is int]
    if 0 in numbers or (len(numbers) != len(sizes) and len(sizes) != 1):
        return None
    return sizes


def same_size(first: Any, second: Any) -> bool:
    """Whether two sizes are the same whatever the symbols stand for; adds no guard."""
    first, second = _known(first), _known(second)
    if type(first) is int or type(second) is int:
        return type(first) is type(second) and bool(first == second)
    return bool(first.node.expr == second.node.expr)


def is_shape_only(user: fx.Node, node: fx.Node) -> bool:
    """Whether a call needs no more of a node than its shape, dtype and device."""
    name = name_of(user)
    flat = [*user.args, *user.kwargs.values()]
    at = [i for i, arg in enumerate(flat) if arg is node]
    if name in _SHAPE_OF_FIRST:
        return at == [0]
    return name in _SHAPE_OF_SECOND and at == [1]


def value_users(node: fx.Node) -> list[fx.Node]:
    """The calls that read the values of a node's result."""
    return [user for user in node.users if not is_shape_only(user, node)]


def follow_writes(graph: fx.Graph) -> None:
    """Make later readers of a tensor that a method wrote to read the method's result.

    It is the same tensor. Afterwards `out.scatter_add_(...)` looks alike whether a program goes on
    with `out` or with what the call returned.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        name = name_of(node)
        if node.op != "call_method" or not name.endswith("_") or name.endswith("__"):
            continue
        target = node.args[0]
        if not isinstance(target, fx.Node) or tensor_of(target) is None or tensor_of(node) is None:
            continue
        if _storage(target) != _storage(node):
            continue
        for user in list(target.users):
            if order[user] > order[node]:
                user.replace_input_with(target, node)


# ---- order and mutation --------------------------------------------------------------------------


class Positions:
    """Where each node stands in a graph, and what is written where; made anew after each change."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.of = {node: position for position, node in enumerate(self.nodes)}
        self.writes = [p for p, node in enumerate(self.nodes) if _written(node) is not None]
        self.boundaries = [p for p, node in enumerate(self.nodes) if name_of(node) in _BOUNDARIES]


def boundary_between(positions: Positions, first: fx.Node, last: fx.Node) -> bool:
    """Whether the grad or autocast mode changes between two calls."""
    start, end = positions.of[first], positions.of[last]
    return any(start < p < end for p in positions.boundaries)


def changed_between(
    positions: Positions, first: fx.Node, last: fx.Node, tensors: Sequence[fx.Node]
) -> bool:
    """Whether two calls may not become one: what they read is written to, or the mode changes.

    Args:
        positions: Of the graph as it is.
        first: The call from which on.
        last: The call up to which.
        tensors: What is read.
    """
    return mutated_between(positions, first, last, tensors) or boundary_between(
        positions, first, last
    )


def mutated_between(
    positions: Positions,
    first: fx.Node,
    last: fx.Node,
    tensors: Sequence[fx.Node],
    known: Sequence[fx.Node] = (),
) -> bool:
    """Whether any of some tensors may be written to between two calls.

    Args:
        positions: Of the graph as it is.
        first: The call from which on.
        last: The call up to which.
        tensors: What is read; views of one storage count as one.
        known: Calls whose writes are part of what has been read.
    """
    start, end = positions.of[first], positions.of[last]
    inside = [p for p in positions.writes if start < p < end and positions.nodes[p] not in known]
    if not inside:
        return False
    storages = [_storage(tensor) for tensor in tensors]
    if any(storage is None for storage in storages):
        return True
    for position in inside:
        for written in _written(positions.nodes[position]) or ():
            storage = _storage(written)
            if storage is None or storage in storages:
                return True
    return False


def changes_mode(module: fx.GraphModule) -> bool:
    """Whether a graph changes the grad or autocast mode."""
    return any(name_of(node) in _BOUNDARIES for node in module.graph.nodes)


def writes(module: fx.GraphModule) -> bool:
    """Whether a graph writes to any tensor, fresh ones among them."""
    return any(_written(node) is not None for node in module.graph.nodes)


def writes_to_inputs(module: fx.GraphModule) -> bool:
    """Whether a graph may change what it is given, or weights and buffers that it holds."""
    given = [n for n in module.graph.nodes if n.op in ("placeholder", "get_attr")]
    known = {_storage(node) for node in given}
    for node in module.graph.nodes:
        if node.op == "call_module" or isinstance(node.target, torch._ops.HigherOrderOperator):
            return True  # not known
        for written in [*(_written(node) or ()), *_updated_statistics(node)]:
            storage = _storage(written)
            if storage is None or storage in known:
                return True
    return False


# Functions that change an argument that their names do not tell of, and when they do.
_STATISTICS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "batch_norm": lambda bound: bound.get("training"),
    "instance_norm": lambda bound: bound.get("use_input_stats", True),
    "embedding": lambda bound: bound.get("max_norm") is not None,
    "embedding_bag": lambda bound: bound.get("max_norm") is not None,
}


def _updated_statistics(node: fx.Node) -> list[Any]:
    """Running statistics, and tables with a maximal norm, that a call of `functional` changes."""
    target: Any = node.target
    name = name_of(node)
    changes = _STATISTICS.get(name)
    if changes is None or getattr(target, "__module__", "") != "torch.nn.functional":
        # `torch.batch_norm` and its kin by position: not understood, taken for a write.
        return [None] if "batch_norm" in name or "instance_norm" in name else []
    for bound in _bound(target, node):
        names = ("running_mean", "running_var", "weight" if "max_norm" in bound else "")
        return [bound[n] for n in names if bound.get(n) is not None] if changes(bound) else []
    return [None]  # not understood: taken for a write


def _storage(node: Any) -> StorageWeakRef | None:
    value = tensor_of(node)
    if value is None or value.layout is not torch.strided:
        return None
    return StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]


def _written(node: fx.Node) -> list[Any] | None:
    """What a call writes to; None if nothing."""
    if node.op not in ("call_function", "call_method"):
        return None
    if isinstance(node.target, torch._ops.OpOverload):
        return _written_by_schema(node, node.target) or None
    name = name_of(node)
    if node.kwargs.get("out") is not None:
        return [node.kwargs["out"]]
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name == "setitem" or _asks_for_in_place(node):
        return [node.args[0] if node.args else None]
    return None


def _written_by_schema(node: fx.Node, target: torch._ops.OpOverload[..., Any]) -> list[Any]:
    written = []
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else None
            written.append(node.kwargs.get(argument.name, given))
    return written


def _asks_for_in_place(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or getattr(target, "__module__", "") != "torch.nn.functional":
        return False
    for bound in _bound(target, node):
        return bool(bound.get("inplace", False))
    return True  # not understood: taken for a write


def _bound(function: Callable[..., Any], node: fx.Node) -> Iterator[dict[str, Any]]:
    try:
        yield dict(inspect.signature(function).bind(*node.args, **node.kwargs).arguments)
    except (TypeError, ValueError):
        return
