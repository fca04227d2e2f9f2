"""The results of `multiring bench allreduce` and `collectives` as text: for terminals, and in Markdown, long
and short."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from multiring.benchmarks.collectives.results import LIMIT, LIMIT_BYTES, OURS, Report, Row
from multiring.benchmarks.results import markdown_table

__all__ = ["compact", "describe", "markdown", "rich", "size_text", "time_text"]

WIDE = 1000  # columns, more than any table has


def size_text(size: int) -> str:
    """A size in bytes with the unit that suits it, as "64 KiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.6g} {unit}"
    return f"{size} B"


def time_text(seconds: float) -> str:
    """Seconds as a number of microseconds."""
    return _number(seconds * 1e6)


def describe(report: Report) -> list[str]:
    """Lines that say what was measured, where and with what."""
    machine = report.machine
    ranks = f"{report.ranks} rank{'s' if report.ranks > 1 else ''}"
    cores = f"{machine.cores} processor{'s' if machine.cores > 1 else ''}"
    memory = "" if machine.memory is None else f", {machine.memory / 2**30:.0f} GiB"
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    where = f" of emulated hosts ({report.hosts}), all" if report.hosts else ""
    return [
        f"{report.what} of float32 over {ranks}{where} on {machine.processor}, {cores}{memory}",
        f"{machine.kernel}, Python {machine.python}, {versions}",
        f"{report.date}: {report.command}",
    ]


def rich(report: Report, columns: int | None) -> str:
    """A table with a line for each contender and a rule between sizes, under the lines of `describe`.

    Args:
        report: The results.
        columns: Width of the terminal that shows it in colours; None: plain text. Nothing in the table is
            cut or wrapped, however wide that makes it.
    """
    from rich.box import ROUNDED
    from rich.console import Console
    from rich.table import Table

    header = _header(report)
    table = Table(box=ROUNDED)
    for name in header:
        table.add_column(name, justify="left" if name in _left(report) else "right", no_wrap=True)
    for part in report.parts():
        for size in part.sizes:
            for row in part.of_size(size):
                table.add_row(*_cells(part, row), style=_style(row))
            table.add_section()
    needed = Console(width=WIDE).measure(table).maximum
    console = Console(file=io.StringIO(), width=max(needed, columns or 0), force_terminal=columns is not None)
    for line in describe(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    if report.left_out:
        console.print(report.left_out, markup=False, highlight=False, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip("\n")


def markdown(report: Report) -> str:
    """The table of `rich` in Markdown, and a line that tells how it was made."""
    rows = [_cells(part, row) for part in report.parts() for size in part.sizes for row in part.of_size(size)]
    return _markdown(report, _header(report), rows)


def compact(report: Report) -> str:
    """A Markdown table with one line for each collective and size.

    Latencies are medians, and GB/s are those of the algorithm. The ratios are those of the faster one of
    multiring's two.
    """
    ours, limit = [name for name in OURS if name in report.contenders], _limit_name(report)
    header = [*report.label_names, "size", *([f"{ours[0]} us", "GB/s", *limit] if ours else [])]
    for name in [*ours[1:], *report.peers]:
        header += [f"{name} us", "GB/s"]
    header += [f"best x {peer}" for peer in report.peers]
    rows = [_compact_cells(part, ours, size) for part in report.parts() for size in part.sizes]
    return _markdown(report, header, rows)


def _compact_cells(report: Report, ours: Sequence[str], size: int) -> list[str]:
    cells = [*report.of_size(size)[0].labels, size_text(size)]
    for place, name in enumerate([*ours, *report.peers]):
        row = report.row(name, size)
        cells += ["", ""] if row is None else [time_text(row.sample.median), _bandwidth(row)]
        if place == 0 and ours and LIMIT in report.contenders:
            cells.append("" if row is None else _percent(report.of_limit(row)))
    mine = [row for name in ours if (row := report.row(name, size)) is not None]
    for peer in report.peers:
        ratios = [ratio for row in mine if (ratio := report.ratio(row, peer)) is not None]
        cells.append(_times(max(ratios, default=None)))
    return cells


def _header(report: Report) -> list[str]:
    fixed = [*report.label_names, "size", "library", "latency us [10 %..90 %]", "algorithm GB/s", "bus GB/s"]
    busy = ["links busy"] if report.hosts else []
    return [*fixed, *(f"x {peer}" for peer in report.peers), *_limit_name(report), *busy]


def _limit_name(report: Report) -> list[str]:
    """The column's, where the limit is known."""
    return ["of limit"] if LIMIT in report.contenders else []


def _cells(report: Report, row: Row) -> list[str]:
    sample = row.sample
    return [
        *row.labels,
        size_text(row.bytes),
        row.contender,
        f"{time_text(sample.median)} [{time_text(sample.low)}..{time_text(sample.high)}]",
        _bandwidth(row),
        _number(report.bus_bandwidth(row) / 1e9),
        *(_times(report.ratio(row, peer)) for peer in report.peers),
        *(_percent(report.of_limit(row)) for _ in _limit_name(report)),
        *([_busy(report, row)] if report.hosts else []),
    ]


def _busy(report: Report, row: Row) -> str:
    if row.bytes < LIMIT_BYTES:
        return ""
    return ", ".join(map(_percent, report.links_busy(row)))


def _style(row: Row) -> str:
    if row.contender == LIMIT:
        return "dim"
    return "bold" if row.contender in OURS else ""


def _left(report: Report) -> list[str]:
    """The columns that hold words."""
    return [*report.label_names, "library"]


def _markdown(report: Report, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, second, third = describe(report)
    date, _, command = third.partition(": ")
    left_out = f" {report.left_out}." if report.left_out else ""
    return (
        f"{markdown_table(header, rows, _left(report))}\n\n`{command}`, {date}: {first}; {second}.{left_out}"
    )


def _bandwidth(row: Row) -> str:
    return _number(row.algorithm_bandwidth / 1e9)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else _number(ratio)


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.0f} %"


def _number(value: float) -> str:
    """Three digits that count, or all before the point; never an exponent."""
    if value <= 0:
        return f"{value:.0f}"
    decimals = 2 - math.floor(math.log10(value))
    return f"{value:.{min(max(decimals, 0), 9)}f}"
