"""What `edgeweave doctor` asks the machine. Each probe reports; none raises.

Only the standard library is imported here: a probe loads what it asks about, so that one missing
package costs one line of the report.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "advice", "missing", "broken"]

_OLDEST_TORCH = (2, 10)
_FEATURES = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_tile", "amx_bf16")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section: Heading that the line stands under.
        name: What was looked at.
        value: What was found, ready for JSON.
        status: `ok`, `advice` (works, could be faster), `missing` (optional), `broken`.
        remedy: The command that mends it, or empty.
    """

    section: str
    name: str
    value: str | int | float | list[str] | None
    status: Status = "ok"
    remedy: str = ""


def find_versions() -> Iterator[Finding]:
    """Report the versions of Python and of the packages in use, without importing them."""
    yield Finding("versions", "python", platform.python_version())
    for package, extra in (
        ("edgeweave", ""),
        ("torch", ""),
        ("numpy", ""),
        ("scipy", ""),
        ("torch-geometric", "pyg"),
    ):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package == "edgeweave":  # run from a source tree that was not installed
                yield Finding("versions", package, "source tree", "ok")
            elif extra:
                command = f'pip install "edgeweave[{extra}]"'
                yield Finding("versions", package, None, "missing", command)
            else:
                yield Finding("versions", package, None, "broken", f"pip install {package}")
            continue
        release = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
        if package == "torch" and release < _OLDEST_TORCH:
            yield Finding("versions", package, version, "broken", 'pip install "torch>=2.10"')
        else:
            yield Finding("versions", package, version)


def find_core() -> Iterator[Finding]:
    """Report whether the native library loads and computes a sum that can be checked by hand."""
    section = "core"
    # Whatever goes wrong below is the very thing to report, hence the broad excepts.
    try:
        from edgeweave import _native

        isa, isas = _native.active_isa(), list(_native.supported_isas())
    except Exception as error:
        remedy = (
            "unset EDGEWEAVE_ISA"
            if "EDGEWEAVE_ISA" in str(error)
            else "pip install --force-reinstall --no-deps edgeweave"
        )
        yield Finding(
            section, "native library", f"{type(error).__name__}: {error}", "broken", remedy
        )
        return
    yield Finding(section, "native library", "loads")
    yield Finding(section, "active ISA", isa)
    yield Finding(section, "supported ISAs", isas)
    try:
        import torch

        import edgeweave.sparse

        edges, x = torch.tensor([[0, 1, 2], [2, 2, 0]]), torch.tensor([[1.0], [2.0], [4.0]])
        found: object = edgeweave.sparse.mm(edges, x).flatten().tolist()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if found == [4.0, 0.0, 3.0]:
        yield Finding(section, "self-test", "sparse.mm gives the right sums")
    else:
        yield Finding(
            section,
            "self-test",
            f"sparse.mm must give [4.0, 0.0, 3.0], got {found}",
            "broken",
            "EDGEWEAVE_ISA=baseline edgeweave doctor  # tells whether one ISA is at fault",
        )


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Return the features that /proc/cpuinfo lists for the first processor."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(match.group(1).split()) if match else frozenset()


def find_processor() -> Iterator[Finding]:
    """Report the processor and its vector features, whether or not the core loads."""
    section = "processor"
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError as error:
        yield Finding(section, "features", f"unknown ({error.strerror})")
        return
    flags = cpu_flags(cpuinfo)
    model = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    yield Finding(section, "model", model.group(1) if model else platform.machine())
    yield Finding(section, "features", [name for name in _FEATURES if name in flags])
    forced = os.environ.get("EDGEWEAVE_ISA")
    if forced:
        yield Finding(section, "EDGEWEAVE_ISA", forced, "advice", "unset EDGEWEAVE_ISA")


