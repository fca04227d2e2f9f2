"""Finds this process's place in its job from what a launcher has put into the environment.

Recognised, the first that fits: `multiring run`, torchrun, Open MPI, MPICH (and others that use its Hydra),
Slurm's srun. Foreign launchers bring no store of ours, so their ranks meet in a directory whose name every
rank of the job derives alike and that no other job, nor another run of the same job, derives. On several
hosts that is a port of the first one under srun, which names the hosts, and of rank 0's host under torchrun,
whose own store says where (integrations/torchrun); others have to be told.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from multiring import config
from multiring.errors import UsageError
from multiring.rendezvous import slurm
from multiring.rendezvous.mpi.bridge import carries
from multiring.rendezvous.user_secret import job_secret
from multiring.store.file import job_directory_prefix

if TYPE_CHECKING:
    from multiring.settings import Settings

__all__ = ["TORCHRUN_SCHEME", "Placement", "detect"]

# Ranks meet by torchrun's store at that host and port, in the run of that name.
TORCHRUN_SCHEME = "torchrun://"

# Rank 0 of a job under srun serves the store on one of these ports of its host, which are not those that
# systems give away to who asks for any.
_SLURM_PORTS = range(16384, 32768)


@dataclass(frozen=True)
class Placement:
    """A process's place in its job.

    Attributes:
        rank: 0 to size - 1.
        size: Number of ranks of the job.
        local_rank: Rank among the ranks of this host.
        local_size: Number of ranks on this host.
        cross_rank: Number of this host.
        cross_size: Number of hosts.
        launcher: "multiring", "torchrun", "openmpi", "mpich", "slurm" or "none".
        store_url: Where the ranks meet; empty where there is only one and no launcher.
        secret: The job's secret, or None where the launcher gives none.
        job_id: The same on all ranks of a job, different for every other job.
        launcher_job: What the launcher calls the job on all of its hosts, in words; empty where that is not
            known.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    launcher: str
    store_url: str
    secret: bytes | None
    job_id: str
    launcher_job: str = ""

    @property
    def is_spread(self) -> bool:
        """Whether the ranks may be on several hosts."""
        return self.cross_size > 1 or self.local_size != self.size


def detect(
    environ: Mapping[str, str] = os.environ,
    launcher_process: Callable[[str], str] | None = None,
) -> Placement:
    """Returns the place that `environ` gives to this process; one rank alone where there is no launcher.

    Args:
        environ: The environment.
        launcher_process: Names the process that started all ranks of this host, given a variable that only
            ranks have; found in /proc by default.

    Raises:
        UsageError: The variables of the launcher contradict each other or are incomplete, a variable of
            multiring has a value that is not accepted, or the job spans several hosts that have no store.
    """
    settings = config.load(environ)
    placement = _from_multiring(settings)
    for launcher, (is_recognised, read) in _FOREIGN.items():
        if placement is None and is_recognised(environ):
            placement = read(_Job(launcher, environ, settings, launcher_process or _launcher_process))
    if placement is not None:
        return _checked(placement, settings, environ)
    return Placement(0, 1, 0, 1, 0, 1, "none", "", None, f"none-{os.getpid()}")


def _checked(placement: Placement, settings: Settings, environ: Mapping[str, str]) -> Placement:
    pairs = (
        ("rank", placement.rank, placement.size),
        ("local rank", placement.local_rank, placement.local_size),
        ("cross rank", placement.cross_rank, placement.cross_size),
    )
    for name, index, count in pairs:
        if not 0 <= index < count:
            raise UsageError(
                f"launcher {placement.launcher}: {name} {index} of {count} cannot be: are variables left "
                "over from another job in the environment?"
            )
    # Else the ranks would look for each other in a directory of their own host.
    is_private = not settings.store and placement.store_url.startswith("file:")
    meets = not is_private or carries(settings, placement.launcher, placement.is_spread, environ)
    if placement.is_spread and placement.launcher != "multiring" and not meets:
        raise UsageError(
            f"launcher {placement.launcher}: the job has {placement.size} ranks, {placement.local_size} of "
            "them on this host, and no store where ranks of several hosts meet: start it by `multiring run "
            "-H`, or run `multiring build mpi` if MPI starts it, or set MULTIRING_STORE and "
            "MULTIRING_SECRET, both the same on all ranks (docs/clusters.md)"
        )
    return placement


