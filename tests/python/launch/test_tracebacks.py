"""How tracebacks are held back, given back and folded, without a job."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiring.commands.launcher.console.multiplexer import Multiplexer
from multiring.commands.launcher.console.tracebacks import Tracebacks, encoded, fold, tagged_lines
from multiring.commands.launcher.report import RankEnd

TEXT = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\nValueError: bad\n  worse'


def test_equal_errors_are_folded_and_the_culprits_comes_last() -> None:
    mine = "{}: {} (raised on rank {} on host7, in barrier)"
    folded = fold({0: TEXT, 1: mine.format("A", "b", 1), 2: TEXT, 3: TEXT, 4: mine.format("A", "b", 4)}, 2)
    assert folded == [([1, 4], mine.format("A", "b", 1)), ([0, 2, 3], TEXT)]
    assert fold({1: mine.format("A", "b", 1)}) == [([1], mine.format("A", "b", 1))]
    lines = tagged_lines(folded, coloured=True)
    assert lines[1] == "[ranks 0, 2-3] Traceback (most recent call last):"
    assert lines[-2:] == [
        "[ranks 0, 2-3] \x1b[1;31mValueError: bad\x1b[0m",
        "[ranks 0, 2-3] \x1b[1;31m  worse\x1b[0m",
    ]
    assert tagged_lines([([1], TEXT)], coloured=False, tagged=False) == TEXT.split("\n")


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("E: <a.B object at 0x7f0011>", "E: <a.B object at 0x7fee11>", True),
        ("E: bad magic 0xdeadbeef", "E: bad magic 0xcafebabe", False),
        ("E: expected 3", "E: expected 4", False),
        ("E: the state differs, seen on rank 0: w", "E: the state differs, seen on rank 1: w", True),
        (
            "E: loss (noticed on rank 0 on a, in barrier)",
            "E: loss (noticed on rank 1 on b, in barrier)",
            True,
        ),
        (
            "PeerLostError: rank 2 on a, in a: no rank 1",
            "PeerLostError: rank 2 stopped all ranks: rank 2 on a, in a: no rank 1 (noticed on rank 0 on b)",
            True,
        ),
        (
            "E: loss (raised on rank 0 on a, in barrier) [process group '0', rank 0]",
            "E: loss (raised on rank 1 on a, in barrier) [process group '0', rank 1]",
            True,
        ),
        (
            "E: loss (raised on rank 0 on a) [process group 'a' of the job's ranks 1, 3; rank 0 in it]",
            "E: loss (raised on rank 1 on a) [process group 'a' of the job's ranks 1, 3; rank 1 in it]",
            True,
        ),
        ("E: rank 1 is lost", "E: rank 2 is lost", False),
        ("E: no data for [rank 0, rank 3]", "E: no data for [rank 0, rank 5]", False),
        ("E: bad [a; rank 3 in it]", "E: bad [a; rank 5 in it]", False),
    ],
)
def test_which_errors_are_equal(one: str, other: str, is_same: bool) -> None:
    folded = fold({0: one, 1: other})
    assert folded == ([([0, 1], one)] if is_same else [([0], one), ([1], other)])


def test_of_many_errors_each_message_is_shown() -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nE: {0}\nmore {0}'
    many = tagged_lines(fold({rank: text.format(rank) for rank in range(9)}, 3), coloured=False)
    assert many[0] == (
        "multiring: of 5 of 9 different errors only the messages are shown; --output-dir keeps the tracebacks"
    )
    assert many[1:5] == ["[0] E: 0", "[0] more 0", "[1] E: 1", "[1] more 1"]
    assert many[-4:] == [
        "[3] Traceback (most recent call last):",
        '[3]   File "a.py", line 1, in f',
        "[3] E: 3",
        "[3] more 3",
    ]
    assert all(f"[{rank}] more {rank}" in many for rank in range(9))


def whole(text: str) -> list[bytes]:
    return text.encode().splitlines(keepends=True)


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 1, in <module>
  | ExceptionGroup: all (1 sub-exception)
  +-+---------------- 1 ----------------
    | ValueError: bad
    +------------------------------------
"""
CHAIN = """Traceback (most recent call last):
  File "a.py", line 1, in f
KeyError: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 2, in f
ValueError: bad
"""
SYNTAX = """  File "a.py", line 2
    def f(:
          ^
SyntaxError: invalid syntax
"""
TORCH = "".join(f"[rank0]: {line}\n" for line in TEXT.splitlines())


CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"


