"""What the machine and control groups allow, read from made-up trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from multiring import machine


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = {"proc/self/cgroup": "0::/a/b\n", "proc/meminfo": "MemTotal: 1000000 kB\n"}
V1 = {
    "proc/self/cgroup": "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n2:pids:/docker/x\n",
    "proc/meminfo": "MemTotal: 1000000 kB\n",
}


def limited(root: Path, version: dict[str, str], limits: dict[str, str]) -> Path:
    """A tree with these files of control groups."""
    return tree(root, version | {f"sys/fs/cgroup/{name}": text for name, text in limits.items()})


def of_groups(root: Path) -> list[float | None]:
    asked = machine.cpu_quota, machine.memory_limit, machine.process_limit, machine.oom_kills
    return [ask(root) for ask in asked]


def test_the_tightest_limit_of_version_2_counts(tmp_path: Path) -> None:
    limits = {
        "a/b/cpu.max": "max 100000\n",
        "a/cpu.max": "150000 100000\n",
        "a/b/memory.max": "500000000\n",
        "a/memory.max": "max\n",
        "a/b/pids.max": "100\n",
        "a/b/memory.events": "low 0\noom 2\noom_kill 3\n",
    }
    root = limited(tmp_path, V2, limits)
    assert of_groups(root) == [1.5, 500_000_000, 100, 3]
    assert machine.core_allowance(root) == 1


def test_version_1_in_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    limits = {
        "cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": "700000000\n",
        "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    }
    assert of_groups(limited(tmp_path, V1, limits)) == [2.5, 700_000_000, None, 1]


def test_no_limit_is_none(tmp_path: Path) -> None:
    unlimited = {
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    for root in (limited(tmp_path / "1", V1, unlimited), tmp_path / "nothing"):
        assert of_groups(root) == [None, None, None, 0]
        assert machine.core_allowance(root) == len(os.sched_getaffinity(0))


def test_memory_that_is_free_is_the_least_of_machine_and_groups(tmp_path: Path) -> None:
    free = "MemTotal: 1000000 kB\nMemAvailable: 600000 kB\n"
    version_2 = {
        "a/memory.max": "500000000\n",
        "a/memory.current": "300000000\n",
        "a/memory.stat": "anon 1\ninactive_file 20000000\nactive_file 25000000\nslab_reclaimable 5000000\n",
        "a/b/memory.max": "max\n",
        "a/b/memory.current": "1\n",
    }
    version_1 = {"memory/memory.limit_in_bytes": "700000\n", "memory/memory.usage_in_bytes": "800000\n"}
    cached = {"memory/memory.stat": "active_file 1\ntotal_inactive_file 100000\ntotal_active_file 50000\n"}
    for version, groups, expected in (
        (V2, version_2, 250_000_000),
        (V1, version_1, 0),
        (V1, version_1 | cached, 50_000),
        (V2, {}, 614_400_000),
    ):
        root = limited(tmp_path / str(expected), version | {"proc/meminfo": free}, groups)
        assert machine.memory_available(root) == expected
    assert machine.memory_available(tmp_path / "nothing") is None


def test_hardware_threads_of_a_core_are_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two packages of two cores with two threads each, the second threads numbered after all first ones.
    files = {}
    for cpu in range(8):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{topology}/physical_package_id"] = f"{cpu % 4 // 2}\n"
        files[f"{topology}/core_id"] = f"{cpu % 2}\n"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert machine.allowed_cpus(tree(tmp_path, files)) == [0, 4, 1, 5, 2, 6, 3, 7]


def test_processors_of_a_numa_node_are_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One package of two nodes, of which each second core belongs to node 1; no cores are told.
    files = {f"sys/devices/system/cpu/cpu{cpu}/node{10 * (cpu % 2)}/cpulist": "" for cpu in range(4)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    assert machine.allowed_cpus(tree(tmp_path, files)) == [0, 2, 1, 3]
    assert machine.numa_nodes(tmp_path) == [0, 10]
    assert machine.numa_nodes(tmp_path / "nothing") == [0]


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    made_up = tree(tmp_path, {"proc/cpuinfo": "flags : fpu avx2 f16c\n"})
    assert machine.processor_flags(made_up) == ["f16c", "avx2"]
    assert machine.numa_nodes()
    assert machine.processor_name()
    assert set(machine.allowed_cpus()) == os.sched_getaffinity(0)
    assert (machine.memory_total() or 0) > 1 << 20
    assert (machine.memory_available() or 0) > 1 << 20
