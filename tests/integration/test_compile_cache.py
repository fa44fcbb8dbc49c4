"""A second start of the same model is warm, unless the passes have changed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

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
