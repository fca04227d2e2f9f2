"""Cuts the output of ranks into lines, tags them and writes them, without ever waiting for a slow reader."""

from __future__ import annotations

import fcntl
import os
import re
import select
import stat
import struct
import termios
import time
from collections import deque
from collections.abc import Iterator

__all__ = ["READ_BYTES", "Console", "LineSplitter", "Sink", "Tail", "read_what_is_there"]

READ_BYTES = 1 << 16  # at once

# A line this long is passed on in parts: memory has an end.
_LONGEST_LINE = 16 << 20

# A writable pipe takes this many bytes without blocking (PIPE_BUF); a regular file never blocks.
_PIPE_BYTES = 4096
_FILE_BYTES = 1 << 20
_WRITES_PER_TURN = 64

_COLOURS = (36, 33, 32, 35, 34, 31)
_ERASE_REST_OF_LINE = b"\x1b[K"


def read_what_is_there(descriptor: int) -> Iterator[bytes]:
    """What a pipe holds at the moment of the first look, however much more is written to it; never waits."""
    (left,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    while left > 0:
        data = os.read(descriptor, min(left, READ_BYTES))
        left -= len(data)
        yield data


class LineSplitter:
    r"""Cuts a stream of bytes after each "\n", "\r\n" and lone "\r", which ends a state of a progress bar."""

    # Whether a "\r" at the very end is followed by "\n" is not known yet, so it does not end a line.
    _END = re.compile(rb"\n|\r\n|\r(?!\Z)")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Adds `data`; returns the lines that are complete now, each with its end."""
        self._buffer += data
        lines = []
        start = 0
        for end in self._END.finditer(self._buffer, self._scanned):
            lines.append(bytes(self._buffer[start : end.end()]))
            start = end.end()
        del self._buffer[:start]
        if len(self._buffer) > _LONGEST_LINE:
            lines.append(self.take())
        self._scanned = len(self._buffer) - self._buffer.endswith(b"\r")
        return lines

    def take(self) -> bytes:
        """Returns and forgets what has come since the end of the last line."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        self._scanned = 0
        return rest


class Sink:
    """A descriptor that is written to only when it will not block; the rest is kept.

    Attributes:
        error: What made writing impossible; from then on everything is thrown away.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.error: OSError | None = None
        self.pending = bytearray()
        self._most = _FILE_BYTES if stat.S_ISREG(os.fstat(descriptor).st_mode) else _PIPE_BYTES
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def write(self, data: bytes) -> None:
        """Queues `data`."""
        if self.error is None:
            self.pending += data

    def flush(self) -> None:
        """Writes what can be written now."""
        for _ in range(_WRITES_PER_TURN):
            if not self.pending or not self._poll.poll(0):
                return
            try:
                written = os.write(self.descriptor, self.pending[: self._most])
            except BlockingIOError:
                return
            except OSError as error:
                self.error = error
                self.pending.clear()
                return
            del self.pending[:written]

    def drain(self, seconds: float) -> None:
        """Writes what is queued, and waits for a slow reader so long at most."""
        deadline = time.monotonic() + seconds
        self.flush()
        while self.pending and (left := deadline - time.monotonic()) > 0:
            self._poll.poll(1000 * left)
            self.flush()


class Console:
    """Puts the lines of many streams onto one sink so that each can be told from the others.

    Args:
        sink: Where to write.
        tagged: Whether lines begin with "[rank] ".
        coloured: Whether tags are coloured and overwritten lines erased, as only a terminal understands.
    """

    def __init__(self, sink: Sink, *, tagged: bool, coloured: bool) -> None:
        self.sink = sink
        self._tagged = tagged
        self._coloured = coloured
        self._unfinished: object = None  # the stream whose line has begun on the sink and not ended
        self._overwriting = False  # the cursor is at the beginning of a line that holds text

    def put(self, stream: object, rank: int, line: bytes) -> None:
        r"""Writes `line`, which ends with "\n", "\r\n" or "\r", or not at all: then more of it may follow."""
        text = line.rstrip(b"\r\n")
        end = line[len(text) :]
        if self._unfinished is not None and self._unfinished is not stream:
            self.sink.write(b"\n")
            self._unfinished = None
        begins = self._unfinished is None
        if begins and not text and (end == b"\r" or self._overwriting):
            # A bar's leading "\r", or the "\n" after the last "\r" of a bar: nothing to tag.
            self.sink.write(b"" if end == b"\r" else end)
        else:
            tag = self._tag(rank) if begins else b""
            erase = _ERASE_REST_OF_LINE if self._overwriting and self._coloured else b""
            self.sink.write(tag + text + erase + end)
        self._unfinished = None if end else stream
        if end:
            self._overwriting = end == b"\r"

    def finish_line(self) -> None:
        """Ends the line that a stream has begun: something else is to follow."""
        if self._unfinished is not None:
            self.sink.write(b"\n")
            self._unfinished = None

    def _tag(self, rank: int) -> bytes:
        if not self._tagged:
            return b""
        if not self._coloured:
            return b"[%d] " % rank
        return b"\x1b[%dm[%d]\x1b[0m " % (_COLOURS[rank % len(_COLOURS)], rank)


class Tail:
    """The last lines of a stream, to show when its rank has failed."""

    def __init__(self, lines: int = 20, bytes_per_line: int = 1000) -> None:
        self._lines: deque[bytes] = deque(maxlen=lines)
        self._bytes_per_line = bytes_per_line

    def add(self, line: bytes) -> None:
        r"""Adds a line or part of one; one that ends with "\r" is replaced by the next, as on a terminal."""
        if self._lines and not self._lines[-1].endswith(b"\n"):
            last = self._lines.pop()
            line = line if last.endswith(b"\r") else last + line
        text = line.rstrip(b"\r\n")
        if len(text) > self._bytes_per_line:
            line = text[: self._bytes_per_line] + b" ..." + line[len(text) :]
        self._lines.append(line)

    def text(self) -> list[str]:
        """The lines without their ends, blank ones at the end left out."""
        lines = [line.rstrip(b"\r\n").decode(errors="replace") for line in self._lines]
        while lines and not lines[-1].strip():
            lines.pop()
        return lines
