"""Stores that a launcher or a framework serves for its own purposes, as stores of ours."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar

from multiring.errors import PeerLostError
from multiring.store.base import Interrupt, Store, check_key, check_value, no_such_key

__all__ = ["ForeignStore"]

_Found = TypeVar("_Found")

# A look costs the host that serves the store little, but thousands of ranks may look.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05


class ForeignStore(Store):
    """A store that somebody else serves. Derived classes say how a key is set and looked up.

    A key is asked for again and again in place of one long wait, which nothing could interrupt, and during
    which some clients serve no other thread.

    Args:
        name: What the store is, for messages.
        server: Who serves it, for messages.
        prefix: How the keys begin there.
        watch: Called while a key is awaited; raises what ends the wait.
    """

    def __init__(self, name: str, server: str, prefix: str = "", watch: Interrupt | None = None) -> None:
        self._name = name
        self._server = server
        self._prefix = prefix
        self.watch = watch

    def __str__(self) -> str:
        return self._name

    @abstractmethod
    def write(self, key: str, value: bytes) -> None:
        """Set a key, which may be set already.

        Raises:
            RuntimeError: The store is gone.
        """

    @abstractmethod
    def look_up(self, key: str, seconds: float) -> bytes | None:
        """Return the value of a key. Takes about `seconds` where there is none yet, and returns None.

        Raises:
            RuntimeError: The store is gone.
        """

    def set(self, key: str, value: bytes, interrupt: Interrupt | None = None) -> None:
        check_key(key)
        check_value(key, value)
        self._asked(lambda: self.write(self._prefix + key, value))

    def get(self, key: str, timeout: float, interrupt: Interrupt | None = None) -> bytes:
        check_key(key)
        deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
        while True:
            left = deadline - time.monotonic()
            found = self._asked(lambda: self.look_up(self._prefix + key, max(0.0, min(pause, left))))  # noqa: B023
            if found is not None:
                return found
            if left <= 0:
                raise no_such_key(key, str(self), timeout)
            for call in (interrupt, self.watch):
                if call is not None:
                    call()
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _asked(self, ask: Callable[[], _Found]) -> _Found:
        try:
            return ask()
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise PeerLostError(
                f"the {self} is gone, or cannot be reached: {reason}. {self._server}, which serves it, may "
                "have ended: look at its output"
            ) from error
