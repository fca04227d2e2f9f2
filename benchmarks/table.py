"""Results as tables: for terminals, and in Markdown; and numbers as they stand in them."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = ["Table", "markdown", "number", "percent", "rich", "size_text", "time_text"]

_WIDE = 1000  # columns, more than any table has


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        columns: Their names.
        rows: Cells.
        left: Columns that hold words.
        title: Above it; empty: none.
        styles: Of each row, as rich has them; empty: none have any.
        parts: So many columns come first that a rule is drawn where they change.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ()
    title: str = ""
    styles: Sequence[str] = ()
    parts: int = 0

    def markdown(self) -> str:
        """As GitHub shows it."""
        rule = [":--" if name in self.left else "--:" for name in self.columns]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (self.columns, rule, *self.rows))


def markdown(tables: Sequence[Table], below: str) -> str:
    """Tables below each other, and a line below all of them."""
    return "\n\n".join([*(table.markdown() for table in tables), below])


def rich(above: Sequence[str], tables: Sequence[Table], below: Sequence[str], columns: int | None) -> str:
    """Tables between lines.

    Args:
        above: Lines.
        tables: Nothing in them is cut or wrapped, however wide that makes them.
        below: Lines.
        columns: Width of the terminal that shows it in colours; None: plain text.
    """
    from rich.console import Console

    made = [_rich(table) for table in tables]
    needed = max(Console(width=_WIDE).measure(table).maximum for table in made)
    stream = io.StringIO()
    console = Console(file=stream, width=max(needed, columns or 0), force_terminal=columns is not None)
    for line in above:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for table in made:
        console.print(table)
    for line in below:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return stream.getvalue().rstrip("\n")


def _rich(table: Table) -> RichTable:
    from rich.box import ROUNDED
    from rich.table import Table as RichTable

    made = RichTable(box=ROUNDED, title=table.title or None, title_justify="left")
    for name in table.columns:
        made.add_column(name, justify="left" if name in table.left else "right", no_wrap=True)
    for index, row in enumerate(table.rows):
        if index and row[: table.parts] != table.rows[index - 1][: table.parts]:
            made.add_section()
        made.add_row(*row, style=table.styles[index] if table.styles else None)
    return made


def size_text(size: float) -> str:
    """A size in bytes with the unit that suits it, as "64 KiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.6g} {unit}"
    return f"{size:.0f} B"


def time_text(seconds: float) -> str:
    """Seconds as a number of microseconds."""
    return number(seconds * 1e6)


def percent(fraction: float | None) -> str:
    """A part of a whole; nothing where there is none."""
    return "" if fraction is None else f"{100 * fraction:.0f} %"


def number(value: float | None) -> str:
    """Three digits that count, or all before the point; never an exponent. Nothing where there is none."""
    if value is None or value <= 0:
        return "" if value is None else f"{value:.0f}"
    decimals = 2 - math.floor(math.log10(value))
    return f"{value:.{min(max(decimals, 0), 9)}f}"
