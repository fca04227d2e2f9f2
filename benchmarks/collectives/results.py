"""What `multiring bench allreduce` and `collectives` have measured, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from multiring.benchmarks.contenders import Limit, Ordinary, Symmetric
from multiring.benchmarks.emulation.start import Emulation, bytes_per_second
from multiring.benchmarks.emulation.traffic import Sent
from multiring.benchmarks.measure import Sample
from multiring.benchmarks.plot import Line, Lines, Panel
from multiring.benchmarks.results import Results
from multiring.benchmarks.table import Table, number, percent, size_text, time_text

__all__ = ["ALLREDUCE", "LIMIT", "LIMIT_BYTES", "OURS", "Report", "Row"]

ALLREDUCE = "allreduce"
OURS = (Symmetric.name, Ordinary.name)
LIMIT = Limit.name
# Below, calling the kernel from Python takes longer than the kernel, and says nothing about the machine.
LIMIT_BYTES = 64 * 1024

# Colour, marker and dash of the lines; peers take theirs in turn. The colours differ in lightness, too.
_STYLES = {OURS[0]: ("#1f4e9c", "o", "-"), OURS[1]: ("#5b9bd5", "s", "-"), LIMIT: ("black", "", "--")}
_PEER_STYLES = (("#d1600a", "^", "-"), ("#2e8b57", "D", "-"), ("#8e44ad", "v", "-"))


@dataclass(frozen=True)
class Row:
    """One contender on one collective and size.

    Attributes:
        contender: Its name.
        bytes: Size of the array.
        sample: Seconds that one operation took.
        sent: Bytes that left each emulated host by each interface for one operation; empty elsewhere.
        collective: Its name.
    """

    contender: str
    bytes: int
    sample: Sample
    sent: Sent = field(default_factory=dict)
    collective: str = ALLREDUCE

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the array per second."""
        return self.bytes / self.sample.median


