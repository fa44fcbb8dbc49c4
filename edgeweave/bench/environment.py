"""What a benchmark ran on: a number without this is worth nothing a month later."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import edgeweave
from edgeweave import runtime

_PACKAGES = {
    "torch": "torch",
    "torch_geometric": "torch-geometric",
    "triton": "triton",
    "numpy": "numpy",
    "scipy": "scipy",
    "torch_scatter": "torch-scatter",
    "torch_sparse": "torch-sparse",
    "pyg_lib": "pyg-lib",
    "dgl": "dgl",
    "transformers": "transformers",
}
_TRIAD_ELEMENTS = 1 << 24


def describe_environment(device: str = "cpu") -> dict[str, Any]:
    """Describes machine, software and settings of this process.

    Args:
        device: What was measured, `"cpu"` or `"cuda"`.

    Returns:
        A JSON-ready dictionary: date, commit, cpu, isa, threads, versions, allocator and huge
        pages; and the GPU's name and driver, where that was measured.

    Example:
        >>> from edgeweave.bench.environment import describe_environment
        >>> sorted(describe_environment())[:3]
        ['allocator', 'commit', 'cpu']
    """
    described = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count() or 0,
        "isa": edgeweave.active_isa(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {"edgeweave": edgeweave.__version__, **_versions()},
        "allocator": {
            **dataclasses.asdict(runtime.allocator_info()),
            "ld_preload": os.environ.get("LD_PRELOAD", ""),
        },
        "transparent_huge_pages": runtime.transparent_huge_pages(),
    }
    if device == "cuda":
        found = torch.cuda.get_device_properties(0)
        described["gpu"] = {
            "name": found.name,
            "memory_gb": round(found.total_memory / 1e9, 1),
            "multiprocessors": found.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return described


def is_installed(module: str) -> bool:
    """Tells whether a module can be found, without importing it.

    Args:
        module: Top-level module name.

    Returns:
        True if it can be found.

    Example:
        >>> from edgeweave.bench.environment import is_installed
        >>> is_installed("torch"), is_installed("no_such_module")
        (True, False)
    """
    return importlib.util.find_spec(module) is not None


def measure_stream_gb_s(elements: int = _TRIAD_ELEMENTS, repeats: int = 9) -> float:
    """Measures the memory bandwidth with STREAM's triad `a = b + 3 c` on fp64 arrays.

    Counted as STREAM counts: three arrays, without the read that precedes a write. Each of the
    default arrays is 128 MiB, well beyond any last-level cache.

    Args:
        elements: Length of each array.
        repeats: Number of runs; the fastest counts.

    Returns:
        Bandwidth in GB/s (1e9 bytes).

    Example:
        >>> from edgeweave.bench.environment import measure_stream_gb_s
        >>> measure_stream_gb_s(elements=1000, repeats=2) > 0
        True

    Source: McCalpin, "STREAM: Sustainable Memory Bandwidth in High Performance Computers".
    """
    a = torch.zeros(elements, dtype=torch.float64)
    b = torch.ones(elements, dtype=torch.float64)
    c = torch.ones(elements, dtype=torch.float64)
    fastest_s = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        torch.add(b, c, alpha=3.0, out=a)
        fastest_s = min(fastest_s, time.perf_counter() - start)
    return 3 * 8 * elements / fastest_s / 1e9


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for module, distribution in _PACKAGES.items():
        try:
            found[module] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            # Some builds carry another distribution name; the module still counts.
            found[module] = "unknown" if is_installed(module) else None
    return found


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the source tree that edgeweave runs from; None for an installed wheel."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        # No git, or a tree without commits: the report then says that the commit is not known.
        return None
    return done.stdout.strip()
