"""Carries the output of all ranks to the launcher's own stdout and stderr, and to files."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from multiring.commands.launcher.console.output import (
    READ_BYTES,
    Console,
    LineSplitter,
    Sink,
    Tail,
    read_what_is_there,
)
from multiring.commands.launcher.console.tracebacks import Tracebacks, is_coloured, without_prefixes
from multiring.errors import UsageError

__all__ = ["Multiplexer"]

# Ranks are not read from while more than this waits to be written, so that they wait and not our memory
# grows.
_MAX_PENDING = 1 << 20

# On a terminal a line without an end (a prompt, a bar) is shown after this many seconds.
_SHOW_UNFINISHED = 0.05

_FINISH_SECONDS = 1.0  # for which a reader that is slow is waited for at the end of a line


class _Stream:
    """One of the two output streams of one rank."""

    def __init__(
        self, rank: int, name: str, descriptor: int, console: Console, file: BinaryIO | None
    ) -> None:
        self.rank = rank
        self.is_stderr = name == "stderr"
        self.descriptor = descriptor
        self.console = console
        self.file = file
        self.splitter = LineSplitter()
        self.tail = Tail()
        self.is_open = True
        self.is_read = False  # registered with the selector
        self.was_read = False  # since the selector was asked, which may have told of what was read


class Multiplexer:
    """Registers the ranks' pipes and our own outputs with a selector; each key's data is what to call.

    Args:
        selector: The selector of the caller's event loop; must accept regular files (not epoll).
        tagged: Whether lines begin with their rank.
        directory: Where to write rank.K.stdout and rank.K.stderr as well, or None.
        warn: Called with a message about output that cannot be written.
        tracebacks: Holds tracebacks back; None: they are written like other lines.
        descriptors: Where lines from stdout and from stderr go.

    Raises:
        UsageError: The directory cannot be made or written to.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        tagged: bool,
        directory: Path | None,
        warn: Callable[[str], None],
        tracebacks: Tracebacks | None = None,
        descriptors: tuple[int, int] = (1, 2),
    ) -> None:
        self._selector = selector
        self._directory = directory
        self._warn = warn
        self._tracebacks = tracebacks
        self._streams: dict[tuple[int, str], _Stream] = {}
        self._consoles = _consoles(tagged, *descriptors)
        self._show_at: float | None = None
        self._shows_unfinished = any(os.isatty(c.sink.descriptor) for c in self._consoles.values())
        self._warned: set[int] = set()
        if directory is not None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"--output-dir {directory} cannot be made: {error.strerror}") from error

    def add(self, rank: int, name: str, descriptor: int) -> None:
        """Takes over the reading end of the pipe that is `rank`'s "stdout" or "stderr"."""
        file: BinaryIO | None = None
        if self._directory is not None:
            path = self._directory / f"rank.{rank}.{name}"
            try:
                file = path.open("wb", buffering=0)
            except OSError as error:
                raise UsageError(f"--output-dir: {path} cannot be written: {error.strerror}") from error
        self._streams[rank, name] = _Stream(rank, name, descriptor, self._consoles[name], file)

    def tail(self, rank: int) -> list[str]:
        """The last lines that `rank` has written to stderr."""
        stream = self._streams.get((rank, "stderr"))
        return [] if stream is None else list(map(without_prefixes, stream.tail.text()))

    @property
    def reader_is_gone(self) -> bool:
        """Whether the reader of our output has closed it, as `head` does."""
        gone = (errno.EPIPE, errno.EIO)
        return any(c.sink.error is not None and c.sink.error.errno in gone for c in self._consoles.values())

    @property
    def is_finished(self) -> bool:
        """Whether all streams have ended and all they wrote is written."""
        ended = not any(stream.is_open for stream in self._streams.values())
        return ended and not any(console.sink.pending for console in self._consoles.values())

    @property
    def next_deadline(self) -> float | None:
        """When `before_wait` wants to be called at the latest (monotonic clock), or None."""
        held = None if self._tracebacks is None else self._tracebacks.next_deadline
        return min((when for when in (self._show_at, held) if when is not None), default=None)

    def before_wait(self) -> None:
        """Tells the selector what to wait for now; call it before each `select`."""
        if self._show_at is not None and time.monotonic() >= self._show_at:
            self._show_at = None
            for stream in self._streams.values():
                self._put(stream, stream.splitter.take())
        if self._tracebacks is not None:
            for rank, lines in self._tracebacks.give_back():
                self._show(rank, lines)
        sinks = {id(console.sink): console.sink for console in self._consoles.values()}
        for sink in sinks.values():
            sink.flush()
            self._report(sink)
            self._watch(sink.descriptor, selectors.EVENT_WRITE, bool(sink.pending), lambda: None)
        for stream in self._streams.values():
            stream.was_read = False
            wanted = stream.is_open and len(stream.console.sink.pending) < _MAX_PENDING
            if wanted != stream.is_read:
                stream.is_read = wanted
                self._watch(stream.descriptor, selectors.EVENT_READ, wanted, partial(self._read, stream))

    def end(self) -> None:
        """Stops reading, whether or not the streams have ended, and passes on what has been written."""
        for stream in self._streams.values():
            if stream.is_open:
                # Unread perhaps because our own reader is slow. It is no more than fits into a pipe.
                for data in read_what_is_there(stream.descriptor):
                    self._take(stream, data)
                self._close(stream)

    def rank_ended(self, rank: int, code: int | None, *, was_told: bool) -> None:
        """To be called when a rank has ended: a traceback that is held may have been none that ended it."""
        if self._tracebacks is not None:
            self._show(rank, self._tracebacks.end_of(rank, code, was_told=was_told))

    def is_ending(self, rank: int) -> bool:
        """Whether a rank has said that an uncaught exception ends it."""
        return self._tracebacks is not None and self._tracebacks.ends(rank)

    def leave_out_interrupts(self) -> None:
        """To be called when Ctrl-C is passed on: the tracebacks of that tell nothing new."""
        if self._tracebacks is not None:
            self._tracebacks.leave_out_interrupts()

    def show_held(self) -> None:
        """Writes what is held, as no other will show it."""
        if self._tracebacks is not None:
            for rank in self._tracebacks.texts():
                self._show(rank, self._tracebacks.release(rank))
            self._consoles["stderr"].sink.drain(_FINISH_SECONDS)

    def finish_line(self) -> None:
        """Lets what the launcher itself writes to stderr begin on a line of its own."""
        if self._tracebacks is not None:
            for rank, begun in self._tracebacks.beginnings():
                self._show(rank, [begun])
        console = self._consoles["stderr"]
        console.finish_line()
        console.sink.drain(_FINISH_SECONDS)

    def discard(self) -> None:
        """Throws away what has not been written yet."""
        self.end()
        for console in self._consoles.values():
            console.sink.pending.clear()

    def _watch(self, descriptor: int, event: int, wanted: bool, call: Callable[[], None]) -> None:
        watched = descriptor in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(descriptor, event, call)
        elif not wanted and watched:
            self._selector.unregister(descriptor)

    def _read(self, stream: _Stream) -> None:
        if not stream.is_open or stream.was_read:
            return
        if data := os.read(stream.descriptor, READ_BYTES):
            if not stream.is_stderr:
                self._read_stderr_of(stream.rank)
            self._take(stream, data)
        else:
            self._close(stream)

    def _read_stderr_of(self, rank: int) -> None:
        """Take what a rank has written to stderr by now: it may have done so before it wrote to stdout."""
        stream = self._streams.get((rank, "stderr"))
        if stream is not None and stream.is_read:
            stream.was_read = True
            for data in read_what_is_there(stream.descriptor):
                self._take(stream, data)

    def _take(self, stream: _Stream, data: bytes) -> None:
        if stream.file is not None:
            self._write_file(stream, data)
        for line in stream.splitter.feed(data):
            self._put(stream, line)
        if self._shows_unfinished and self._show_at is None:
            self._show_at = time.monotonic() + _SHOW_UNFINISHED

    def _put(self, stream: _Stream, line: bytes) -> None:
        if line:
            stream.tail.add(line)
            if self._tracebacks is None:
                stream.console.put(stream, stream.rank, line)
            elif stream.is_stderr:
                self._show(stream.rank, self._tracebacks.take(stream.rank, line))
            else:
                self._show(stream.rank, self._tracebacks.other_output(stream.rank))
                stream.console.put(stream, stream.rank, line)

    def _show(self, rank: int, lines: Sequence[bytes]) -> None:
        """Writes lines of a rank's stderr."""
        for line in lines:
            stream = self._streams[rank, "stderr"]
            stream.console.put(stream, rank, line)

    def _close(self, stream: _Stream) -> None:
        self._put(stream, stream.splitter.take())
        stream.is_open = stream.is_read = False
        self._watch(stream.descriptor, selectors.EVENT_READ, False, lambda: None)
        os.close(stream.descriptor)
        if stream.file is not None:
            stream.file.close()

    def _write_file(self, stream: _Stream, data: bytes) -> None:
        assert stream.file is not None
        view = memoryview(data)
        try:
            while view:
                view = view[stream.file.write(view) :]
        except OSError as error:
            self._warn(f"{stream.file.name} is incomplete from here on: {error.strerror}")
            with contextlib.suppress(OSError):
                stream.file.close()
            stream.file = None

    def _report(self, sink: Sink) -> None:
        if sink.error is not None and sink.descriptor not in self._warned:
            self._warned.add(sink.descriptor)
            if sink.error.errno not in (errno.EPIPE, errno.EIO):
                name = {1: "stdout", 2: "stderr"}.get(sink.descriptor, "output")
                self._warn(f"cannot write to {name}: {sink.error.strerror}; output of ranks is lost")


def _consoles(tagged: bool, stdout: int, stderr: int) -> dict[str, Console]:
    """A console for each of our outputs; the same one for both where they go to the same place."""

    def console(descriptor: int) -> Console:
        return Console(Sink(descriptor), tagged=tagged, coloured=is_coloured(descriptor))

    def place(descriptor: int) -> tuple[int, int]:
        found = os.fstat(descriptor)
        return found.st_dev, found.st_ino

    first = console(stdout)
    return {"stdout": first, "stderr": first if place(stdout) == place(stderr) else console(stderr)}
