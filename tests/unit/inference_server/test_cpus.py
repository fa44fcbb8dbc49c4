"""Processors from masks, quotas and NUMA nodes, on made-up file systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeweave.inference_server._cpus import (
    available_cpus,
    cgroup_cpu_limit,
    numa_nodes,
    share_cpus,
    threads_per_instance,
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_quota_of_version_2_is_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
        },
    )
    assert cgroup_cpu_limit(root) == 1.5
    assert available_cpus(root, range(8)) == [0, 1]


def test_quota_inside_a_container_whose_path_is_not_mounted(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {"proc/self/cgroup": "0::/../../pod\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"},
    )
    assert cgroup_cpu_limit(root) == 0.5
    assert available_cpus(root, range(4)) == [0]


def test_quota_of_version_1(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/box\n3:memory:/box\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cgroup_cpu_limit(root) == 3.0


def test_no_quota(tmp_path: Path) -> None:
    assert cgroup_cpu_limit(tmp_path) is None
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert cgroup_cpu_limit(tmp_path) is None
    assert available_cpus(tmp_path, [3, 1]) == [1, 3]


def test_processors_of_a_node_stand_together(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "sys/devices/system/node/node0/cpulist": "0,2,4-5\n",
            "sys/devices/system/node/node1/cpulist": "1,3,6-7\n",
        },
    )
    cpus = available_cpus(root, range(8))
    assert cpus == [0, 2, 4, 5, 1, 3, 6, 7]
    # Two instances of four threads: one on each node.
    nodes = numa_nodes(cpus, root)
    assert share_cpus(nodes, 2, 4) == [[0, 2, 4, 5], [1, 3, 6, 7]]
    # Three do not divide four: each still stays on a node, while one has room.
    assert share_cpus(nodes, 2, 3) == [[0, 2, 4], [1, 3, 6]]
    assert share_cpus(nodes, 3, 2) == [[0, 2], [4, 5], [1, 3]]
    # The last one has to take what is left of both.
    assert share_cpus(numa_nodes([0, 2, 4, 1, 3, 6], root), 3, 2) == [[0, 2], [1, 3], [4, 6]]
    assert share_cpus(nodes, 1, 6) == [[0, 2, 4, 5, 1, 3]]


@pytest.mark.parametrize(
    ("cpus", "instances", "wanted", "threads"),
    [(8, 2, 0, 4), (8, 3, 0, 2), (2, 4, 0, 1), (8, 2, 3, 3), (8, 2, 64, 4), (1, 1, 16, 1)],
)
def test_threads(cpus: int, instances: int, wanted: int, threads: int) -> None:
    assert threads_per_instance(cpus, instances, wanted) == threads


def test_more_instances_than_processors() -> None:
    assert share_cpus([[5, 6]], 3, 1) == [[5], [6], [5]]
    assert share_cpus([[5], [6]], 3, 2) == [[5, 6], [5, 6], [5, 6]]


def test_processors_of_this_machine_are_all_found() -> None:
    import os

    mask = sorted(os.sched_getaffinity(0))
    assert sorted(cpu for node in numa_nodes(mask) for cpu in node) == mask
    assert set(available_cpus()) <= set(mask)
