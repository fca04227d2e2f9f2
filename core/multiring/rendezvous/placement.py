"""A process's place in its job, and what readers of a launcher's variables make it of."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from multiring.errors import UsageError
from multiring.rendezvous.user_secret import job_secret
from multiring.store.file import job_directory_prefix

if TYPE_CHECKING:
    from multiring.settings import Settings

__all__ = ["Job", "Placement", "digest_of", "host_count", "launcher_process", "meeting_at"]

# Rank 0 of a job on several hosts serves the store on one of these ports of its host, which are not those
# that systems give away to who asks for any.
_PORTS = range(16384, 32768)


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


@dataclass(frozen=True)
class Job:
    """The variables that a foreign launcher has set in this process, and how they are read.

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
        digest = digest_of(self.launcher, key)
        directory = Path(tempfile.gettempdir()).absolute() / (job_directory_prefix() + digest)
        return Placement(
            *(rank, size, *local, *hosts),
            self.launcher,
            self.settings.store or directory.as_uri(),
            self.settings.secret,
            f"{self.settings.job_id or self.launcher}-{digest}",
            f"{self.launcher} {name}" if name else "",
        )


def meeting_at(
    placement: Placement, settings: Settings, host: str, key: list[str], port: int | None = None
) -> Placement:
    """Return the place with a store on the host of rank 0, where the user has named none.

    Port and secret follow from what the launcher calls the job: a user may give many jobs the same name of
    ours.

    Args:
        placement: The place.
        settings: Of this process.
        host: Where rank 0 is.
        key: What the launcher tells its jobs apart by.
        port: Where other processes reach rank 0; None: any.
    """
    if settings.store or not host:
        return placement
    name = f"{placement.launcher}-{digest_of(placement.launcher, key)}"
    digest = hashlib.sha256(name.encode()).digest()
    port = _PORTS[int.from_bytes(digest[:4]) % len(_PORTS)] if port is None else port
    address = f"[{host}]" if ":" in host else host
    secret = settings.secret or job_secret(name)
    return dataclasses.replace(placement, store_url=f"tcp://{address}:{port}", secret=secret)


def host_count(size: int, local_size: int) -> int:
    """Return how many hosts have so many ranks, each as many as this one."""
    return -(-size // max(1, local_size))


def digest_of(launcher: str, key: list[str]) -> str:
    """Return a name that is another one for every job of a launcher that tells its jobs apart by `key`."""
    return hashlib.sha256("\0".join([launcher, *key]).encode()).hexdigest()[:16]


def launcher_process(rank_variable: str) -> str:
    """Name the nearest ancestor that is not part of a rank itself, as no other process was or will be named.

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
