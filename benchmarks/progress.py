"""Rank 0 tells how far a benchmark is: by a bar on a terminal, elsewhere by a line every 30 s on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from typing import TextIO

__all__ = ["rounds", "show"]

_LINE_SECONDS = 30.0
_shown_as = ""  # the command whose progress this process tells; empty: it tells nothing
_bars: TextIO | None = None  # the terminal for bars; None: lines
_next_line = 0.0


def show(command: str, terminal: str | None) -> None:
    """From now on this process tells how far `command` is.

    Args:
        command: As the user knows it.
        terminal: Path of the terminal that the user sees; None: there is none.
    """
    global _shown_as, _bars, _next_line
    _shown_as, _next_line = command, time.monotonic() + _LINE_SECONDS
    if terminal is not None and find_spec("rich") is not None:
        try:
            _bars = open(terminal, "w", encoding="utf-8")  # noqa: SIM115  # as long as the process
        except OSError:
            return
        if not _bars.isatty():
            _bars.close()
            _bars = None


def rounds(what: str, count: int) -> Iterator[int]:
    """The numbers below `count`, one for each round of a part of the benchmark, whose progress is told.

    Args:
        what: The part, as "training".
        count: Rounds of it.
    """
    if not _shown_as:
        yield from range(count)
    elif _bars is not None:
        yield from _with_bar(what, count, _bars)
    else:
        yield from _with_lines(what, count)


def _with_bar(what: str, count: int, terminal: TextIO) -> Iterator[int]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # A thread that draws would take time from the processor of rank 0.
    console = Console(file=terminal, force_terminal=True)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task(what, total=count)
        bar.refresh()
        for number in range(count):
            yield number
            bar.advance(task)
            bar.refresh()


def _with_lines(what: str, count: int) -> Iterator[int]:
    global _next_line
    began = time.monotonic()
    for number in range(count):
        yield number
        now, done = time.monotonic(), number + 1
        if now >= _next_line and done < count:
            _next_line = now + _LINE_SECONDS
            left = timedelta(seconds=round((now - began) / done * (count - done)))
            text = f"{_shown_as}: {what}, round {done} of {count}, {left} left of this part"
            print(text, file=sys.stderr, flush=True)
