"""What the values of a frozen graph are: dtypes and shapes, found by running it once.

Freezing drops most of the types that tracing had found, and the rules need them. So a copy of the
graph is run which returns dtype, shape and strides of every tensor instead of the results; each
tensor dies after its last use as in a normal run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Info", "Values", "probe"]

# c10::ScalarType in its fixed order, which prim::dtype returns.
_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.bool,
)
_BF16_CODE = 15


@dataclass(frozen=True)
class Info:
    """A tensor value.

    Attributes:
        dtype: Its dtype; None for those that have no place here (quantised, 8-bit floats).
        shape: Its shape.
        stride: Its strides.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dense(self) -> bool:
        """Whether the elements fill their memory without gaps, in any order of dimensions."""
        expected = 1
        sizes = [(st, n) for st, n in zip(self.stride, self.shape, strict=True) if n != 1]
        for stride, size in sorted(sizes):
            if stride != expected:
                return False
            expected *= size
        return True

    @property
    def empty(self) -> bool:
        """Whether there are no elements."""
        return 0 in self.shape


class Values:
    """Infos of the tensors of a graph and its copies, by position.

    Args:
        inputs: One per graph input.
        outputs: One list per node of the top block.
    """

    def __init__(self, inputs: list[Info], outputs: list[list[Info | None]]) -> None:
        self._inputs = inputs
        self._outputs = outputs

    def of(self, graph: Any) -> dict[int, Info]:
        """Infos of a fresh copy of the graph, by the values' numbers.

        Args:
            graph: The graph that was probed or a copy of it, not yet rewritten.

        Returns:
            From `value.unique()` to its info.
        """
        infos = {v.unique(): i for v, i in zip(graph.inputs(), self._inputs, strict=True)}
        for node, found in zip(graph.nodes(), self._outputs, strict=True):
            for value, info in zip(node.outputs(), found, strict=True):
                if info is not None:
                    infos[value.unique()] = info
        return infos


def probe(graph: Any, inputs: Sequence[Tensor]) -> Values:
    """Runs a graph to learn what its values are.

    Args:
        graph: Without `self` input.
        inputs: One tensor per input.

    Returns:
        What was found.
    """
    copy = graph.copy()
    ints = torch._C.ListType(torch._C.IntType.get())
    asked: list[Any] = []
    wanted: list[list[bool]] = []
    for node in list(copy.nodes()):
        row = [_is_tensor(value) for value in node.outputs()]
        wanted.append(row)
        after = node
        for value, is_tensor in zip(list(node.outputs()), row, strict=True):
            if not is_tensor:
                continue
            for kind in ("prim::dtype", "aten::size", "aten::stride"):
                question = copy.create(kind, [value], 1)
                question.insertAfter(after)
                question.output().setType(torch._C.IntType.get() if kind == "prim::dtype" else ints)
                asked.append(question.output())
                after = question
    for _ in list(copy.outputs()):
        copy.eraseOutput(0)
    answer = copy.create("prim::TupleConstruct", asked, 1)
    copy.appendNode(answer)
    answer.output().setType(torch._C.TupleType([value.type() for value in asked]))
    copy.registerOutput(answer.output())
    answers = iter(torch._C._create_function_from_graph("probe", copy)(*inputs))
    outputs = [[_info(answers) if is_tensor else None for is_tensor in row] for row in wanted]
    return Values([_info_of(tensor) for tensor in inputs], outputs)


def _is_tensor(value: Any) -> bool:
    return isinstance(value.type(), torch._C.TensorType)


def _info(answers: Any) -> Info:
    code, shape, stride = next(answers), next(answers), next(answers)
    dtype = _DTYPES[code] if code < len(_DTYPES) else None
    if code == _BF16_CODE:
        dtype = torch.bfloat16
    return Info(dtype, tuple(shape), tuple(stride))


def _info_of(tensor: Tensor) -> Info:
    return Info(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
