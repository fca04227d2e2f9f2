"""What rank 0 shows while it trains: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

__all__ = ["BarProgress", "LineProgress", "Progress", "SilentProgress", "open_progress"]

# Plain lines about steps come at most this often, so that a log file stays readable.
LINE_SECONDS = 5.0


class Progress(Protocol):
    """Shows steps and lines; a context manager."""

    def advance(self, step: int, text: str) -> None:
        """`step` steps are done; `text` says how it goes."""

    def line(self, text: str) -> None:
        """Show a line that stays."""

    def __enter__(self) -> Progress: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SilentProgress:
    """Shows nothing: every rank but the first."""

    def advance(self, step: int, text: str) -> None:
        """Nothing."""

    def line(self, text: str) -> None:
        """Nothing."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class _Pace:
    """How fast steps are done since the first one that is told, evaluations and checkpoints included.

    Args:
        total: Steps in all.
        rank_batch: Images of one rank and step.
    """

    def __init__(self, total: int, rank_batch: int) -> None:
        self._total, self._rank_batch = total, rank_batch
        self._began: tuple[int, float] | None = None

    def rate_and_left(self, step: int) -> tuple[str, str]:
        """Images per second, and the time that is left; empty where no two steps are known."""
        now = time.monotonic()
        self._began = self._began or (step, now)
        steps, seconds = step - self._began[0], now - self._began[1]
        if steps < 1 or seconds <= 0:
            return "", ""
        left = timedelta(seconds=round(seconds / steps * (self._total - step)))
        return f"{steps * self._rank_batch / seconds:.0f} images/s for each rank", f"{left} left"


class LineProgress(SilentProgress):
    """Plain lines for files and pipes; those about steps at most every few seconds.

    Args:
        total: Steps in all.
        rank_batch: Images of one rank and step.
        stream: Where to write; standard output by default.
    """

    def __init__(self, total: int, rank_batch: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._pace = _Pace(total, rank_batch)
        self._stream = stream or sys.stdout
        self._next = time.monotonic() + LINE_SECONDS

    def advance(self, step: int, text: str) -> None:
        """Write a line if the last one is long enough ago."""
        pace = self._pace.rate_and_left(step)
        if text and time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_SECONDS
            self.line("  ".join(filter(None, (f"step {step}/{self._total}", text, *pace))))

    def line(self, text: str) -> None:
        """Write a line at once."""
        print(text, file=self._stream, flush=True)


class BarProgress:
    """A bar with the remaining time, lines above it.

    Args:
        total: Steps in all.
        done: Steps that were done before.
        rank_batch: Images of one rank and step.
        stream: A terminal.
    """

    def __init__(self, total: int, done: int, rank_batch: int, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar: RichProgress = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=Console(file=stream, force_terminal=True),
        )
        self._pace = _Pace(total, rank_batch)
        self._task = self._bar.add_task("training", total=total, completed=done, text="")

    def advance(self, step: int, text: str) -> None:
        """Move the bar."""
        rate, _ = self._pace.rate_and_left(step)
        self._bar.update(self._task, completed=step, text="  ".join(filter(None, (text, rate))))

    def line(self, text: str) -> None:
        """Show a line above the bar."""
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def open_progress(total: int, done: int, rank_batch: int, terminal: str | None) -> Progress:
    """Choose how rank 0 shows its progress.

    Args:
        total: Steps in all.
        done: Steps that were done before.
        rank_batch: Images of one rank and step.
        terminal: Path of the terminal that the user sees, where a launcher stands between it and this
            process; None if standard output is all there is.

    Returns:
        A bar if there is a terminal and rich is installed, plain lines otherwise.
    """
    if find_spec("rich") is None:
        return LineProgress(total, rank_batch)
    if sys.stdout.isatty():
        return BarProgress(total, done, rank_batch, sys.stdout)
    if terminal is not None:
        try:
            stream = open(terminal, "w", encoding="utf-8")  # noqa: SIM115  (open as long as the process)
        except OSError:
            return LineProgress(total, rank_batch)
        if stream.isatty():
            return BarProgress(total, done, rank_batch, stream)
        stream.close()
    return LineProgress(total, rank_batch)
