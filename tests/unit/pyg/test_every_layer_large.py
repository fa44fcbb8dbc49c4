"""Every fused layer on a graph that is cut into blocks and tiles: as near to float64 as stock."""

import functools

import pytest
import torch
from _every_layer import Case
from _layer_changes import FUSED
from _layer_inputs import Inputs
from _layer_runs import FLOWS, run_case
from torch import Tensor

import edgeweave.pyg

# Blocks and tiles hold some thousand edges each: several of them, the last not full.
GRAPH = {"nodes": 1_500, "others": 1_700, "count": 30_011}


@functools.cache
def inputs() -> Inputs:
    return Inputs.make(**GRAPH)


def run(case: Case, flow: str | None, dtype: torch.dtype) -> list[Tensor]:
    return run_case(case, flow, dtype, inputs=inputs())


def flows(case: Case) -> tuple[str | None, ...]:
    return FLOWS if case.flows else (None,)


def distance(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).norm().item()


@pytest.mark.parametrize("case", FUSED, ids=[case.name for case in FUSED])
def test_the_same_in_float64(case):
    for flow in flows(case):
        stock = run(case, flow, torch.float64)
        with edgeweave.pyg.accelerated():
            ours = run(case, flow, torch.float64)
        for a, b in zip(ours, stock, strict=True):
            # Sums over 30,000 edges in another order, relative to the whole of the tensor: single
            # numbers in it may cancel.
            assert distance(a, b) <= 1e-12 * max(1.0, b.norm().item())


@pytest.mark.parametrize("case", FUSED, ids=[case.name for case in FUSED])
def test_as_near_to_float64_as_stock(case):
    for flow in flows(case):
        exact = run(case, flow, torch.float64)
        stock = run(case, flow, torch.float32)
        with edgeweave.pyg.accelerated():
            ours = run(case, flow, torch.float32)
        for i, (a, b, right) in enumerate(zip(ours, stock, exact, strict=True)):
            # Stock adds up the gradients of parameters by halves, we in blocks of a thousand edges:
            # a factor of 8 for that, and some roundings of the result itself.
            room = 8 * torch.finfo(torch.float32).eps / 2 * right.double().norm().item()
            assert distance(a, right) <= 8 * distance(b, right) + room, f"{flow}, tensor {i}"


def rising(out: Tensor) -> Tensor:
    """Numbers that rise from the first node to the last, as in graphs whose nodes are in order."""
    return torch.linspace(-1, 1, out.numel()).to(out.dtype).view_as(out)


# Edges are worked off in the order of their destinations, so that a sum over them runs far off
# before it comes back: 10 to 40 times as far from float64 as stock's, some 1e-5 of the gradient.
# Strict: whoever mends one has to take it out here.
DRIFTS = (
    "TransformerConv, edge features",
    "GINEConv",
    "GINEConv, two kinds of nodes",
    "CGConv",
    "CGConv, two kinds of nodes",
    "EdgeConv",
    "EdgeConv, aggr='mean'",
    "EdgeConv, two kinds of nodes",
    "PointNetConv",
)
KNOWN = pytest.mark.xfail(strict=True, reason="gradients of the parameters drift")
ORDERED = [pytest.param(c, marks=KNOWN if c.name in DRIFTS else [], id=c.name) for c in FUSED]


@pytest.mark.parametrize("case", ORDERED)
def test_gradients_that_rise_from_node_to_node(case):
    flow = flows(case)[0]
    exact, stock = (
        run_case(case, flow, dtype, inputs=inputs(), weigh=rising)
        for dtype in (torch.float64, torch.float32)
    )
    with edgeweave.pyg.accelerated():
        ours = run_case(case, flow, torch.float32, inputs=inputs(), weigh=rising)
    for i, (a, b, right) in enumerate(zip(ours, stock, exact, strict=True)):
        # As above.
        room = 8 * torch.finfo(torch.float32).eps / 2 * right.double().norm().item()
        assert distance(a, right) <= 8 * distance(b, right) + room, f"tensor {i}"
