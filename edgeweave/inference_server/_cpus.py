"""How many processors this process may use, and how instances share them.

A container's quota bounds the processors beside the affinity mask: torch sees the machine's and
starts a thread for each, and the kernel then stops them all for most of every period.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = [
    "available_cpus",
    "cgroup_cpu_limit",
    "numa_nodes",
    "share_cpus",
    "threads_per_instance",
]

_ROOT = Path("/")


def cgroup_cpu_limit(root: Path = _ROOT) -> float | None:
    """The processors that the control group grants.

    Args:
        root: Root of the file system.

    Returns:
        The smallest quota from this process's group up to the root, in processors; None where
        there is no quota.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:  # no such file: not Linux, or /proc is not mounted
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _quotas(root / "sys/fs/cgroup", path, _quota_v2)
        elif "cpu" in controllers.split(","):
            limits += _quotas(root / "sys/fs/cgroup/cpu", path, _quota_v1)
    return min(limits, default=None)


def _quotas(mount: Path, path: str, read: Callable[[Path], float | None]) -> list[float]:
    """Quotas of a group and all above it; inside a container the path may lead out of the mount."""
    relative = Path(path.lstrip("/"))
    folders = [mount, *(mount / parent for parent in relative.parents), mount / relative]
    found = []
    for folder in dict.fromkeys(folders):
        quota = read(folder)
        if quota is not None:
            found.append(quota)
    return found


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    except OSError:  # the root group has no such file
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period = int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
    except OSError:
        return None
    return None if quota < 0 else quota / period


def available_cpus(root: Path = _ROOT, allowed: Sequence[int] | None = None) -> list[int]:
    """The processors to use, those of one NUMA node side by side.

    Args:
        root: Root of the file system.
        allowed: The affinity mask; this process's if None.

    Returns:
        Processor numbers. Where a quota is smaller than the mask, as many of them as it grants,
        rounded up.
    """
    mask = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    in_order = [cpu for node in numa_nodes(mask, root) for cpu in node]
    quota = cgroup_cpu_limit(root)
    return in_order if quota is None else in_order[: max(1, math.ceil(quota))]


def numa_nodes(cpus: Sequence[int], root: Path = _ROOT) -> list[list[int]]:
    """Group processors by the memory that is theirs.

    Args:
        cpus: Processor numbers.
        root: Root of the file system.

    Returns:
        Those of each node that has any of them; all together where nothing tells.
    """
    node_of: dict[int, int] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        number = int(folder.name.removeprefix("node"))
        for cpu in _parse_list((folder / "cpulist").read_text(encoding="ascii")):
            node_of[cpu] = number
    nodes: dict[int, list[int]] = {}
    for cpu in cpus:
        nodes.setdefault(node_of.get(cpu, 0), []).append(cpu)
    return [nodes[number] for number in sorted(nodes)]


def _parse_list(text: str) -> list[int]:
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def threads_per_instance(cpus: int, instances: int, wanted: int = 0) -> int:
    """Threads of one instance: what was asked for, but never more than its share.

    Args:
        cpus: Processors there are.
        instances: Instances that share them.
        wanted: Threads asked for; 0 for the share.

    Returns:
        At least 1.
    """
    share = max(1, cpus // instances)
    return min(wanted, share) if wanted else share


def share_cpus(nodes: Sequence[Sequence[int]], instances: int, threads: int) -> list[list[int]]:
    """Give each instance processors of its own, of one node where one has as many left.

    Args:
        nodes: Processors of each node, as from `numa_nodes`.
        instances: How many share them.
        threads: Threads of each.

    Returns:
        One list per instance. With more instances than processors they are shared in turn.
    """
    everything = [cpu for node in nodes for cpu in node]
    left = [list(node) for node in nodes]
    shares = []
    for i in range(instances):
        room = next((node for node in left if len(node) >= threads), None)
        if room is not None:
            shares.append(room[:threads])
            del room[:threads]
            continue
        rest = [cpu for node in left for cpu in node]
        if len(rest) < threads:
            rest = [everything[(i * threads + j) % len(everything)] for j in range(threads)]
        share = rest[:threads]
        shares.append(share)
        left = [[cpu for cpu in node if cpu not in share] for node in left]
    return shares
