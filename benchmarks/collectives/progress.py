"""What rank 0 shows while it measures: a bar on a terminal, a line for every size elsewhere; on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol, TextIO

__all__ = ["Progress", "open_progress"]


class Progress(Protocol):
    """Shows what is being measured and what has been."""

    def begin(self, text: str) -> None:
        """Says what comes now."""

    def done(self, text: str) -> None:
        """Says what has come out of it."""


class _Silence:
    """Every rank but the first."""

    def begin(self, text: str) -> None:
        """Nothing."""

    def done(self, text: str) -> None:
        """Nothing."""


class _Lines:
    """Plain lines for files and pipes."""

    def begin(self, text: str) -> None:
        """Nothing."""

    def done(self, text: str) -> None:
        """Writes a line."""
        print(text, file=sys.stderr, flush=True)


class _Bar:
    """A bar, with a line above it for everything that is done."""

    def __init__(self, total: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            console=Console(file=stream, force_terminal=True),
            transient=True,
            # Drawn only when something happens: a thread that redraws it would disturb what is measured.
            auto_refresh=False,
        )
        self._task = self.bar.add_task("", total=total)

    def begin(self, text: str) -> None:
        """Shows it before the bar."""
        self.bar.update(self._task, description=text, refresh=True)

    def done(self, text: str) -> None:
        """Moves the bar."""
        self.bar.advance(self._task)
        self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def open_progress(total: int, terminal: str | None, *, shown: bool) -> Iterator[Progress]:
    """Chooses how progress is shown.

    Args:
        total: How often `done` will be called.
        terminal: Path of the terminal that the user sees, where a launcher stands between it and this
            process; None if stderr is all there is.
        shown: False shows nothing: all ranks but one.
    """
    stream = _terminal(terminal) if shown and find_spec("rich") is not None else None
    if stream is None:
        yield _Lines() if shown else _Silence()
        return
    try:
        bar = _Bar(total, stream)
        with bar.bar:
            yield bar
    finally:
        if stream is not sys.stderr:
            stream.close()


def _terminal(path: str | None) -> TextIO | None:
    if sys.stderr.isatty():
        return sys.stderr
    if path is None:
        return None
    try:
        stream = open(path, "w", encoding="utf-8")  # noqa: SIM115  (closed by the caller)
    except OSError:
        return None
    if stream.isatty():
        return stream
    stream.close()
    return None
