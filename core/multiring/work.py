"""The handle of an asynchronous operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from multiring import _core

__all__ = ["Work"]


class Work:
    """An asynchronous operation in progress: the only handle to its completion, its result and its error.

    The arrays given to the operation are kept alive until it is complete; they must not be written, and its
    output not be read, before that.
    """

    __slots__ = ("_core", "_finish", "_result")

    def __init__(self, core: _core.Work, finish: Callable[[_core.Work], Any]) -> None:
        self._core = core
        self._finish: Callable[[_core.Work], Any] | None = finish
        self._result: Any = None

    def done(self) -> bool:
        """Whether the operation is complete, with success or not. Never blocks."""
        return self._core.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the operation and returns its result, as the synchronous form would.

        Args:
            timeout: Seconds to wait at most; None waits as long as the operation takes, which has the
                communicator's own deadline.

        Raises:
            TimeoutError: `timeout` has passed; the operation goes on.
            MismatchError, PeerLostError, TimeoutError, AbortedError: The operation failed.
        """
        self._core.wait(-1.0 if timeout is None else timeout)
        if self._finish is not None:
            self._result = self._finish(self._core)
            self._finish = None
        return self._result
