"""Models from tensors to tensors, batched along the first dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ._batch import Work
from ._errors import InvalidArgumentError
from ._tensors import (
    check_inputs,
    name_outputs,
    output_rows,
    pick_outputs,
    stack,
    to_output_array,
)
from ._types import InferRequest, InferResult, OutputTensor, TensorSpec, WireTensor

__all__ = ["DenseRunner"]

# What a request may say to any model.
COMMON_PARAMETERS: Final = frozenset(("priority", "timeout"))


@dataclass(slots=True)
class _Rows:
    inputs: dict[str, WireTensor]
    outputs: tuple[str, ...]
    rows: int


class DenseRunner:
    """Runs a module on rows.

    Args:
        call: The module or what an engine made of it.
        inputs: Specifications, in the order of the module's arguments.
        outputs: Specifications, in the order of what it returns.
        max_batch_size: Rows of a batch; 0 where the first dimension is no batch.
        keywords: Whether `call` takes its inputs by name.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        max_batch_size: int,
        *,
        keywords: bool = False,
    ) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.optional_inputs: tuple[TensorSpec, ...] = ()
        self.parameters = COMMON_PARAMETERS
        self.budget: tuple[int, ...] = (max_batch_size or 1,)
        self._batched = max_batch_size > 0
        self._call = call
        self._keywords = keywords
        self._specs = {spec.name: spec for spec in outputs}

    def admit(self, request: InferRequest) -> Work:
        """Hold a request against the model.

        Args:
            request: The request.

        Returns:
            What the scheduler queues.

        Raises:
            InvalidArgumentError: It does not fit.
        """
        check_inputs(request, self.inputs)
        names = pick_outputs(request, self.outputs)
        if not self._batched:
            payload = _Rows(request.inputs, names, 1)
            return Work(None, (1,), 1, request.nbytes, payload, request.id)
        shapes = [request.inputs[spec.name].array.shape for spec in self.inputs]
        count = shapes[0][0]
        for shape in shapes:
            if shape[0] != count:
                rows = sorted({shape[0] for shape in shapes})
                raise InvalidArgumentError(
                    f"request: inputs must have one number of rows, got {rows}"
                )
        if count > self.budget[0]:
            raise InvalidArgumentError(
                f"request: rows must be at most {self.budget[0]}, the model's max_batch_size, "
                f"got {count}"
            )
        signature = tuple([shape[1:] for shape in shapes])
        payload = _Rows(request.inputs, names, count)
        return Work(signature, (count,), count, request.nbytes, payload, request.id)

    def collate(self, works: Sequence[Work]) -> list[Any]:
        """Put rows below each other; see `Runner`."""
        payloads = [work.payload for work in works]
        return [stack([p.inputs[spec.name] for p in payloads]) for spec in self.inputs]

    def infer(self, batch: list[Any]) -> Any:
        """Run the module; see `Runner`."""
        if self._keywords:
            return self._call(
                **{spec.name: value for spec, value in zip(self.inputs, batch, strict=True)}
            )
        return self._call(*batch)

    def split(self, raw: Any, works: Sequence[Work]) -> list[InferResult]:
        """Hand each request its rows; see `Runner`."""
        named = name_outputs(raw, self.outputs)
        arrays = {n: to_output_array(v, self._specs[n].datatype) for n, v in named.items()}
        if not self._batched:
            names = works[0].payload.outputs
            return [
                InferResult([OutputTensor(n, self._specs[n].datatype, arrays[n]) for n in names])
            ]
        total = sum(work.payload.rows for work in works)
        for name, array in arrays.items():
            if not array.ndim or array.shape[0] != total:
                raise ValueError(
                    f"model: output {name} must have a row for each of {total} input rows, "
                    f"got shape {list(array.shape)}"
                )
        results, start = [], 0
        for work in works:
            stop = start + work.payload.rows
            results.append(
                InferResult(output_rows(arrays, self._specs, work.payload.outputs, start, stop))
            )
            start = stop
        return results
