"""The operations of a rank that are under way, found by their names."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress

from multiring import errors
from multiring.horovod.pending import UNNAMED, Key, Pending, auto_number, is_done
from multiring.horovod.request import Request

__all__ = ["PendingTable"]

_PRUNE_AT = 64
_SEVERAL_THREADS = (
    "two threads call collectives without names at a time, so that ranks could match them in another order "
    "and exchange their values: give each call the same name on all ranks"
)


class PendingTable:
    """The operations of a rank whose results were not taken yet, and how many there have been of each name.

    Not thread-safe.

    Attributes:
        unnamed: How many calls had no name.
    """

    def __init__(self) -> None:
        self._pending: dict[Key, Pending] = {}
        self._counts: Counter[str] = Counter()  # of those with a name
        self.unnamed = 0
        self._last_thread = 0  # that has called without a name
        self._of_last_number: set[Key] = set()  # operations whose names have the number `unnamed`

    def auto_name(self, rank: int) -> str:
        """Return a name for an operation that has none: a counter, the same on ranks that call the same.

        Names of several operations of one call may begin with it: `f"{name}.{k}"`.

        Raises:
            ValueError: An operation without a name is under way in another thread.
        """
        thread = threading.get_ident()
        if thread != self._last_thread:
            for (name, _), pending in self._pending.items():
                if auto_number(name) is not None and not is_done(pending):
                    raise ValueError(f"rank {rank}: {_SEVERAL_THREADS}")
            self._last_thread = thread
        self.unnamed += 1
        self._of_last_number.clear()
        return f"{UNNAMED}{self.unnamed}"

    def next_key(self, name: str) -> Key:
        """Return the key of the operation that is submitted next under a name."""
        return name, self._counts[name]

    def last_of(self, name: str) -> Pending | None:
        """Return the last operation of a name; None: there was none, or its result was taken."""
        return self._pending.get((name, self._counts[name] - 1))

    def add(self, pending: Pending) -> None:
        """Add an operation, and count it."""
        self._pending[pending.key] = pending
        number = auto_number(pending.key[0])
        if number is None:  # the others come once each, and would be counted for ever
            self._counts[pending.key[0]] += 1
        elif number == self.unnamed:
            self._of_last_number.add(pending.key)
        if len(self._pending) > _PRUNE_AT:
            self.prune()

    def count(self, key: Key) -> None:
        """Count an operation that was refused to all ranks, also to those that have not submitted it."""
        name, before = key
        if auto_number(name) is None:
            self._counts[name] = max(self._counts[name], before + 1)

    def remove(self, pending: Pending) -> None:
        """Remove an operation, if it is there."""
        if self._pending.get(pending.key) is pending:
            del self._pending[pending.key]

    def prune(self) -> None:
        """Remove what has ended well."""
        for key, pending in list(self._pending.items()):
            if not is_done(pending):
                continue
            assert pending.work is not None
            with suppress(errors.MultiringError):
                pending.work.wait()
                del self._pending[key]

    def has_submitted(self, key: Key) -> bool:
        """Whether the program has submitted an operation, which may have ended long ago."""
        name, before = key
        number = auto_number(name)
        if number is not None:
            return number < self.unnamed or key in self._of_last_number
        return self._counts[name] > before

    def values(self) -> list[Pending]:
        """Return the operations, in the order of submission."""
        return list(self._pending.values())

    def requests(self) -> dict[Key, Request]:
        """Return what the operations ask for."""
        return {key: each.request for key, each in self._pending.items()}
