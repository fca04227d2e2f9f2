"""What is seen while the checks run and at the end: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from multiring.models.regress.checks import CHECKS
from multiring.models.regress.judge import Status, Verdict
from multiring.models.regress.report import Report

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

__all__ = ["Lines", "View", "brief", "open_view", "summary"]

Running = Mapping[tuple[str, int], tuple[str, float]]

STYLES = {
    Status.PASS: "green",
    Status.FAIL: "bold red",
    Status.ERROR: "bold red",
    Status.SKIP: "dim",
    Status.WAIT: "dim",
}
REFRESH_SECONDS = 0.5


class View(Protocol):
    """Shows how far the checks are."""

    def show(self, verdicts: Sequence[Verdict], running: Running) -> None:
        """Show the state of all checks, and what is running: task and seconds by framework and ranks."""


class Lines:
    """A line for every check when it is decided.

    Args:
        stream: Where to write.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told: set[object] = set()

    def show(self, verdicts: Sequence[Verdict], running: Running) -> None:
        """See `View.show`."""
        for verdict in verdicts:
            if verdict.status is not Status.WAIT and verdict.cell not in self._told:
                self._told.add(verdict.cell)
                print(f"{verdict.cell}: {verdict.status}: {verdict.text}", file=self._stream, flush=True)


class _LiveTable:
    def __init__(self, live: Live, titles: Mapping[str, str]) -> None:
        self._live = live
        self._titles = titles
        self._next = 0.0

    def show(self, verdicts: Sequence[Verdict], running: Running) -> None:
        """See `View.show`."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REFRESH_SECONDS
            self._live.update(_table(verdicts, self._titles, running), refresh=True)


@contextmanager
def open_view(stream: TextIO, titles: Mapping[str, str]) -> Iterator[View]:
    """A table that follows the checks if `stream` is a terminal and rich is installed, otherwise lines."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        yield Lines(stream)
        return
    if not stream.isatty():
        yield Lines(stream)
        return
    # Drawn by us only: a thread that does would take time from what is measured.
    with Live(console=Console(file=stream), auto_refresh=False, transient=True) as live:
        yield _LiveTable(live, titles)


def brief(verdict: Verdict) -> str:
    """A verdict in a word or two, for a cell of a table."""
    if verdict.status is not Status.PASS:
        return {Status.FAIL: "FAIL", Status.ERROR: "ERROR", Status.SKIP: "skipped", Status.WAIT: "..."}[
            verdict.status
        ]
    values = {metric.name: metric.value for metric in verdict.metrics}
    if verdict.cell.check == "bits":
        return "equal"
    if "test accuracy" in values:
        return f"{values['test accuracy']:.2%}"
    if "efficiency" in values:
        own = values.get("times its own way")
        return f"{values['efficiency']:.1%}" + (f", {own:.2f} x own way" if own is not None else "")
    worst: dict[str, float] = {}
    for name, value in values.items():
        kind = "f32" if "float32" in name else "f64"
        worst[kind] = max(worst.get(kind, 0.0), value)
    return ", ".join(f"{kind} {value:.0e}" for kind, value in sorted(worst.items()))


def _table(verdicts: Sequence[Verdict], titles: Mapping[str, str], running: Running) -> Table:
    from rich.box import ROUNDED
    from rich.table import Table
    from rich.text import Text

    by_cell = {(v.cell.framework, v.cell.ranks, v.cell.check): v for v in verdicts}
    checks = [name for name in CHECKS if any(v.cell.check == name for v in verdicts)]
    table = Table(box=ROUNDED)
    table.add_column("framework", no_wrap=True)
    table.add_column("ranks", justify="right")
    for name in checks:
        table.add_column(CHECKS[name].title, no_wrap=True)
    if running:
        table.add_column("now", no_wrap=True)
    before = None
    for framework, ranks in dict.fromkeys((v.cell.framework, v.cell.ranks) for v in verdicts):
        if before not in (None, framework):
            table.add_section()
        cells = [
            Text(brief(found), style=STYLES[found.status]) if found is not None else Text("")
            for found in (by_cell.get((framework, ranks, name)) for name in checks)
        ]
        if running:
            task, seconds = running.get((framework, ranks), ("", 0.0))
            cells.append(Text(f"{task} {seconds:.0f} s" if task else ""))
        table.add_row(titles[framework] if framework != before else "", str(ranks), *cells)
        before = framework
    return table


def summary(report: Report, stream: TextIO) -> None:
    """Prints the table, everything that is wrong, and the headline."""
    try:
        from rich.console import Console
    except ImportError:
        pass
    else:
        terminal = stream.isatty()
        console = Console(file=stream, width=None if terminal else 160, force_terminal=terminal)
        console.print(_table(report.verdicts, report.titles, {}))
    for name, why in report.skipped.items():
        print(f"{report.titles.get(name, name)} left out: {why}", file=stream)
    for verdict in report.bad:
        print(f"{verdict.status.upper()} {verdict.cell}: {verdict.text}", file=stream)
    for text in report.regressions:
        print(f"REGRESSION {text}", file=stream)
    print(f"{report.baseline}\n{report.headline()}, {report.seconds:.0f} s", file=stream, flush=True)
