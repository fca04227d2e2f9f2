"""The tables of `multiring doctor -H`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from multiring.commands.doctor.host_findings import Measured, as_rate

__all__ = ["hosts_table", "rates_table"]

_MOST_COLUMNS = 8
_Host = tuple[str, int, Mapping[str, Any] | None, tuple[float, float] | None]


def hosts_table(hosts: Sequence[_Host]) -> str:
    """A line for each host: name, ranks, what it tells, its clock's offset."""
    rows = [("host", "ranks", "cores", "NUMA nodes", "Python", "multiring", "NumPy", "clock", "addresses")]
    for name, ranks, facts, offset in hosts:
        if facts is None:
            rows.append((name, str(ranks), *"-" * 7))
            continue
        versions = facts["versions"]
        clock = "this one" if offset is None else f"{offset[0]:+.3f} s (+-{offset[1]:.3f})"
        addresses = ", ".join(f"{interface} {address}" for interface, address, _ in facts["addresses"])
        numpy = versions.get("numpy", "none")
        nodes = facts.get("NUMA nodes", "-")  # another version may not tell
        known = (str(facts["cores"]), str(nodes), versions["python"], versions["multiring"], numpy)
        rows.append((name, str(ranks), *known, clock, addresses or "none"))
    return _table(rows)


def rates_table(names: Sequence[str], measured: Sequence[Measured]) -> str:
    """Rate and latency from each host to each other one; a list where there are many hosts."""
    found = {
        (sender, taker): f"{as_rate(rate)} {late * 1e3:.2f} ms" for sender, taker, rate, late in measured
    }
    if len(names) > _MOST_COLUMNS:
        pairs = [(names[sender], names[taker], text) for (sender, taker), text in sorted(found.items())]
        return _table([("from", "to", "rate, latency"), *pairs])
    rows = [("from \\ to", *names)]
    for sender, name in enumerate(names):
        rows.append((name, *(found.get((sender, taker), "-") for taker in range(len(names)))))
    return _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
