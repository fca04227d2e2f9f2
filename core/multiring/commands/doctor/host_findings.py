"""What `multiring doctor -H` makes of what hosts tell about themselves and of what passes between them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multiring.commands.doctor.checks import Finding, Status

__all__ = ["LINKS_MARK", "Measured", "Row", "as_rate", "host_findings", "rate_findings"]

# How the line begins in which `links` tells what it has measured.
LINKS_MARK = "multiring-links "
# Logs of hosts can still be read side by side, and files are not made in the future, below a second.
_MOST_SECONDS_APART = 1.0
_SLOW = 0.5  # of the median of the hosts, or of what both ends of a link reach with others

# Sender, receiver, bytes per second, seconds of latency.
Measured = tuple[int, int, float, float]


@dataclass(frozen=True)
class Row:
    """What was found, and about which host or what."""

    about: str
    finding: Finding


def host_findings(
    name: str,
    ranks: int,
    facts: Mapping[str, Any],
    offset: tuple[float, float] | None,
    here: Mapping[str, Any],
    known: Mapping[str, Mapping[str, Any]],
) -> list[Finding]:
    """What is to be fixed on a host.

    Args:
        name: The host.
        ranks: That it is to have.
        facts: What it tells.
        offset: Seconds that its clock is ahead of this one's, and how exact that is; None: it is this one's.
        here: What this host tells.
        known: What all hosts tell, by their names.
    """
    found = _versions(facts["versions"], here["versions"])
    if not facts["directory"]:
        detail = "the directory that you are in is not there, or cannot be entered"
        fix = "start the job from one that all hosts have by the same name, as on a shared file system"
        found.append(Finding(Status.FAILED, detail, fix))
    if ranks > facts["cores"]:
        detail = f"{ranks} ranks share {facts['cores']} cores"
        found.append(Finding(Status.WARNING, detail, f"give it {facts['cores']} slots at most"))
    if offset is not None and abs(offset[0]) - offset[1] > _MOST_SECONDS_APART:
        ahead = "ahead of" if offset[0] > 0 else "behind"
        detail = f"its clock is {abs(offset[0]):.1f} s (+-{offset[1]:.3f} s) {ahead} that of this host"
        found.append(Finding(Status.WARNING, detail, "let chrony or another NTP client set the clocks"))
    if facts["no addresses"]:
        fix = "choose other interfaces with MULTIRING_INTERFACES, or bring one up"
        found.append(Finding(Status.FAILED, facts["no addresses"], fix))
    for other, its in known.items():
        if other == name:
            break
        if its["machine"] == facts["machine"]:
            detail = f"is the same machine as {other}: their ranks share memory and processors"
            found.append(Finding(Status.WARNING, detail, f"name it once, with the slots of both: {other}:N"))
    checks = [(check, Status(status), detail, fix) for check, status, detail, fix in facts["findings"]]
    return found + [Finding(status, f"{check}: {detail}", fix) for check, status, detail, fix in checks]


def _versions(there: Mapping[str, str], here: Mapping[str, str]) -> list[Finding]:
    found = []
    for name in dict.fromkeys((*here, *there)):
        own, its = here.get(name), there.get(name)
        if own == its:
            continue
        has = f"{name} {its}" if its else f"no {name}"
        wanted = f"{name} {own}" if own else "none"
        vital = name == "multiring" or (name == "python" and _minor(own) != _minor(its))
        if name == "python":
            fix = "name another Python with --remote-python"
        else:
            fix = f"run `pip install {name}=={own}` there" if own else f"install {name} {its} here as well"
        detail = f"has {has}; this host has {wanted}"
        found.append(Finding(Status.FAILED if vital else Status.WARNING, detail, fix))
    return found


def _minor(version: str | None) -> list[str]:
    return (version or "").split(".")[:2]


def rate_findings(names: Sequence[str], measured: Sequence[Measured]) -> list[Row]:
    """Hosts that send or receive at less than half the rate of the others, and links with less than half of
    what both ends reach with others."""
    sends = {
        host: max(rate for sender, _, rate, _ in measured if sender == host) for host in range(len(names))
    }
    takes = {host: max(rate for _, taker, rate, _ in measured if taker == host) for host in range(len(names))}
    rows = []
    for best, verb in ((sends, "sends"), (takes, "receives")):
        median = statistics.median(best.values())
        for host, rate in best.items():
            if rate < _SLOW * median:
                detail = f"{verb} {as_rate(rate)} at most; the median of the hosts is {as_rate(median)}"
                fix = "look at its network card, cable and switch port (ethtool), and at who else uses them"
                rows.append(Row(names[host], Finding(Status.WARNING, detail, fix)))
    for sender, taker, rate, _ in measured:
        reached = min(sends[sender], takes[taker])
        if rate < _SLOW * reached:
            detail = f"{names[sender]} -> {names[taker]}: {as_rate(rate)}; with others both reach "
            fix = "look at what is between the two: cables, switches, routes (traceroute)"
            rows.append(Row("links", Finding(Status.WARNING, detail + as_rate(reached), fix)))
    if rows:
        return rows
    rates = [rate for *_, rate, _ in measured]
    latency = statistics.median(latency for *_, latency in measured)
    detail = f"{as_rate(min(rates))} to {as_rate(max(rates))}, {latency * 1e3:.2f} ms of latency"
    return [Row("rates", Finding(Status.OK, detail))]


def as_rate(rate: float) -> str:
    """Bytes per second as networks have it: "9.4 Gbit/s"."""
    bits = rate * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
