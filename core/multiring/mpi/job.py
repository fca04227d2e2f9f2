"""Jobs whose ranks MPI knows: who they are, and where they meet."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from multiring import _core, config
from multiring.errors import MultiringError, UsageError
from multiring.mpi.bridge import bridge_path, is_built
from multiring.store import Store, TcpStore, TcpStoreServer

__all__ = ["MpiJob", "finalize_at_exit", "join_communicator", "join_launched"]

# Ways to reach the store that do not answer cost so much each, in seconds.
_CONNECT_SECONDS = 5.0

Broadcast = Callable[[bytes], bytes]


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
            "MULTIRING_INTERFACES chooses the interfaces that rank 0 listens on"
        )


def join_launched(rank: int, size: int, launcher: str, settings: config.Settings) -> MpiJob:
    """Joins the ranks that `launcher` has started. Collective.

    Raises:
        UsageError: The bridge is missing, or is for another MPI than that of the launcher.
    """
    library = _name(_core.mpi_library(str(_bridge(settings))))
    remedy = "run `multiring build mpi` with the MPI that starts the job, or set MULTIRING_TRANSPORT=tcp"
    # Its initialisation would end the process.
    if launcher in ("openmpi", "mpich") and (launcher == "openmpi") != ("Open MPI" in library):
        raise UsageError(f"{launcher} has started this process, and the bridge is to {library}: {remedy}")
    session = _open(settings, 0)
    if (session.rank, session.size) != (rank, size):
        raise UsageError(
            f"this process is rank {rank} of {size} for {launcher}, but rank {session.rank} of "
            f"{session.size} for the MPI of the bridge ({library}): {remedy}"
        )
    return _meet(rank, size, session, lambda value: session.broadcast(value, 0, settings.timeout), settings)


def join_communicator(comm: Any, settings: config.Settings) -> MpiJob:
    """Joins the ranks of `comm`, a communicator of mpi4py. Collective among them.

    Raises:
        UsageError: `comm` is none, or the bridge is for another MPI than mpi4py's.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UsageError("init(comm=...) takes a communicator of mpi4py, which is not installed") from error
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise UsageError(f"init(comm=...) takes an intracommunicator of mpi4py, not {comm!r}")
    session = None
    if settings.transport == "mpi" or (not settings.transport and is_built(settings)):
        ours, theirs = _core.mpi_library(str(_bridge(settings))), MPI.Get_library_version()
        if _name(ours) != _name(theirs):
            raise UsageError(
                f"mpi4py uses {_name(theirs)} and the bridge {_name(ours)}: run `multiring build mpi` with "
                "that of mpi4py, or set MULTIRING_TRANSPORT=tcp"
            )
        session = _open(settings, MPI._addressof(comm))
    rank, size = comm.Get_rank(), comm.Get_size()
    return _meet(rank, size, session, lambda value: bytes(comm.bcast(value, 0)), settings)


def _name(library: str) -> str:
    return library.replace("\0", "").strip().splitlines()[0]


def _bridge(settings: config.Settings) -> Any:
    path = bridge_path(settings)
    if not path.is_file():
        raise UsageError(
            f"MULTIRING_TRANSPORT=mpi needs a bridge to MPI, and there is none at {path}: run "
            "`multiring build mpi` on every host"
        )
    return path


def _open(settings: config.Settings, communicator: int) -> _core.MpiSession:
    session = _core.MpiSession(str(_bridge(settings)), communicator)
    _opened.append((os.getpid(), session))
    return session


_opened: list[tuple[int, _core.MpiSession]] = []


def finalize_at_exit() -> None:
    """Ends MPI if a job of this process has begun it; for the end of the process, when the world is closed.

    Not where an exception ends it: MPI would wait for the peers, while mpirun ends the job of a process that
    goes without.
    """
    if _opened and _opened[-1][0] == os.getpid() and getattr(sys, "last_value", None) is None:
        _opened[-1][1].finalize()


def _meet(
    rank: int, size: int, session: _core.MpiSession | None, broadcast: Broadcast, settings: config.Settings
) -> MpiJob:
    """Lets rank 0 serve a store, and all others know of it."""
    told = b""
    if rank == 0:
        addresses = _own_addresses(settings)
        server, secret = _serve("::" if all(":" in each for each in addresses[:-1]) else "0.0.0.0")
        facts = {
            "job": secrets.token_hex(8),
            "addresses": [(host, server.port) for host in addresses],
            "secret": secret.hex(),
        }
        told = json.dumps(facts).encode()
    facts = json.loads(broadcast(told))
    return MpiJob(
        rank,
        size,
        session,
        f"mpi-{facts['job']}",
        [(host, port) for host, port in facts["addresses"]],
        bytes.fromhex(facts["secret"]),
    )


@functools.cache
def _serve(host: str) -> tuple[TcpStoreServer, bytes]:
    """Serves a store as long as this process lives, for one job after the other, and its secret."""
    secret = secrets.token_bytes(32)
    server = TcpStoreServer(host, 0, secret)
    process = os.getpid()
    atexit.register(lambda: server.close() if os.getpid() == process else None)  # not of a fork
    return server, secret


def _own_addresses(settings: config.Settings) -> list[str]:
    found: list[str] = []
    with contextlib.suppress(UsageError):  # of a host without a network
        found = _core.own_addresses(settings.interfaces)
    return [*found, "127.0.0.1"]
