"""What every store offers, and the limits that all of them keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self

from multiring import errors
from multiring.errors import UsageError

__all__ = [
    "MAX_KEY_BYTES",
    "MAX_VALUE_BYTES",
    "Interrupt",
    "Store",
    "check_key",
    "check_value",
    "no_such_key",
]

Interrupt = Callable[[], object]
"""Is called while a store waits; what it raises ends the wait."""

MAX_KEY_BYTES = 4096
"""Longest key, in bytes of UTF-8."""
MAX_VALUE_BYTES = 16 << 20
"""Largest value of a key."""


class ClosedOnExit:
    """A context manager that closes itself."""

    def close(self) -> None:
        """Gives back what this object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Store(ClosedOnExit, ABC):
    """Keys and values that every rank of a job can read and write.

    A value appears whole or not at all; setting a key again replaces its value.
    """

    @abstractmethod
    def set(self, key: str, value: bytes, interrupt: Interrupt | None = None) -> None:
        """Sets `key` to `value`.

        Args:
            key: At most MAX_KEY_BYTES as UTF-8.
            value: At most MAX_VALUE_BYTES.
            interrupt: Called every few tens of milliseconds while the store does not answer; what it raises
                ends the wait.

        Raises:
            UsageError: The key is empty, or key or value is longer than the limits of this module.
            PeerLostError: The store is gone.
        """

    @abstractmethod
    def get(self, key: str, timeout: float, interrupt: Interrupt | None = None) -> bytes:
        """Returns the value of `key`, waiting at most `timeout` seconds until some rank has set it.

        Args:
            key: As in `set`.
            timeout: Seconds.
            interrupt: As in `set`.

        Raises:
            TimeoutError: Nobody has set the key in time.
            PeerLostError: The store is gone.
        """

    def forget(self, key: str) -> None:
        """Give up a key that nobody asks for any more. A store may keep it all the same."""


def check_key(key: str) -> bytes:
    """Returns `key` as UTF-8 or raises UsageError."""
    encoded = key.encode()
    if not 0 < len(encoded) <= MAX_KEY_BYTES:
        raise UsageError(
            f"a store's key has 1 to {MAX_KEY_BYTES} bytes, this one has {len(encoded)}: {key[:80]!r}"
        )
    return encoded


def check_value(key: str, value: bytes) -> None:
    """Raises UsageError if `value` is too large for a store."""
    if len(value) > MAX_VALUE_BYTES:
        raise UsageError(
            f"the value of key {key!r} has {len(value)} bytes, a store takes at most {MAX_VALUE_BYTES}: "
            "use broadcast_object for bulk data"
        )


def no_such_key(key: str, store: str, timeout: float) -> errors.TimeoutError:
    """The error of a key that nobody has set in time."""
    return errors.TimeoutError(
        f"no rank has set the key {key!r} in the {store} within {timeout:g} s: some rank has not started, "
        "is still starting, or has ended; look at the output of every rank, or raise MULTIRING_TIMEOUT",
        elapsed=timeout,
    )
