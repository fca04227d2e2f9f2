"""Which communicator a call is for, and what it has one of for each purpose: communicators, named queues."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from multiring.communicator import Communicator
from multiring.errors import InternalError, UsageError
from multiring.initialization import world
from multiring.named_queue import NamedQueue

__all__ = ["derived", "reserve_name", "resolve", "shared_queue"]

_GROUP, _QUEUE = "group", "queue"


class _Made:
    """What has been made of a communicator, by kind and purpose; the same on all ranks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.parts: dict[tuple[str, str], Any] = {}
        self.owners: dict[tuple[str, str], threading.Thread] = {}


# Lives no longer than the parents: a part does not refer to its parent, which closes it.
_made: weakref.WeakKeyDictionary[Communicator, _Made] = weakref.WeakKeyDictionary()


def resolve(comm: Communicator | None) -> Communicator:
    """The communicator that a call is for: the world where none is given.

    Raises:
        UsageError: It is something else.
    """
    if comm is None:
        return world()
    comm = getattr(comm, "plain", comm)  # where a framework has a communicator of its own around ours
    if not isinstance(comm, Communicator):
        raise UsageError(
            f"comm is {comm!r}, of type {type(comm).__name__}: pass a multiring.Communicator, such as "
            "multiring.world() or what its split() returns, or leave it out for all ranks"
        )
    return comm


def derived(comm: Communicator, purpose: str) -> Communicator:
    """A communicator of the same ranks as `comm`, one per purpose; with one rank `comm` itself.

    Operations on different communicators are independent: layers that talk in the middle of a backward
    pass, for example, need not keep any order with the gradient buckets that leave meanwhile. Collective at
    the first call for a purpose, from any thread; closed together with `comm`.
    """
    if comm.size == 1:
        return comm
    child: Communicator = _part(comm, _GROUP, purpose)
    return child


def shared_queue(comm: Communicator, purpose: str) -> NamedQueue:
    """The named queue of `comm` for a purpose. Collective at the first call, from any thread."""
    return NamedQueue(_part(comm, _QUEUE, purpose), comm)


def reserve_name(comm: Communicator, purpose: str, name: str) -> None:
    """The name belongs to this thread from now on, until the thread ends.

    Nothing orders what two threads submit under one name: one's would meet the other's on another rank.

    Args:
        comm: The ranks.
        purpose: Of the `shared_queue` that the operations of this name go through.
        name: What the operations are matched by.

    Raises:
        UsageError: It belongs to another thread that lives. The operations of all ranks in the queue fail.
    """
    made, mine, key = _made.setdefault(comm, _Made()), threading.current_thread(), (purpose, name)
    owner = made.owners.setdefault(key, mine)
    if owner is mine or comm.size == 1 or isinstance(mine, threading._DummyThread):
        return
    if not owner.is_alive():
        made.owners[key] = mine
        return
    what = f"'{name}'" if name else "a collective without a name"
    message = (
        f"rank {comm.rank}: {what} was called from thread '{mine.name}' and belongs to thread "
        f"'{owner.name}': ranks may reach operations of two threads in different order, so that one thread's "
        "would meet the other's; give each thread a communicator of its own (comm.split(0)), or its "
        "operations names of their own"
    )
    shared_queue(comm, purpose).abort(message)
    raise UsageError(message, rank=comm.rank, tensor=name or None)


def _part(comm: Communicator, kind: str, purpose: str) -> Any:
    made = _made.setdefault(comm, _Made())
    key = kind, purpose
    if key not in made.parts:
        with made.lock:
            while key not in made.parts:
                _make(comm, key, made.parts)
    return made.parts[key]


def _make(comm: Communicator, key: tuple[str, str], parts: dict[tuple[str, str], Any]) -> None:
    """Make what this rank wants, and what the others want.

    Threads of two ranks may ask for different parts first: each rank then makes both, in one order, and the
    threads that come later find theirs.
    """
    wanted = {key} if comm.size == 1 else set(comm.allgather_object(key, name="derived communicators"))
    for one in sorted(wanted - parts.keys()):
        parts[one] = _MAKERS[one[0]](comm, one[1])


def _split(comm: Communicator, purpose: str) -> Communicator:
    child = comm.split(0)
    if child is None:
        raise InternalError(f"rank {comm.rank}: a split in which every rank takes part gave no communicator")
    return child


def _queue(comm: Communicator, purpose: str) -> Any:
    # Without the face of it, which refers to the communicator.
    return comm.named_queue(purpose)._core


_MAKERS: dict[str, Callable[[Communicator, str], Any]] = {_GROUP: _split, _QUEUE: _queue}