def _from_multiring(settings: Settings) -> Placement | None:
    given = {
        "MULTIRING_RANK": settings.rank,
        "MULTIRING_SIZE": settings.size,
        "MULTIRING_LOCAL_RANK": settings.local_rank,
        "MULTIRING_LOCAL_SIZE": settings.local_size,
        "MULTIRING_CROSS_RANK": settings.cross_rank,
        "MULTIRING_CROSS_SIZE": settings.cross_size,
    }
    if settings.rank is None and settings.size is None:
        return None
    missing = [name for name, value in given.items() if value is None]
    if not settings.store:
        missing.append("MULTIRING_STORE")
    if missing:
        raise UsageError(
            f"MULTIRING_RANK or MULTIRING_SIZE is set but {', '.join(missing)} is not: start the program "
            "with `multiring run`, or set all of them, or none"
        )
    rank, size, local_rank, local_size, cross_rank, cross_size = (value or 0 for value in given.values())
    return Placement(
        *(rank, size, local_rank, local_size, cross_rank, cross_size),
        launcher="multiring",
        store_url=settings.store,
        secret=settings.secret,
        job_id=settings.job_id or "unnamed",
    )


@dataclass(frozen=True)
class _Job:
    """What a foreign launcher has told this process of its job.

    Attributes:
        launcher: Its name.
        environ: The environment.
        settings: Those of multiring in the environment.
        launcher_process: See `detect`.
    """

    launcher: str
    environ: Mapping[str, str]
    settings: Settings
    launcher_process: Callable[[str], str]

    def number(self, name: str, default: int | None = None) -> int:
        """The value of a variable, which has to be an integer."""
        text = self.environ.get(name)
        if text is None and default is not None:
            return default
        try:
            return int(text or "")
        except ValueError:
            raise UsageError(
                f"launcher {self.launcher}: environment variable {name} should be a number and is "
                f"{'missing' if text is None else repr(text)}"
            ) from None

    def texts(self, *names: str) -> list[str]:
        """The values of variables, empty where there is none."""
        return [self.environ.get(name, "") for name in names]

    def placement(
        self,
        rank: int,
        size: int,
        local: tuple[int, int],
        hosts: tuple[int, int],
        key: list[str],
        name: str = "",
    ) -> Placement:
        """This process's place; `key` is what the launcher tells its jobs apart by, `name` what it calls this
        one on all hosts."""
        digest = _digest(self.launcher, key)
        directory = Path(tempfile.gettempdir()).absolute() / (job_directory_prefix() + digest)
        return Placement(
            *(rank, size, *local, *hosts),
            self.launcher,
            self.settings.store or directory.as_uri(),
            self.settings.secret,
            f"{self.settings.job_id or self.launcher}-{digest}",
            f"{self.launcher} {name}" if name else "",
        )


