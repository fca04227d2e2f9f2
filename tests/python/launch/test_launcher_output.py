"""How the launcher cuts, tags and writes the output of ranks."""

from __future__ import annotations

import os
import selectors
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring.commands.launcher.console.multiplexer import Multiplexer
from multiring.commands.launcher.console.output import Console, LineSplitter, Sink, Tail

_CHUNKS = st.lists(st.text(alphabet="ab\r\n", max_size=8).map(str.encode))


@given(_CHUNKS)
def test_the_splitter_loses_and_adds_nothing(chunks: list[bytes]) -> None:
    """And lines do not depend on how they arrive."""
    splitter, whole = LineSplitter(), LineSplitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    assert lines == whole.feed(b"".join(chunks))
    rest = splitter.take()
    assert rest == whole.take()
    assert b"".join([*lines, rest]) == b"".join(chunks)


def test_lines_end_with_newline_or_carriage_return() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"a\nb\r\nc\rd") == [b"a\n", b"b\r\n", b"c\r"]
    assert splitter.feed(b"\r") == []  # "\n" may follow
    assert splitter.feed(b"\ne\r") == [b"d\r\n"]
    assert splitter.feed(b"f") == [b"e\r"]
    assert splitter.take() == b"f"
    assert splitter.take() == b""


TAG = b"\x1b[36m[0]\x1b[0m "
A, B = "a", "b"  # streams


@pytest.mark.parametrize(
    ("options", "written", "shown"),
    [
        # Each line is tagged with its rank.
        ({}, [(A, 0, b"one\n"), (B, 11, b"two\r\n"), (A, 0, b"\n")], b"[0] one\n[11] two\r\n[0] \n"),
        # Each state of a bar is tagged, and overwrites the last.
        ({}, [(A, 0, b"\r"), (A, 0, b" 0%\r"), (A, 0, b" 9%\n")], b"[0]  0%\r[0]  9%\n"),
        # Without tags lines are left as they are.
        ({"tagged": False}, [(A, 0, b"one\n"), (B, 0, b"two"), (A, 0, b"three\n")], b"one\ntwo\nthree\n"),
        # A line that comes in parts is tagged once.
        ({}, [(A, 0, b"name"), (A, 0, b"? "), (A, 0, b"yes\n")], b"[0] name? yes\n"),
        # A line of another rank does not join an unfinished one.
        ({}, [(A, 0, b"name? "), (B, 1, b"hello\n"), (A, 0, b"yes\n")], b"[0] name? \n[1] hello\n[0] yes\n"),
        # The newline after a bar keeps its last state.
        ({}, [(A, 3, b"100%\r"), (A, 3, b"\n"), (A, 3, b"next\n")], b"[3] 100%\r\n[3] next\n"),
        # On a terminal tags are coloured and overwritten lines erased.
        (
            {"coloured": True},
            [(A, 0, b"a long state\r"), (A, 0, b"short\n"), (A, 0, b"next\n")],
            TAG + b"a long state\r" + TAG + b"short\x1b[K\n" + TAG + b"next\n",
        ),
    ],
)
def test_what_a_console_shows(
    options: dict[str, bool], written: list[tuple[str, int, bytes]], shown: bytes
) -> None:
    found = bytearray()
    sink: Any = SimpleNamespace(write=found.extend)
    screen = Console(sink, **({"tagged": True, "coloured": False} | options))
    for stream, rank, line in written:
        screen.put(stream, rank, line)
    assert found == shown


def test_the_tail_keeps_the_last_lines_only() -> None:
    tail = Tail(lines=3, bytes_per_line=10)
    for number in range(10):
        tail.add(b"line %d\n" % number)
    tail.add(b"x" * 50 + b"\n")
    assert tail.text() == ["line 8", "line 9", "x" * 10 + " ..."]
    tail = Tail()
    for part in (b"10%\r", b"20%\r", b"30%\n", b"Trace", b"back\n", b"bytes \xff\n", b"\n", b"  \n"):
        tail.add(part)
    shown = ["30%", "Traceback", "bytes \N{REPLACEMENT CHARACTER}"]
    assert tail.text() == shown, "the last state of a bar, parts joined"


def test_a_sink_never_waits_for_a_slow_reader() -> None:
    reading, writing = os.pipe()
    sink = Sink(writing)
    data = os.urandom(300_000)
    sink.write(data)
    sink.flush()  # would block for ever if it tried to write everything
    assert sink.pending
    received = b""
    while len(received) < len(data):
        received += os.read(reading, 1 << 16)
        sink.flush()
    same = received == data
    assert same
    os.close(reading)
    sink.write(b"more")
    sink.flush()
    assert isinstance(sink.error, BrokenPipeError)
    assert not sink.pending
    os.close(writing)


def test_a_full_disk_is_told_once_and_ends_nothing() -> None:
    told: list[str] = []
    full = os.open("/dev/full", os.O_WRONLY)
    with selectors.PollSelector() as selector:
        outputs = Multiplexer(
            selector, tagged=False, directory=None, warn=told.append, descriptors=(full, full)
        )
        reading, writing = os.pipe()
        outputs.add(0, "stdout", reading)

        def turn() -> None:
            outputs.before_wait()
            for key, _ in selector.select(1.0):
                key.data()

        for _ in range(3):
            os.write(writing, b"line\n")
            turn()
        os.close(writing)
        turn()
        assert outputs.is_finished
        assert not outputs.reader_is_gone
    os.close(full)
    assert len(told) == 1
    assert "cannot write" in told[0]


def test_what_a_rank_has_written_to_stderr_comes_before_what_it_writes_to_stdout_then() -> None:
    shown, written = os.pipe()
    pipes = {name: os.pipe() for name in ("stdout", "stderr")}  # in this order the selector finds them
    with selectors.PollSelector() as selector:
        outputs = Multiplexer(
            selector, tagged=False, directory=None, warn=pytest.fail, descriptors=(written, written)
        )
        for name, (reading, _) in pipes.items():
            outputs.add(0, name, reading)
        for name in ("stderr", "stdout"):
            os.write(pipes[name][1], f"to {name}\n".encode())
        while outputs.before_wait() is None and (ready := selector.select(0)):
            for key, _ in ready:
                key.data()
        outputs.end()
    found = os.read(shown, 100)
    for descriptor in (shown, written, *(writing for _, writing in pipes.values())):
        os.close(descriptor)
    assert found == b"to stderr\nto stdout\n"
