"""From calls with any structure to calls with flat tensors, which is all that tracing knows.

`flatten` takes tensors out of tuples, lists, dicts and dataclasses; what stays behind is a `Spec`
that is part of a shape bucket's key, so that a different flag or a missing mask is another bucket.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Capture", "Spec", "flatten", "unflatten"]

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format)


@dataclasses.dataclass(frozen=True)
class Spec:
    """The structure that tensors were taken out of; hashable.

    Attributes:
        kind: `"tensor"`, `"static"`, `"sequence"`, `"fields"` or `"dict"`.
        type: Class of the container.
        names: Keys or fields, or `(value,)` if static.
        parts: What the container holds.
    """

    kind: str
    type: type | None = None
    names: tuple[Any, ...] = ()
    parts: tuple[Spec, ...] = ()


_TENSOR = Spec("tensor")


def flatten(value: Any, tensors: list[Tensor], place: str) -> Spec:
    """Takes the tensors out of a structure.

    Args:
        value: A tensor, a plain value, or tuples, lists, dicts and dataclasses of such.
        tensors: Gets the tensors, in order.
        place: What `value` is, for the error message.

    Returns:
        The structure without the tensors.

    Raises:
        TypeError: If something is none of these.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TENSOR
    if value is None or isinstance(value, _PLAIN):
        # The type too: True == 1 == 1.0, but a model can tell them apart.
        return Spec("static", type(value), (value,))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value) if field.init)
        parts = tuple(flatten(getattr(value, n), tensors, f"{place}.{n}") for n in names)
        return Spec("fields", type(value), names, parts)
    if type(value) in (dict, OrderedDict):
        parts = tuple(flatten(v, tensors, f"{place}[{k!r}]") for k, v in value.items())
        return Spec("dict", type(value), tuple(value), parts)
    if isinstance(value, tuple | list) and (
        type(value) in (tuple, list) or hasattr(value, "_fields")
    ):
        parts = tuple(flatten(v, tensors, f"{place}[{i}]") for i, v in enumerate(value))
        return Spec("sequence", type(value), (), parts)
    raise TypeError(
        f"optimize: {place} must be made of tensors, plain values, tuples, lists, dicts and "
        f"dataclasses, got {type(value).__name__}"
    )


def unflatten(spec: Spec, tensors: Iterator[Tensor]) -> Any:
    """Puts tensors back into a structure.

    Args:
        spec: From `flatten`.
        tensors: The tensors, in the same order.

    Returns:
        A new structure of the same types.
    """
    if spec.kind == "tensor":
        return next(tensors)
    if spec.kind == "static":
        return spec.names[0]
    parts = [unflatten(part, tensors) for part in spec.parts]
    kind: Any = spec.type
    if spec.kind == "sequence":
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    if spec.kind == "dict":
        return kind(zip(spec.names, parts, strict=True))
    return kind(**dict(zip(spec.names, parts, strict=True)))


class Capture(nn.Module):
    """A model with flat tensors in and out, for one structure of inputs.

    Args:
        model: The model.
        spec: Structure of `(args, kwargs)`.
    """

    def __init__(self, model: nn.Module, spec: Spec) -> None:
        super().__init__()
        self.model = model
        self.inputs = spec
        self.outputs: Spec | None = None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Runs the model and notes the structure of its result.

        Args:
            tensors: Every tensor of the inputs.

        Returns:
            Every tensor of the result.

        Raises:
            TypeError: If the result holds something else than structures of tensors, or no tensor.
        """
        args, kwargs = unflatten(self.inputs, iter(tensors))
        found: list[Tensor] = []
        self.outputs = flatten(self.model(*args, **kwargs), found, "the model's result")
        if not found:
            raise TypeError("optimize: the model's result must hold a tensor, got none")
        return tuple(found)
