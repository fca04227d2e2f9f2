"""Tracebacks with which ranks end: held back, so that equal ones are shown once, and the message last.

A traceback is held while the lines on stderr can belong to it. Whatever else its rank writes, or that the
rank goes on, shows that it was none that ended it: it is written as it came then, before what follows. Where
the rank has said that an exception ends it, its last traceback is held until it has exited.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "Tracebacks",
    "encoded",
    "fold",
    "is_coloured",
    "message_of",
    "rank_list",
    "tagged_lines",
    "without_prefixes",
]

_SECONDS = 1.0  # that a rank may take to exit which has not said that it does
_SECONDS_OF_EXIT = 15.0  # that one may take which has: frameworks have much to tidy up
_SECONDS_AFTER_END = 20.0  # that a job may take to end when a rank has
_MAX_BYTES = 256 << 10
_MAX_SHOWN = 4  # different tracebacks

# torch.distributed begins each line with the rank.
_PREFIX = re.compile(r"(?m)^\[rank\d+\]: ?")
# A progress bar may be before it on its line. The last form is that of a SyntaxError.
_FIRST_LINE = re.compile(
    rb"(?P<before>.*?)(?P<first>(?:\[rank\d+\]: )?(?P<group>  \+ Exception Group )?"
    rb"Traceback \(most recent call last\):\r?\n)"
    rb"|(?P<syntax>(?:\[rank\d+\]: )?  File \".*\", line \d+\r?\n)",
    re.DOTALL,
)
# What Python writes between the tracebacks of exceptions that belong together.
_CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")
# What is before a traceback that does not end its process; the last is of multiprocessing.
_HANDLED = re.compile(rb"Exception in thread|Exception ignored|Error in atexit|Process \S+:\r?\n")
_CHAINED_TEXT = tuple(line.decode() for line in _CHAINED)
_EXIT_CODES = (1, 130, -2)  # with which Python ends because of an exception, that of Ctrl-C included

# What differs between ranks that have met the same error: where it was raised, and addresses of objects.
_OWN = re.compile(
    r" \((?:raised|noticed) on rank \d+ on .*\)(?=$| \[process group )"
    r"|(?<= \[process group )(?P<group>[^\]\n]*?)(?:, rank \d+|; rank \d+ in it)(?=\]$)"
    r"|, seen on rank \d+(?=:)"
    r"|(?<= at )0x[0-9a-f]+(?=>)"
    r"|(?<=PeerLostError: )(?:rank \d+ stopped all ranks: )?rank \d+ on [^,:]+(?=[,:])"
    r"|(?<=MismatchError: )rank \d+ on [^,:]+(?=: the ranks do not agree )",
    re.MULTILINE,
)
# The exceptions that Ctrl-C leads to, by the first line of their message: on the ranks, and on those that
# lose them; as Torch and pybind11 tell of them, too.
_INTERRUPT = re.compile(
    r"(?:[\w.]+\.)?(?:KeyboardInterrupt|PeerLostError|AbortedError|HorovodInternalError)(?::|$)"
    r"|RuntimeError: Got the following error when running the callback: (?:PeerLostError|AbortedError):"
    r"|RuntimeError: .*\bREPLACED BY KeyboardInterrupt\b"
)


@dataclass
class _Held:
    began: float
    until: float
    before: bytes = b""  # on the line that it began on
    lines: list[bytes] = field(default_factory=list)
    size: int = 0
    has_message: bool = False
    is_chained: bool = False  # another traceback belongs to it
    is_complete: bool = False  # other lines have come after it

    def add(self, line: bytes) -> None:
        self.lines.append(line)
        self.size += len(line)

    def text(self) -> str:
        return b"".join(self.lines).decode(errors="surrogateescape")


class Tracebacks:
    """What is held of each rank.

    Args:
        is_ending: Whether a rank has said that an uncaught exception ends it.
        is_full: Whether none is left out.

    Attributes:
        is_full: As given.
    """

    def __init__(
        self, is_ending: Callable[[int], bool] = lambda rank: False, *, is_full: bool = False
    ) -> None:
        self.is_full = is_full
        self._interrupted: float | None = None  # when, since which what Ctrl-C leads to is left out
        self._is_ending = is_ending
        self._ending: set[int] = set()  # ranks that have said so
        self._overdue: set[int] = set()  # whose traceback was written because they took too long to exit
        self._held: dict[int, _Held] = {}
        self._last: dict[int, bytes] = {}  # line of stderr
        self._verbatim: set[int] = set()  # ranks of which nothing is held any more
        self._ended: set[int] = set()  # by an exception, as it seems

    def take(self, rank: int, line: bytes) -> list[bytes]:
        """Takes a line of stderr; returns those that are to be written now, in this order."""
        last, self._last[rank] = self._last.get(rank, b""), _bare(line)
        if rank in self._verbatim:
            return [line]
        held = self._held.get(rank)
        if held is not None and _continues(held, line):
            held.add(line)
            return self.release(rank) if held.size > _MAX_BYTES else []
        found = _FIRST_LINE.fullmatch(line) if line.endswith(b"\n") else None
        if self._interrupted is not None and _HANDLED.match(line):
            written = self.release(rank)
            self._begin(rank, line).is_chained = True  # the traceback comes next
        elif found is None or _HANDLED.match(last):
            written = [*self.other_output(rank), line]
        else:
            written = self.release(rank)
            begun = self._begin(rank, found["syntax"] or found["first"], found["before"] or b"")
            begun.has_message = bool(found["group"])
        return written

    def _begin(self, rank: int, line: bytes, before: bytes = b"") -> _Held:
        now = time.monotonic()
        seconds = _SECONDS_AFTER_END if rank in self._ended else _SECONDS
        begun = self._held[rank] = _Held(now, now + seconds, before)
        begun.add(line)
        return begun

    def ends(self, rank: int) -> bool:
        """Whether a rank has said that an uncaught exception ends it."""
        if rank not in self._ending and self._is_ending(rank):
            self._ending.add(rank)
        return rank in self._ending

    def other_output(self, rank: int) -> list[bytes]:
        """To be called when a rank writes what is no traceback; returns what is to be written before."""
        held = self._held.get(rank)
        if held is None:
            self._overdue.discard(rank)
            return []
        if not self.ends(rank):
            return self.release(rank)
        held.is_complete = True
        return []

    def release(self, rank: int) -> list[bytes]:
        """What is held of a rank, which is to be written now."""
        held = self._held.pop(rank, None)
        if held is None:
            return []
        if self._is_left_out(held):
            return [held.before] if held.before else []
        first, *rest = held.lines
        return [held.before + first, *rest]

    def leave_out_interrupts(self) -> None:
        """Leaves out tracebacks that begin from now on and tell of nothing but what Ctrl-C leads to."""
        if self._interrupted is None and not self.is_full:
            self._interrupted = time.monotonic()

    def _is_left_out(self, held: _Held) -> bool:
        if self._interrupted is None or held.began < self._interrupted:
            return False
        parts: list[list[str]] = [[]]
        for line in without_prefixes(held.text()).splitlines():
            if line.startswith(_CHAINED_TEXT):
                parts.append([])
            else:
                parts[-1].append(line)
        # An error of the program that one of them hides would be lost.
        return all(any(map(_INTERRUPT.match, part[message_of(part) :][:1])) for part in parts)

    def end_of(self, rank: int, code: int | None, *, was_told: bool = False) -> list[bytes]:
        """To be called when a rank has ended; returns what is to be written now.

        Args:
            rank: The rank.
            code: Its exit code.
            was_told: Whether the launcher had told it to end, by a signal.
        """
        if code not in _EXIT_CODES and (code == 0 or not was_told):
            self._verbatim.add(rank)
            self._overdue.discard(rank)  # no exception has ended it
            return self.release(rank)
        self._ended.add(rank)
        if rank in self._held:
            self._held[rank].until = time.monotonic() + _SECONDS_AFTER_END
        return []

    @property
    def next_deadline(self) -> float | None:
        """When something has to be given back at the latest (monotonic clock), or None."""
        return min((held.until for held in self._held.values()), default=None)

    def give_back(self) -> Iterator[tuple[int, list[bytes]]]:
        """What has been held for too long: rank and lines, which are to be written."""
        now = time.monotonic()
        for rank in [rank for rank, held in self._held.items() if held.until <= now]:
            held = self._held[rank]
            if self.ends(rank) and now < held.began + _SECONDS_OF_EXIT:
                held.until = held.began + _SECONDS_OF_EXIT
                continue
            self._overdue.add(rank)
            yield rank, self.release(rank)

    def held_lines(self, rank: int) -> list[str]:
        """The traceback that is held of a rank; empty: none is."""
        held = self._held.get(rank)
        return [] if held is None else without_prefixes(held.text()).splitlines()

    def holds(self, rank: int) -> bool:
        """Whether the traceback is held that a rank has written last."""
        return rank in self._held

    def has_shown(self, rank: int) -> bool:
        """Whether the last that a rank has written is a traceback that was held, for too long."""
        return rank in self._overdue

    def beginnings(self) -> Iterator[tuple[int, bytes]]:
        """What is before tracebacks on the lines that they began on: by rank, to be written."""
        for rank, held in self._held.items():
            if held.before:
                yield rank, held.before
                held.before = b""

    def texts(self) -> dict[int, str]:
        """The tracebacks that are held, by rank; bytes that are not UTF-8 as `encoded` takes them."""
        return {
            rank: without_prefixes(held.text()).replace("\r\n", "\n").strip("\n")
            for rank, held in sorted(self._held.items())
            if not self._is_left_out(held)
        }


def encoded(line: str) -> bytes:
    """The bytes of a line of a rank, or of the launcher itself."""
    try:
        return line.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # of the launcher, about a name that is no text
        return line.encode(errors="replace")


def without_prefixes(text: str) -> str:
    """Lines of a rank without what torch.distributed puts before each."""
    return _PREFIX.sub("", text)


def _bare(line: bytes) -> bytes:
    return re.sub(rb"^\[rank\d+\]: ?", b"", line)


def _continues(held: _Held, line: bytes) -> bool:
    """Whether a line can belong to the traceback that is held."""
    if held.is_complete or not line.endswith(b"\n"):
        return False
    words = _bare(line)
    if words.startswith(_CHAINED):
        held.is_chained, held.has_message = True, False
        return True
    if words.startswith((b"Traceback ", b"  + Exception Group Traceback ")):
        joined, held.is_chained = held.is_chained, False
        held.has_message = words.startswith(b" ")
        return joined
    if words[:1] in (b" ", b"\r", b"\n"):
        return True
    first, held.has_message = not held.has_message, True
    return first and not held.is_chained


def fold(texts: Mapping[int, str], last: int | None = None) -> list[tuple[list[int], str]]:
    """The different errors and the ranks that raised each, the one of rank `last` at the end.

    Each is the text of the first of its ranks: what only tells on which rank an error was raised is no
    difference.
    """
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(_OWN.sub(lambda found: found["group"] or "", text), []).append(rank)
    folded = [(ranks, texts[ranks[0]]) for ranks in groups.values()]
    return sorted(folded, key=lambda group: last in group[0])


def tagged_lines(
    folded: Sequence[tuple[Collection[int], str]], *, coloured: bool, tagged: bool = True
) -> list[str]:
    """The lines that show errors, messages in colour; where there are too many, of some the messages alone.

    Args:
        folded: The errors, with the ranks that raised each.
        coloured: Whether colours are shown.
        tagged: Whether lines begin with their ranks.
    """
    lines = []
    short = len(folded) - _MAX_SHOWN
    if short > 0:
        what = f"of {short} of {len(folded)} different errors only the messages are shown"
        lines.append(f"multiring: {what}; --output-dir keeps the tracebacks")
    for index, (ranks, text) in enumerate(folded):
        tag = f"[{rank_list(ranks)}] " if len(ranks) == 1 else f"[ranks {rank_list(ranks)}] "
        words = text.split("\n")
        begin = message_of(words)
        first = begin if index < short and begin < len(words) else 0
        for number, line in enumerate(words[first:], first):
            shown = f"\x1b[1;31m{line}\x1b[0m" if coloured and number >= begin and line else line
            lines.append(f"{tag}{shown}" if tagged else shown)
    return lines


def message_of(lines: Sequence[str]) -> int:
    """Where the message of the exception begins among the lines of its traceback."""
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    after = range(frames[-1] if frames else 0, len(lines))
    return next((number for number in after if lines[number][:1] not in ("", " ")), len(lines))


def rank_list(ranks: Collection[int]) -> str:
    """Ascending ranks, as "0-3, 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)


def is_coloured(descriptor: int) -> bool:
    """Whether colours are shown there."""
    plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return os.isatty(descriptor) and not plain