@pytest.mark.parametrize("text", [TEXT + "\n", GROUP, CHAIN, CHAIN + CAUSE + GROUP, SYNTAX, TORCH])
def test_a_traceback_is_held_whole_and_any_other_line_gives_it_back(text: str) -> None:
    lines = whole(text)
    for following in (b"and this\n", b"a prompt? ", b" 10%\r", b"Exception in thread A\n"):
        held = Tracebacks()
        assert held.take(0, b"some line\n") == [b"some line\n"]
        assert not any(held.take(0, line) for line in lines)
        assert held.texts() == {0: text.replace("[rank0]: ", "").strip("\n")}
        assert held.take(0, following) == [*lines, following]
        assert not held.holds(0)
        assert held.next_deadline is None
    assert not any(held.take(1, line) for line in lines)
    assert not any(held.take(2, line) for line in lines)
    first = "Traceback (most recent call last):"
    assert held.take(2, first.encode() + b"\n") == lines, "another one begins, which is held in turn"
    assert held.texts()[2] == first


def test_what_follows_from_a_lost_rank_is_secondary_also_behind_prefixes() -> None:
    text = CHAIN.replace("KeyError: 1", "multiring.errors.PeerLostError: lost rank 1")
    held = Tracebacks()
    for rank, shown in enumerate(
        (text, "".join(f"[rank1]: {line}" for line in text.splitlines(keepends=True)))
    ):
        assert not any(held.take(rank, line) for line in whole(shown))
        assert held.held_lines(rank) == text.splitlines()
        assert RankEnd(rank, 1, 1, False, held.held_lines(rank)).is_secondary


def test_what_does_not_end_its_rank_is_not_held() -> None:
    held = Tracebacks()
    for header in (b"Exception in thread Thread-1 (f):\n", b"Exception ignored in: <function f>\n"):
        lines = [header, *whole(TEXT)[:-1]]
        assert [shown for line in lines for shown in held.take(0, line)] == lines
    lines = whole(CHAIN)
    for code, was_told in ((0, False), (0, True), (-9, False), (3, False)):
        held = Tracebacks()
        assert not any(held.take(0, line) for line in lines)
        assert held.end_of(0, code, was_told=was_told) == lines
        assert held.take(0, lines[0]) == [lines[0]], "what it has started is not held"
    for code, was_told in ((1, False), (-15, True)):
        held = Tracebacks()
        assert not any(held.take(1, line) for line in lines)
        assert held.end_of(1, code, was_told=was_told) == []
        assert held.holds(1)
    held = Tracebacks()
    first, *rest = lines
    shown = [*held.take(0, first), *(line for _ in range(9999) for line in held.take(0, b" " * 99 + b"\n"))]
    assert shown[0] == first, "as much as is too much is given back"
    assert rest


def test_a_traceback_is_held_until_its_rank_has_exited_where_that_has_said_so() -> None:
    held = Tracebacks(lambda rank: rank == 1)
    lines = whole(TEXT + "\n")
    for rank in (0, 1):
        assert not any(held.take(rank, line) for line in lines)
    with later(2.0):
        assert list(held.give_back()) == [(0, lines)]
    assert held.has_shown(0)
    assert not held.has_shown(1)
    for line in (b"warning at the exit\n", b"Exception ignored in: <function f>\n", *lines):
        assert held.take(1, line) == [line], "comes before it"
    assert held.texts() == {1: TEXT}
    assert [shown for line in whole(CHAIN) for shown in held.take(1, line)] == lines, "the last ends it"
    with later(30.0):
        assert list(held.give_back()) == [(1, whole(CHAIN))]


INTERRUPTED = TEXT.replace("ValueError: bad\n  worse", "KeyboardInterrupt\n")
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
LOST = "multiring.errors.AbortedError: rank 1 aborted"
REPLACED = "AbortedError REPLACED BY KeyboardInterrupt"


@pytest.mark.parametrize(
    ("text", "is_left_out"),
    [
        (INTERRUPTED, True),
        (INTERRUPTED + CAUSE + TEXT + "\n", False),
        (INTERRUPTED + DURING + INTERRUPTED.replace("KeyboardInterrupt", LOST), True),
        (INTERRUPTED + DURING + TORCH.replace("ValueError: bad", LOST), True),
        (INTERRUPTED.replace("KeyboardInterrupt", f"RuntimeError: {REPLACED}: "), True),
        (TEXT + "\n" + DURING + INTERRUPTED, False),
        (INTERRUPTED.replace("KeyboardInterrupt", "ValueError: AbortedError: row locked"), False),
        (CHAIN.replace("ValueError: bad", LOST), False),
        (INTERRUPTED.replace("KeyboardInterrupt", "RuntimeError: after KeyboardInterrupt()"), False),
        (TORCH, False),
        ("Exception ignored in atexit callback: <function f>\n" + INTERRUPTED, True),
        ("Exception ignored in atexit callback: <function f>\n" + CHAIN, False),
    ],
)
def test_what_ctrl_c_leads_to_is_left_out(text: str, is_left_out: bool) -> None:
    held = Tracebacks()
    with later(-5.0):
        assert not any(held.take(2, line) for line in whole(INTERRUPTED))
    held.leave_out_interrupts()
    assert held.texts() == {2: INTERRUPTED.strip("\n")}, "it was there before"
    held.end_of(2, 0)
    shown = [line for each in (*whole(text), b"saved\n") for line in held.take(0, each)]
    assert shown == [*([] if is_left_out else whole(text)), b"saved\n"]
    assert not any(held.take(1, line) for line in whole(text))
    assert bool(held.texts()) is not is_left_out


