"""The world: the communicator of all ranks of the job, one for the process."""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from multiring import _core, config
from multiring.communicator import Communicator
from multiring.errors import MultiringError, UsageError
from multiring.reductions import native_comm_dtype
from multiring.rendezvous import launch_environment, offered_store
from multiring.rendezvous.joined import tell_launcher
from multiring.rendezvous.launch_environment import Placement
from multiring.rendezvous.mpi import job as mpi_job
from multiring.rendezvous.mpi.bridge import carries
from multiring.rendezvous.user_secret import OTHER_USER_SECRET
from multiring.store import OTHER_SECRET, FileStore, Store, open_store, serve_store
from multiring.tuning.startup import follow_measured_ways
from multiring.tuning.table import OFF, Tuning, ranks_of_hosts
from multiring.tuning.table import load as load_tuning

__all__ = [
    "at_shutdown",
    "before_shutdown",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "world",
]

_log = logging.getLogger("multiring")

# Launchers that serve a store of their own, and the integration that lets ranks meet there; imported only in
# their jobs.
_MEETINGS = {"torchrun": "multiring.torchrun.meeting"}

# Reentrant: a signal handler may call shutdown while init or shutdown waits below it.
_lock = threading.RLock()
_world: Communicator | None = None
# How often this process has called init: every rank of a job calls it equally often, so the number keeps the
# addresses of one generation apart from those of the one before.
_generation = 0
_joining = False
# The communicator of mpi4py that the world was made of.
_joined: Any = None
# What the world holds on to.
_held = ExitStack()
# Stores of this process, by their URLs.
_served: set[str] = set()
_before_shutdown: list[Callable[[], None]] = []
_shutdown_callbacks: list[Callable[[], None]] = []
# In a process that was forked from a rank: who that is.
_parent: str | None = None


class _Prefixed(Store):
    """A store seen through a prefix, so that each initialisation has keys of its own."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str, timeout: float) -> bytes:
        return self._store.get(self._prefix + key, timeout)


def init(comm: Any = None) -> Communicator:
    """Joins the job that this process was launched in and returns the world, the communicator of all its
    ranks.

    Rank, size and meeting point come from the launcher (`multiring run`, torchrun, mpirun, srun) or from
    `comm`; without either, this process is a world of size 1. Collective. Calling it again returns the same
    world.

    Args:
        comm: A communicator of mpi4py, whose ranks are those of the job, in the same order.

    Raises:
        UsageError: The launcher's variables or a MULTIRING_ variable are wrong, `comm` is no communicator or
            not that of the world there is, or this process is a fork of one that is a rank.
        TimeoutError: Ranks are missing after MULTIRING_TIMEOUT seconds; says which.
    """
    global _world, _generation, _joining, _joined
    with _lock:
        if _world is not None:
            if comm is not None and comm is not _joined and not _is_same(comm, _joined):
                raise UsageError(
                    "multiring.init(comm=...) was called before, without a communicator or with one of other "
                    "ranks: call multiring.shutdown() first"
                )
            return _world
        if _joining:
            raise UsageError("multiring.init() was called by a signal handler that interrupts init() itself")
        if _parent is not None:
            raise UsageError(_child_cannot(_parent))
        settings = config.load()
        _configure_log(settings.log_level)
        _generation += 1
        _joining = True
        try:
            joined = _join(comm, settings)
        finally:
            _joining = False
        _joined, _world = comm, joined
        return joined


def _join(comm: Any, settings: config.Settings) -> Communicator:
    """The world, which nobody else sees before all ranks are done with it here."""
    core = _connect(comm, settings)
    joined = Communicator(core)
    try:
        _warn_of_other_tuning(core)
        if joined.cross_size > 1:  # the rank that serves the store may end as soon as all have joined
            joined.barrier()
            if not settings.tuning and not settings.mode:
                follow_measured_ways(joined)
        if joined.rank == 0:
            tell_launcher(settings)
    except BaseException:
        joined.close()
        _held.close()
        raise
    return joined


def _is_same(comm: Any, other: Any) -> bool:
    """Whether two communicators of mpi4py are of the same ranks in the same order."""
    from mpi4py import MPI

    if not isinstance(comm, MPI.Intracomm) or not isinstance(other, MPI.Intracomm):
        return False
    return MPI.Comm.Compare(comm, other) in (MPI.IDENT, MPI.CONGRUENT)


def _connect(comm: Any, settings: config.Settings) -> _core.Communicator:
    if comm is not None:
        return _connect_mpi(mpi_job.join_communicator(comm, settings), settings)
    place = launch_environment.detect()
    if place.size > 1 and carries(settings, place.launcher, place.is_spread):
        return _connect_mpi(mpi_job.join_launched(place.rank, place.size, place.launcher, settings), settings)
    return _connect_launched(place, settings)


def _options(rank: int, size: int, settings: config.Settings) -> _core.WorldOptions:
    options = _core.WorldOptions()
    options.rank = rank
    options.size = size
    options.host = settings.host
    options.interfaces = settings.interfaces
    options.mode = settings.mode
    if settings.tuning and size > 1:
        # Ranks compare what is here, so none measures while others do not.
        options.tuning = OFF if settings.tuning == OFF else load_tuning(settings.tuning).text
    options.comm_dtype = native_comm_dtype(settings.comm_dtype)
    options.staging_bytes = settings.staging_bytes
    options.spin_microseconds = -1.0 if settings.spin_microseconds is None else settings.spin_microseconds
    options.timeout = settings.timeout
    options.stall_warning = settings.stall_warning
    options.warn = _warn
    return options


def _warn(message: str) -> None:
    """Writes what the native core has to say into the log, and where the user's program is."""
    where = _place_in_program()
    _log.warning("%s%s", message, f" (this rank is at {where})" if where else "")


