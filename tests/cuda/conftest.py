"""Where the kernels for CUDA are tested: on a GPU, or by Triton's interpreter on the CPU.

With TRITON_INTERPRET=1 (before anything imports Triton) plans of CPU tensors are made as those of
CUDA tensors are, and every kernel runs in numpy: slow, but the same source. Without it and without
a GPU the tests are skipped. `tests/unit/plan/test_interpreted.py` runs them in that way.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

HERE = Path(__file__).resolve().parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Others' warnings on a GPU are not ours to mend.
pytestmark = pytest.mark.filterwarnings("default")


def _why_not() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not INTERPRETED and not torch.cuda.is_available():
        return "no CUDA device (TRITON_INTERPRET=1 runs these on the CPU, in Triton's interpreter)"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.filterwarnings("default"))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> Iterator[None]:
    """Route plans of CPU tensors to the interpreted kernels."""
    if not INTERPRETED or _why_not() is not None:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    from edgeweave._plan import _device

    convert = interpreter._convert_float

    def rounding(data, source, target, mode):
        # The interpreter cuts bfloat16 off where the hardware rounds.
        if source == tl.float32 and target == tl.bfloat16:
            values = torch.from_numpy(np.array(data, dtype=np.float32)).bfloat16()
            return values.view(torch.int16).numpy().view(np.uint16)
        return convert(data, source, target, mode)

    interpreter._convert_float = rounding
    _device._as_on_cuda = True
    yield
    _device._as_on_cuda = False
    interpreter._convert_float = convert


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> str:
    """Where the tensors of a test go."""
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def gpu() -> str:
    """The same, for tests that mean nothing without a GPU."""
    if not torch.cuda.is_available() or INTERPRETED:
        pytest.skip("no CUDA device")
    return "cuda"
