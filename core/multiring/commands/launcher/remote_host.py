"""What ssh starts on another host for `multiring run`: starts that host's ranks and sees them through.

The first line of standard input says what to start; further ones are signals to a rank ("process 15 3",
"group 9 3"). Its end means that the launcher, or the connection with it, is gone: the ranks get SIGTERM and
soon SIGKILL. Standard output is as frames.py has it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from multiring import machine
from multiring.commands.launcher import binding
from multiring.commands.launcher.console.output import READ_BYTES, read_what_is_there
from multiring.commands.launcher.descriptors import allow_descriptors
from multiring.commands.launcher.devices import device_environments
from multiring.commands.launcher.frames import END, FRAME, GREETING, STREAMS
from multiring.commands.launcher.guardian import end_processes
from multiring.commands.launcher.process import RankProcess
from multiring.commands.launcher.rank_starter import (
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    ProgramError,
    command_of,
    enter_directory,
    own_python_first,
)
from multiring.errors import MultiringError

__all__ = ["main"]

_END_SECONDS = 3.0  # from SIGTERM to SIGKILL when the launcher is gone
_DRAIN_SECONDS = 2.0  # for output that a process outside of our reach keeps open
# Ranks are not read from while more than this waits for the launcher, so that they wait and not our memory
# grows.
_MAX_PENDING = 1 << 20
_MARK = "REMOTE_RANK_MARK"  # in the environment of a rank and of what it starts


class _Rank:
    """A started rank, and the ends of its pipes that are open: kind and descriptor."""

    def __init__(self, process: RankProcess, mark: str) -> None:
        self.process = process
        self.mark = mark
        outputs = process.outputs()
        self.open = {kind: outputs[name] for kind, name in enumerate(STREAMS)}
        self.drain_until = float("inf")


class _Host:
    """The ranks of this host, and what is to be told of them."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._order = order
        self._ranks: dict[int, _Rank] = {}
        self._pending = bytearray(GREETING)
        self._left = b""  # of a line of standard input
        self._end_by = float("inf")
        self._is_heard = True
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Returns when all ranks have ended and the launcher knows."""
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._start()
        # ssh's own end is told by standard input; these would end us before the ranks, who would inherit it.
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        os.set_blocking(1, False)
        self._selector.register(reading, selectors.EVENT_READ, partial(os.read, reading, READ_BYTES))
        self._selector.register(0, selectors.EVENT_READ, self._hear)
        while self._ranks or (self._pending and self._is_heard):
            self._watch()
            for key, _ in self._selector.select(self._patience()):
                key.data()
            if time.monotonic() >= self._end_by:
                self._end_by = float("inf")
                self._signal_all(signal.SIGKILL)
            for rank in list(self._ranks):
                self._look(rank)

    def _start(self) -> None:
        order = self._order
        for entry in order["ranks"]:
            number = entry["rank"]
            mark = f"{order['environ']['MULTIRING_JOB_ID']}-{number}"
            try:
                process = _start(order, number, {**order["environ"], **entry["environ"], _MARK: mark})
                self._ranks[number] = _Rank(process, mark)
            except (ProgramError, MultiringError, OSError) as error:
                code = EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE
                code = 2 if isinstance(error, MultiringError) else getattr(error, "code", code)
                self._tell(1, number, f"multiring: on {socket.gethostname()}: {error}\n".encode())
                self._tell(END, number, b"%d" % code)

    def _patience(self) -> float:
        due = [self._end_by, *(rank.drain_until for rank in self._ranks.values())]
        return max(0.0, min(1.0, min(due) - time.monotonic()))

    def _watch(self) -> None:
        """Waits for what can be gone on with now."""
        self._turn(1, selectors.EVENT_WRITE, bool(self._pending), self._write)
        for number, rank in self._ranks.items():
            for kind, descriptor in rank.open.items():
                wanted = len(self._pending) < _MAX_PENDING
                read = partial(self._read, number, kind, descriptor)
                self._turn(descriptor, selectors.EVENT_READ, wanted, read)

    def _turn(self, descriptor: int, event: int, wanted: bool, call: Callable[[], None] | None) -> None:
        watched = descriptor in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(descriptor, event, call)
        elif watched and not wanted:
            self._selector.unregister(descriptor)

    def _tell(self, kind: int, rank: int, data: bytes) -> None:
        self._pending += FRAME.pack(kind, rank, len(data)) + data

    def _write(self) -> None:
        try:
            del self._pending[: os.write(1, self._pending)]
        except BlockingIOError:
            return
        except OSError:  # nobody listens, as standard input tells
            self._pending.clear()

    def _read(self, number: int, kind: int, descriptor: int) -> None:
        if data := os.read(descriptor, READ_BYTES):
            self._tell(kind, number, data)
        else:
            self._close(self._ranks[number], kind)

    def _close(self, rank: _Rank, kind: int) -> None:
        descriptor = rank.open.pop(kind)
        self._turn(descriptor, selectors.EVENT_READ, False, None)
        os.close(descriptor)

    def _look(self, number: int) -> None:
        rank = self._ranks[number]
        if rank.process.look():
            end_processes(f"{_MARK}={rank.mark}".encode(), {rank.process.pid})
            rank.drain_until = time.monotonic() + _DRAIN_SECONDS
        if rank.process.is_running or (rank.open and time.monotonic() < rank.drain_until):
            return
        for kind, descriptor in list(rank.open.items()):
            # Unread perhaps because the launcher is slow. It is no more than fits into a pipe.
            for data in read_what_is_there(descriptor):
                self._tell(kind, number, data)
            self._close(rank, kind)
        self._tell(END, number, b"%d" % (rank.process.code or 0))
        rank.process.release()
        del self._ranks[number]

    def _hear(self) -> None:
        data = os.read(0, READ_BYTES)
        *lines, self._left = (self._left + data).split(b"\n")
        for line in lines:
            self._pass_on(line)
        if not data:
            self._selector.unregister(0)
            self._is_heard = False
            self._signal_all(signal.SIGTERM)
            self._end_by = time.monotonic() + _END_SECONDS

    def _pass_on(self, line: bytes) -> None:
        whom, *numbers = line.split()
        if len(numbers) != 2 or (rank := self._ranks.get(int(numbers[1]))) is None:
            return
        if whom == b"group":
            rank.process.signal_group(int(numbers[0]))
        else:
            rank.process.signal(int(numbers[0]))

    def _signal_all(self, number: int) -> None:
        for rank in self._ranks.values():
            rank.process.signal_group(number)


def _start(order: Mapping[str, Any], rank: int, environ: Mapping[str, str]) -> RankProcess:
    enter_directory(order["directory"])
    environ = {**os.environ, **environ}
    environ["PATH"] = own_python_first(environ)
    local_rank, local_size = int(environ["MULTIRING_LOCAL_RANK"]), int(environ["MULTIRING_LOCAL_SIZE"])
    shares = binding.shares(machine.allowed_cpus(), local_size, order["bind"])
    environ |= binding.thread_environment(machine.core_allowance(), local_size, environ)
    environ |= device_environments(order["devices"], local_size, environ)[local_rank]
    command = command_of(order["program"], order["module"], environ)
    share = None if shares is None else shares[local_rank]
    return RankProcess(rank, command, environ, cpus=share, stdin=False, piped=True)


def main() -> int:
    """Returns 0 when all ranks have ended, however they have."""
    line = b""
    while not line.endswith(b"\n"):  # what follows is not to be read yet
        byte = os.read(0, 1)
        if not byte:
            return 1
        line += byte
    order = json.loads(line)
    allow_descriptors(2 * len(order["ranks"]))
    _Host(order).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
