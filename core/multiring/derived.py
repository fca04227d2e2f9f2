"""Communicators of the same ranks for traffic that must not mix with other traffic."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from multiring.errors import InternalError

if TYPE_CHECKING:
    from multiring import Communicator

__all__ = ["derived"]

# Lives no longer than the parents: a child does not refer to its parent, which closes it.
_children: weakref.WeakKeyDictionary[Communicator, dict[str, Communicator]] = weakref.WeakKeyDictionary()


def derived(comm: Communicator, purpose: str) -> Communicator:
    """A communicator of the same ranks as `comm`, one per purpose; with one rank `comm` itself.

    Operations on different communicators are independent: layers that talk in the middle of a backward
    pass, for example, need not keep any order with the gradient buckets that leave meanwhile. Collective at
    the first call for a purpose; closed together with `comm`.
    """
    if comm.size == 1:
        return comm
    children = _children.setdefault(comm, {})
    if purpose not in children:
        child = comm.split(0)
        if child is None:
            raise InternalError(
                f"rank {comm.rank}: a split in which every rank takes part gave no communicator"
            )
        children[purpose] = child
    return children[purpose]
