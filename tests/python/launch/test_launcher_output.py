"""How the launcher cuts, tags and writes the output of ranks."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring.commands.launcher.frames import END, FRAME, GREETING
from multiring.commands.launcher.multiplexer import Multiplexer
from multiring.commands.launcher.output import Console, LineSplitter, Sink, Tail
from multiring.commands.launcher.remote_ranks import RemoteHost
from multiring.errors import UsageError

_CHUNKS = st.lists(st.text(alphabet="ab\r\n", max_size=8).map(str.encode))


@given(_CHUNKS)
def test_the_splitter_loses_and_adds_nothing(chunks: list[bytes]) -> None:
    splitter = LineSplitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    assert b"".join([*lines, splitter.take()]) == b"".join(chunks)


@given(_CHUNKS)
def test_lines_do_not_depend_on_how_they_arrive(chunks: list[bytes]) -> None:
    splitter, whole = LineSplitter(), LineSplitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    assert lines == whole.feed(b"".join(chunks))
    assert splitter.take() == whole.take()


def test_lines_end_with_newline_or_carriage_return() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"a\nb\r\nc\rd") == [b"a\n", b"b\r\n", b"c\r"]
    assert splitter.feed(b"\r") == []  # "\n" may follow
    assert splitter.feed(b"\ne\r") == [b"d\r\n"]
    assert splitter.feed(b"f") == [b"e\r"]
    assert splitter.take() == b"f"
    assert splitter.take() == b""


class Written:
    """A sink that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def console(*, coloured: bool = False, tagged: bool = True) -> tuple[Console, Written]:
    written = Written()
    return Console(written, tagged=tagged, coloured=coloured), written  # type: ignore[arg-type]


TAG = b"\x1b[36m[0]\x1b[0m "
A, B = "a", "b"  # streams


