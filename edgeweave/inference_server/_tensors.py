"""Between the wire's arrays and torch tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._errors import InvalidArgumentError
from ._types import BYTES, DATATYPES, InferRequest, OutputTensor, TensorSpec, WireTensor

__all__ = [
    "check_inputs",
    "name_outputs",
    "output_rows",
    "pick_outputs",
    "stack",
    "to_output_array",
]


def check_inputs(
    request: InferRequest, specs: Sequence[TensorSpec], optional: Sequence[TensorSpec] = ()
) -> None:
    """Hold a request's inputs against a model's.

    Args:
        request: The request.
        specs: Inputs that must be there.
        optional: Inputs that may be.

    Raises:
        InvalidArgumentError: One is missing, unknown, or of another datatype or shape.
    """
    inputs = request.inputs
    found = 0
    for spec in specs:
        tensor = inputs.get(spec.name)
        if tensor is None:
            raise InvalidArgumentError(f"input {spec.name!r}: must be given")
        _check_input(spec, tensor)
        found += 1
    for spec in optional:
        tensor = inputs.get(spec.name)
        if tensor is not None:
            _check_input(spec, tensor)
            found += 1
    if found < len(inputs):
        known = [spec.name for spec in (*specs, *optional)]
        unknown = next(name for name in inputs if name not in known)
        raise InvalidArgumentError(
            f"request: inputs must be among {', '.join(known)}, got {unknown[:64]!r}"
        )


def _check_input(wanted: TensorSpec, tensor: WireTensor) -> None:
    if tensor.datatype != wanted.datatype:
        raise InvalidArgumentError(
            f"input {wanted.name!r}: datatype must be {wanted.datatype}, got {tensor.datatype}"
        )
    shape = tensor.array.shape
    fits = len(shape) == len(wanted.shape)
    if fits:
        for size, expected in zip(shape, wanted.shape, strict=True):
            if size != expected and expected != -1:
                fits = False
    if not fits:
        raise InvalidArgumentError(
            f"input {wanted.name!r}: shape must be {list(wanted.shape)}, got {list(shape)}"
        )


def stack(tensors: Sequence[WireTensor]) -> Any:
    """Copy arrays one below the other into fresh memory.

    Args:
        tensors: Of one datatype, and of one shape but for the first dimension.

    Returns:
        A tensor that the model may write to; for BYTES a numpy array of objects.
    """
    first = tensors[0]
    if first.datatype == BYTES:
        return np.concatenate([tensor.array for tensor in tensors])
    dtype = DATATYPES[first.datatype].torch
    shape = list(first.array.shape)
    if shape:
        shape[0] = sum(tensor.array.shape[0] for tensor in tensors)
    out = torch.empty(shape, dtype=dtype)
    view = out.view(torch.uint16).numpy() if dtype is torch.bfloat16 else out.numpy()
    if len(tensors) == 1:
        view[...] = first.array
    else:
        np.concatenate([tensor.array for tensor in tensors], out=view)
    return out


def to_output_array(value: Any, datatype: str) -> np.ndarray[Any, Any]:
    """What a model returned, as contiguous bytes in the wire's order.

    Args:
        value: A tensor, or for BYTES an array of strings.
        datatype: The declared datatype, which the values are converted to.

    Returns:
        The array; bf16 as its 16 bits.

    Raises:
        TypeError: `value` is neither.
    """
    if datatype == BYTES:
        return np.asarray(value, dtype=object)
    if not isinstance(value, Tensor):
        raise TypeError(f"model: output must be a tensor, got {type(value).__name__}")
    tensor = value.detach().to(device="cpu", dtype=DATATYPES[datatype].torch).contiguous()
    if datatype == "BF16":
        tensor = tensor.view(torch.uint16)
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array


def name_outputs(raw: Any, specs: Sequence[TensorSpec]) -> dict[str, Any]:
    """Give what a model returned the declared names.

    Args:
        raw: A tensor, a sequence in the declared order, or a mapping by name.
        specs: The declared outputs.

    Returns:
        By name.

    Raises:
        TypeError: There are too few, or a name is missing.
    """
    if isinstance(raw, Mapping):
        missing = [spec.name for spec in specs if spec.name not in raw]
        if missing:
            raise TypeError(f"model: outputs must include {missing}, got {list(raw)}")
        return {spec.name: raw[spec.name] for spec in specs}
    values = raw if isinstance(raw, tuple | list) else (raw,)
    if len(values) < len(specs):
        raise TypeError(f"model: must return {len(specs)} outputs, got {len(values)}")
    return {spec.name: value for spec, value in zip(specs, values, strict=False)}


def pick_outputs(request: InferRequest, specs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Names of the outputs to answer with.

    Args:
        request: The request.
        specs: The declared outputs.

    Returns:
        Those asked for, or all.

    Raises:
        InvalidArgumentError: One is unknown.
    """
    known = tuple([spec.name for spec in specs])
    for name in request.outputs:
        if name not in known:
            raise InvalidArgumentError(
                f"request: outputs must be among {', '.join(known)}, got {name[:64]!r}"
            )
    return request.outputs or known


def output_rows(
    arrays: Mapping[str, np.ndarray[Any, Any]],
    specs: Mapping[str, TensorSpec],
    names: Sequence[str],
    start: int,
    stop: int,
) -> list[OutputTensor]:
    """One request's rows of a batch's outputs, in the order asked for."""
    return [OutputTensor(n, specs[n].datatype, arrays[n][start:stop]) for n in names]
