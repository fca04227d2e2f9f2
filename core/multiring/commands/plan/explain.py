"""The table of what may run a collective across hosts, with what each row sends and is predicted to take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from multiring import _core as native
from multiring.commands.plan.report import Collective, cluster_line, table, what_runs
from multiring.units import seconds_text, size_text

__all__ = ["rows_as_json", "rows_as_text"]


def rows_as_text(collective: Collective, rows: Iterable[native.AlgorithmRow]) -> str:
    """The cluster, and a line for each algorithm, the quickest first; what does not run there comes last,
    with the reason.
    """
    has_hops = len(collective.cluster.ranks) > 1
    order = f", in {collective.order} order" if collective.order else ""
    lines = [["mode", "hops", "by a rank", "predicted", ""]]
    for row in _ordered(rows):
        if row.excluded:
            lines.append([row.name, "-", "-", "-", row.excluded])
            continue
        costs = [str(row.hops), size_text(row.rank_bytes), seconds_text(row.seconds)]
        words = ["chosen"] * row.is_chosen + [f"for {row.needs}"] * bool(row.needs)
        lines.append([row.name, *costs, " ".join(words)])
    if not has_hops:
        lines = [[line[0], *line[3:]] for line in lines]
    head = [
        cluster_line(collective),
        what_runs(collective) + order,
    ]
    return "\n".join([*head, "", *table(lines, left=(0, len(lines[0]) - 1))])


def rows_as_json(rows: Iterable[native.AlgorithmRow]) -> list[dict[str, Any]]:
    """The same, in a form that JSON can hold. Bytes and seconds."""
    return [
        {"name": row.name, "excluded": row.excluded}
        if row.excluded
        else {
            "name": row.name,
            "needs": row.needs,
            "hops": row.hops,
            "rank_bytes": row.rank_bytes,
            "seconds": row.seconds,
            "is_chosen": row.is_chosen,
        }
        for row in _ordered(rows)
    ]


def _ordered(rows: Iterable[native.AlgorithmRow]) -> list[native.AlgorithmRow]:
    return sorted(rows, key=lambda row: (bool(row.excluded), row.seconds))