@dataclass(frozen=True, kw_only=True)
class Report(Results):
    """Everything that one run has measured.

    Attributes:
        rows: By collective, by size, then in the order of the contenders.
        parts: The contenders that are parts of the limit.
    """

    rows: tuple[Row, ...]
    parts: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """All collectives."""
        return f"{', '.join(self._collectives)} of float32"

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
        return [name for name in self.contenders if name not in (*OURS, LIMIT, *self.parts)]

    @property
    def _collectives(self) -> list[str]:
        return list(dict.fromkeys(row.collective for row in self.rows))

    def row(self, contender: str, size: int, collective: str = ALLREDUCE) -> Row | None:
        """The row of a contender and a size in bytes, if there is one."""
        wanted = (contender, size, collective)
        return next((row for row in self.rows if (row.contender, row.bytes, row.collective) == wanted), None)

    def bus_bandwidth(self, row: Row) -> float:
        """Bytes per second that a rank has to send or to receive; for an allreduce, if a ring did it."""
        share = (self.ranks - 1) / self.ranks
        return row.algorithm_bandwidth * {ALLREDUCE: 2 * share, "broadcast": 1.0}.get(row.collective, share)

    def ratio(self, row: Row, peer: str) -> float | None:
        """How many times as long as `row` the peer takes; None unless `row` is multiring's."""
        other = self.row(peer, row.bytes, row.collective)
        if row.contender not in OURS or other is None:
            return None
        return other.sample.median / row.sample.median

    def of_limit(self, row: Row) -> float | None:
        """The fraction of the limit that `row` reaches; None unless it is multiring's, from 64 KiB on."""
        return self.ratio(row, LIMIT) if row.bytes >= LIMIT_BYTES else None

    def busy(self, row: Row) -> dict[str, list[float]]:
        """For each link and emulated host, which part of what it can send in the median's time it has sent.

        Headers included. What a link has saved up in a pause comes out faster than its rate, so that it may
        be more than 1; empty where no hosts are emulated.
        """
        if not row.sent:
            return {}
        emulation = Emulation.parse(*self.hosts.split(" --rate "))
        return {
            link: [sent / bytes_per_second(rate) / row.sample.median for sent in row.sent[link]]
            for link, rate in emulation.links.items()
        }

    def derived(self) -> dict[str, Any]:
        """As `Results`: beside each row."""
        return {"rows": [{**asdict(row), "derived": self._derived(row)} for row in self.rows]}

    def _derived(self, row: Row) -> dict[str, Any]:
        return {
            "algorithm_bandwidth": row.algorithm_bandwidth,
            "bus_bandwidth": self.bus_bandwidth(row),
            "ratios": {peer: self.ratio(row, peer) for peer in self.peers},
            "of_limit": self.of_limit(row),
            "busy": self.busy(row),
        }

    def tables(self, *, compact: bool) -> Sequence[Table]:
        """As `Results`."""
        return [self._compact() if compact else self._long()]

    def _labels(self, collective: str) -> list[str]:
        """The first cells of a row: that of allreduce needs none."""
        return [] if self._collectives == [ALLREDUCE] else [collective]

    def _long(self) -> Table:
        """A line for each contender and a rule between sizes."""
        label = self._labels("collective")
        columns = [*label, "size", "library", "latency us [10 %..90 %]", "algorithm GB/s", "bus GB/s"]
        columns += [*(f"x {peer}" for peer in self.peers), *self._limit_name()]
        columns += ["links busy"] if self.hosts else []
        styles = ["dim" if row.contender == LIMIT else "bold" * (row.contender in OURS) for row in self.rows]
        rows = [self._cells(row) for row in self.rows]
        return Table(columns, rows, [*label, "library"], styles=styles, parts=len(label) + 1)

    def _limit_name(self) -> list[str]:
        """The column's, where the limit is known."""
        return ["of limit"] if LIMIT in self.contenders else []

    def _cells(self, row: Row) -> list[str]:
        median, low, high = map(time_text, (row.sample.median, row.sample.low, row.sample.high))
        return [
            *self._labels(row.collective),
            size_text(row.bytes),
            row.contender,
            f"{median} [{low}..{high}]",
            number(row.algorithm_bandwidth / 1e9),
            number(self.bus_bandwidth(row) / 1e9),
            *(number(self.ratio(row, peer)) for peer in self.peers),
            *(percent(self.of_limit(row)) for _ in self._limit_name()),
            *([self._busy(row)] if self.hosts else []),
        ]

    def _busy(self, row: Row) -> str:
        if row.bytes < LIMIT_BYTES:
            return ""
        # In an allreduce all hosts have as much to send; with a root, one may have nearly all.
        one = min if row.collective == ALLREDUCE else max
        return ", ".join(percent(one(hosts)) for hosts in self.busy(row).values())

    def _compact(self) -> Table:
        """A line for each collective and size.

        Latencies are medians, and GB/s are those of the algorithm. The ratios are those of the faster one of
        multiring's two.
        """
        ours = [name for name in OURS if name in self.contenders]
        label, limit = self._labels("collective"), self._limit_name() if ours else []
        columns, rows = [*label, "size"], []
        for name in [*ours, *self.peers]:
            columns += [f"{name} us", "GB/s", *(limit if name == ours[0] else [])]
        columns += [f"best x {peer}" for peer in self.peers]
        for collective, size in dict.fromkeys((row.collective, row.bytes) for row in self.rows):
            cells = [*self._labels(collective), size_text(size)]
            found = {name: self.row(name, size, collective) for name in [*ours, *self.peers]}
            for name, row in found.items():
                cells += (
                    [time_text(row.sample.median), number(row.algorithm_bandwidth / 1e9)] if row else ["", ""]
                )
                if limit and name == ours[0]:
                    cells.append(percent(self.of_limit(row)) if row else "")
            for peer in self.peers:
                ratios = [ratio for name in ours if (row := found[name]) and (ratio := self.ratio(row, peer))]
                cells.append(number(max(ratios, default=None)))
            rows.append(cells)
        return Table(columns, rows, label)

    def panels(self) -> Sequence[Sequence[Panel]]:
        """Latency and algorithm bandwidth over the size, side by side for each collective.

        Bands reach from the 10th to the 90th percentile. The limit begins where it is one, at 64 KiB.
        """

        def microseconds(row: Row, seconds: float) -> float:
            return seconds * 1e6

        def bandwidth(row: Row, seconds: float) -> float:
            return row.bytes / seconds / 1e9

        return [
            [
                self._panel(name, "latency", "us, lower is better", microseconds),
                self._panel(name, "algorithm bandwidth", "GB/s, higher is better", bandwidth),
            ]
            for name in self._collectives
        ]

    def _panel(self, collective: str, title: str, unit: str, value: Callable[[Row, float], float]) -> Lines:
        peers = iter(_PEER_STYLES * len(self.contenders))
        lines = []
        # The limit stays visible where another line reaches it.
        for name in sorted(self.contenders, key=lambda name: name == LIMIT):
            style = _STYLES.get(name) or next(peers)
            least = LIMIT_BYTES if name == LIMIT else 0
            found = [row for size in sorted(self.sizes) if (row := self.row(name, size, collective))]
            rows = [row for row in found if row.bytes >= least]
            band = [value(r, r.sample.low) for r in rows], [value(r, r.sample.high) for r in rows]
            medians = [value(row, row.sample.median) for row in rows]
            if rows:
                lines.append(Line(name, style, [row.bytes for row in rows], medians, band))
        over = f"size of the {'array on each rank' if collective == ALLREDUCE else 'whole array'}"
        return Lines(f"{collective}, {title}", over, unit, lines, size_text)
