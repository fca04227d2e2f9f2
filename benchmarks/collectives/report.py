"""What `multiring bench collectives` has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from multiring.benchmarks.collectives.kinds import COLLECTIVES
from multiring.benchmarks.collectives.results import Report, Row

__all__ = ["CollectiveRow", "CollectivesReport"]


@dataclass(frozen=True)
class CollectiveRow(Row):
    """One contender on one collective and size.

    Attributes:
        collective: Its name, as in `COLLECTIVES`.
    """

    collective: str = field(kw_only=True)

    @property
    def labels(self) -> tuple[str, ...]:
        """The collective."""
        return (self.collective,)


@dataclass(frozen=True)
class CollectivesReport(Report):
    """Everything that one run has measured; rows by collective, then as in `Report`."""

    kind: ClassVar[str] = "multiring bench collectives"
    row_type: ClassVar[type[Row]] = CollectiveRow
    label_names: ClassVar[tuple[str, ...]] = ("collective",)
    size_meaning: ClassVar[str] = "size of the whole array"

    @property
    def what(self) -> str:
        """All of them."""
        return ", ".join(dict.fromkeys(label for row in self.rows for label in row.labels))

    def parts(self) -> Sequence[Report]:
        """A report for each collective."""
        labels = dict.fromkeys(row.labels for row in self.rows)
        return [replace(self, rows=tuple(row for row in self.rows if row.labels == one)) for one in labels]

    def links_busy(self, row: Row) -> list[float]:
        """Of `busy`, for each link, the most: with a root, one host may have nearly all to send."""
        return [max(hosts) for hosts in self.busy(row).values()]

    def bus_bandwidth(self, row: Row) -> float:
        """Bytes per second that a rank has to send or to receive."""
        (name,) = row.labels
        return row.algorithm_bandwidth * COLLECTIVES[name].bus(self.ranks)
