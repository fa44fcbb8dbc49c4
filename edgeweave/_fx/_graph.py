"""The captured graph: nodes that call ATen, tensors with sizes that may be symbolic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ._sizes import evaluate_size
from ._structure import Structure

__all__ = [
    "Captured",
    "Meta",
    "Node",
    "Ref",
    "Source",
    "Sym",
    "Symbol",
    "map_refs",
    "readers_of",
    "refs_of",
    "row_strides",
]

Size = int | str


@dataclass(frozen=True)
class Ref:
    """A value that another node, an input or a constant defines."""

    name: str


@dataclass(frozen=True)
class Sym:
    """A size that depends on the input, as an expression of symbols."""

    expression: str


def row_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of a value of these sizes that lies row by row."""
    return tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))


@dataclass(frozen=True)
class Meta:
    """What is known of a tensor before it exists.

    Attributes:
        shape: Sizes; a string is an expression of symbols.
        stride: Strides, likewise.
        dtype: Its dtype.
    """

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: torch.dtype

    def bind(self, symbols: Mapping[str, int]) -> Meta:
        """The same with the symbols' values put in."""
        return Meta(
            tuple(evaluate_size(size, symbols) for size in self.shape),
            tuple(evaluate_size(size, symbols) for size in self.stride),
            self.dtype,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape, which must be bound."""
        assert all(isinstance(size, int) for size in self.shape)
        return self.shape  # type: ignore[return-value]

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides, which must be bound."""
        assert all(isinstance(size, int) for size in self.stride)
        return self.stride  # type: ignore[return-value]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements; the shape must be bound."""
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def in_rows(self) -> bool:
        """Whether the value, whose sizes must be bound, lies row by row."""
        wanted = zip(self.sizes, self.strides, row_strides(self.sizes), strict=True)
        return all(size == 1 or stride == step for size, stride, step in wanted)

    @property
    def static(self) -> bool:
        """Whether no size is symbolic."""
        return all(isinstance(size, int) for size in self.shape)


@dataclass
class Node:
    """One call.

    Attributes:
        name: Of the value that it defines.
        target: `aten.relu.default`-like name below `torch.ops`, or `getitem`.
        args: Positional arguments, with `Ref` for tensors and `Sym` for sizes.
        kwargs: Keyword arguments, likewise.
        meta: Of its result; None where the result is no tensor (a tuple of tensors).
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: Meta | None


@dataclass(frozen=True)
class Symbol:
    """A size that may change from call to call: dimension `dim` of input `position`."""

    position: int
    dim: int
    least: int
    most: int | None


@dataclass
class Source:
    """Where a constant lives in the model, so that a change of it is seen.

    Attributes:
        owner: The module that holds it, or None if the graph does.
        attribute: Its name there.
    """

    owner: nn.Module | None
    attribute: str

    def find(self, fallback: Tensor) -> tuple[dict[str, Any] | None, Tensor]:
        """The tensor that is there now, and the module's dictionary that holds it, if one does."""
        if self.owner is not None:
            for holder in (self.owner._parameters, self.owner._buffers):
                found: Tensor | None = holder.get(self.attribute)
                if found is not None:
                    return holder, found
        return None, fallback


@dataclass
class Captured:
    """A model as a list of ATen calls.

    Attributes:
        inputs: Names of the flat inputs; None for one that is no tensor.
        input_metas: Of each flat input.
        constants: Parameters, buffers and literal tensors by name; the model's own tensors.
        sources: Where each constant lives.
        nodes: The calls, in order.
        outputs: For each flat output a `Ref`, or a plain value.
        symbols: Sizes that may change.
        input_structure: How arguments nest.
        output_structure: How results nest.
        literals: The flat inputs that are no tensors, by position; they must not change.
    """

    inputs: list[str | None]
    input_metas: list[Meta | None]
    constants: dict[str, Tensor]
    sources: dict[str, Source]
    nodes: list[Node]
    outputs: list[Any]
    symbols: dict[str, Symbol]
    input_structure: Structure
    output_structure: Structure
    literals: dict[int, Any] = field(default_factory=dict)

    def metas(self) -> dict[str, Meta]:
        """Of every tensor: inputs, constants and results."""
        found = {
            name: meta
            for name, meta in zip(self.inputs, self.input_metas, strict=True)
            if name is not None and meta is not None
        }
        for name, tensor in self.constants.items():
            found[name] = Meta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        for node in self.nodes:
            if node.meta is not None:
                found[node.name] = node.meta
        return found


def map_refs(value: Any, change: Callable[[Any], Any]) -> Any:
    """Copy nested arguments with every `Ref` and `Sym` put through `change`."""
    if isinstance(value, Ref | Sym):
        return change(value)
    if isinstance(value, list):
        return [map_refs(item, change) for item in value]
    if isinstance(value, tuple):
        return tuple(map_refs(item, change) for item in value)
    if isinstance(value, dict):
        return {key: map_refs(item, change) for key, item in value.items()}
    return value


def refs_of(value: Any) -> Iterator[str]:
    """Names of the tensors in nested arguments."""
    if isinstance(value, Node):
        yield from refs_of(value.args)
        yield from refs_of(value.kwargs)
    elif isinstance(value, Ref):
        yield value.name
    elif isinstance(value, list | tuple):
        for item in value:
            yield from refs_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from refs_of(item)


def readers_of(nodes: Iterable[Node]) -> dict[str, list[Node]]:
    """The calls that read each value, by its name; a call once for each time that it does."""
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for name in refs_of(node):
            readers.setdefault(name, []).append(node)
    return readers
