"""MPICH beside Open MPI: two MPI libraries cannot be in one process, nor their packages in one environment.

So every rank of the benchmark has a companion (`companion`) in MPICH's own Python, which MPICH's own launcher
has started on the same emulated host, and which takes the rank's turn while that one sleeps.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiring import Communicator
from multiring.benchmarks import companion, launch
from multiring.benchmarks.contenders import Elsewhere
from multiring.benchmarks.emulation.hosts import EmulatedHosts
from multiring.benchmarks.emulation.start import HOSTS, MODULE, Emulation
from multiring.errors import InternalError, UsageError

__all__ = ["NAME", "Mpich", "MpichEnvironment", "find_mpich"]

NAME = "MPICH"
_INSTALL = "python -m venv DIRECTORY && DIRECTORY/bin/pip install mpich mpi4py numpy"
_CHECK = (
    "import numpy, mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.get_vendor()[0], end='')"
)
_START_SECONDS = 60.0
_END_SECONDS = 30.0
_LOOK_SECONDS = 0.05
# What other launchers tell their ranks, and what multiring tells its own: not for MPICH's.
_OTHERS = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI_LOCAL", "MULTIRING_")
_JOB = "MULTIRING_JOB_ID"  # by which the launcher's guard finds all that belongs to the job
# Reads the devices of its own host: those of /sys are of the host that has mounted it.
_WITH_OWN_DEVICES = 'mount -t sysfs sysfs /sys && exec "$@"'


@dataclass(frozen=True)
class MpichEnvironment:
    """Where MPICH is installed.

    Attributes:
        python: The Python with MPICH, mpi4py and NumPy.
        mpiexec: MPICH's launcher, Hydra.
    """

    python: Path
    mpiexec: Path


def find_mpich(path: Path) -> MpichEnvironment:
    """The environment that is a virtual environment, or that of a Python.

    Raises:
        UsageError: There is none with MPICH; says what to do.
    """
    python = path / "bin" / "python" if path.is_dir() else path
    remedy = f"make one by `{_INSTALL}`, or leave --mpich out"
    if not os.access(python, os.X_OK) or python.is_dir():
        raise UsageError(f"--mpich {path}: {python} is no Python: {remedy}")
    asked = launch.ask([str(python), "-P", "-c", _CHECK])
    if asked.returncode != 0:
        why = (asked.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise UsageError(f"--mpich {path}: {python} cannot use MPICH ({why}): {remedy}")
    if asked.stdout != NAME:
        raise UsageError(f"--mpich {path}: the mpi4py of {python} uses {asked.stdout}, not {NAME}: {remedy}")
    # Not resolved: a virtual environment's Python is a link to another one.
    beside = [python.absolute().with_name(name) for name in ("mpiexec.hydra", "mpiexec", "mpirun")]
    in_path = [Path(found) for name in ("mpiexec.hydra", "mpiexec") if (found := shutil.which(name))]
    for mpiexec in [*beside, *in_path]:
        if os.access(mpiexec, os.X_OK) and launch.vendor_of(mpiexec) == NAME:
            return MpichEnvironment(python.absolute(), mpiexec)
    raise UsageError(f"--mpich {path}: no mpiexec of {NAME} is beside {python} or in PATH: {remedy}")


class Mpich(Elsewhere):
    """MPICH's MPI_Allreduce, in companions of the ranks.

    Args:
        comm: The ranks.
        path: Where MPICH is; see `find_mpich`.
        cpus: Of this rank.
        crowded: Whether there are more ranks than processors.
        emulation: The hosts; None: all ranks are on this one.

    Raises:
        UsageError: There is no MPICH, or the ranks are on several hosts that are not emulated.
        InternalError: MPICH does not start, or not where it should.
    """

    def __init__(
        self,
        comm: Communicator,
        path: Path,
        cpus: list[int],
        *,
        crowded: bool,
        emulation: Emulation | None,
    ) -> None:
        if comm.cross_size > 1 and emulation is None:
            raise UsageError(
                "--mpich measures on one host or on emulated ones, and these are several: leave it out"
            )
        self.name = NAME
        self._comm = comm
        self._mpiexec: subprocess.Popen[bytes] | None = None
        self._directory = Path(comm.broadcast_object(_make_directory(comm.size) if comm.rank == 0 else None))
        try:
            self._connection = self._start_all(path, emulation)
            self._stream = self._connection.makefile("rw", encoding="utf-8")
            flags = str(self._directory / "flags")
            self._started = self._ask("start", cpus=cpus, size=comm.size, flags=flags, crowded=crowded)
            self._check_place()
            comm.barrier()
        finally:
            if comm.rank == 0:  # all have connected, and have mapped the flags
                shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def versions(self) -> dict[str, str]:
        """MPICH's, by its name."""
        return {self._started["vendor"]: self._started["version"]}

    def prepare(self, count: int) -> None:
        """An array of `count` elements in each companion."""
        self._ask("prepare", count=count)

    def iterate(self, first: int, count: int) -> list[tuple[int, int]]:
        """Iterations from the number `first` on; when the companion entered and left each, in nanoseconds."""
        return [(begin, end) for begin, end in self._ask("iterate", first=first, count=count)]

    def close(self) -> None:
        """Lets the companions end. Collective."""
        self._stream.close()
        self._connection.close()
        if self._mpiexec is None:
            return
        try:
            self._mpiexec.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._mpiexec.kill()
            self._mpiexec.wait()

    def _start_all(self, path: Path, emulation: Emulation | None) -> socket.socket:
        """Has rank 0 start the companions; the connection to this rank's. Collective."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._directory / str(self._comm.rank)))
            listener.listen(1)
            self._comm.barrier()
            if self._comm.rank == 0:
                self._mpiexec = _start(find_mpich(path), self._directory, self._comm.size, emulation)
            return self._accept(listener)

    def _accept(self, listener: socket.socket) -> socket.socket:
        listener.settimeout(_LOOK_SECONDS)
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                connection = listener.accept()[0]
                connection.settimeout(None)
                return connection
            if self._mpiexec is not None and self._mpiexec.poll() is not None:
                break
        code = None if self._mpiexec is None else self._mpiexec.poll()
        what = f"has not come in {_START_SECONDS:.0f} s" if code is None else f"mpiexec ended with {code}"
        raise InternalError(
            f"{NAME}'s rank {self._comm.rank} did not start ({what}); what {NAME} says of it is above"
        )

    def _check_place(self) -> None:
        """Each companion has to be on the host of its rank, or another network would be measured."""
        mine = {"rank": self._comm.rank, "network": os.stat("/proc/self/ns/net").st_ino}
        for what, value in mine.items():
            if self._started[what] != value:
                raise InternalError(
                    f"{NAME}'s rank {self._comm.rank} was started in the wrong place: its {what} is "
                    f"{self._started[what]} instead of {value}"
                )

    def _ask(self, what: str, **arguments: Any) -> Any:
        try:
            self._stream.write(json.dumps([what, arguments]) + "\n")
            self._stream.flush()
            line = self._stream.readline()
        except OSError:
            line = ""
        if not line:
            raise InternalError(f"{NAME}'s rank {self._comm.rank} has ended; what {NAME} says of it is above")
        reply = json.loads(line)
        if "error" in reply:
            raise InternalError(f"{NAME} on rank {self._comm.rank}: {reply['error']}")
        return reply["answer"]


def _make_directory(ranks: int) -> str:
    directory = Path(tempfile.mkdtemp(prefix="multiring-bench-"))
    (directory / "flags").write_bytes(bytes(8 * companion.LINE * ranks))
    return str(directory)


def _start(
    environment: MpichEnvironment, directory: Path, ranks: int, emulation: Emulation | None
) -> subprocess.Popen[bytes]:
    program = [str(environment.python), "-P", companion.__file__, str(directory)]
    environ = mpich_environment(os.environ)
    if emulation is None:
        words = ["-launcher", "fork", "-rmk", "user"]
    else:
        words = _on_emulated_hosts(directory, emulation)
        program = ["unshare", "--mount", "sh", "-c", _WITH_OWN_DEVICES, "sh", *program]
        environ = {**over_tcp(len(emulation.rates)), **environ}
    return subprocess.Popen(
        [str(environment.mpiexec), *words, "-n", str(ranks), *program],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),  # stdout has the results
    )


def _on_emulated_hosts(directory: Path, emulation: Emulation) -> list[str]:
    """Hydra's options: a script in place of rsh goes to a host, since Hydra takes one word for it."""
    shell = directory / "shell"
    hosts = f"{HOSTS}={os.environ[HOSTS]}"
    command = shlex.join(["env", hosts, sys.executable, "-m", MODULE, "shell"])
    shell.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    shell.chmod(0o755)
    host_list = [f"{EmulatedHosts.address(host)}:{emulation.ranks}" for host in range(emulation.hosts)]
    return ["-launcher", "rsh", "-launcher-exec", str(shell), "-rmk", "user", "-hosts", ",".join(host_list)]


def mpich_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for MPICH's launcher inside of a rank that another one has started."""
    return {name: value for name, value in environ.items() if name == _JOB or not name.startswith(_OTHERS)}


def over_tcp(links: int) -> dict[str, str]:
    """What keeps MPICH on the links of emulated hosts, with UCX and with libfabric.

    UCX takes all processes of one kernel to be on one host, and would pass the bytes through memory. Between
    ranks of one host MPICH uses memory by itself, by what its launcher says of who is where.
    """
    devices = [f"eth{link}" for link in range(links)]
    return {
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": ",".join(devices),
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": devices[0],
    }
