"""Fixtures for all tests; `_reference` becomes importable because this directory is on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

import edgeweave

# Timings on a shared machine say nothing, and a test must not fail today and pass tomorrow.
hypothesis.settings.register_profile(
    "edgeweave",
    deadline=None,
    max_examples=40,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("edgeweave")

PACKAGE_PARENT = Path(edgeweave.__file__).resolve().parent.parent
TESTS = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> Iterator[None]:
    """Seed torch, and put back the process-wide settings a test may have changed."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_device(None)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Run the test with nothing compiled and nothing counted, and leave nothing compiled behind."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def empty_cache() -> Iterator[None]:
    """Run the test with an empty plan cache and the default limit, and empty it afterwards."""
    limit = edgeweave.sparse.cache_info().max_bytes
    edgeweave.sparse.cache_clear()
    yield
    edgeweave.sparse.set_cache_limit(limit)
    edgeweave.sparse.cache_clear()


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs Python code in a fresh process which can import edgeweave.

    Args of the returned function: `code` (source text) or `script` (a path below `tests/`),
    `args` for the command line, `env` with additional variables. It asserts that the exit
    status is 0, unless `check=False`.
    """

    def run(
        code: str | None = None,
        *,
        script: str | None = None,
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        check: bool = True,
        timeout_s: float = 180,
    ) -> subprocess.CompletedProcess[str]:
        start = ["-c", code] if code is not None else [str(TESTS / str(script))]
        variables = {k: v for k, v in os.environ.items() if not k.startswith("EDGEWEAVE_")}
        paths = [str(PACKAGE_PARENT), str(TESTS), variables.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        done = subprocess.run(
            [sys.executable, *start, *args],
            env=variables | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and done.returncode != 0:
            pytest.fail(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    return run
