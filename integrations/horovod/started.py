"""Operations that were submitted together, and that one caller waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from multiring.horovod.operations import NOT_YET, Operations, Pending, Start
from multiring.horovod.request import Request

__all__ = ["Finish", "Started", "submit_all", "tell_when_done"]

Finish = Callable[[Any], Any]
Tell = Callable[[Any, Exception | None], None]

_LOOK_EVERY = 0.005
# One thread looks after all operations that no caller waits for: so long at the first of them, in seconds.
_LOOK_AT_ONE = 0.0005


class Started:
    """Operations that were submitted, and what becomes of their results.

    Attributes:
        is_finished: Whether the results are there, with whatever the library does with them.

    Args:
        operations: Where they were submitted.
        pending: The operations, in the order of the results.
        finish: Makes what the caller gets of the list of results.
        failure: What was raised when a further one was to be submitted.
    """

    def __init__(
        self,
        operations: Operations,
        pending: Sequence[Pending],
        finish: Finish,
        failure: Exception | None = None,
    ) -> None:
        self._operations, self._pending, self._finish = operations, pending, finish
        self._results: list[Any] = []
        self._failure = failure
        self._value: Any = None
        self.is_finished = False

    @property
    def number(self) -> int:
        """The number of operations of the first one's name that came before it, on every rank."""
        return self._pending[0].key[1]

    def forget(self) -> None:
        """Tell that no caller will wait for the operations. They go on, and later ones of their names wait
        for them."""
        for each in self._pending:
            each.is_forgotten = True

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(self._operations.is_done(each) for each in self._pending[len(self._results) :])

    def has_ended(self) -> bool:
        """Whether all of them have ended, well or not; takes note of the results that there are."""
        while len(self._results) < len(self._pending):
            try:
                result = self._operations.take(self._pending[len(self._results)])
            except Exception as error:  # the others are waited for as well: no other caller would
                self._failure = self._failure or error
                result = None
            if result is NOT_YET:
                return False
            self._results.append(result)
        return True

    def look(self, seconds: float) -> None:
        """Waits for the next of them so long at most."""
        if len(self._results) < len(self._pending):
            self._operations.look(self._pending[len(self._results)], seconds)

    def wait(self) -> Any:
        """The result.

        Raises:
            HorovodInternalError: One of them has failed, on all ranks.
        """
        if self.is_finished:
            return self._value
        if len(self._pending) == 1 and not self._results and self._failure is None:
            self._results = [self._operations.wait(self._pending[0])]
        while not self.has_ended():
            self.look(_LOOK_EVERY)
        if self._failure is not None:
            raise self._failure
        self._value, self.is_finished = self._finish(self._results), True
        return self._value


def submit_all(operations: Operations, parts: Sequence[tuple[Request, Start]], finish: Finish) -> Started:
    """Submits the operations of one call.

    Raises:
        ValueError: The first is not accepted. What is raised by a further one is found by `Started.wait`, for
            others are in progress then, whose tensors are in use.
        HorovodInternalError: Likewise.
    """
    pending: list[Pending] = []
    for request, start in parts:
        try:
            pending.append(operations.submit(request, start))
        except (ValueError, RuntimeError) as error:
            if not pending:
                raise
            return Started(operations, pending, finish, error)
    return Started(operations, pending, finish)


class _Watch:
    """A thread that tells callers when their operations have ended, in whatever order they do."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: list[tuple[Started, Tell]] = []
        self._thread: threading.Thread | None = None

    def add(self, started: Started, tell: Tell) -> None:
        with self._changed:
            self._open.append((started, tell))
            if self._thread is None or not self._thread.is_alive():  # of another process, after a fork
                self._thread = threading.Thread(target=self._run, name="multiring.horovod", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._open:
                    self._changed.wait()
                looked_at = list(self._open)
            ended = [entry for entry in looked_at if entry[0].has_ended()]
            if not ended:
                looked_at[0][0].look(_LOOK_AT_ONE)
                continue
            with self._changed:
                self._open = [entry for entry in self._open if entry not in ended]
            for started, tell in ended:
                _tell(started, tell)


def _tell(started: Started, tell: Tell) -> None:
    try:
        result = started.wait()
    except Exception as error:
        tell(None, error)
    else:
        tell(result, None)


_watch = _Watch()


def tell_when_done(started: Started, tell: Tell) -> None:
    """Calls `tell` with the result or the error of operations that have ended, in a thread of its own."""
    _watch.add(started, tell)