def test_a_bar_before_a_traceback_is_shown_as_it_was() -> None:
    first, *rest = whole(CHAIN)
    held = Tracebacks()
    assert not any(held.take(0, line) for line in (b" 20%|## |" + first, *rest))
    assert held.texts() == {0: CHAIN.strip("\n")}
    assert held.take(0, b"next\n") == [b" 20%|## |" + first, *rest, b"next\n"]
    assert not held.take(0, b" 40%|#### |" + first)
    assert list(held.beginnings()) == [(0, b" 40%|#### |")]
    assert held.release(0) == [first], "each once"


def test_bytes_of_an_error_are_kept() -> None:
    held = Tracebacks()
    lines = [b"Traceback (most recent call last):\n", b"ValueError: \xff\xc3\xa9\n"]
    assert not any(held.take(0, line) for line in lines)
    shown = tagged_lines(fold(held.texts()), coloured=False, tagged=False)
    assert [encoded(line) + b"\n" for line in shown] == lines
    assert encoded("\ud800") == b"?"


@contextlib.contextmanager
def later(seconds: float) -> Iterator[None]:
    """As if it were so much later."""
    now = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now + seconds)
        yield


class Screen:
    """A multiplexer of one rank, its pipes, and the file to which it writes."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "screen"
        self.tracebacks = Tracebacks()
        self._selector = selectors.PollSelector()
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT)
        self.outputs = Multiplexer(
            self._selector,
            tagged=True,
            directory=None,
            warn=print,
            tracebacks=self.tracebacks,
            descriptors=(self._file, self._file),
        )
        self._pipes = {}
        for name in ("stdout", "stderr"):
            reading, self._pipes[name] = os.pipe()
            self.outputs.add(0, name, reading)

    def write(self, name: str, text: str) -> None:
        os.write(self._pipes[name], text.encode())
        self.outputs.before_wait()
        for key, _ in self._selector.select(0):
            key.data()
        self.outputs.before_wait()

    def close(self) -> str:
        """Returns what is to be seen."""
        for descriptor in self._pipes.values():
            os.close(descriptor)
        self.outputs.end()
        self.outputs.finish_line()
        self._selector.close()
        os.close(self._file)
        return self.path.read_text()


def test_lines_of_a_rank_are_shown_in_their_order(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    shown = []
    for step in range(3):
        screen.write("stderr", CHAIN)
        screen.write("stdout", f"step {step}\n")
        shown += [*CHAIN.splitlines(), f"step {step}"]
    screen.write("stderr", CHAIN)
    assert screen.tracebacks.holds(0)
    with later(1.0):
        screen.outputs.before_wait()  # the rank has gone on for a second
    assert not screen.tracebacks.holds(0)
    screen.write("stderr", "bar" + CHAIN)
    screen.outputs.rank_ended(0, 1, was_told=False)
    assert screen.tracebacks.texts() == {0: CHAIN.strip("\n")}
    shown += [*CHAIN.splitlines(), "bar"]
    assert screen.close() == "".join(f"[0] {line}\n" for line in shown)


def test_last_lines_have_no_prefixes_of_ranks(tmp_path: Path) -> None:
    text = CHAIN.replace("KeyError: 1", "multiring.errors.PeerLostError: lost rank 1")
    screen = Screen(tmp_path)
    screen.write("stderr", "".join(f"[rank0]: {line}" for line in text.splitlines(keepends=True)))
    screen.write("stderr", "and this\n")
    assert screen.outputs.tail(0) == [*text.splitlines(), "and this"]
    assert RankEnd(0, 1, 1, False, screen.outputs.tail(0)[:-1]).is_secondary
    screen.close()


def test_what_is_held_is_shown_where_the_job_cannot_go_on(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    screen.write("stderr", CHAIN)
    screen.outputs.show_held()
    assert screen.close() == "".join(f"[0] {line}\n" for line in CHAIN.splitlines())
