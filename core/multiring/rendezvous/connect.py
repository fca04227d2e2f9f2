"""Connects this process with the other ranks of its job: where they meet, and what the core is told."""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from multiring import _core, errors
from multiring.errors import MultiringError, UsageError
from multiring.rendezvous import launch_environment, offered_store
from multiring.rendezvous.children import check_not_taken, forget_placement, note_placement
from multiring.rendezvous.joined import HOSTS_KEY
from multiring.rendezvous.launch_environment import Placement
from multiring.rendezvous.mpi import job as mpi_job
from multiring.rendezvous.mpi.bridge import carries
from multiring.rendezvous.mutual_waits import tell, watch_waits
from multiring.rendezvous.user_secret import OTHER_USER_SECRET
from multiring.settings import Settings
from multiring.store import OTHER_SECRET, FileStore, Interrupt, Store, open_store, serve_store
from multiring.tuning.file import OFF
from multiring.tuning.file import load as load_tuning

__all__ = ["Connected", "connect", "connect_members"]

_log = logging.getLogger("multiring")

# Launchers that serve a store of their own, and the integration that lets ranks meet there; imported only in
# their jobs.
_MEETINGS = {"torchrun": "multiring.torchrun.meeting"}

# Stores of this process, by their URLs.
_served: set[str] = set()


class Connected(NamedTuple):
    """What `connect` returns."""

    core: _core.Communicator
    by_mpi: bool = False


class _Prefixed(Store):
    """A store seen through a prefix, so that each initialisation has keys of its own."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._own: list[str] = []  # keys that this rank has set

    def set(self, key: str, value: bytes, interrupt: Interrupt | None = None) -> None:
        self._own.append(self._prefix + key)
        self._store.set(self._prefix + key, value, interrupt)

    def forget_own(self) -> None:
        """Give up the keys that this rank has set, when all ranks have read them."""
        for key in self._own:
            self._store.forget(key)

    def get(self, key: str, timeout: float, interrupt: Interrupt | None = None) -> bytes:
        return self._store.get(self._prefix + key, timeout, interrupt)


def connect(comm: Any, settings: Settings, generation: int, held: ExitStack) -> Connected:
    """Meets the other ranks and connects with them. Collective.

    Args:
        comm: A communicator of mpi4py, whose ranks are those of the job; None: as the launcher says.
        settings: Of this process.
        generation: How often this process has connected, this time included; the same on all ranks.
        held: Gets what has to stay open as long as the communicator.

    Returns:
        The communicator of all ranks, and whether MPI carries what goes between hosts.

    Raises:
        UsageError: The launcher's variables or a setting are wrong, or `comm` is no communicator.
        TimeoutError: Ranks are missing.
    """
    if comm is not None:
        return _connect_mpi(mpi_job.join_communicator(comm, settings), settings)
    placement = launch_environment.detect()
    if placement.size == 1:
        return Connected(_connect_launched(placement, settings, generation))
    check_not_taken(placement)
    connected = _connect_ranks(placement, settings, generation)
    note_placement(placement)
    held.callback(forget_placement)
    return connected


def _connect_ranks(placement: Placement, settings: Settings, generation: int) -> Connected:
    if carries(settings, placement.launcher, placement.is_spread):
        job = mpi_job.join_launched(placement.rank, placement.size, placement.launcher, settings)
        return _connect_mpi(job, settings)
    return Connected(_connect_launched(placement, settings, generation))


def connect_members(
    store: Store, rank: int, size: int, settings: Settings, *, job: str, secret: bytes
) -> _core.Communicator:
    """Connects ranks that have met by themselves, wherever they are. Collective.

    For groups beside the job's world, as a framework makes them; between hosts they use TCP.

    Args:
        store: Where they have met, with keys that no other group uses. Not used any more when this returns.
        rank: This rank in the group.
        size: Number of ranks.
        settings: Of this process; `timeout` for the group.
        job: Name of the group, for messages.
        secret: The same on all ranks; keeps other processes out.

    Raises:
        UsageError: A setting is wrong, or another one than on other ranks.
        TimeoutError: Ranks are missing.
    """
    options = _options(rank, size, settings)
    options.spread = size > 1
    options.secret = secret
    options.job = job
    return _core.connect(store if size > 1 else None, options)


def _options(rank: int, size: int, settings: Settings) -> _core.WorldOptions:
    options = _core.WorldOptions(settings)
    options.rank = rank
    options.size = size
    if settings.tuning and settings.tuning != OFF:
        # Ranks compare what is here, so none measures while others do not.
        options.tuning = load_tuning(settings.tuning) if size > 1 else ""
    options.warn = functools.partial(_warn, settings)
    return options


def _warn(settings: Settings, message: str) -> None:
    """Writes what the native core has to say into the log, and where the user's program is."""
    tell(message)
    watch_waits(settings)


