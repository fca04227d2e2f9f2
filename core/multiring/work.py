"""The handle of an asynchronous operation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from multiring import _core
from multiring.errors import UsageError

__all__ = ["Work", "keep_times", "seconds"]


def seconds(timeout: float | None) -> float:
    """A timeout as the native core takes it: negative for the default."""
    if timeout is None:
        return -1.0
    if not timeout >= 0:  # NaN included
        raise UsageError(f"timeout is {timeout}; expected seconds, at least 0, or None for the default")
    return timeout


def keep_times(kept: bool) -> None:
    """Whether operations that are submitted from now on keep the times that `Work.times` tells."""
    _core.keep_times(kept)


class Work:
    """An asynchronous operation in progress: the only handle to its completion, its result and its error.

    The arrays given to the operation are kept alive until it is complete; they must not be written, and its
    output not be read, before that.
    """

    __slots__ = ("_communicator", "_core", "_finish", "_lock", "_result")

    def __init__(self, core: _core.Work, finish: Callable[[_core.Work], Any], communicator: object) -> None:
        self._core = core
        self._finish: Callable[[_core.Work], Any] | None = finish
        self._result: Any = None
        self._lock = threading.Lock()
        # A communicator that is let go of fails what is still pending in it.
        self._communicator = communicator

    def done(self) -> bool:
        """Whether the operation is complete, with success or not. Never blocks."""
        return self._core.done()

    def times(self) -> tuple[int, int, int, int]:
        """When the operation was submitted, matched (in a named queue), begun and complete, as
        `time.monotonic_ns()` tells the time; 0: not kept, see `keep_times`. To be called when it is done."""
        return self._core.times()

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the operation and returns its result, as the synchronous form would.

        Args:
            timeout: Seconds to wait at most; None waits as long as the operation takes, which has the
                communicator's own deadline.

        Raises:
            UsageError: `timeout` is negative, or this process is a fork of the one that submitted the
                operation.
            TimeoutError: `timeout` has passed; the operation goes on.
            MismatchError, PeerLostError, TimeoutError, AbortedError: The operation failed.
        """
        self._core.wait(seconds(timeout))
        with self._lock:  # the result is taken out of the core once, whichever thread comes first
            if self._finish is not None:
                self._result = self._finish(self._core)
                self._finish = None
        return self._result
