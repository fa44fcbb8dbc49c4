"""`torch.compile(model, backend="edgeweave_onednn")`: the partitions of graphfuse under Dynamo."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._errors import EdgeweaveWarning
from ._module import FusedModule, FuseError, fuse

__all__ = ["edgeweave_onednn"]

_said: set[str] = set()
_lock = threading.Lock()


def _say_once(text: str) -> None:
    with _lock:
        if text in _said:
            return
        _said.add(text)
    warnings.warn(text, EdgeweaveWarning, stacklevel=3)


def _with_literals(
    graph: fx.GraphModule, example: Sequence[Any]
) -> tuple[fx.GraphModule, dict[int, float]]:
    """Undo what Dynamo does to Python floats when sizes are dynamic: tensors that are read back."""
    copied = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    literals: dict[int, float] = {}
    placeholders = [node for node in copied.graph.nodes if node.op == "placeholder"]
    for position, (node, value) in enumerate(zip(placeholders, example, strict=True)):
        users = list(node.users)
        read_back = users and all(u.op == "call_method" and u.target == "item" for u in users)
        wrapped = isinstance(value, Tensor) and value.dtype == torch.float64 and value.dim() == 0
        if read_back and wrapped:
            literals[position] = float(value)
            for user in users:
                user.replace_all_uses_with(literals[position])
                copied.graph.erase_node(user)
    copied.recompile()
    return copied, literals


class _Bound(nn.Module):
    """A Dynamo graph with its weights as parameters, and its sizes read off the inputs."""

    def __init__(self, graph: fx.GraphModule, example: Sequence[Any]) -> None:
        super().__init__()
        graph, self.literals = _with_literals(graph, example)
        self.graph_module = graph
        self.weight_positions: list[int] = []
        self.tensor_positions: list[int] = []
        self.dynamic: list[set[int]] = []
        self.size_sources: dict[int, tuple[int, int]] = {}
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        symbols: dict[str, tuple[int, int]] = {}
        for position, (node, value) in enumerate(zip(placeholders, example, strict=True)):
            if not isinstance(value, Tensor) or position in self.literals:
                continue
            static = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
            if isinstance(value, nn.Parameter) or static is not None:
                self.weight_positions.append(position)
                self._put(position, value)
                continue
            shape = node.meta["example_value"].shape
            free = {dim for dim, size in enumerate(shape) if isinstance(size, torch.SymInt)}
            self.dynamic.append(free)
            for dim in free:
                symbols.setdefault(str(shape[dim]), (len(self.tensor_positions), dim))
            self.tensor_positions.append(position)
        for position, value in enumerate(example):
            if not isinstance(value, Tensor):
                source = symbols.get(str(value))
                if source is None:
                    raise FuseError(f"a size or number that no input has: {value}")
                self.size_sources[position] = source
        self.total = len(example)
        self.train(False)

    def forward(self, *tensors: Tensor) -> Any:
        """Run the graph."""
        arguments: list[Any] = [None] * self.total
        for position, number in self.literals.items():
            arguments[position] = number
        for position in self.weight_positions:
            arguments[position] = getattr(self, f"weight{position}")
        for position, tensor in zip(self.tensor_positions, tensors, strict=True):
            arguments[position] = tensor
        for position, (index, dim) in self.size_sources.items():
            arguments[position] = tensors[index].shape[dim]
        return self.graph_module(*arguments)

    def _put(self, position: int, value: Tensor) -> None:
        name = f"weight{position}"
        if isinstance(value, nn.Parameter):
            self.register_parameter(name, value)
        else:
            self.register_buffer(name, value, persistent=False)

    def take_weights(self, arguments: Sequence[Any]) -> None:
        """Dynamo may call the same code for another module of the same class."""
        for position in self.weight_positions:
            if getattr(self, f"weight{position}") is not arguments[position]:
                self._put(position, arguments[position])


class _Compiled:
    """Fuses at the first call, when real inputs are there and Dynamo is done."""

    def __init__(self, bound: _Bound, graph: fx.GraphModule) -> None:
        self._bound, self._graph = bound, graph
        self._fused: FusedModule | None = None
        self._failed = False
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        tensors = tuple(arguments[position] for position in self._bound.tensor_positions)
        if self._fused is None and not self._failed:
            with self._lock:
                if self._fused is None and not self._failed:
                    self._fuse(arguments, tensors)
        same = all(float(arguments[p]) == number for p, number in self._bound.literals.items())
        if self._fused is None or not same:
            return self._graph(*arguments)
        self._bound.take_weights(arguments)
        return self._fused(*tensors)

    def _fuse(self, arguments: Sequence[Any], tensors: tuple[Tensor, ...]) -> None:
        self._bound.take_weights(arguments)
        dims: Any = self._bound.dynamic if any(self._bound.dynamic) else None
        try:
            # Dynamo guards the mode, and its graph has none of the conversions.
            dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else None
            self._fused = fuse(self._bound, tensors, dtype=dtype, dynamic=dims)
        except (FuseError, TypeError, ValueError) as error:
            self._failed = True
            _say_once(f"edgeweave_onednn: a graph runs in eager: {error}")


def edgeweave_onednn(
    graph: fx.GraphModule, example_inputs: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """Backend of `torch.compile` for inference.

    Graphs that record gradients run in eager, which is said once.

    Args:
        graph: From Dynamo.
        example_inputs: Weights, sizes and inputs.
        options: None are known.

    Returns:
        What runs in the graph's place.

    Raises:
        ValueError: If options are given.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()
        >>> compiled = torch.compile(model, backend="edgeweave_onednn")
        >>> x = torch.randn(4, 8)
        >>> with torch.no_grad():
        ...     bool(torch.allclose(compiled(x), model(x), atol=1e-6))
        True
    """
    if options:
        raise ValueError(f"edgeweave_onednn: options must be empty, got {sorted(options)}")
    records = torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in example_inputs
    )
    if records:
        _say_once(
            "edgeweave_onednn: a graph that records gradients runs in eager; "
            "call the compiled model under torch.no_grad() or torch.inference_mode()"
        )
        return graph.forward
    try:
        bound = _Bound(graph, example_inputs)
    except FuseError as error:
        _say_once(f"edgeweave_onednn: a graph runs in eager: {error}")
        return graph.forward
    return _Compiled(bound, graph)
