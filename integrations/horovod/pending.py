"""Operations that a rank has submitted, and what ranks tell each other about theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from multiring import Communicator, errors
from multiring.horovod.request import Request
from multiring.named_queue import NamedQueue
from multiring.work import Work

__all__ = [
    "LOOK_EVERY",
    "UNNAMED",
    "Key",
    "Pending",
    "RankReport",
    "Start",
    "auto_number",
    "call_meanwhile",
    "is_done",
    "settle",
    "whole_of",
]

Start = Callable[[NamedQueue], Work]
Key = tuple[str, int]
"""A name, and how many operations of this name came before."""

# How names begin that the program has not given.
UNNAMED = "noname."
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
        self.is_forgotten = False  # no caller will wait for it


class RankReport:
    """What a rank tells the others when they meet."""

    def __init__(
        self, is_broken: bool, joined_in: int | None, unnamed: int, pending: dict[Key, Request]
    ) -> None:
        self.is_broken = is_broken
        self.joined_in = joined_in
        self.unnamed = unnamed
        self.pending = pending


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


def call_meanwhile(call: Callable[[], Any], look: Callable[[], None]) -> Any:
    """The result of `call`, which waits for other ranks; calls `look` again and again until it is there.

    What `look` raises is raised at once, while `call` goes on in its thread.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    # A daemon: the end of the process does not wait for the other ranks.
    threading.Thread(target=run, name="multiring.horovod.meeting", daemon=True).start()
    while not wait([future], LOOK_EVERY).done:
        look()
    return future.result()


def auto_number(name: str) -> int | None:
    """The number in a name of `Operations.auto_name`, or in one that was made of it; None: it is none."""
    if not name.startswith(UNNAMED):
        return None
    digits = name.removeprefix(UNNAMED).partition("_")[0].partition(".")[0]
    return int(digits) if digits.isdigit() else None
