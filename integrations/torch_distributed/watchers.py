"""Threads that wait, each for one thing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

__all__ = ["Watchers"]

_JOIN_SECONDS = 5.0


class Watchers:
    """Runs functions that wait, all of them at the same time: as many threads as are waiting, used again.

    One thread for all would not do: what completes a future may call a function of the user's, and that may
    wait for another future.

    Args:
        name: Of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._idle = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    def run(self, function: Callable[[], None]) -> None:
        """Calls a function, which must not raise, in a thread.

        Raises:
            RuntimeError: No thread can be started; the function is not called.
        """
        with self._changed:
            self._waiting.append(function)
            if self._idle < len(self._waiting):
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    self._waiting.pop()
                    raise
                self._threads.append(thread)
            else:
                self._changed.notify()

    def close(self) -> None:
        """Ends the threads, once what they wait for has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._waiting and not self._closed:
                    self._changed.wait()
                self._idle -= 1
                if not self._waiting:
                    return
                function = self._waiting.popleft()
            function()
