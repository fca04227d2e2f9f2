"""The launcher of `multiring.run`, as its caller sees it: a process that prints, and sends a report."""

from __future__ import annotations

import codecs
import contextlib
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from multiring.commands.functions import memory
from multiring.commands.functions.job import python_command
from multiring.commands.functions.outcome import JobReport
from multiring.errors import MultiringError, UsageError

__all__ = ["run_launcher"]


def run_launcher(order_file: int, descriptors: Sequence[int]) -> JobReport:
    """Runs a job to its end, and carries what is printed to `sys.stdout` and `sys.stderr`.

    An exception that comes meanwhile, such as KeyboardInterrupt, ends the ranks before it leaves.

    Args:
        order_file: Descriptor of the file with the order.
        descriptors: Those of all files that the launcher and the ranks use.

    Raises:
        UsageError: The launcher cannot be started.
        MultiringError: The launcher has ended without a report.
    """
    ours, theirs = (socket.socket(fileno=memory.not_standard(end.detach())) for end in socket.socketpair())
    with ours, memory.closed_in_forks(ours.fileno()):
        with theirs:
            command = python_command("multiring.commands.functions.job", order_file, theirs.fileno())
            launched = _Launched(command, (theirs.fileno(), *descriptors), ours)
        with launched:
            launched.finish()
    if not launched.report:
        ended = launched.process.returncode
        how = f"signal {signal.Signals(-ended).name}" if ended < 0 else f"exit code {ended}"
        who = f"the launcher (process {launched.process.pid})"
        raise MultiringError(f"{who} ended with {how}; see its stderr")
    report: JobReport = pickle.loads(launched.report)
    return report


class _Launched:
    """The process.

    Attributes:
        process: It.
        report: What it has sent, so far.
    """

    def __init__(self, command: Sequence[str], descriptors: Sequence[int], channel: socket.socket) -> None:
        self.report = bytearray()
        self._channel = channel
        targets = [_target("stdout"), _target("stderr")]
        pipes = [subprocess.PIPE if isinstance(target, _Stream) else target for target in targets]
        if isinstance(targets[0], _Stream) and targets[0] == targets[1]:
            pipes[1] = subprocess.STDOUT
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=pipes[0],
                stderr=pipes[1],
                pass_fds=descriptors,
                # A terminal's Ctrl-C comes to the caller alone, which passes it on once.
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(f"cannot start the launcher: {error}") from error
        self._pumps = [
            _Pump(pipe, target)
            for pipe, target in zip((self.process.stdout, self.process.stderr), targets, strict=True)
            if pipe is not None and isinstance(target, _Stream)
        ]

    def __enter__(self) -> _Launched:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()  # the job ends, where it has not yet
        for pump in self._pumps:
            pump.pipe.close()
        self.process.wait()

    def finish(self) -> None:
        """Carries output until the process has ended."""
        first: BaseException | None = None
        while True:
            try:
                self._watch()
                break
            except BaseException as error:
                first = first or error
                is_interrupt = isinstance(error, KeyboardInterrupt)
                if not is_interrupt:  # of what has taken the place of sys.stdout, perhaps
                    for pump in self._pumps:
                        pump.mute()
                with contextlib.suppress(OSError):
                    self._channel.send(bytes([signal.SIGINT if is_interrupt else signal.SIGTERM]))
        if first is not None:
            raise first

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            for pump in self._pumps:
                selector.register(pump.pipe, selectors.EVENT_READ, pump)
            is_there = True
            while is_there:
                for key, _ in selector.select():
                    if key.data is None:
                        is_there = self._hear()
                    elif not key.data.carry():
                        selector.unregister(key.data.pipe)
        self.process.wait()
        for pump in self._pumps:
            pump.finish()

    def _hear(self) -> bool:
        """Whether the launcher is still there."""
        try:
            data = self._channel.recv(1 << 16)
        except ConnectionResetError:
            return False
        self.report += data
        return bool(data)


@dataclass(frozen=True)
class _Stream:
    """What has taken the place of a standard stream: in a notebook, in tests, by `redirect_stdout`."""

    stream: Any

    def write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def _target(name: str) -> _Stream | int | None:
    """Where the launcher writes: what Popen takes (None: to our own descriptor), or a stream of ours."""
    stream = getattr(sys, name)
    if stream is None:
        return subprocess.DEVNULL
    with contextlib.suppress(Exception):
        stream.flush()  # what has been printed before comes before
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if stream.fileno() == {"stdout": 1, "stderr": 2}[name]:
            return None
    return _Stream(stream)


class _Pump:
    """Carries what comes from a pipe to a stream of text."""

    def __init__(self, pipe: IO[bytes], target: _Stream) -> None:
        self.pipe = pipe
        self._target: _Stream | None = target
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        os.set_blocking(pipe.fileno(), False)

    def carry(self) -> bool:
        """Carries what is there; returns whether there may be more."""
        try:
            data = os.read(self.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        self._put(data)
        return bool(data)

    def finish(self) -> None:
        """Carries what is left; a process that a rank has left behind may hold the pipe open."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.pipe.fileno(), 1 << 16):
                self._put(data)
        self._put(b"", final=True)

    def mute(self) -> None:
        """From now on throws away what comes."""
        self._target = None

    def _put(self, data: bytes, final: bool = False) -> None:
        text = self._decoder.decode(data, final=final)
        if text and self._target is not None:
            self._target.write(text)
