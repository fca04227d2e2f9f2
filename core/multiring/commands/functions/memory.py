"""Anonymous files, by which the caller, the launcher and the ranks hand each other what is pickled.

They have no name, so nothing of them is left however the processes end, and other users cannot open them.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pickle
from collections.abc import Generator, Iterator
from typing import Any

from multiring.commands.functions import pickling

__all__ = ["anonymous_files", "closed_in_forks", "is_empty", "not_standard", "read", "write"]

_ours: set[int] = set()


@contextlib.contextmanager
def anonymous_files(count: int) -> Iterator[list[int]]:
    """Descriptors of so many empty files, closed in the end."""
    made: list[int] = []
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            descriptor = not_standard(os.memfd_create("multiring"))
            stack.callback(os.close, descriptor)
            stack.enter_context(closed_in_forks(descriptor))
            made.append(descriptor)
        yield made


def not_standard(descriptor: int) -> int:
    """The descriptor, or, where it has the number of a standard one that is closed, another in its place."""
    if descriptor > 2:
        return descriptor
    other = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return other


@contextlib.contextmanager
def closed_in_forks(descriptor: int) -> Iterator[None]:
    """Closes a descriptor in processes that other threads of this one fork meanwhile: they may outlive it."""
    _ours.add(descriptor)
    try:
        yield
    finally:
        _ours.discard(descriptor)


def _close_in_fork() -> None:
    while _ours:
        with contextlib.suppress(OSError):
            os.close(_ours.pop())


os.register_at_fork(after_in_child=_close_in_fork)


def write(descriptor: int, *values: Any) -> None:
    """Makes values, pickled one after the other, the content of a file.

    Raises:
        Exception: One cannot be pickled, or there is no memory for it.
    """
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "wb", closefd=False) as file:
        for value in values:
            pickling.dump(value, file)


def is_empty(descriptor: int) -> bool:
    """Whether nothing has been written to a file."""
    return os.fstat(descriptor).st_size == 0


def read(descriptor: int) -> Generator[Any, None, None]:
    """The values in a file, each unpickled when it is asked for.

    Not by the position in the file: processes that have inherited a descriptor share it.
    """
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as file:
        while file.tell() < len(file):
            yield pickle.load(file)
