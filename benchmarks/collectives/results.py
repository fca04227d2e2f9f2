"""What `multiring bench allreduce` has measured, what follows from it, and its file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from multiring.benchmarks.contenders import Limit, Ordinary, Symmetric
from multiring.benchmarks.emulation.start import Emulation, bytes_per_second
from multiring.benchmarks.emulation.traffic import Sent
from multiring.benchmarks.measure import Sample
from multiring.benchmarks.results import Results

__all__ = ["LIMIT", "LIMIT_BYTES", "OURS", "Report", "Row"]

OURS = (Symmetric.name, Ordinary.name)
LIMIT = Limit.name
# Below, calling the kernel from Python takes longer than the kernel, and says nothing about the machine.
LIMIT_BYTES = 64 * 1024


@dataclass(frozen=True)
class Row:
    """One contender on one size.

    Attributes:
        contender: Its name.
        bytes: Size of the array.
        sample: Seconds that one operation took.
        sent: Bytes that left each emulated host by each interface for one operation; empty elsewhere.
    """

    contender: str
    bytes: int
    sample: Sample
    sent: Sent = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, ...]:
        """What tells it from others of the same contender and size."""
        return ()

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the array per second."""
        return self.bytes / self.sample.median


@dataclass(frozen=True)
class Report(Results):
    """Everything that one run has measured.

    Attributes:
        rows: By size, then in the order of the contenders.
        hosts: Emulated ones, as `--emulate` and `--rate` have them; empty: the ranks were on one host.
        left_out: Which library was not measured, and what adds it; empty: none to speak of.
    """

    kind: ClassVar[str] = "multiring bench allreduce"
    row_type: ClassVar[type[Row]] = Row
    label_names: ClassVar[tuple[str, ...]] = ()  # of `Row.labels`
    size_meaning: ClassVar[str] = "size of the array on each rank"

    rows: tuple[Row, ...]
    hosts: str = ""
    left_out: str = ""

    @property
    def what(self) -> str:
        """What was measured."""
        return "allreduce"

    def parts(self) -> Sequence[Report]:
        """A report for each collective: what follows has a meaning within one only."""
        return [self]

    @property
    def sizes(self) -> list[int]:
        """The sizes in bytes, in their order."""
        return list(dict.fromkeys(row.bytes for row in self.rows))

    @property
    def contenders(self) -> list[str]:
        """The names of all contenders, in their order."""
        return list(dict.fromkeys(row.contender for row in self.rows))

    @property
    def peers(self) -> list[str]:
        """The names of the other libraries, in their order."""
        return [name for name in self.contenders if name not in (*OURS, LIMIT)]

    def of_size(self, size: int) -> list[Row]:
        """The rows of one size in bytes."""
        return [row for row in self.rows if row.bytes == size]

    def row(self, contender: str, size: int) -> Row | None:
        """The row of a contender and a size in bytes, if there is one."""
        found = [row for row in self.of_size(size) if row.contender == contender]
        return found[0] if found else None

    def bus_bandwidth(self, row: Row) -> float:
        """Bytes per second that each rank would have to send and to receive if a ring did the allreduce."""
        return row.algorithm_bandwidth * 2 * (self.ranks - 1) / self.ranks

    def ratio(self, row: Row, peer: str) -> float | None:
        """How many times as long as `row` the peer takes; None unless `row` is multiring's."""
        other = self.row(peer, row.bytes)
        if row.contender not in OURS or other is None:
            return None
        return other.sample.median / row.sample.median

    def of_limit(self, row: Row) -> float | None:
        """The fraction of the limit that `row` reaches; None unless it is multiring's, from 64 KiB on."""
        limit = self.row(LIMIT, row.bytes)
        if row.contender not in OURS or limit is None or row.bytes < LIMIT_BYTES:
            return None
        return limit.sample.median / row.sample.median

    def busy(self, row: Row) -> dict[str, list[float]]:
        """For each link and emulated host, which part of what it can send in the median's time it has sent.

        Headers included. What a link has saved up in a pause comes out faster than its rate, so that it may
        be more than 1; empty where no hosts are emulated.
        """
        if not row.sent:
            return {}
        emulation = Emulation.parse(*self.hosts.split(" --rate "))
        return {
            f"eth{link}": [
                sent / bytes_per_second(rate) / row.sample.median for sent in row.sent[f"eth{link}"]
            ]
            for link, rate in enumerate(emulation.rates)
        }

    def links_busy(self, row: Row) -> list[float]:
        """Of `busy`, for each link, the least: all hosts have as much to send."""
        return [min(hosts) for hosts in self.busy(row).values()]

    def to_json(self) -> str:
        """Everything measured and, under "derived", what follows from it."""
        fields = {name: value for name, value in asdict(self).items() if name != "rows"}
        rows = [{**asdict(row), "derived": part._derived(row)} for part in self.parts() for row in part.rows]
        return json.dumps({"kind": self.kind, **fields, "rows": rows}, indent=2, allow_nan=False)

    @classmethod
    def measured_from(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """As `Results`."""
        rows = []
        for row in fields["rows"]:
            del row["derived"]
            rows.append(cls.row_type(**{**row, "sample": Sample(**row["sample"])}))
        return fields | {"rows": tuple(rows)}

    def render(self, style: str, columns: int | None) -> str:
        """A text to print; see `multiring.benchmarks.collectives.table`."""
        from multiring.benchmarks.collectives import table

        if style == "rich":
            return table.rich(self, columns)
        return table.markdown(self) if style == "markdown" else table.compact(self)

    def draw(self, path: Path) -> None:
        """Writes a PNG; see `multiring.benchmarks.collectives.plot`."""
        from multiring.benchmarks.collectives import plot

        plot.draw(self, path)

    def _derived(self, row: Row) -> dict[str, Any]:
        return {
            "algorithm_bandwidth": row.algorithm_bandwidth,
            "bus_bandwidth": self.bus_bandwidth(row),
            "ratios": {peer: self.ratio(row, peer) for peer in self.peers},
            "of_limit": self.of_limit(row),
            "busy": self.busy(row),
        }
