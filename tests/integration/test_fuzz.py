"""The public ops with arguments of every kind: no crash, no hang, only the documented errors.

The calls are made in a process of their own, the same at each run. `EDGEWEAVE_FUZZ_SECONDS=600`
makes new ones for ten minutes.
"""

from __future__ import annotations

import os
import re

from fuzz import op_surface

from edgeweave import scatter, sparse

# Take no tensors, or only describe what an op returned.
NOT_OPS = {"CacheInfo", "cache_clear", "cache_info", "set_cache_limit"}


def test_every_public_op_is_fuzzed():
    assert set(op_surface.OPS) == {*scatter.__all__, *sparse.__all__} - NOT_OPS


def test_only_documented_errors_come_out(run_python, tmp_path):
    log = tmp_path / "calls.txt"
    seconds = os.environ.get("EDGEWEAVE_FUZZ_SECONDS")
    amount = ("--seconds", seconds) if seconds else ("--examples", "80")
    done = run_python(
        script="fuzz/op_surface.py",
        args=(*amount, "--log", str(log)),
        check=False,
        timeout_s=float(seconds or 0) * 1.5 + 300,
    )
    calls = log.read_text().splitlines() if log.exists() else ["none"]
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\nlast call: {calls[-1]}"
    # Neither all refused nor all accepted, or the arguments say nothing.
    for op in op_surface.OPS:
        counts = dict.fromkeys(("a result", "Error"), 0)
        for line in done.stdout.splitlines():
            if (found := re.match(rf"\s*(\d+)  {op}: .*?(a result|Error)", line)) is not None:
                counts[found[2]] += int(found[1])
        assert min(counts.values()) >= sum(counts.values()) / 10, (op, counts)
