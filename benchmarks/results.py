"""What the results of all benchmarks have in common: how they were run, are shown and are written."""

from __future__ import annotations

import argparse
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from multiring import Communicator
from multiring.benchmarks import plot, table
from multiring.benchmarks.machine import Machine

__all__ = ["Results"]


@dataclass(frozen=True, kw_only=True)
class Results(ABC):
    """How a benchmark was run. What it has measured is added by those that derive from it.

    Attributes:
        command: The command line.
        launcher: What had started the ranks, as `launch_environment.Placement.launcher`.
        machine: Where, and with what.
        ranks: How many.
        date: When, in ISO format with the offset from UTC.
        hosts: Emulated ones, as `--emulate` and `--rate` have them; empty: the ranks were on one host.
        left_out: What was not measured, and what adds it; empty: none to speak of.
    """

    command: str
    launcher: str
    machine: Machine
    ranks: int
    date: str
    hosts: str = ""
    left_out: str = ""

    @staticmethod
    def run_fields(
        comm: Communicator, args: argparse.Namespace, versions: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """The attributes of this run but `left_out`. Collective.

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
            "hosts": "" if args.emulation is None else str(args.emulation),
        }

    @property
    @abstractmethod
    def what(self) -> str:
        """What was measured."""

    @abstractmethod
    def tables(self, *, compact: bool) -> Sequence[table.Table]:
        """The tables, in short or at length."""

    @abstractmethod
    def panels(self) -> Sequence[Sequence[plot.Panel]]:
        """The picture, by row."""

    @abstractmethod
    def derived(self) -> dict[str, Any]:
        """What follows from what was measured, and takes the place of attributes of the same name."""

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        return json.dumps({"what": self.what, **asdict(self), **self.derived()}, indent=2, allow_nan=False)

    def render(self, style: str, columns: int | None) -> str:
        """A text to print.

        Args:
            style: "rich", "markdown" or "compact".
            columns: Width of the terminal that shows it, which may have colours; None: a file or a pipe.
        """
        first, second = self._describe()
        tables = self.tables(compact=style == "compact")
        if style == "rich":
            above = (first, second, f"{self.date}: {self.command}")
            return table.rich(above, tables, (self.left_out,) if self.left_out else (), columns)
        left_out = f" {self.left_out}." if self.left_out else ""
        return table.markdown(tables, f"`{self.command}`, {self.date}: {first}; {second}.{left_out}")

    def draw(self, path: Path) -> None:
        """Writes a PNG to `path`, whose name may end otherwise."""
        plot.draw("\n".join(self._describe()), self.panels(), path)

    def _describe(self) -> tuple[str, str]:
        """Lines that say what was measured, where and with what."""
        machine = self.machine
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        cores = f"{machine.cores} processor{'s' if machine.cores > 1 else ''}"
        memory = "" if machine.memory is None else f", {machine.memory / 2**30:.0f} GiB"
        versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
        where = f" of emulated hosts ({self.hosts}), all" if self.hosts else ""
        return (
            f"{self.what} over {ranks}{where} on {machine.processor}, {cores}{memory}",
            f"{machine.kernel}, Python {machine.python}, {versions}",
        )
