"""oneDNN between edgeweave's ops: where graphs are cut, and that it is used and the same."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import edgeweave
from edgeweave import graphfuse
from edgeweave.compile import _measured
from edgeweave.compile._passes import run_passes
from edgeweave.compile._record import recording
from edgeweave.compile._regions import Region, cut_for_onednn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs))


class Layer(nn.Module):
    """GIN by hand."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.nn = mlp(inputs, outputs)

    def forward(self, x, edges):
        return self.nn(x + torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]]))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Layer(6, 16), Layer(16, 16), mlp(16, 4)

    def forward(self, x, edges):
        return self.head(self.second(self.first(x, edges).relu(), edges).relu())


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(40, 6), torch.randint(0, 40, (2, 160))


def cut(function, *example):
    """Return what a captured and rewritten graph is cut into."""
    found = []

    def backend(graph, given):
        run_passes(graph)
        found.append(cut_for_onednn(graph, given))
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend)(*example)
    return found[0]


def test_each_region_with_a_chain_is_onednns() -> None:
    pieces = cut(Net().eval(), *inputs())
    regions = [child for child in pieces.children() if isinstance(child, Region)]
    assert len(regions) == 2  # behind each of the two sums; the head belongs to the second


def test_it_is_the_same_and_it_is_said_who_ran_what(monkeypatch) -> None:
    def prefer_regions(sides):
        for side in sides.values():
            side()
        return {name: 0.1 if name == "passes + onednn" else 1.0 for name in sides}

    monkeypatch.setattr(_measured, "time_sides", prefer_regions)
    # On sizes as small as these ATen may be faster: not what is asked here.
    everything = functools.partial(graphfuse.fuse, keep="all")
    monkeypatch.setattr("edgeweave.graphfuse._backend.fuse", everything)
    net, example = Net().eval(), inputs()
    with torch.no_grad(), recording() as records:
        compiled = edgeweave.optimize(net)
        torch.testing.assert_close(compiled(*example), net(*example), rtol=1e-4, atol=1e-4)
        other = inputs()[0], example[1]
        torch.testing.assert_close(compiled(*other), net(*other), rtol=1e-4, atol=1e-4)
    (record,) = records
    record.settle()
    assert record.engine == "onednn"
    assert "passes + onednn 0.1 ms" in record.reason
    assert record.got["edgeweave's ops"] == 2
    # Of each region at least its two products.
    assert record.got["oneDNN partitions"] >= 4
    assert record.share > 0.5
    assert record.left == ""


def test_regions_are_a_candidate_and_no_more(monkeypatch) -> None:
    asked: list[list[str]] = []

    def time_sides(sides):
        asked.append(list(sides))
        return {name: 0.1 if name == "inductor" else 1.0 for name in sides}

    monkeypatch.setattr(_measured, "time_sides", time_sides)
    net, example = Net().eval(), inputs()
    with torch.no_grad(), recording() as records:
        edgeweave.optimize(net)(*example)
    assert asked == [["inductor", "passes + onednn", "passes + ATen", "eager"]]
    assert records[0].engine == "inductor"


class OneProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x, edges):
        return torch.zeros_like(x).index_add_(0, edges[1], self.lin(x)[edges[0]])


class Writes(Net):
    def forward(self, x, edges):
        return super().forward(x, edges).mul_(2)


class Casts(Net):
    def forward(self, x, edges):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, edges)


@pytest.mark.parametrize("net", [OneProduct(), Writes(), Casts()])
def test_graphs_that_stay_whole(net) -> None:
    assert cut(net.eval(), *inputs()) is None


def test_open_sizes_stay_whole() -> None:
    found = []

    def backend(graph, given):
        run_passes(graph)
        found.append(cut_for_onednn(graph, given))
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Net().eval(), backend=backend, dynamic=True)(*inputs())
    assert found == [None]
