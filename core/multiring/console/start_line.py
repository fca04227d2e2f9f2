"""The line by which rank 0 says at the start what job this is, and warnings of too few cores or ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from multiring import machine
from multiring.errors import UsageError
from multiring.log import announce
from multiring.rendezvous import launch_environment
from multiring.tuning.file import rule_limits
from multiring.units import size_text

if TYPE_CHECKING:
    from multiring.communicator import Communicator
    from multiring.settings import Settings

__all__ = ["cores_for_each_rank", "looks_distributed", "say_start"]

_log = logging.getLogger("multiring")
_has_said = False  # one job has one start, however often its ranks join again

# By what the ranks of one host differ from what has started them, for each launcher.
_RANK_VARIABLES = (
    *("MULTIRING_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"),
    *("JSM_NAMESPACE_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "SLURM_PROCID", "HOROVOD_RANK"),
)
# How many processes a launcher that was not recognised has started, or would start.
_COUNTS = (
    *("WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE", "FLUX_JOB_SIZE"),
    *("HOROVOD_SIZE", "JAX_NUM_PROCESSES", "NUM_PROCESSES", "DMLC_NUM_WORKER"),
)
# Variables that only processes of a job have.
_SIGNS = ("MASTER_ADDR", "PMIX_RANK", "JAX_COORDINATOR_ADDRESS", "JOB_COMPLETION_INDEX", "JSM_NAMESPACE_RANK")
_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 26)  # bytes of allreduces, up to which an algorithm is told


def say_start(comm: Communicator, settings: Settings, *, by_mpi: bool) -> None:
    """Says version, ranks, hosts, cores, transport and algorithms, in one line; to be called on rank 0.

    Args:
        comm: The world.
        settings: Of this rank; `quiet` silences everything here.
        by_mpi: Whether MPI carries what goes between hosts.
    """
    global _has_said
    if settings.quiet or _has_said:
        return
    _has_said = True
    from multiring import __version__

    cores = cores_for_each_rank(comm.local_size)
    ranks, hosts = _count(comm.size, "rank"), _count(comm.cross_size, "host")
    launcher = _launcher()
    places = f"{ranks} on {hosts}" if comm.size > 1 else _alone(launcher)
    parts = [f"version {__version__}", f"{places}, {_cores_text(cores)} for each rank"]
    if comm.size > 1:
        parts.append(_transport(comm, by_mpi))
        parts.append(f"{_algorithms(comm)}order {settings.order}")
    announce("; ".join(parts))
    if comm.local_size > 1 and cores < 1:
        most = max(1, round(cores * comm.local_size))
        _log.warning(
            "%d ranks share %s of host %s and take turns on them, so that every step waits for the last: "
            "start at most %s on this host, or give it more cores",
            *(comm.local_size, _count(most, "core"), comm.host, _count(most, "rank")),
        )
    if comm.size == 1 and launcher == "none" and (sign := looks_distributed(os.environ)):
        _log.warning(
            "this process trains alone, although %s: it was started by no launcher that multiring knows, so "
            "nothing is reduced over ranks. Start it by `%s`, torchrun, mpirun or srun, or set the variables "
            "that docs/launching.md names",
            *(sign, _two_ranks()),
        )


def cores_for_each_rank(local_size: int) -> float:
    """How many cores each rank of this host has; less than 1: they take turns.

    A rank may be bound to its share, or see what all of its host have: that is what the launcher may use.
    Where that is unknown, as of a launcher of another user, a rank that may not use all of its host is bound.
    """
    own, allowed = os.sched_getaffinity(0), _launcher_cpus()
    if not allowed and len(own) < (os.cpu_count() or 1):
        return min(float(len(own)), _quota() / local_size)
    total = min(len(own | allowed), _quota())
    return min(float(len(own)), total / local_size)


def looks_distributed(environ: Mapping[str, str]) -> str:
    """What in the environment says that there are several processes; empty: nothing does."""
    for name in _COUNTS:
        text = environ.get(name, "")
        if text.isdecimal() and int(text) > 1:
            return f"{name} is {text}"
    places = _lines(environ.get("PBS_NODEFILE", ""))
    if places > 1:
        return f"PBS_NODEFILE names {places} places"
    sign = next((name for name in _SIGNS if name in environ), "")
    return f"{sign} is set" if sign else ""


def _lines(path: str) -> int:
    """The number of lines of a file; 0: it cannot be read."""
    try:
        return len(_read(path).splitlines()) if path else 0
    except OSError:
        return 0


def _quota() -> float:
    quota = machine.cpu_quota()
    return float("inf") if quota is None else max(1.0, quota)


def _launcher_cpus() -> set[int]:
    """The processors of the nearest ancestor that is not part of a rank itself."""
    name = next((name for name in _RANK_VARIABLES if name in os.environ), "")
    if not name:
        return set()
    pid, mark = os.getppid(), f"\0{name}=".encode()
    try:
        while pid > 1 and mark in b"\0" + _read(f"/proc/{pid}/environ"):
            pid = int(_read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1])
        return os.sched_getaffinity(pid) if pid > 1 else set()
    except (OSError, ValueError, IndexError):  # another user's, or gone
        return set()


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _launcher() -> str:
    """What has started this process, as `Placement` has it; "unknown" where its variables make no sense."""
    with contextlib.suppress(UsageError):  # a communicator of MPI was given, which needs none of them
        return launch_environment.detect().launcher
    return "unknown"


def _alone(launcher: str) -> str:
    """How to call a world of one rank."""
    advice = f" (no launcher; `{_two_ranks()}` starts two)"
    return f"1 rank{advice if launcher == 'none' else ''}"


def _two_ranks() -> str:
    """The command that starts this program on two ranks; in a notebook the function."""
    if hasattr(sys.modules.get("__main__"), "get_ipython"):
        return "multiring.launch(fn, np=2)"
    script = sys.argv[0] if sys.argv else ""
    name = os.path.basename(script)
    is_ours = os.path.basename(os.path.dirname(script) if name == "__main__.py" else script) == "multiring"
    if is_ours and sys.argv[1:2] == ["train"]:
        return "multiring train -np 2"
    return f"multiring run -np 2 {name if name.endswith('.py') else 'train.py'}"


def _transport(comm: Communicator, by_mpi: bool) -> str:
    if comm.cross_size == 1:
        return "shared memory"
    between = f"{'MPI' if by_mpi else 'TCP'} between hosts"
    return f"shared memory and {between}" if comm.size > comm.cross_size else between


def _algorithms(comm: Communicator) -> str:
    """Which algorithms allreduces use across hosts, by size."""
    if comm.cross_size == 1:
        return ""
    chosen: list[tuple[str, str]] = []
    limits = [limit for limit in rule_limits(comm._core.tuning) if limit < _SIZES[-1]]
    for nbytes in sorted({*_SIZES, *limits}):
        rows = comm._core.algorithm_rows("allreduce", nbytes, "")
        name = next((row.name for row in rows if row.is_chosen), "a rule")
        if chosen and chosen[-1][0] == name:
            chosen.pop()
        chosen.append((name, size_text(nbytes)))
    return "allreduces by " + ", ".join(f"{name} up to {size}" for name, size in chosen) + "; "


def _cores_text(cores: float) -> str:
    return "1 core" if cores == 1 else f"{cores:.3g} cores"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