@pytest.mark.parametrize(
    ("options", "written", "shown"),
    [
        # Each line is tagged with its rank.
        ({}, [(A, 0, b"one\n"), (B, 11, b"two\r\n"), (A, 0, b"\n")], b"[0] one\n[11] two\r\n[0] \n"),
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
    screen, found = console(**options)
    for stream, rank, line in written:
        screen.put(stream, rank, line)
    assert found.data == shown


def test_each_state_of_a_progress_bar_is_tagged_and_overwrites_the_last() -> None:
    screen, written = console()
    splitter = LineSplitter()
    for line in splitter.feed(b"\r 0%\r 50%\r 100%\ndone\n"):
        screen.put("a", 0, line)
    assert written.data == b"[0]  0%\r[0]  50%\r[0]  100%\n[0] done\n"


def test_the_tail_keeps_the_last_lines_only() -> None:
    tail = Tail(lines=3, bytes_per_line=10)
    for number in range(10):
        tail.add(b"line %d\n" % number)
    tail.add(b"x" * 50 + b"\n")
    assert tail.text() == ["line 8", "line 9", "x" * 10 + " ..."]


def test_the_tail_shows_the_last_state_of_a_bar_and_joins_parts() -> None:
    tail = Tail()
    for part in (b"10%\r", b"20%\r", b"30%\n", b"Trace", b"back\n", b"bytes \xff\n", b"\n", b"  \n"):
        tail.add(part)
    assert tail.text() == ["30%", "Traceback", "bytes \N{REPLACEMENT CHARACTER}"]


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


class Screen:
    """Pipes in place of stdout and stderr."""

    def __init__(self) -> None:
        self.stdout, self._stdout = os.pipe()
        self.stderr, self._stderr = os.pipe()
        self.descriptors = self._stdout, self._stderr

    def close(self) -> None:
        for descriptor in (self.stdout, self.stderr, *self.descriptors):
            os.close(descriptor)


@pytest.fixture
def screen() -> Iterator[Screen]:
    with contextlib.closing(Screen()) as opened:
        yield opened


def ignore(message: str) -> None:
    """Takes warnings that a test does not expect to matter."""


def turn(outputs: Multiplexer, selector: selectors.BaseSelector, timeout: float = 0.0) -> None:
    outputs.before_wait()
    for key, _ in selector.select(timeout):
        key.data()


def test_a_reader_that_stops_makes_ranks_wait_and_loses_nothing(screen: Screen) -> None:
    line = b"x" * 999 + b"\n"
    total = 5000
    with selectors.PollSelector() as selector:
        outputs = Multiplexer(
            selector, tagged=False, directory=None, warn=ignore, descriptors=screen.descriptors
        )
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        outputs.add(0, "stdout", reading)
        sent = 0
        left = line * total
        stalled = 0
        while stalled < 10:  # nobody reads: at some point nothing more is accepted
            try:
                count = os.write(writing, left[:65536])
            except BlockingIOError:
                count = 0
            sent += count
            left = left[count:]
            stalled = 0 if count else stalled + 1
            turn(outputs, selector)
        assert 1 << 20 <= sent < len(line) * total
        received = b""
        while not outputs.is_finished:
            if left:
                with contextlib.suppress(BlockingIOError):
                    left = left[os.write(writing, left[:65536]) :]
            elif writing >= 0:
                os.close(writing)
                writing = -1
            os.set_blocking(screen.stdout, False)
            with contextlib.suppress(BlockingIOError):
                received += os.read(screen.stdout, 1 << 20)
            turn(outputs, selector)
        while len(received) < len(line) * total:
            received += os.read(screen.stdout, 1 << 20)
        same = received == line * total
        assert same  # not compared here: a difference would be shown in full


def test_a_rank_elsewhere_has_not_ended_before_its_output_has_come(tmp_path: Path) -> None:
    words = b"x" * 65536 + b"LAST LINE\n"
    said = tmp_path / "said"
    said.write_bytes(GREETING + FRAME.pack(0, 3, len(words)) + words + FRAME.pack(END, 3, 1) + b"7")
    woken: list[bool] = []
    with selectors.PollSelector() as selector:
        host = RemoteHost(
            ssh=["sh", "-c", f"cat {said}; exec sleep 3600.4"],
            host="elsewhere",
            python="",
            order={},
            places={3: {}},
            selector=selector,
            wake=lambda: woken.append(True),
        )
        rank = host.ranks[3]
        reading = rank.outputs()["stdout"]
        heard = bytearray()

        def go_on() -> None:
            for key, _ in selector.select(10):
                key.data()

        while not woken:
            go_on()
        assert not rank.look(), "its last words do not fit into the pipe, and nobody reads them"
        woken.clear()
        heard += os.read(reading, 65536)
        while not woken:
            go_on()
        assert rank.look()
        assert rank.code == 7
        heard += os.read(reading, 1 << 20)
        assert heard == words
        os.close(reading)
        os.close(rank.outputs()["stderr"])
        host.end_ssh()
        host.release()


def test_files_get_the_bytes_as_they_are(screen: Screen, tmp_path: Path) -> None:
    with selectors.PollSelector() as selector:
        outputs = Multiplexer(
            selector, tagged=True, directory=tmp_path / "out", warn=ignore, descriptors=screen.descriptors
        )
        for rank in range(2):
            reading, writing = os.pipe()
            outputs.add(rank, "stderr", reading)
            os.write(writing, b"\rbar \xff %d" % rank)
            os.close(writing)
        deadline = time.monotonic() + 30
        while not outputs.is_finished:
            assert time.monotonic() < deadline
            turn(outputs, selector, 0.01)
        assert outputs.tail(1) == ["bar \N{REPLACEMENT CHARACTER} 1"]
    assert (tmp_path / "out" / "rank.0.stderr").read_bytes() == b"\rbar \xff 0"
    assert (tmp_path / "out" / "rank.1.stderr").read_bytes() == b"\rbar \xff 1"
    assert os.read(screen.stderr, 1000) == b"[0] bar \xff 0\n[1] bar \xff 1"


def test_a_full_disk_is_told_once_and_ends_nothing() -> None:
    told: list[str] = []
    full = os.open("/dev/full", os.O_WRONLY)
    with selectors.PollSelector() as selector:
        outputs = Multiplexer(
            selector, tagged=False, directory=None, warn=told.append, descriptors=(full, full)
        )
        reading, writing = os.pipe()
        outputs.add(0, "stdout", reading)
        for _ in range(3):
            os.write(writing, b"line\n")
            turn(outputs, selector, 1.0)
            turn(outputs, selector)
        os.close(writing)
        turn(outputs, selector, 1.0)
        assert outputs.is_finished
        assert not outputs.reader_is_gone
    os.close(full)
    assert len(told) == 1
    assert "cannot write" in told[0]


def test_an_output_directory_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with selectors.PollSelector() as selector, pytest.raises(UsageError, match="--output-dir"):
        Multiplexer(selector, tagged=False, directory=tmp_path / "file" / "out", warn=ignore)
