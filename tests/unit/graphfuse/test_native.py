"""The native side refuses what does not fit, before anything of oneDNN runs."""

from __future__ import annotations

import random

import pytest
import torch

from edgeweave import graphfuse
from edgeweave._native import ops
from edgeweave.graphfuse._code import Op, Tensor, graph_code


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    graphfuse.load_library()


def _relu_graph() -> list[int]:
    tensors = {"x": Tensor((2, 4)), "y": Tensor((2, 4))}
    return graph_code(tensors, [Op("relu", ["x"], ["y"], "y")], fpmath="strict", policy="fusion")


def _relu_program(graph: int) -> list[int]:
    strided = [3, 2, 2, 4, 4, 1]  # float32, rank, sizes, strides
    values = [2, 0, 0, 0, *strided, 4, 0, 0, *strided]
    return [*values, 1, 0, graph, 0, 1, 0, 1, 1]


def test_a_graph_and_a_program_by_hand() -> None:
    graph = ops.onednn_graph_create(_relu_graph())
    assert ops.onednn_graph_partitions(graph).tolist() == [1, 1, 0, 1, 0, 1, 1]
    program = ops.onednn_program_create(_relu_program(graph), [])
    x = torch.randn(2, 4)
    (y,) = ops.onednn_run(program, [x])
    assert torch.equal(y, x.relu())
    # The program keeps the partitions it uses.
    ops.onednn_graph_release(graph)
    assert torch.equal(ops.onednn_run(program, [x])[0], x.relu())
    ops.onednn_program_release(program)
    with pytest.raises(ValueError, match="no program has handle"):
        ops.onednn_run(program, [x])


@pytest.mark.parametrize(
    "inputs",
    [
        [],
        [torch.randn(2, 5)],
        [torch.randn(4, 2).t()],
        [torch.randn(2, 4).double()],
        [torch.randn(2, 4), torch.randn(2, 4)],
    ],
)
def test_inputs_that_do_not_fit(inputs: list[torch.Tensor]) -> None:
    graph = ops.onednn_graph_create(_relu_graph())
    program = ops.onednn_program_create(_relu_program(graph), [])
    with pytest.raises(ValueError, match="oneDNN: "):
        ops.onednn_run(program, inputs)
    ops.onednn_program_release(program)
    ops.onednn_graph_release(graph)


def test_every_truncated_description_is_an_error() -> None:
    code = _relu_graph()
    graph = ops.onednn_graph_create(code)
    program = _relu_program(graph)
    for length in range(len(code)):
        with pytest.raises((ValueError, RuntimeError), match="oneDNN"):
            ops.onednn_graph_create(code[:length])
    for length in range(len(program)):
        with pytest.raises((ValueError, RuntimeError), match="oneDNN"):
            ops.onednn_program_create(program[:length], [])
    ops.onednn_graph_release(graph)


def test_random_words_never_crash() -> None:
    graph = ops.onednn_graph_create(_relu_graph())
    code = _relu_program(graph)
    words = random.Random(0)
    refused = 0
    for _ in range(300):
        broken = list(code)
        broken[words.randrange(len(broken))] = words.choice([-1, 0, 1, 2, 7, 2**40, -(2**63)])
        try:
            ops.onednn_program_release(ops.onednn_program_create(broken, []))
        except (ValueError, RuntimeError):
            refused += 1
    assert refused > 100
    ops.onednn_graph_release(graph)


def test_an_unknown_graph() -> None:
    with pytest.raises(ValueError, match="no graph has handle 123456"):
        ops.onednn_graph_partitions(123456)
