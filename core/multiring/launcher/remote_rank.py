"""What ssh starts on another host for `multiring run`: starts one rank there and sees it through.

The first line of standard input says what to start; further ones are signals ("process 15", "group 9"). Its
end means that the launcher, or the connection with it, is gone: the rank gets SIGTERM and soon SIGKILL.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

from multiring import machine
from multiring.errors import MultiringError
from multiring.launcher import binding
from multiring.launcher.guardian import end_processes
from multiring.launcher.process import RankProcess
from multiring.launcher.rank_starter import EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND, ProgramError, command_of

__all__ = ["main"]

_END_SECONDS = 3.0  # from SIGTERM to SIGKILL when the launcher is gone
_MARK = "REMOTE_RANK_MARK"  # in the environment of the rank and of what it starts


def _mark(order: dict[str, Any]) -> str:
    return f"{order['environ']['MULTIRING_JOB_ID']}-{order['rank']}"


def main() -> int:
    """Returns the exit code of the rank as a shell gives it."""
    line = b""
    while not line.endswith(b"\n"):  # what follows is not to be read yet
        byte = os.read(0, 1)
        if not byte:
            return 1
        line += byte
    try:
        order = json.loads(line)
        process = _start(order)
    except (ProgramError, MultiringError) as error:
        return _refuse(error, error.code if isinstance(error, ProgramError) else 2)
    except OSError as error:
        return _refuse(error, EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE)
    code = _see_through(process)
    # What it has left: ssh would wait for those that hold its output.
    end_processes(f"{_MARK}={_mark(order)}".encode(), {process.pid})
    process.release()
    return 128 - code if code < 0 else code


def _refuse(error: Exception, code: int) -> int:
    print(f"multiring: on {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
    return code


def _start(order: dict[str, Any]) -> RankProcess:
    try:
        os.chdir(order["directory"])
    except OSError as error:
        raise ProgramError(
            f"there is no directory {order['directory']}, where the job was started: {error.strerror}",
            EXIT_NOT_EXECUTABLE,
        ) from error
    environ = {**os.environ, **order["environ"], _MARK: _mark(order)}
    # `python` is the one that has multiring, as in an activated environment.
    environ["PATH"] = f"{os.path.dirname(sys.executable)}:{environ.get('PATH', os.defpath)}"
    local_rank, local_size = int(environ["MULTIRING_LOCAL_RANK"]), int(environ["MULTIRING_LOCAL_SIZE"])
    shares = binding.shares(machine.allowed_cpus(), local_size, order["bind"])
    environ |= binding.thread_environment(machine.core_allowance(), local_size, environ)
    command = command_of(order["program"], order["module"], environ)
    share = None if shares is None else shares[local_rank]
    return RankProcess(order["rank"], command, environ, cpus=share, stdin=False, piped=False)


def _see_through(process: RankProcess) -> int:
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # ssh's own end is told by standard input; these would end us before the rank.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    selector.register(reading, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    left = b""
    until = float("inf")
    while not process.look():
        for key, _ in selector.select(min(1.0, max(0.0, until - time.monotonic()))):
            data = os.read(key.fd, 4096)
            if key.fd == reading:
                continue
            *lines, left = (left + data).split(b"\n")
            for line in lines:
                _pass_on(process, line)
            if not data:
                selector.unregister(0)
                process.signal_group(signal.SIGTERM)
                until = time.monotonic() + _END_SECONDS
        if time.monotonic() >= until:
            process.signal_group(signal.SIGKILL)
            until = float("inf")
    assert process.code is not None
    return process.code


def _pass_on(process: RankProcess, line: bytes) -> None:
    whom, _, number = line.partition(b" ")
    if not number.isdigit():
        return
    if whom == b"group":
        process.signal_group(int(number))
    else:
        process.signal(int(number))


if __name__ == "__main__":
    sys.exit(main())
