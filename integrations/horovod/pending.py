"""Operations that a rank has submitted, and what ranks tell each other about theirs."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from multiring import Communicator, errors
from multiring.horovod.request import Request
from multiring.named_queue import NamedQueue
from multiring.work import Work

__all__ = [
    "LOOK_EVERY",
    "Key",
    "Meeting",
    "Pending",
    "Start",
    "gather_meanwhile",
    "is_done",
    "numpy_zeros",
    "settle",
    "whole_of",
]

Start = Callable[[NamedQueue], Work]
Key = tuple[str, int]
"""A name, and how many operations of this name came before."""

# While a rank waits it looks this often, in seconds, whether ranks meet.
LOOK_EVERY = 0.005


class Pending:
    """An operation of this rank that was submitted."""

    def __init__(self, request: Request, key: Key, start: Start) -> None:
        self.request = request
        self.key = key
        self.start = start
        self.work: Work | None = None
        self.refusal = ""  # why it has failed, on all ranks


class Meeting:
    """What a rank tells the others when they meet."""

    def __init__(
        self, is_broken: bool, joined_in: int | None, unnamed: int, pending: dict[Key, Request]
    ) -> None:
        self.is_broken = is_broken
        self.joined_in = joined_in
        self.unnamed = unnamed
        self.pending = pending


def numpy_zeros(request: Request) -> Any:
    """Zeros of the dtype and shape of a request."""
    return np.zeros(request.shape, request.dtype)


def is_done(pending: Pending) -> bool:
    """Whether it has been submitted and has ended."""
    return pending.work is not None and pending.work.done()


def settle(pending: Pending) -> None:
    """Waits until an operation has ended in one way or the other."""
    if pending.work is not None:
        with suppress(errors.MultiringError):
            pending.work.wait()


def whole_of(comm: Communicator) -> Communicator:
    """Another communicator of the same ranks. Collective."""
    part = comm.split(0)
    assert part is not None  # every rank takes part
    return part


def gather_meanwhile(comm: Communicator, value: Any, look: Callable[[], None]) -> list[Any]:
    """`comm.allgather_object(value)` that calls `look` again and again while it waits."""
    work = comm.allgather_async(np.frombuffer(pickle.dumps(value), np.uint8))
    while not work.done():
        with suppress(errors.MultiringError):  # its own is raised below
            work.wait(LOOK_EVERY)
        look()
    stream = io.BytesIO(work.wait().tobytes())
    return [pickle.load(stream) for _ in range(comm.size)]
