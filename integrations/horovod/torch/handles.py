"""Handles: numbers that stand for operations in progress."""

from __future__ import annotations

import itertools
from typing import Any

from multiring.horovod.basics import after
from multiring.horovod.exceptions import HorovodInternalError
from multiring.horovod.started import Started

__all__ = ["forget", "handle_of", "number_of", "poll", "result_of", "synchronize"]

_numbers = itertools.count()
_started: dict[int, Started] = {}
after("shutdown", _started.clear)


def handle_of(started: Started) -> int:
    """A new handle."""
    number = next(_numbers)
    _started[number] = started
    return number


def forget(handle: int) -> None:
    """Lets go of an operation that no caller will wait for; see `Started.forget`."""
    started = _started.pop(handle, None)
    if started is not None:
        started.forget()


def number_of(handle: int) -> int | None:
    """Return how many operations of the same name came before that of a handle; None as `synchronize`."""
    started = _started.get(handle)
    return None if started is None else started.number


def poll(handle: int) -> bool:
    """Whether `synchronize` would return at once."""
    started = _started.get(handle)
    return started is None or started.is_done()


def synchronize(handle: int) -> Any:
    """Waits for an operation.

    Returns:
        Its result; None for a handle that is not known, was synchronized before, or is of a job that was
        left.

    Raises:
        HorovodInternalError: The operation has failed, on all ranks.
    """
    started = _started.pop(handle, None)
    return None if started is None else started.wait()


def result_of(handle: int) -> Any:
    """As `synchronize`, for a handle that was not synchronized before.

    Raises:
        HorovodInternalError: The operation has failed, on all ranks, or its job was left.
    """
    result = synchronize(handle)
    if result is None:
        raise HorovodInternalError("hvd.shutdown() was called before the operation was waited for")
    return result
