"""Patches of somebody else's: in effect while accelerated, and still there after `restore`."""

import functools

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import utils
from torch_geometric.nn import GINConv, Linear, MessagePassing, SAGEConv, SumAggregation
from torch_geometric.nn.aggr import Aggregation

import edgeweave.pyg

NODES = 300  # enough rows for the faster products


@pytest.fixture
def edges() -> Tensor:
    return torch.randint(0, NODES, (2, 1500))


def counting(original, calls):
    @functools.wraps(original)
    def replacement(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    return replacement


USES = {
    (SAGEConv, "forward"): lambda edges: SAGEConv(8, 4)(torch.randn(NODES, 8), edges),
    (GINConv, "forward"): lambda edges: GINConv(nn.ReLU())(torch.randn(NODES, 8), edges),
    (Linear, "forward"): lambda edges: Linear(8, 4)(torch.randn(NODES, 8)),
    (Aggregation, "reduce"): lambda edges: SumAggregation()(torch.randn(1500, 4), edges[0]),
    (MessagePassing, "_set_jittable_templates"): lambda edges: SAGEConv(8, 4),
}


@pytest.mark.parametrize(
    "target", USES, ids=lambda target: ".".join((target[0].__name__, target[1]))
)
@pytest.mark.parametrize("when", ["before", "while"])
def test_replaced_method(target, when, edges, monkeypatch):
    calls: list[int] = []
    if when == "while":
        edgeweave.pyg.accelerate()
    replacement = counting(vars(target[0])[target[1]], calls)
    monkeypatch.setattr(*target, replacement)
    edgeweave.pyg.accelerate()
    assert vars(target[0])[target[1]] is replacement
    USES[target](edges)
    assert calls == [1]
    edgeweave.pyg.restore()
    assert vars(target[0])[target[1]] is replacement
    monkeypatch.undo()
    with edgeweave.pyg.accelerated():  # what was put back may be a wrapper of ours by now
        USES[target](edges)
    assert calls == [1]


def test_replaced_before_the_first_accelerate(run_python):
    """In a process of its own: what PyG's own functions are is not learnt from what is there."""
    done = run_python(
        "import warnings; warnings.simplefilter('ignore')\n"
        "import functools, torch\n"
        "from torch_geometric import utils\n"
        "from torch_geometric.nn import SAGEConv\n"
        "import edgeweave.pyg\n"
        "calls = []\n"
        "def replace(owner, name):\n"
        "    original = getattr(owner, name)\n"
        "    @functools.wraps(original)\n"
        "    def replacement(*args, **kwargs):\n"
        "        calls.append(name)\n"
        "        return original(*args, **kwargs)\n"
        "    setattr(owner, name, replacement)\n"
        "    return replacement\n"
        "forward, scatter = replace(SAGEConv, 'forward'), replace(utils, 'scatter')\n"
        "for accelerate in (edgeweave.pyg.accelerate, edgeweave.pyg.restore):\n"
        "    accelerate()\n"
        "    assert SAGEConv.forward is forward and utils.scatter is scatter\n"
        "    SAGEConv(3, 2)(torch.randn(300, 3), torch.zeros(2, 5, dtype=torch.long))\n"
        "    utils.scatter(torch.randn(3), torch.tensor([0, 0, 1]))\n"
        "print(calls.count('forward'), calls.count('scatter'))\n"
    )
    assert done.stdout.split() == ["2", "2"]


def test_replaced_function(monkeypatch):
    calls: list[int] = []
    replacement = counting(utils.scatter, calls)
    monkeypatch.setattr(utils, "scatter", replacement)
    with edgeweave.pyg.accelerated():
        utils.scatter(torch.randn(3), torch.tensor([0, 0, 1]))
    assert calls == [1]
    assert utils.scatter is replacement


@pytest.mark.parametrize(
    ("cls", "make"),
    [(Linear, lambda: SAGEConv(8, 4)), (nn.Linear, lambda: GINConv(nn.Linear(8, 4)))],
)
def test_replaced_forward_of_an_inner_layer(cls, make, edges, monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr(cls, "forward", counting(cls.forward, calls))
    layer = make()
    layer(torch.randn(NODES, 8), edges)
    expected = len(calls)
    with edgeweave.pyg.accelerated():
        layer(torch.randn(NODES, 8), edges)
    assert len(calls) == 2 * expected > 0