@contextmanager
def _telling_if_late(placement: Placement, settings: Settings) -> Iterator[None]:
    """Warn if this rank waits for the store of `multiring run`."""
    timer = threading.Timer(
        settings.stall_warning,
        lambda: tell(
            f"rank {placement.rank} of {placement.size} has waited {settings.stall_warning:g} s in init for "
            f"the store of multiring run, which cannot be reached{offered_store.HOW_TO_SILENCE}"
        ),
    )
    timer.daemon = True
    if _warns(placement) and settings.stall_warning > 0:
        with suppress(RuntimeError):  # no thread is left
            timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _warns(placement: Placement) -> bool:
    """Whether this rank warns of a long wait for others: one rank of each host, and rank 1."""
    return placement.rank == 1 or placement.local_rank == 0


def _connect_mpi(job: mpi_job.MpiJob, settings: Settings) -> Connected:
    options = _options(job.rank, job.size, settings)
    options.spread = job.size > 1
    options.secret = job.secret
    options.job = job.job_id
    if job.session is not None:
        options.mpi = job.session
    if job.size == 1:
        return Connected(_core.connect(None, options))
    with job.open_store(settings.timeout) as store:
        return Connected(_core.connect(_Prefixed(store, f"{job.job_id}/"), options), job.session is not None)


def _connect_launched(placement: Placement, settings: Settings, generation: int) -> _core.Communicator:
    options = _options(placement.rank, placement.size, settings)
    options.spread = placement.is_spread and placement.size > 1
    with ExitStack() as stack:
        store: _Prefixed | None = None
        if placement.size > 1:
            placement, opened, prefix = _meet(placement, settings, generation)
            stack.enter_context(opened)
            store = _Prefixed(opened, prefix)
            options.hosts = _hosts_of_ranks(placement, opened)
            if isinstance(opened, FileStore) and not placement.is_spread:
                options.socket_directory = str(opened.directory)
        options.secret = placement.secret or b""
        options.job = f"{placement.job_id}/{generation}"
        connected = _core.connect(store, options)
        if store is not None and not options.spread:  # where all are connected when one returns
            store.forget_own()
        return connected


def _hosts_of_ranks(placement: Placement, store: Store) -> list[str]:
    """What the launcher calls the host of each rank; empty: it has not said."""
    if placement.launcher != "multiring" or placement.cross_size == 1:
        return []
    with suppress(errors.TimeoutError):  # no key, as under a launcher of another version
        return store.get(HOSTS_KEY, 0.0).decode().split("\n")
    return []


def _meet(placement: Placement, settings: Settings, generation: int) -> tuple[Placement, Store, str]:
    """The place with all that is known once the ranks have met, the store where they did, and how the keys of
    this generation begin there."""
    meeting = (
        importlib.import_module(_MEETINGS[placement.launcher]) if placement.launcher in _MEETINGS else None
    )
    if meeting is not None and meeting.is_meant(placement):
        found: tuple[Placement, Store, str] = meeting.meet(placement, settings)
        return found
    prefix = f"generation-{generation}/"
    if placement.launcher == "slurm" and not settings.store:
        # What follows from the job's name may be what follows from another one's. All ranks know the name.
        prefix = f"{placement.job_id}/{prefix}"
    if placement.launcher == "multiring":  # which has made the store for this job
        with _telling_if_late(placement, settings):
            return placement, _open(placement, settings, settings.timeout), prefix
    reopen = functools.partial(_open, placement, settings)
    return placement, *offered_store.meet(
        placement.rank,
        placement.size,
        prefix,
        settings.timeout,
        reopen,
        party=offered_store.Party(f"job '{placement.launcher_job}'" if placement.launcher_job else ""),
        warn_after=settings.stall_warning if _warns(placement) else 0.0,
    )


def _open(placement: Placement, settings: Settings, timeout: float) -> Store:
    """Opens the store where the ranks meet. A foreign launcher serves none: where one is named, rank 0
    does."""
    others = _serve(placement) if placement.rank == 0 and placement.launcher != "multiring" else None
    if others is not None and not settings.store:  # the one that does is not part of this job
        raise UsageError(
            f"rank 0 cannot serve the store {placement.store_url}, where the ranks of this job meet: "
            f"{others}. Set MULTIRING_STORE to a port that is free there, and MULTIRING_SECRET, both the "
            "same on all ranks (docs/clusters.md)"
        ) from others
    why = OTHER_SECRET if settings.secret else OTHER_USER_SECRET
    try:
        return open_store(placement.store_url, placement.secret, timeout, why, settings.timeout)
    except MultiringError as error:
        if others is not None:
            error.args = (f"{error}. Rank 0 does not serve it either, since {others}",)
        raise


def _serve(placement: Placement) -> UsageError | None:
    """Serves the store as long as this process lives, or says why it does not: others may be reading when it
    has joined, or shut down."""
    if placement.store_url in _served:
        return None
    try:
        server = serve_store(placement.store_url, placement.secret)
    except UsageError as error:
        return error
    if server is not None:
        _served.add(placement.store_url)
        process = os.getpid()
        atexit.register(lambda: server.close() if os.getpid() == process else None)  # not of a fork
    return None
