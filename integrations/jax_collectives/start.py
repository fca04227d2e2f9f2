"""The start of JAX's collectives: the processes connect when JAX makes its CPU client."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from functools import partial
from typing import Any

from jax._src import distributed

from multiring import config
from multiring.communicator import Communicator
from multiring.console.traceback_hook import install_hook
from multiring.error_text import text_of
from multiring.errors import MultiringError, UsageError
from multiring.initialization import adopt, begin_job
from multiring.jax_collectives import library
from multiring.jax_collectives.coordinator import CoordinatorStore
from multiring.jax_collectives.rehearsal import Rehearsals
from multiring.log import configure_log
from multiring.rendezvous.connect import connect_members
from multiring.rendezvous.joined import tell_end
from multiring.rendezvous.offered_store import agree_on_secret
from multiring.settings import Settings

__all__ = ["start"]

_CONNECT = ctypes.CFUNCTYPE(
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_int),
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_char),
    ctypes.c_size_t,
)
_starts = itertools.count(1)  # each rank makes as many clients as the others
_kept: list[Any] = []  # what native code refers to until the process ends


def start() -> None:
    """Connect the processes of `jax.distributed` and give their collectives to XLA. Collective.

    Called by libmultiring_mpi.so in the place of MPI_Init_thread.

    Raises:
        UsageError: A setting of multiring is wrong, or MPI is asked for between hosts.
        TimeoutError: Processes are missing after MULTIRING_TIMEOUT seconds.
        PeerLostError: JAX's coordinator is gone.
    """
    state = distributed.global_state
    settings = config.load()
    if settings.transport == "mpi":
        raise UsageError(
            "MULTIRING_TRANSPORT=mpi: JAX's collectives over multiring go over TCP between hosts; unset it"
        )
    configure_log(settings.log_level)
    install_hook(settings.traceback, partial(tell_end, settings))
    groups = _Groups(state.client, state.process_id, state.num_processes, settings)
    connect = _CONNECT(groups.address_of)
    native = ctypes.CDLL(str(library("libmultiring_jax_collectives.so")))
    table = ctypes.addressof(
        ctypes.c_char.in_dll(ctypes.CDLL(str(library("libmultiring_mpi.so"))), "multiring_mpi_table")
    )
    native.multiring_mpi_attach(ctypes.c_void_p(table), groups.rank, groups.size, connect)
    Rehearsals(native, groups.rank).watch_client()
    _kept.extend([groups, connect])


class _Groups:
    """The communicators of this process, each connected when its ranks first communicate.

    Args:
        client: JAX's client of its coordinator.
        rank: Number of this process.
        size: Number of processes.
        settings: Of this process.
    """

    def __init__(self, client: Any, rank: int, size: int, settings: Settings) -> None:
        self.rank = rank
        self.size = size
        self._client = client
        self._prefix = f"multiring/{next(_starts)}/"
        self._settings = settings
        self._secret = agree_on_secret(CoordinatorStore(client, self._prefix), "secret", rank, settings)
        self._lock = threading.Lock()
        self._all = tuple(range(size))
        self._made = {self._all: self._connect(self._all)}
        begin_job(self._made[self._all], settings)

    def address_of(self, ranks: Any, count: int, text: Any, room: int) -> int | None:
        """Return the address of a group's communicator; None, with an error in `text`, if it fails.

        Called by native code, in any thread.
        """
        try:
            members = tuple(int(ranks[index]) for index in range(count))
            with self._lock:
                comm = self._made.get(members)
            if comm is None:
                comm = self._connect(members)
                with self._lock:
                    self._made[members] = comm
            return int(comm._core.native_address())
        except BaseException as error:  # no exception leaves a callback
            told = f"multiring: {type(error).__name__}: {error}"
            if isinstance(error, MultiringError):
                told = text_of(error)  # by which the error itself is found again
            encoded = told.encode()[: room - 1].decode(errors="ignore").encode()
            ctypes.memmove(text, encoded + b"\0", len(encoded) + 1)
            return None

    def _connect(self, members: tuple[int, ...]) -> Communicator:
        name = "-".join(map(str, members))
        settings = self._settings
        if members != self._all:  # both are for all ranks of the job
            settings = config.load()
            settings.mode = settings.tuning = ""
        core = connect_members(
            CoordinatorStore(self._client, f"{self._prefix}{name}/"),
            members.index(self.rank),
            len(members),
            settings,
            job=f"jax {name}",
            secret=self._secret,
        )
        comm = Communicator(core)
        # An uncaught exception is told to peers. Nothing is closed at the exit: programs whose results JAX
        # has yet to wait for are still communicating.
        adopt(comm, _end_without_waiting)
        return comm


def _end_without_waiting() -> None:
    """After an uncaught exception, let this process end although others have not: the destructors of JAX's
    client and of its coordinator would wait minutes for them, or abort the process."""
    state = distributed.global_state
    if getattr(sys, "last_value", None) is None:
        return
    for kept in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    state.client = state.service = None
