"""A second start of the same model is warm, unless the passes have changed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

_CODE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
import edgeweave
from edgeweave.compile import _engine

if sys.argv[1:] == ["other passes"]:
    _engine.pipeline_id = lambda without: "other passes"

class Sums(torch.nn.Module):
    def forward(self, x, edges):
        return torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]]).relu()

torch.manual_seed(0)
x, edges = torch.randn(9, 5, requires_grad=True), torch.randint(0, 9, (2, 60))
edgeweave.optimize(Sums(), engine="inductor")(x, edges).sum().backward()
counters = torch._dynamo.utils.counters
print(json.dumps([counters["inductor"]["fxgraph_cache_hit"],
                  counters["aot_autograd"]["autograd_cache_hit"],
                  x.grad.sum().item()]))
"""


def test_the_second_start_is_warm(run_python: Run, tmp_path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def start(*args: str) -> list[float]:
        done = run_python(_CODE, args=args, env=env)
        return json.loads(done.stdout.splitlines()[-1])

    cold, warm, changed = start(), start(), start("other passes")
    assert cold[:2] == [0, 0]
    assert warm[0] >= 1
    assert warm[1] == 1
    assert changed[:2] == [0, 0]  # the id of the pipeline is part of the key
    assert cold[2] == warm[2] == changed[2]


_NETWORK = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
import edgeweave

class Messages(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 6), torch.nn.Linear(6, 3)

    def forward(self, x, edges):
        own, other = x[edges[1]], x[edges[0]]
        rows = self.first(torch.cat([own, other - own], -1))
        rows = rows.tanh() if sys.argv[1:] == ["other network"] else rows.relu()
        index = edges[1].view(-1, 1).expand(-1, 3)
        out = torch.zeros(len(x), 3)
        return out.scatter_reduce(0, index, self.second(rows), "amax", include_self=False)

torch.manual_seed(0)
x, edges = torch.randn(90, 4, requires_grad=True), torch.randint(0, 90, (2, 20000))
model = Messages()
with edgeweave.compile._record.recording() as records:
    out = edgeweave.optimize(model, engine="inductor")(x, edges)
out.sum().backward()
out = out.detach().sum().item(), x.grad.sum().item(), model.first.weight.grad.sum().item()
counters = torch._dynamo.utils.counters
print(json.dumps([counters["aot_autograd"]["autograd_cache_hit"],
                  records[0].ops.get("edgeweave.edge_network", 0), *out]))
"""


def test_a_network_of_edges_is_what_it_was_in_the_next_process(run_python: Run, tmp_path) -> None:
    """Its text is in the compiled code, and so in the key."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def start(*args: str) -> list[float]:
        done = run_python(_NETWORK, args=args, env=env)
        return json.loads(done.stdout.splitlines()[-1])

    cold, warm, other, again = start(), start(), start("other network"), start("other network")
    assert cold[:2] == other[:2] == [0, 1]
    assert warm[:2] == again[:2] == [1, 1]
    assert warm[2:] == pytest.approx(cold[2:], rel=1e-5)
    assert again[2:] == pytest.approx(other[2:], rel=1e-5)
    assert other[2] != pytest.approx(cold[2], rel=1e-2)