def _torchrun(job: _Job) -> Placement:
    environ, number = job.environ, job.number
    size = number("WORLD_SIZE")
    local_size = number("LOCAL_WORLD_SIZE", size)
    # The error file lies in a directory with a random name, per attempt, per local rank:
    # /tmp/torchelastic_x1b2/<run id>_a3c4/attempt_0/<local rank>/error.json
    attempt = os.path.dirname(os.path.dirname(environ.get("TORCHELASTIC_ERROR_FILE", "")))
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    placement = job.placement(
        *(number("RANK"), size),
        (number("LOCAL_RANK"), local_size),
        (number("GROUP_RANK", 0), number("GROUP_WORLD_SIZE", _hosts(size, local_size))),
        [*job.texts(*names), attempt],
        " ".join(filter(None, job.texts("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))),
    )
    # Else rank 0 of torch.distributed would have to serve that store, and there may be none.
    has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "MASTER_ADDR" in environ
    if job.settings.store or not placement.is_spread or not has_store:
        return placement
    host = environ["MASTER_ADDR"]
    address = f"{f'[{host}]' if ':' in host else host}:{number('MASTER_PORT')}"
    run = urllib.parse.quote(environ["TORCHELASTIC_RUN_ID"], safe="")
    return dataclasses.replace(placement, store_url=f"{TORCHRUN_SCHEME}{address}/{run}")


def _openmpi(job: _Job) -> Placement:
    rank, size = job.number("OMPI_COMM_WORLD_RANK"), job.number("OMPI_COMM_WORLD_SIZE")
    local_size = job.number("OMPI_COMM_WORLD_LOCAL_SIZE", size)
    local = job.number("OMPI_COMM_WORLD_LOCAL_RANK", rank), local_size
    # The namespace names host, process and job of mpirun, the URI the port that it listens on.
    names = ("PMIX_NAMESPACE", "PMIX_SERVER_URI2", "PMIX_SERVER_TMPDIR", "OMPI_MCA_ess_base_jobid")
    key = job.texts(*names)
    if not any(key):
        key = [job.launcher_process("OMPI_COMM_WORLD_RANK")]
    return job.placement(
        rank, size, local, (0, _hosts(size, local_size)), key, job.environ.get("PMIX_NAMESPACE", "")
    )


def _mpich(job: _Job) -> Placement:
    rank, size = job.number("PMI_RANK"), job.number("PMI_SIZE")
    local = job.number("MPI_LOCALRANKID"), job.number("MPI_LOCALNRANKS", size)
    key = [job.launcher_process("MPI_LOCALRANKID")]  # Hydra gives a job no name
    return job.placement(rank, size, local, (0, _hosts(size, local[1])), key)


def _slurm(job: _Job) -> Placement:
    environ, number = job.environ, job.number
    size = number("SLURM_STEP_NUM_TASKS")
    hosts = number("SLURM_STEP_NUM_NODES", number("SLURM_NNODES", 1))
    host = number("SLURM_NODEID", 0)
    tasks = slurm.tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    key = job.texts(*names)
    rank = number("SLURM_PROCID")
    local = number("SLURM_LOCALID", rank), tasks[host] if host < len(tasks) else size // hosts
    name = ".".join(filter(None, job.texts("SLURM_JOB_ID", "SLURM_STEP_ID")))
    placement = job.placement(rank, size, local, (host, hosts), key, name)
    return _meeting_on_first_host(placement, job.settings, environ, key) if placement.is_spread else placement


# How ranks of foreign launchers are recognised, and read.
_FOREIGN: dict[str, tuple[Callable[[Mapping[str, str]], bool], Callable[[_Job], Placement]]] = {
    "torchrun": (lambda environ: {"TORCHELASTIC_RUN_ID", "RANK"} <= environ.keys(), _torchrun),
    "openmpi": (lambda environ: "OMPI_COMM_WORLD_RANK" in environ, _openmpi),
    # PMI_RANK alone can be Slurm's; Hydra, which starts MPICH's and Intel's ranks, adds the local ones.
    "mpich": (lambda environ: {"PMI_RANK", "MPI_LOCALRANKID"} <= environ.keys(), _mpich),
    "slurm": (slurm.in_step, _slurm),
}


def _meeting_on_first_host(
    placement: Placement, settings: Settings, environ: Mapping[str, str], key: list[str]
) -> Placement:
    """The place with a store on the host of rank 0, where the user has named none.

    Port and secret follow from what Slurm calls the job: a user may give many jobs the same name of ours.
    """
    host = slurm.first_host(environ.get("SLURM_STEP_NODELIST", ""))
    if settings.store or not host:
        return placement
    name = f"slurm-{_digest('slurm', key)}"
    digest = hashlib.sha256(name.encode()).digest()
    port = _SLURM_PORTS[int.from_bytes(digest[:4]) % len(_SLURM_PORTS)]
    secret = settings.secret or job_secret(name)
    return dataclasses.replace(placement, store_url=f"tcp://{host}:{port}", secret=secret)


def _hosts(size: int, local_size: int) -> int:
    return -(-size // max(1, local_size))


def _digest(launcher: str, key: list[str]) -> str:
    """Another one for every job of a launcher that tells its jobs apart by `key`."""
    return hashlib.sha256("\0".join([launcher, *key]).encode()).hexdigest()[:16]


def _launcher_process(rank_variable: str) -> str:
    """Names the nearest ancestor that is not part of a rank itself, as no other process was or will be named.

    A rank may have been started through a shell script or `numactl`, so the parent is not always the
    launcher; but those in between carry the rank's variables and the launcher does not.
    """
    pid = os.getppid()
    while (parent := _parent(pid)) is not None and _has_variable(pid, rank_variable):
        pid = parent
    boot = _read("/proc/sys/kernel/random/boot_id").strip()
    return f"{boot} {pid} {_start_time(pid)}"


def _has_variable(pid: int, name: str) -> bool:
    return any(entry.startswith(name + "=") for entry in _read(f"/proc/{pid}/environ").split("\0"))


def _parent(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return int(fields[1]) if fields and int(fields[1]) > 0 else None


def _start_time(pid: int) -> str:
    fields = _stat_fields(pid)
    return fields[19] if fields else ""


def _stat_fields(pid: int) -> list[str]:
    # The second field of /proc/pid/stat is the name in brackets and may hold anything; count after it.
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # another user's process, or gone: then it says nothing about itself
        return ""
