"""A plan and its predicted costs, as text and as JSON."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from multiring import _core as native
from multiring.units import rate_text, seconds_text, size_text

__all__ = [
    "Collective",
    "Prediction",
    "as_json",
    "as_text",
    "cluster_line",
    "described_as_json",
    "table",
    "what_runs",
]


@dataclass(frozen=True)
class Collective:
    """A collective on a described cluster.

    Attributes:
        cluster: The hosts and their ranks.
        interfaces: Those of every host.
        host_links: What links the hosts: "switch", "ring" or "line".
        name: "allreduce", "gather", ...
        count: Number of elements of a rank's array.
        dtype: Name of the elements' type.
        order: In which order it adds: "canonical" or "any"; "": it adds nothing.
    """

    cluster: native.Cluster
    interfaces: Sequence[native.Interface]
    host_links: str
    name: str
    count: int
    dtype: str
    order: str


@dataclass(frozen=True)
class Prediction(Collective):
    """A plan of it.

    Attributes:
        row: What the table of algorithms says of it.
        plan: The plan.
        limit: Time that bytes over bandwidth allow at best, in seconds.
        step_seconds: Predicted time of each step if chunks go whole.
    """

    row: native.AlgorithmRow
    plan: native.Plan
    limit: float
    step_seconds: Sequence[float]

    @property
    def share_of_limit(self) -> float:
        """How much of what bytes over bandwidth allow is reached; 1 where nothing has to move."""
        return self.limit / self.row.seconds if self.row.seconds > 0 else 1.0


def as_text(prediction: Prediction) -> str:
    """The cluster, the plan with a line for each step, what it moves and how long that takes."""
    plan = prediction.plan
    lines = [
        cluster_line(prediction),
        f"{what_runs(prediction)}, mode {prediction.row.name}",
    ]
    if prediction.order:
        lines.append(f"order      {order_text(prediction)}")
    if prediction.row.segments > 1:
        lines.append(f"segments   {prediction.row.segments}, one after the other")
    if plan.steps:
        lines += ["", *table(_rows(prediction), left=(1, 2, 3)), ""]
    lines += [f"link       {line}" for line in _link_lines(prediction)]
    lines.append(f"predicted  {seconds_text(prediction.row.seconds)}")
    lines.append(
        f"limit      {seconds_text(prediction.limit)} (bytes over bandwidth): {_percent(prediction)}"
    )
    return "\n".join(lines)


def order_text(prediction: Prediction) -> str:
    """In which order the plan adds, and what hosts send each other because of it."""
    return _order_text(prediction) + (
        f"; partial sums of {prediction.dtype} travel as float32" if _widens(prediction) else ""
    )


def _widens(prediction: Prediction) -> bool:
    """Whether hosts send each other sums in a wider type than that of the elements."""
    ranks = prediction.cluster.ranks
    plan = prediction.plan
    return plan.partial_bytes > plan.element_bytes and len(ranks) > 1 and max(map(len, ranks)) > 1


def _order_text(prediction: Prediction) -> str:
    plan = prediction.plan
    if plan.order == "any":
        return "any: sums may differ in their last bits between plans and placements of ranks"
    if len(prediction.cluster.ranks) == 1:
        return "canonical"
    if plan.parts_across_hosts == 1:
        return "canonical; what a host brings to each step is one subtree, so a host's sum travels as it is"
    return (
        "canonical; the ranks of a host, or of a block of hosts, form no subtree, so up to "
        f"{plan.parts_across_hosts} sums of parts of them travel in place of one"
    )


def described_as_json(collective: Collective, row: native.AlgorithmRow) -> dict[str, Any]:
    """What runs where, and what the row of the algorithm says; bytes and seconds."""
    return {
        "hosts": collective.cluster.ranks,
        "interfaces": [
            {"bytes_per_second": one.bytes_per_second, "latency": one.latency}
            for one in collective.interfaces
        ],
        "host_links": collective.host_links,
        "collective": collective.name,
        "dtype": collective.dtype,
        "count": collective.count,
        "bytes": collective.count * native.dtype_size(collective.dtype),
        "mode": row.name,
        "order": collective.order,
        "segments": row.segments,
        "seconds": None if row.excluded else row.seconds,
    }


def as_json(prediction: Prediction) -> dict[str, Any]:
    """All of it, in a form that JSON can hold. Bytes, seconds and numbers of elements."""
    plan = prediction.plan
    links, ranks = plan.traffic()
    return described_as_json(prediction, prediction.row) | {
        "order": plan.order,
        "aligned": prediction.cluster.aligned,
        "parts_across_hosts": plan.parts_across_hosts,
        "channels": [
            {"interface": channel.interface, "bytes_per_second": channel.bytes_per_second}
            for channel in plan.channels
        ],
        "steps": [_step_json(prediction, index) for index in range(len(plan.steps))],
        "links": [
            {"host": link.host, "interface": link.interface, "sent": link.sent, "received": link.received}
            for link in links
        ],
        "ranks": [{"sent": rank.sent, "sent_in_memory": rank.sent_in_memory} for rank in ranks],
        "limit_seconds": prediction.limit,
        "share_of_limit": prediction.share_of_limit,
    }


def _step_json(prediction: Prediction, index: int) -> dict[str, Any]:
    step = prediction.plan.steps[index]
    return {
        "phase": step.phase,
        "dimension": step.dimension,
        "algorithm": step.algorithm,
        "hops": step.hops,
        "parts": step.parts,
        "seconds": prediction.step_seconds[index],
        "groups": [
            {"ranks": group.ranks, "begin": group.begin, "end": group.end, "channel": group.channel}
            for group in step.groups
        ],
    }


def what_runs(collective: Collective) -> str:
    """Its name, and on how many elements."""
    nbytes = collective.count * native.dtype_size(collective.dtype)
    elements = f"{size_text(nbytes)} ({collective.count:,} x {collective.dtype})"
    from_each = " from each rank" if collective.name in ("allgather", "gather") else ""
    return f"{collective.name} of {elements}{from_each}"


def cluster_line(collective: Collective) -> str:
    """Hosts, ranks and interfaces."""
    counts = [len(ranks) for ranks in collective.cluster.ranks]
    each = f"{counts[0]}" if len(set(counts)) == 1 else "+".join(map(str, counts))
    hosts = f"{len(counts)} host{'s' if len(counts) > 1 else ''} of {each} rank{'s' if each != '1' else ''}"
    if len(counts) == 1:
        return hosts
    rates = ", ".join(rate_text(one.bytes_per_second) for one in collective.interfaces)
    links = "" if collective.host_links == "switch" else f", {collective.host_links} of cables"
    return f"{hosts}{links}, interfaces: {rates}, {seconds_text(collective.interfaces[0].latency)}"


def _rows(prediction: Prediction) -> list[list[str]]:
    rows = [["step", "dimension", "phase", "algorithm", "groups", "hops", "sums", "by a rank", "if alone"]]
    for index, step in enumerate(prediction.plan.steps):
        _, ranks = prediction.plan.traffic(index)
        most = max(rank.sent_in_memory if step.dimension == 0 else rank.sent for rank in ranks)
        rows.append(
            [
                str(index + 1),
                "within hosts" if step.dimension == 0 else f"across hosts {step.dimension}",
                step.phase,
                step.algorithm,
                str(len(step.groups)),
                str(step.hops),
                str(step.parts),
                size_text(most),
                seconds_text(prediction.step_seconds[index]),
            ]
        )
    return rows


def table(rows: Sequence[Sequence[str]], left: Container[int]) -> list[str]:
    """Lines with columns as wide as they need; those of `left` to the left, others, numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _link_lines(prediction: Prediction) -> list[str]:
    """For each interface that carries anything, what the busiest host sends and receives through it."""
    links, _ = prediction.plan.traffic()
    by_switch = prediction.host_links == "switch"
    kind, both = ("interface", "") if by_switch else ("cable", ", to both neighbours together,")
    lines = []
    for number, interface in enumerate(prediction.interfaces):
        sent = max((link.sent for link in links if link.interface == number), default=0)
        received = max((link.received for link in links if link.interface == number), default=0)
        if sent or received:
            lines.append(
                f"{kind} {number} ({rate_text(interface.bytes_per_second)}) of a host{both} sends up to "
                f"{size_text(sent)} and receives up to {size_text(received)}"
            )
    return lines


def _percent(prediction: Prediction) -> str:
    return f"{100 * prediction.share_of_limit:.1f} % of it reached"
