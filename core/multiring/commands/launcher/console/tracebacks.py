"""Tracebacks with which ranks end: held back, so that equal ones are shown once, and the message last.

A traceback is held from its first line on, with all that its rank writes to stderr after it. If the rank goes
on for a while, it was none that ended it: it is shown like other lines then.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Tracebacks", "fold", "is_coloured", "message_of", "rank_list", "tagged_lines"]

_SECONDS = 1.5  # that a rank may take to exit
_SECONDS_AFTER_END = 10.0  # that a job may take to end when a rank has
_MAX_BYTES = 256 << 10
_MAX_SHOWN = 4  # different errors

# torch.distributed begins each line with the rank. The second form is that of a SyntaxError.
_PREFIX = re.compile(r"(?m)^\[rank\d+\]: ?")
_FIRST_LINE = re.compile(
    rb"(?:\[rank\d+\]: )?(?:Traceback \(most recent call last\):|  File \".*\", line \d+)\r?\n"
)
# What differs between ranks that have met the same error.
_OWN = re.compile(r" \((?:raised|noticed) on rank \d+ on .*\)$|0x[0-9a-f]{6,}", re.MULTILINE)


@dataclass
class _Held:
    until: float
    lines: list[bytes] = field(default_factory=list)
    bytes: int = 0

    def text(self) -> str:
        return b"".join(self.lines).decode(errors="replace")


class Tracebacks:
    """What is held of each rank."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._given_back: set[int] = set()

    def take(self, rank: int, line: bytes) -> bool:
        """Whether a line of stderr is held, or to be written."""
        held = self._held.get(rank)
        if held is None:
            self._given_back.discard(rank)
            if not _FIRST_LINE.fullmatch(line):
                return False
            held = self._held[rank] = _Held(time.monotonic() + _SECONDS)
        held.lines.append(line)
        held.bytes += len(line)
        if held.bytes > _MAX_BYTES:
            held.until = 0.0
        return True

    def end_of(self, rank: int) -> None:
        """To be called when a rank writes no more."""
        if rank in self._held:
            self._held[rank].until = time.monotonic() + _SECONDS_AFTER_END

    @property
    def next_deadline(self) -> float | None:
        """When something has to be given back at the latest (monotonic clock), or None."""
        return min((held.until for held in self._held.values()), default=None)

    def give_back(self) -> Iterator[tuple[int, list[bytes]]]:
        """What has been held for too long: rank and lines, which are to be written."""
        now = time.monotonic()
        for rank in [rank for rank, held in self._held.items() if held.until <= now]:
            self._given_back.add(rank)
            yield rank, self._held.pop(rank).lines

    def is_written(self, rank: int) -> bool:
        """Whether the last that a rank has said is a traceback that was given back."""
        return rank in self._given_back

    def texts(self) -> dict[int, str]:
        """What is held, by rank."""
        return {
            rank: _PREFIX.sub("", held.text()).replace("\r\n", "\n").strip("\n")
            for rank, held in sorted(self._held.items())
        }


def fold(texts: Mapping[int, str], last: int | None = None) -> list[tuple[list[int], str]]:
    """The different errors and the ranks that raised each, the one of rank `last` at the end.

    What only tells on which rank an error was raised is no difference, and left out where there are several.
    """
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(_OWN.sub("", text), []).append(rank)
    folded = [(ranks, texts[ranks[0]] if len(ranks) == 1 else common) for common, ranks in groups.items()]
    return sorted(folded, key=lambda group: last in group[0])


def tagged_lines(folded: Sequence[tuple[list[int], str]], coloured: bool) -> list[str]:
    """The lines that show errors, each with its ranks before it; the messages in colour."""
    lines = []
    left_out = sum(len(ranks) for ranks, _ in folded[:-_MAX_SHOWN])
    if left_out:
        lines.append(f"multiring: {left_out} more ranks raised other errors; --output-dir keeps all of them")
    for ranks, text in folded[-_MAX_SHOWN:]:
        tag = f"[{rank_list(ranks)}]" if len(ranks) == 1 else f"[ranks {rank_list(ranks)}]"
        words = text.split("\n")
        begin = message_of(words)
        for number, line in enumerate(words):
            shown = f"\x1b[1;31m{line}\x1b[0m" if coloured and number >= begin and line else line
            lines.append(f"{tag} {shown}".rstrip())
    return lines


def message_of(lines: Sequence[str]) -> int:
    """Where the message of the exception begins among the lines of its traceback."""
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    after = range(frames[-1] if frames else 0, len(lines))
    return next((number for number in after if lines[number][:1] not in ("", " ")), len(lines))


def rank_list(ranks: Sequence[int]) -> str:
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
