"""What this machine, or the container we are in, lets us use: processors and memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "allowed_cpus",
    "core_allowance",
    "cpu_quota",
    "memory_available",
    "memory_limit",
    "memory_total",
    "numa_nodes",
    "oom_kills",
    "process_limit",
    "processor_flags",
    "processor_name",
]

_SIMD_FLAGS = ("sse2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16")
_SIMD_FLAGS_ARM = ("asimd", "asimdhp", "bf16", "sve", "sve2")


def allowed_cpus(root: Path = Path("/")) -> list[int]:
    """The processors this process may run on, so ordered that those of a package, of a NUMA node in it, and
    hardware threads of a core are neighbours.

    Linux often numbers the second hardware threads after all first ones; equal shares of plain numbers would
    put two ranks on the same cores.
    """

    def location(cpu: int) -> tuple[int, int, int, int]:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package, core = _number(topology / "physical_package_id"), _number(topology / "core_id")
        return (package, _numa_node(cpu, root), core, cpu)

    return sorted(os.sched_getaffinity(0), key=location)


def numa_nodes(root: Path = Path("/")) -> list[int]:
    """The NUMA nodes of these processors, ascending; node 0 where the system tells none."""
    return sorted({_numa_node(cpu, root) for cpu in os.sched_getaffinity(0)})


def _numa_node(cpu: int, root: Path) -> int:
    links = (root / f"sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")
    return min((int(link.name.removeprefix("node")) for link in links), default=0)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The tightest limit on processor time, in processors, that control groups set; None without one."""
    quotas = []
    for directory in _groups("cpu", root):
        quota, _, period = _text(directory / "cpu.max").partition(" ")
        if not quota:
            quota = _text(directory / "cpu.cfs_quota_us")
            period = _text(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:  # "max" and -1 mean no limit
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def core_allowance(root: Path = Path("/")) -> int:
    """How many threads can run at once: allowed processors, or fewer where a quota says so; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


_CACHED = ("inactive_file", "active_file", "slab_reclaimable")  # of memory.stat


def memory_total(root: Path = Path("/")) -> int | None:
    """Bytes of memory of the machine."""
    return _meminfo("MemTotal", root)


def memory_available(root: Path = Path("/")) -> int | None:
    """Bytes that processes can still take, by the machine and by control groups; None where none tells."""
    found = [_meminfo("MemAvailable", root)]
    for directory in _groups("memory", root):
        for most, used, of_all in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, taken = _text(directory / most), _text(directory / used)
            if limit.isdigit() and taken.isdigit():
                # What is cached of files counts as used, and gives way.
                cached = (_counter(directory / "memory.stat", of_all + field) or 0 for field in _CACHED)
                found.append(max(0, int(limit) - int(taken) + sum(cached)))
    return min((each for each in found if each is not None), default=None)


def _meminfo(field: str, root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None


def memory_limit(root: Path = Path("/")) -> int | None:
    """The tightest limit in bytes that control groups set on memory; None without one below the machine's."""
    limits = []
    for directory in _groups("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _text(directory / name)
            if text.isdigit():
                limits.append(int(text))
    limit = min(limits, default=None)
    total = memory_total(root)
    # Version 1 writes "no limit" as a number larger than any memory.
    return None if limit is None or (total is not None and limit >= total) else limit


def process_limit(root: Path = Path("/")) -> int | None:
    """The tightest limit that control groups set on processes and threads; None without one."""
    texts = [_text(directory / "pids.max") for directory in _groups("pids", root)]
    return min((int(text) for text in texts if text.isdigit()), default=None)


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes of our control group the kernel has killed for want of memory."""
    for directory in _groups("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            if (kills := _counter(directory / name, "oom_kill")) is not None:
                return kills
    return 0


def _counter(path: Path, name: str) -> int | None:
    for line in _text(path).splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    return None


def processor_name(root: Path = Path("/")) -> str:
    """The processor's model as the kernel names it."""
    return _cpuinfo("model name", root) or platform.processor() or platform.machine()


def processor_flags(root: Path = Path("/")) -> list[str]:
    """The vector extensions that matter to reductions and that this processor has."""
    have = set((_cpuinfo("flags", root) or _cpuinfo("Features", root)).split())
    return [flag for flag in _SIMD_FLAGS + _SIMD_FLAGS_ARM if flag in have]


def _cpuinfo(field: str, root: Path) -> str:
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Our control group of a controller and all above it, in version 2 and in version 1.

    In a container the path in /proc/self/cgroup may be the host's and not exist here; then the mount's root
    is our own group, and it is always among those yielded.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [f"sys/fs/cgroup/{controllers}", f"sys/fs/cgroup/{controller}"]
        else:
            continue
        for mount in mounts:
            inside = Path(path.strip("/"))
            for relative in (inside, *inside.parents):
                directory = root / mount / relative
                if directory.is_dir():
                    yield directory


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() else 0
