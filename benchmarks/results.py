"""What the results of all benchmarks have in common: how they were run, their file, and tables as text."""

from __future__ import annotations

import argparse
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Self

from multiring import Communicator
from multiring.benchmarks.machine import Machine
from multiring.models.errors import DataError

__all__ = ["Results", "Table", "markdown", "markdown_table", "rich"]

Table = tuple[str, list[str], list[list[str]]]
"""Title, columns and cells."""


@dataclass(frozen=True)
class Results(ABC):
    """How a benchmark was run. What it has measured is added by those that derive from it.

    Attributes:
        command: The command line.
        launcher: What had started the ranks, as `launch_environment.Placement.launcher`.
        machine: Where, and with what.
        ranks: How many.
        date: When, in ISO format with the offset from UTC.
    """

    kind: ClassVar[str]  # of the file

    command: str
    launcher: str
    machine: Machine
    ranks: int
    date: str

    @staticmethod
    def run_fields(
        comm: Communicator, args: argparse.Namespace, versions: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """The attributes of this run. Collective.

        Args:
            comm: All ranks.
            args: The options.
            versions: Of libraries in other environments.
        """
        return {
            "command": args.shown_as,
            "launcher": args.launcher,
            "machine": Machine.here(args.cores, mpi="mpi" in args.peers, others=versions),
            "ranks": comm.size,
            "date": comm.broadcast_object(datetime.now().astimezone().isoformat(timespec="seconds")),
        }

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The results that `to_json` has written.

        Raises:
            DataError: The text is something else.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("kind") != cls.kind:
                raise ValueError(f"it is no {cls.kind!r}")
            return cls(machine=Machine(**fields.pop("machine")), **cls.measured_from(fields))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"no results of `{cls.kind}`: {error!r}") from error

    @classmethod
    @abstractmethod
    def measured_from(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """The attributes but `machine`, from what JSON holds of them."""


def markdown(tables: Sequence[Table]) -> str:
    """Tables as GitHub shows them, below each other."""
    return "\n\n".join(markdown_table(columns, rows, columns[:1]) for _, columns, rows in tables)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> str:
    """A table as GitHub shows it; the columns named in `left` hold words."""
    rule = [":--" if name in left else "--:" for name in columns]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rule, *rows))


def rich(tables: Sequence[Table], columns: int | None, *, wrap: bool = False) -> str:
    """Tables for a terminal of so many columns; None: plain, for a file."""
    from rich.console import Console
    from rich.table import Table as RichTable

    stream = io.StringIO()
    console = Console(file=stream, width=columns or 120, force_terminal=columns is not None)
    for title, names, rows in tables:
        table = RichTable(title=title, title_justify="left")
        for index, name in enumerate(names):
            table.add_column(name, justify="right" if index else "left", no_wrap=not wrap)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    return stream.getvalue().rstrip("\n")
