"""A timeline of the named operations, as a trace that chrome://tracing and Perfetto show.

Rank 0 writes it. The core keeps the times of each operation; a thread writes down those that have ended.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from multiring.work import keep_times

if TYPE_CHECKING:
    from multiring.horovod.operations import Pending

__all__ = ["Timeline", "active", "start", "start_by_environment", "stop"]

_PATH, _MARK_CYCLES = "HOROVOD_TIMELINE", "HOROVOD_TIMELINE_MARK_CYCLES"
_DYNAMIC = "DYNAMIC"  # written where the program asks for it
_LOOK_EVERY = 0.1
_GLOBAL = 0  # the process of events that belong to no tensor


class Timeline:
    """Writes a trace.

    Each name, as "allreduce.x", is what the format calls a process. NEGOTIATE_ALLREDUCE lasts until all ranks
    have submitted the operation, ALLREDUCE from there to its end, with QUEUE in it as long as others run
    before it. CYCLE_START is where a negotiation has found operations that all ranks have submitted.

    Args:
        path: The file; what is there is overwritten.
        mark_cycles: Whether CYCLE_START is marked.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], mark_cycles: bool) -> None:
        self.path = path
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (open until `close`)
        self._file.write("[\n")
        self._began = time.monotonic_ns()
        self._mark_cycles = mark_cycles
        self._numbers: dict[str, int] = {}
        self._last_cycle = 0
        self._is_first = True
        self._is_broken = False  # it cannot be written any more
        self._lock = threading.Lock()
        self._open: list[Pending] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multiring.horovod.timeline", daemon=True)
        keep_times(True)
        self._thread.start()

    def add(self, pending: Pending) -> None:
        """An operation has been submitted."""
        with self._lock:
            if not self._is_broken:
                self._open.append(pending)

    def close(self) -> None:
        """Writes what has ended, and closes the file."""
        keep_times(False)
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._file:
                while not self._ends.wait(_LOOK_EVERY):
                    self._write_ended()
                    self._file.flush()
                self._write_ended()
                self._file.write("\n]\n")
        except OSError as error:
            _say(f"the timeline {self.path} is incomplete: {error.strerror}")
            with self._lock:
                self._is_broken = True
                self._open.clear()

    def _write_ended(self) -> None:
        with self._lock:
            open_before, self._open = self._open, []
        left = []
        for pending in open_before:
            if pending.refusal:
                continue
            if pending.work is None or not pending.work.done():
                left.append(pending)
            else:
                self._write(pending, pending.work.times())
        with self._lock:
            self._open += left

    def _write(self, pending: Pending, times: tuple[int, int, int, int]) -> None:
        made, queued, begun, ended = times
        if made < self._began:
            return  # submitted before
        request = pending.request
        kind = request.kind.upper()
        prefix = f"{request.kind}."
        number = self._number_of(prefix + request.name.removeprefix(prefix))
        if self._mark_cycles and queued > self._last_cycle:
            self._last_cycle = queued
            self._event("i", "CYCLE_START", _GLOBAL, queued, s="g")
        self._event("B", f"NEGOTIATE_{kind}", number, made)
        self._event("E", f"NEGOTIATE_{kind}", number, queued or ended)
        if queued:
            self._event("B", kind, number, queued)
            self._event("B", "QUEUE", number, queued)
            self._event("E", "QUEUE", number, begun or ended)
            self._event("E", kind, number, ended, args={"dtype": request.dtype, "shape": list(request.shape)})

    def _number_of(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers) + 1
            self._put({"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}})
            self._put(
                {"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}}
            )
        return number

    def _event(self, phase: str, name: str, number: int, moment: int, **more: Any) -> None:
        at = (moment - self._began) / 1000  # in microseconds
        self._put({"ph": phase, "name": name, "pid": number, "tid": 0, "ts": at, **more})

    def _put(self, event: dict[str, Any]) -> None:
        self._file.write(("" if self._is_first else ",\n") + json.dumps(event))
        self._is_first = False


active: Timeline | None = None
"""What is being written."""


def start(path: str | os.PathLike[str], mark_cycles: bool) -> None:
    """Begins to write, on this rank. A timeline that is being written ends, unless it is the same file.

    Raises:
        OSError: The file cannot be written.
    """
    global active
    if active is not None and os.path.abspath(active.path) == os.path.abspath(path):
        return  # begun anew it would lose what is there
    before, active = active, Timeline(path, mark_cycles)
    if before is not None:
        before.close()
        keep_times(True)


def start_by_environment() -> None:
    """Begins to write where the variables ask for it, and says so where that cannot be done."""
    path = os.environ.get(_PATH, "")
    if path and path.upper() != _DYNAMIC and active is None:
        try:
            start(path, os.environ.get(_MARK_CYCLES, "") in ("1", "true"))
        except OSError as error:  # no reason not to train
            _say(f"{_PATH}: {error}; no timeline is written")


def stop() -> None:
    """Writes no more; does nothing where no timeline is being written."""
    global active
    timeline, active = active, None
    if timeline is not None:
        timeline.close()


def _say(text: str) -> None:
    print(f"multiring: {text}", file=sys.stderr)


atexit.register(stop)