def cgroup_cpu_limit(membership: str, root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return how many processors the control groups of this process allow, or None for no limit.

    Args:
        membership: The text of /proc/self/cgroup.
        root: Where the control groups are mounted.
    """
    limits = []
    for line in membership.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            top = root
        elif "cpu" in controllers.split(","):
            top = root / "cpu"
        else:
            continue
        group = top / path.lstrip("/")
        # A parent's limit binds its children; in a container the own path may not be mounted.
        for folder in (group, *group.parents):
            limits.append(_folder_cpu_limit(folder))
            if folder == top:
                break
    return min((limit for limit in limits if limit is not None), default=None)


def _folder_cpu_limit(folder: Path) -> float | None:
    unified, quota = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if unified.is_file():
        allowed, period = unified.read_text().split()
    elif quota.is_file():
        allowed, period = quota.read_text(), (folder / "cpu.cfs_period_us").read_text()
    else:
        return None
    return None if allowed.strip() in ("max", "-1") else int(allowed) / int(period)


def find_threads() -> Iterator[Finding]:
    """Report torch's threads beside the processors that this process may use."""
    section = "threads"
    cores = len(os.sched_getaffinity(0))
    yield Finding(section, "usable processors", cores)
    try:
        limit = cgroup_cpu_limit(Path("/proc/self/cgroup").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        yield Finding(section, "control group limit", f"unknown ({error})")
        limit = None
    else:
        yield Finding(section, "control group limit", "none" if limit is None else limit)
    try:
        import torch
    except ImportError as error:
        yield Finding(section, "torch threads", f"unknown ({error})", "broken", "pip install torch")
        return
    threads = torch.get_num_threads()
    allowed = max(1, int(cores if limit is None else min(cores, limit)))
    if threads > allowed:  # threads that share a processor wait for each other in every kernel
        yield Finding(
            section, "torch threads", threads, "advice", f"export OMP_NUM_THREADS={allowed}"
        )
    else:
        yield Finding(section, "torch threads", threads)


def find_memory() -> Iterator[Finding]:
    """Report the allocator, whether it keeps freed memory, and huge pages."""
    from edgeweave.runtime import allocator_info, transparent_huge_pages

    section = "memory"
    try:
        allocator = allocator_info()
    except RuntimeError as error:
        yield Finding(section, "allocator", str(error))
    else:
        value = f"{allocator.name} {allocator.version}"
        if allocator.name == "glibc" and not allocator.tuned:
            yield Finding(
                section,
                "allocator",
                f"{value}, returns large blocks to the kernel",
                "advice",
                "call edgeweave.runtime.tune_allocator() first thing in the program",
            )
        else:
            yield Finding(section, "allocator", f"{value}{', tuned' if allocator.tuned else ''}")
    mode = transparent_huge_pages()
    if mode == "never":
        yield Finding(
            section,
            "huge pages",
            mode,
            "advice",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    else:
        yield Finding(section, "huge pages", mode)


class _DnnlVersion(ctypes.Structure):
    _fields_ = (("major", ctypes.c_int), ("minor", ctypes.c_int), ("patch", ctypes.c_int))


def _dnnl_version(library: str) -> str:
    function = ctypes.CDLL(library).dnnl_version
    function.restype = ctypes.POINTER(_DnnlVersion)
    version = function().contents
    return f"{version.major}.{version.minor}.{version.patch}"


def find_onednn() -> Iterator[Finding]:
    """Report the oneDNN library that would be loaded: explicit, from the pip wheel, or system's."""
    section, name = "oneDNN", "libdnnl"
    explicit = os.environ.get("EDGEWEAVE_DNNL")
    bundled = Path(sys.prefix) / "lib" / "libdnnl.so.3"
    if explicit is not None:
        candidates = [explicit]
    else:
        candidates = [str(bundled)] if bundled.exists() else []
        candidates.append("libdnnl.so.3")
    reason = ""
    for library in candidates:
        try:
            yield Finding(section, name, f"{_dnnl_version(library)} ({library})")
            return
        except (OSError, AttributeError) as error:  # not there, not loadable, or not oneDNN
            reason = str(error)
    remedy = "unset EDGEWEAVE_DNNL" if explicit is not None else 'pip install "edgeweave[onednn]"'
    yield Finding(section, name, f"not found ({reason})", "missing", remedy)


def find_tools() -> Iterator[Finding]:
    """Report the C++ compiler, which only torch.compile's Inductor needs."""
    wanted = os.environ.get("CXX", "g++")
    found = shutil.which(wanted) or shutil.which("clang++")
    if found:
        yield Finding("tools", "C++ compiler", found)
    else:
        yield Finding(
            "tools",
            "C++ compiler",
            f"{wanted} not on PATH (only torch.compile with Inductor needs one)",
            "missing",
            "apt-get install g++",
        )


PROBES = (
    find_versions,
    find_core,
    find_processor,
    find_threads,
    find_memory,
    find_onednn,
    find_tools,
)
