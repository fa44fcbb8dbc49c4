"""The kernels for CUDA, run by Triton's interpreter on the CPU: `tests/cuda` in its own process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]

# A few of each kind, for the interpreter takes a second where a GPU takes a millisecond.
CHOSEN = (
    "integers or no_edges or out_of_range or bits or nan or ties or graph_arrays or special"
    " or segments or test_gather or known_again or (test_values and float32 and 33)"
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_for_cuda_under_the_interpreter():
    words = [sys.executable, "-m", "pytest", "-q", "-x", str(TESTS / "cuda"), "-k", CHOSEN]
    done = subprocess.run(
        [*words, "-p", "no:cacheprovider"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
