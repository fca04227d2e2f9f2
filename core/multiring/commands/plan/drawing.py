"""A plan in characters: hosts below each other, and what their ranks do with those of other hosts."""

from __future__ import annotations

from collections.abc import Sequence

from multiring import _core as native
from multiring.units import rate_text

__all__ = ["draw"]

_MAX_HOSTS = 10
_MAX_COLUMNS = 12
_BAR = 40
# What joins neighbouring hosts, by the dimension in which they meet.
_JOINTS = "|:.'"


def draw(hosts: Sequence[Sequence[int]], plan: native.Plan) -> str:
    """A line for each host with the rank that takes part in each exchange, joined by dimension; a legend; and
    the share of each channel. Long pictures are cut in the middle.

    Args:
        hosts: The ranks of each host.
        plan: A plan for them.
    """
    across = [step for step in plan.steps if step.dimension > 0]
    if not across:
        return "\n".join(
            f"host {number}  " + "  ".join(map(str, ranks)) for number, ranks in enumerate(hosts)
        )
    columns = _columns(hosts, across[0])
    shown = columns[:_MAX_COLUMNS]
    cut = len(columns) > len(shown)
    sizes = plan.sizes[1:]
    label = len(f"host {len(hosts) - 1}")
    width = max(len(str(rank)) for column in shown for rank in column)
    lines = []
    for host in range(len(hosts)):
        if len(hosts) > _MAX_HOSTS and _MAX_HOSTS - 2 <= host < len(hosts) - 1:
            if host == _MAX_HOSTS - 2:
                lines.append(f"{'...':<{label}}")
            continue
        cells = "   ".join(f"{column[host]:>{width}}" for column in shown)
        lines.append(f"{f'host {host}':<{label}}   {cells}{'   ...' if cut else ''}")
        if host + 1 < len(hosts):
            joint = _JOINTS[min(_meeting(host, sizes), len(_JOINTS) - 1)]
            lines.append(" " * (label + 3) + "   ".join(f"{joint:>{width}}" for _ in shown))
    return "\n".join([*lines, "", *_legend(across, sizes), *_stripes(plan)])


def _columns(hosts: Sequence[Sequence[int]], step: native.Step) -> list[list[int]]:
    """For each range of elements that is exchanged on its own, the rank of each host that has it."""
    host_of = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
    owners: dict[tuple[int, int], list[int]] = {}
    for group in step.groups:
        column = owners.setdefault((group.begin, group.end), [-1] * len(hosts))
        for rank in group.ranks:
            column[host_of[rank]] = rank
    distinct = {tuple(owners[extent]): None for extent in sorted(owners)}  # stripes have the same owners
    return [list(column) for column in distinct]


def _meeting(host: int, sizes: Sequence[int]) -> int:
    """The dimension, counted from 0, in which a host and the next one meet."""
    block = 1
    for dimension, size in enumerate(sizes):
        block *= size
        if (host + 1) % block:
            return dimension
    return len(sizes) - 1


def _legend(across: Sequence[native.Step], sizes: Sequence[int]) -> list[str]:
    lines = []
    phases = {step.phase for step in across}
    for step in across:
        if step.phase in ("all-gather", "broadcast") and len(phases) > 1:
            continue
        joint = _JOINTS[min(step.dimension - 1, len(_JOINTS) - 1)]
        count = len({tuple(group.ranks) for group in step.groups})
        times = f", {count} at once" if count > 1 else ""
        back = {"reduce-scatter": ", and all-gather back", "reduce": ", and broadcast back"}.get(
            step.phase if len(phases) > 1 else "", ""
        )
        lines.append(
            f"{joint}  {step.phase} by {step.algorithm} among {sizes[step.dimension - 1]} hosts{times}{back}"
        )
    return lines


def _stripes(plan: native.Plan) -> list[str]:
    """A bar for each channel, as long as its share."""
    if len(plan.channels) < 2:
        return []
    total = sum(channel.bytes_per_second for channel in plan.channels)
    lines = ["", "stripes of every exchange, by interface"]
    for channel in plan.channels:
        share = channel.bytes_per_second / total
        bar = "#" * max(round(share * _BAR), 1)
        lines.append(
            f"{channel.interface}  {bar:<{_BAR}}  {100 * share:.0f} %  {rate_text(channel.bytes_per_second)}"
        )
    return lines
