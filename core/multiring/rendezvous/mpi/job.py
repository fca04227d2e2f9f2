"""Jobs whose ranks MPI knows: who they are, and where they meet."""

from __future__ import annotations

import functools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiring import _core
from multiring.errors import MultiringError, UsageError
from multiring.rendezvous.mpi.agreement import agree, compare
from multiring.rendezvous.mpi.bridge import bridge_path, is_built
from multiring.rendezvous.offered_store import offer_store
from multiring.store import Store, TcpStore

if TYPE_CHECKING:
    from multiring.settings import Settings

__all__ = ["MpiJob", "finalize_at_exit", "join_communicator", "join_launched"]

# Ways to reach the store that do not answer cost so much each, in seconds.
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class MpiJob:
    """A job as MPI tells it.

    Attributes:
        rank: 0 to size - 1.
        size: Number of ranks.
        session: Carries the bytes between hosts; None: TCP does.
        job_id: The same on all ranks.
        addresses: Where the store of rank 0 may be reached: host and port.
        secret: The job's secret.
    """

    rank: int
    size: int
    session: _core.MpiSession | None
    job_id: str
    addresses: list[tuple[str, int]]
    secret: bytes

    def open_store(self, timeout: float) -> Store:
        """Opens the store of rank 0.

        Raises:
            UsageError: No address of it can be reached, or it is another job's.
        """
        failures = []
        for host, port in self.addresses:
            try:
                return TcpStore(host, port, self.secret, min(timeout, _CONNECT_SECONDS))
            except MultiringError as error:
                failures.append(str(error))
        raise UsageError(
            f"rank {self.rank} cannot reach the store of rank 0: {'; '.join(failures)}. "
            "MULTIRING_INTERFACES chooses the addresses that rank 0 gives to others"
        )


def join_launched(rank: int, size: int, launcher: str, settings: Settings) -> MpiJob:
    """Joins the ranks that `launcher` has started. Collective.

    Raises:
        UsageError: The bridge is missing, or is for another MPI than that of the launcher.
        TimeoutError: Ranks are missing after MULTIRING_TIMEOUT seconds, once MPI has started.
    """
    library = _name(_core.mpi_library(str(_bridge(settings))))
    remedy = "run `multiring build mpi` with the MPI that starts the job, or set MULTIRING_TRANSPORT=tcp"
    # Its initialisation would end the process.
    if (launcher == "openmpi" and "MPICH" in library) or (launcher == "mpich" and "Open MPI" in library):
        raise UsageError(f"{launcher} has started this process, and the bridge is to {library}: {remedy}")
    session = _world_session(str(_bridge(settings)))
    if (session.rank, session.size) != (rank, size):
        raise UsageError(
            f"this process is rank {rank} of {size} for {launcher}, but rank {session.rank} of "
            f"{session.size} for the MPI of the bridge ({library}): {remedy}"
        )
    offer = json.dumps(offer_store(settings.interfaces)).encode() if rank == 0 else b""
    return _job(rank, size, session, json.loads(session.broadcast(offer, 0, settings.timeout)))


def join_communicator(comm: Any, settings: Settings) -> MpiJob:
    """Joins the ranks of `comm`, a communicator of mpi4py. Collective among them.

    Raises:
        UsageError: `comm` is none; or on any rank the bridge is missing, for another MPI than mpi4py's, or
            not used while others use it: on all ranks, then.
        TimeoutError: Ranks are missing after MULTIRING_TIMEOUT seconds.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UsageError("init(comm=...) takes a communicator of mpi4py, which is not installed") from error
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise UsageError(f"init(comm=...) takes an intracommunicator of mpi4py, not {comm!r}")
    rank, size = comm.Get_rank(), comm.Get_size()
    facts: dict[str, Any] = {"engine": "tcp", "error": ""}
    try:
        if settings.transport == "mpi" or (not settings.transport and is_built(settings)):
            _require_same_library(MPI, settings)
            facts["engine"] = "mpi"
        if rank == 0:
            facts["offer"] = offer_store(settings.interfaces)
    except MultiringError as error:
        facts["error"] = str(error)
    # From here on all ranks do the same, or none would know why another does not come.
    found = agree(comm, facts, settings.timeout)
    compare(found)
    session = None
    if facts["engine"] == "mpi":
        session = _session_of(comm, str(_bridge(settings)))
    return _job(rank, size, session, found[0]["offer"])


def _require_same_library(mpi: Any, settings: Settings) -> None:
    ours, theirs = _name(_core.mpi_library(str(_bridge(settings)))), _name(mpi.Get_library_version())
    if ours != theirs:
        raise UsageError(
            f"mpi4py uses {theirs} and the bridge {ours}: run `multiring build mpi` with that of mpi4py, "
            "or set MULTIRING_TRANSPORT=tcp"
        )
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise UsageError(
            "MPI was initialised without MPI_THREAD_MULTIPLE, and multiring calls it from threads of its "
            "own: leave mpi4py.rc.threads and thread_level as they are, or set MULTIRING_TRANSPORT=tcp"
        )


def _name(library: str) -> str:
    return library.replace("\0", "").strip().splitlines()[0]


def _bridge(settings: Settings) -> Path:
    path = bridge_path(settings)
    if not path.is_file():
        raise UsageError(
            f"MULTIRING_TRANSPORT=mpi needs a bridge to MPI, and there is none at {path}: run "
            "`multiring build mpi` on every host"
        )
    return path


# One for a communicator, however often ranks join by it: each holds one of MPI's own, of which there are few.
@functools.cache
def _world_session(bridge: str) -> _core.MpiSession:
    session = _core.MpiSession(bridge, 0)
    _opened.append((os.getpid(), session))
    return session


@functools.cache
def _session_key() -> int:
    from mpi4py import MPI

    return int(MPI.Comm.Create_keyval())


def _session_of(comm: Any, bridge: str) -> _core.MpiSession:
    from mpi4py import MPI

    session = comm.Get_attr(_session_key())
    if session is None:
        session = _core.MpiSession(bridge, MPI._addressof(comm))
        comm.Set_attr(_session_key(), session)
    assert isinstance(session, _core.MpiSession)
    return session


_opened: list[tuple[int, _core.MpiSession]] = []


def finalize_at_exit() -> None:
    """Ends MPI if a job of this process has begun it; for the end of the process, when the world is closed.

    Not where an exception ends it: MPI would wait for the peers, while mpirun ends the job of a process that
    goes without. (`sys.exit` is no such exception.)
    """
    if _opened and _opened[-1][0] == os.getpid() and getattr(sys, "last_value", None) is None:
        _opened[-1][1].finalize()


def _job(rank: int, size: int, session: _core.MpiSession | None, offer: dict[str, Any]) -> MpiJob:
    addresses = [(host, port) for host, port in offer["addresses"]]
    return MpiJob(rank, size, session, f"mpi-{offer['job']}", addresses, bytes.fromhex(offer["secret"]))