def _place_in_program() -> str:
    """File and line where the main thread is outside of installed packages; empty: not known."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] != "multiring" and "-packages" not in file and not file.startswith("<"):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _warn_of_other_tuning(core: _core.Communicator) -> None:
    """A tuning of another cluster is no error: a job may be continued on fewer hosts."""
    here = Tuning(ranks_of_hosts(core.hosts), ()).layout
    there = core.tuning.partition(":")[0]
    if core.rank == 0 and there not in ("", here):
        _log.warning(
            "MULTIRING_TUNING is for %s (hosts x ranks on each), and this job has %s: it is not followed; "
            "run `multiring tune` in a job like this one",
            there,
            here,
        )


def _connect_mpi(job: mpi_job.MpiJob, settings: config.Settings) -> _core.Communicator:
    options = _options(job.rank, job.size, settings)
    options.spread = job.size > 1
    options.secret = job.secret
    options.job = job.job_id
    if job.session is not None:
        options.mpi = job.session
    if job.size == 1:
        return _core.connect(None, options)
    with ExitStack() as stack:
        store = stack.enter_context(job.open_store(settings.timeout))
        core = _core.connect(_Prefixed(store, f"{job.job_id}/"), options)
        _held.enter_context(stack.pop_all())
        return core


def _connect_launched(place: Placement, settings: config.Settings) -> _core.Communicator:
    options = _options(place.rank, place.size, settings)
    options.spread = place.is_spread and place.size > 1
    with ExitStack() as stack:
        store: Store | None = None
        if place.size > 1:
            place, opened, prefix = _meet(place, settings)
            stack.enter_context(opened)
            store = _Prefixed(opened, prefix)
            if isinstance(opened, FileStore) and not place.is_spread:
                options.socket_directory = str(opened.directory)
        options.secret = place.secret or b""
        options.job = f"{place.job_id}/{_generation}"
        core = _core.connect(store, options)
        if len(set(core.hosts)) > 1:  # groups that are split from it meet in the store, too
            _held.enter_context(stack.pop_all())
        return core


def _meet(place: Placement, settings: config.Settings) -> tuple[Placement, Store, str]:
    """The place with all that is known once the ranks have met, the store where they did, and how the keys of
    this generation begin there."""
    meeting = importlib.import_module(_MEETINGS[place.launcher]) if place.launcher in _MEETINGS else None
    if meeting is not None and meeting.is_meant(place):
        place, store = meeting.meet(place, settings)
        return place, store, f"{place.job_id}/"  # another one each time
    prefix = f"generation-{_generation}/"
    if place.launcher == "slurm" and not settings.store:
        # What follows from the job's name may be what follows from another one's. All ranks know the name.
        prefix = f"{place.job_id}/{prefix}"
    if place.launcher == "multiring":  # which has made the store for this job
        return place, _open(place, settings, settings.timeout), prefix
    reopen = functools.partial(_open, place, settings)
    return place, *offered_store.meet(place.rank, place.size, prefix, settings.timeout, reopen)


def _open(place: Placement, settings: config.Settings, timeout: float) -> Store:
    """Opens the store where the ranks meet. A foreign launcher serves none: where one is named, rank 0
    does."""
    others = _serve(place) if place.rank == 0 and place.launcher != "multiring" else None
    if others is not None and not settings.store:  # the one that does is not part of this job
        raise UsageError(
            f"rank 0 cannot serve the store {place.store_url}, where the ranks of this job meet: {others}. "
            "Set MULTIRING_STORE to a port that is free there, and MULTIRING_SECRET, both the same on all "
            "ranks (docs/clusters.md)"
        ) from others
    why = OTHER_SECRET if settings.secret else OTHER_USER_SECRET
    try:
        return open_store(place.store_url, place.secret, timeout, why, settings.timeout)
    except MultiringError as error:
        if others is not None:
            error.args = (f"{error}. Rank 0 does not serve it either, since {others}",)
        raise


def _serve(place: Placement) -> UsageError | None:
    """Serves the store as long as this process lives, or says why it does not: others may be reading when it
    has joined, or shut down."""
    if place.store_url in _served:
        return None
    try:
        server = serve_store(place.store_url, place.secret)
    except UsageError as error:
        return error
    if server is not None:
        _served.add(place.store_url)
        process = os.getpid()
        atexit.register(lambda: server.close() if os.getpid() == process else None)  # not of a fork
    return None


def _configure_log(level: str) -> None:
    _log.setLevel(level.upper())
    # Python by itself writes nothing that is less than a warning. A program that has handlers decides.
    if _log.getEffectiveLevel() < logging.WARNING and not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())
        _log.propagate = False  # or what is configured later would tell all twice


def shutdown() -> None:
    """Leaves the job: closes the world and every communicator split from it. Idempotent; called at exit.

    No collective: peers that still need this rank raise `PeerLostError`. Only gradients of a last step that
    nobody waits for (double buffering) are let arrive first. `init` may be called again afterwards, by all
    ranks.
    """
    _leave(_before_shutdown)


def _leave(first: list[Callable[[], None]]) -> None:
    global _world
    with _lock:
        leaving, _world = _world, None
        if leaving is None:
            return
        try:
            for callback in first:
                callback()
        finally:
            leaving.close()
            _held.close()
            for callback in _shutdown_callbacks:
                callback()


def before_shutdown(callback: Callable[[], None]) -> None:
    """Calls `callback` whenever the world is about to be closed: for adapters whose last operations are still
    on their way when a program has ended. Not called at the exit from an exception."""
    _before_shutdown.append(callback)


def at_shutdown(callback: Callable[[], None]) -> None:
    """Calls `callback` whenever the world has been closed: for adapters that keep what belongs to it, such as
    compiled programs with addresses in them."""
    _shutdown_callbacks.append(callback)


def is_initialized() -> bool:
    """Whether `init` has been called and `shutdown` has not."""
    return _world is not None


def world() -> Communicator:
    """The world.

    Raises:
        UsageError: `init` has not been called.
    """
    if _world is None and _parent is not None:
        raise UsageError(_child_cannot(_parent))
    if _world is None:
        raise UsageError("multiring is not initialised: call multiring.init() first")
    return _world


def rank() -> int:
    """Rank of this process in the world."""
    return world().rank


def size() -> int:
    """Number of ranks in the world."""
    return world().size


def local_rank() -> int:
    """Rank of this process among those of its host."""
    return world().local_rank


def local_size() -> int:
    """Number of ranks on this host."""
    return world().local_size


def cross_rank() -> int:
    """Number of this host."""
    return world().cross_rank


def cross_size() -> int:
    """Number of hosts."""
    return world().cross_size


def _child_cannot(parent: str) -> str:
    return (
        f"this process was forked from {parent}, which alone is part of the job: leave communication to it, "
        "or fork before multiring.init()"
    )


def _forget_in_child() -> None:
    """A forked child (a data loader, say) has no part in the job: its copies of descriptors are closed, so
    that peers notice the parent's end, and its exit says no goodbye in the parent's name."""
    global _world, _lock, _parent
    _lock = threading.RLock()  # another thread may have held it
    if _world is not None:
        if _world.size > 1:
            _parent = f"rank {_world.rank} of {_world.size} (process {os.getppid()})"
        _world._forget_in_child()
        _world = None


def _end() -> None:
    error = getattr(sys, "last_value", None)  # what nobody has caught
    if error is not None and _world is not None and _world.size > 1:
        _world._fail(error)
    _leave([] if error is not None else _before_shutdown)
    mpi_job.finalize_at_exit()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget_in_child)
# What is registered last comes first before a fork, and last after it.
os.register_at_fork(
    before=_core.before_fork, after_in_parent=_core.after_fork, after_in_child=_core.after_fork
)
