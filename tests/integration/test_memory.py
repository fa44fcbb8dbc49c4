"""`sparse.mm` allocates no `[E, F]` temporary, forward or backward: peak memory is measured."""

from __future__ import annotations

import json

import pytest

# E * F * 4 bytes = 512 MB against N * F * 4 = 1 MB and about 4 MB for each array of length E.
MEASURE = """
import json, sys, torch
from edgeweave import sparse

num_nodes, num_edges, width = 2000, 1_000_000, 128
reduce, features, weight_shape = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])


def status_mb(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def reset_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


edges = torch.randint(0, num_nodes, (2, num_edges))
graph = sparse.Graph(edges, size=(num_nodes, num_nodes))
graph.row, graph.perm  # the plan is not what is measured
x = torch.randn(num_nodes, *features, requires_grad=True)
weight = None if weight_shape is None else torch.randn(weight_shape, requires_grad=True)
upstream = torch.randn(num_nodes, *features)
small = sparse.Graph(edges[:, :100], size=(num_nodes, num_nodes))
small_weight = None if weight is None else weight[:100]
sparse.mm(small, x, reduce, weight=small_weight).backward(upstream)  # warm up
x.grad = None
if weight is not None:
    weight.grad = None

result = {}
reset_peak()
start = status_mb("VmRSS")
out = sparse.mm(graph, x, reduce, weight=weight)
result["forward"] = status_mb("VmHWM") - start
reset_peak()
start = status_mb("VmRSS")
out.backward(upstream)
result["backward"] = status_mb("VmHWM") - start
del out
reset_peak()
start = status_mb("VmRSS")
messages = x.detach()[edges[0]]
result["control"] = status_mb("VmHWM") - start
print(json.dumps(result))
"""


@pytest.mark.parametrize(
    ("reduce", "features", "weight_shape"),
    [
        ("sum", [128], None),
        ("sum", [128], [1_000_000]),
        ("mean", [4, 32], [1_000_000, 4]),
        ("amax", [128], None),
        ("amin", [128], [1_000_000]),
        ("amax", [4, 32], [1_000_000, 4]),
    ],
    ids=str,
)
def test_no_temporary_of_the_size_of_all_messages(run_python, reduce, features, weight_shape):
    done = run_python(MEASURE, args=(reduce, json.dumps(features), json.dumps(weight_shape)))
    peak = json.loads(done.stdout.splitlines()[-1])
    assert peak["control"] > 450, "the measurement does not see a tensor of 512 MB"
    # Results: 1 MB forward; backward 1 MB, 16 MB for weights of four heads, as much again for
    # accumulating. An [E, F] tensor, or even [E, F/4], would be 128 MB or more.
    assert peak["forward"] < 64, peak
    assert peak["backward"] < 64, peak
