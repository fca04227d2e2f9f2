"""The world: the communicator of all ranks of the job, one for the process."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from multiring import _core, config
from multiring.communicator import Communicator
from multiring.console.start_line import say_start
from multiring.console.traceback_hook import install_hook
from multiring.errors import UsageError
from multiring.log import configure_log
from multiring.rendezvous.connect import connect
from multiring.rendezvous.joined import tell_end, tell_launcher
from multiring.rendezvous.mpi import job as mpi_job
from multiring.settings import Settings
from multiring.tuning.costs import learn_costs

__all__ = [
    "adopt",
    "at_shutdown",
    "before_shutdown",
    "begin_job",
    "cross_rank",
    "cross_size",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "release",
    "shutdown",
    "size",
    "world",
]

_log = logging.getLogger("multiring")

# Reentrant: a signal handler may call shutdown while init or shutdown waits below it.
_lock = threading.RLock()
_world: Communicator | None = None
# How often this process has called init: every rank of a job calls it equally often, so the number keeps the
# addresses of one generation apart from those of the one before.
_generation = 0
_joining = False
# The communicator of mpi4py that the world was made of.
_joined: Any = None
_has_joined = False  # ever
# What the world holds on to.
_held = ExitStack()
_before_shutdown: list[Callable[[], None]] = []
_shutdown_callbacks: list[Callable[[], None]] = []
# Communicators beside the world, and what ends each of them.
_adopted: dict[Communicator, Callable[[], None]] = {}
# In a process that was forked from a rank: who that is.
_parent: str | None = None


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
    global _world, _generation, _joining, _joined, _has_joined
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
        configure_log(settings.log_level)
        install_hook(settings.traceback, partial(_tell_end, settings))
        _generation += 1
        _joining = True
        try:
            joined = _join(comm, settings)
        finally:
            _joining = False
        _joined, _world, _has_joined = comm, joined, True
        return joined


def _tell_end(settings: Settings) -> None:
    if _has_joined:  # or the place that it asked for is another process's
        tell_end(settings)


def _join(comm: Any, settings: Settings) -> Communicator:
    """The world, which nobody else sees before all ranks are done with it here."""
    connected = connect(comm, settings, _generation, _held)
    joined = Communicator(connected.core)
    try:
        begin_job(joined, settings, by_mpi=connected.by_mpi)
        joined.barrier()  # what the ranks write comes after what rank 0 has said of the start
    except BaseException:
        joined.close()
        _held.close()
        raise
    return joined


def begin_job(world: Communicator, settings: Settings, *, by_mpi: bool = False) -> None:
    """Tell the launcher that the ranks have joined, and the user by the line about the start. Collective.

    Args:
        world: All ranks of the job, from `connect` or as a framework has brought them together.
        settings: Of this process.
        by_mpi: Whether MPI carries what goes between hosts.
    """
    learn_costs(world, settings)
    if world.rank == 0:
        tell_launcher(settings)
        say_start(world, settings, by_mpi=by_mpi)


def _is_same(comm: Any, other: Any) -> bool:
    """Whether two communicators of mpi4py are of the same ranks in the same order."""
    from mpi4py import MPI

    if not isinstance(comm, MPI.Intracomm) or not isinstance(other, MPI.Intracomm):
        return False
    return MPI.Comm.Compare(comm, other) in (MPI.IDENT, MPI.CONGRUENT)


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


def adopt(comm: Communicator, end: Callable[[], None]) -> None:
    """Lets a communicator beside the world end as that does: a forked child has no part in it, and at the
    exit from an exception its peers are told why before `end` is called."""
    _adopted[comm] = end


def release(comm: Communicator) -> None:
    """The opposite of `adopt`, for a communicator that is closed."""
    _adopted.pop(comm, None)


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
    for comm in _adopted:
        comm._forget_in_child()
    _adopted.clear()


def _end() -> None:
    while not _lock.acquire(timeout=0.05):
        if _joining:  # a daemon thread, which may wait there for long; the end of the process ends that, too
            return
    _lock.release()
    error = getattr(sys, "last_value", None)  # what nobody has caught
    for comm, end in list(_adopted.items()):
        if error is not None and comm.size > 1:
            comm._fail(error)
        end()
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
