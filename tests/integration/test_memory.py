"""`sparse.mm` allocates no `[E, F]` temporary, forward or backward: peak memory is measured."""

from __future__ import annotations

import json

import pytest

# E * F * 4 bytes = 512 MB against N * F * 4 = 1 MB and 4 MB for an fp32 array of length E.
MEASURE = """
import json, torch
from edgeweave import sparse

num_nodes, num_edges = 2000, 1_000_000


def status_mb(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def growth_mb(function):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak to what is resident now
    start = status_mb("VmRSS")
    result = function()
    return result, status_mb("VmHWM") - start


edges = torch.randint(0, num_nodes, (2, num_edges))
graph = sparse.Graph(edges, size=(num_nodes, num_nodes))
graph.row, graph.perm, graph.in_degree  # the plan is not what is measured
few = sparse.Graph(edges[:, :100], size=(num_nodes, num_nodes))
report = {}
for reduce, features, weight_shape in (
    ("sum", [128], None),
    ("sum", [128], [num_edges]),
    ("mean", [4, 32], [num_edges, 4]),
    ("amax", [128], None),
    ("amin", [128], [num_edges]),
    ("amax", [4, 32], [num_edges, 4]),
):
    x = torch.randn(num_nodes, *features, requires_grad=True)
    weight = None if weight_shape is None else torch.randn(weight_shape, requires_grad=True)
    leaves = [x] if weight is None else [x, weight]
    upstream = torch.randn(num_nodes, *features)
    warm = sparse.mm(few, x, reduce, weight=None if weight is None else weight[:100])
    torch.autograd.grad(warm, leaves, upstream)
    out, forward = growth_mb(lambda: sparse.mm(graph, x, reduce, weight=weight))
    grads, backward = growth_mb(lambda: torch.autograd.grad(out, leaves, upstream))
    del warm, out, grads
    report[f"{reduce} {features} {weight_shape}"] = [forward, backward]
control = growth_mb(lambda: torch.randn(num_nodes, 128)[edges[0]])[1]
print(json.dumps({"control": control, "growth": report}))
"""


def test_no_temporary_of_the_size_of_all_messages(run_python):
    measured = json.loads(run_python(MEASURE).stdout.splitlines()[-1])
    assert measured["control"] > 450, "the measurement does not see a tensor of 512 MB"
    assert len(measured["growth"]) == 6
    # Results: 1 MB forward; backward 1 MB for x, 16 MB for weights of four heads, and as much
    # again while they are summed. An [E, F] tensor, or even [E, F / 4], would be over 120 MB.
    for case, (forward, backward) in measured["growth"].items():
        assert forward < 64, (case, forward)
        assert backward < 64, (case, backward)


ATTENTION = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
import json, sys, torch
import edgeweave
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

num_nodes, num_edges, heads, width = 2000, 250_000, 4, 32
edges = torch.randint(0, num_nodes, (2, num_edges))
x = torch.randn(num_nodes, heads * width, requires_grad=True)
cls = {"GAT": GATConv, "GATv2": GATv2Conv, "Transformer": TransformerConv}[sys.argv[1]]
layer = cls(heads * width, width, heads=heads)
if sys.argv[2] == "accelerated":
    edgeweave.accelerate()
layer(x[:10], torch.tensor([[0, 1], [1, 2]])).sum().backward()

def status_mb(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))

with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # resets the peak, which importing raised, to what is resident now
before = status_mb("VmRSS")
layer(x, edges).sum().backward()
print(json.dumps(status_mb("VmHWM") - before))
"""


@pytest.mark.parametrize("layer", ["GAT", "GATv2", "Transformer"])
def test_attention_needs_at_most_a_third_of_the_memory(run_python, layer):
    stock, ours = (
        json.loads(run_python(ATTENTION, args=(layer, how)).stdout.splitlines()[-1])
        for how in ("stock", "accelerated")
    )
    # One [E, H, C] is 128 MB, and stock holds at least the gathered features and the messages.
    assert stock > 250
    assert ours < stock / 3
