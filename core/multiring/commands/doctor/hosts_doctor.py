"""`multiring doctor -H`: checks that hosts can run a job together and says what to fix."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from multiring.commands.doctor.checks import Finding, Status
from multiring.commands.doctor.host_probe import MODULE, longer, look, marked
from multiring.commands.launcher.descriptors import enough_descriptors
from multiring.commands.launcher.hosts import HostSlots
from multiring.commands.launcher.options import split_ssh
from multiring.commands.launcher.remote_ranks import current_directory

__all__ = ["Host", "host_findings", "look_at", "rate_findings"]

_PROBE_SECONDS = 90.0  # the native library is loaded, perhaps from a slow network file system
_JOB_SECONDS = 120.0
_DESCRIPTORS_OF_SSH = 6
_LINKS = "multiring.commands.doctor.links"  # not imported: it needs the native library
_SSH_FAILED = 255
_NO_SUCH_PROGRAM = (126, 127)
# Logs of hosts can still be read side by side, and files are not made in the future, below a second.
_MAX_SECONDS_APART = 1.0
_SLOW = 0.5  # of the median of the hosts, or of what both ends of a link reach with others

# Which host or what it is about, and what was found.
Row = tuple[str, Finding]
# Sender, receiver, bytes per second, seconds of latency.
Measured = Sequence[Any]


@dataclass
class Host:
    """One of the hosts.

    Attributes:
        name: What it is called in what is printed.
        slots: As it was given; an empty name is this one.
        facts: What it is like; None if it cannot be told.
        problem: Why not.
        offset: Seconds that its clock is ahead of this one's, and how exact that is; None: it is this one's.
    """

    name: str
    slots: HostSlots
    facts: Mapping[str, Any] | None = None
    problem: Finding | None = None
    offset: tuple[float, float] | None = None


def look_at(args: argparse.Namespace, slots: Sequence[HostSlots]) -> Iterator[Row]:
    """Checks hosts; gives what is found as it is found.

    Args:
        args: The options of `launcher.options.add_host_arguments`.
        slots: The hosts.

    Raises:
        UsageError: An option cannot be understood.
    """
    ssh = split_ssh(args.ssh)
    hosts = [Host(each.name or os.uname().nodename, each) for each in slots]
    environ = {name: text for name, text in os.environ.items() if name.startswith("MULTIRING_")}
    order: dict[str, Any] = {"directory": current_directory(), "environ": environ}
    here = look(**order)
    with (
        enough_descriptors(_DESCRIPTORS_OF_SSH * len(hosts), f"{len(hosts)} hosts"),
        ThreadPoolExecutor(len(hosts)) as pool,
    ):
        limit = longer(_PROBE_SECONDS, len(hosts))
        list(pool.map(lambda host: _ask(host, ssh, args.remote_python, order, here, limit), hosts))
    able = []
    for host in hosts:
        found = [host.problem] if host.problem else host_findings(host, here, hosts)
        if not any(finding.status is Status.FAILED for finding in found):
            able.append(host)
            yield host.name, Finding(Status.OK, _describe(host))
        yield from ((host.name, finding) for finding in found)
    if any(host.slots.name for host in hosts):
        if len(able) < len(hosts):
            detail = "not looked at where something has failed above"
            yield "links", Finding(Status.WARNING, detail, "fix what has failed above, and run this again")
        if any(host.slots.name for host in able):
            yield from _links(args, ssh, able)


def _ask(
    host: Host,
    ssh: Sequence[str],
    python: str,
    order: Mapping[str, Any],
    here: Mapping[str, Any],
    limit: float,
) -> None:
    """Has a host tell what it is like."""
    if not host.slots.name:
        host.facts = here
        return
    python = python or sys.executable
    command = [*ssh, host.slots.name, f"exec {shlex.quote(python)} -P -m {MODULE}"]
    before = time.time()
    try:
        # Not a pipe: what ssh leaves running to share a connection keeps it open.
        with tempfile.TemporaryFile("w+", errors="replace") as stderr:
            run = subprocess.run(
                command,
                input=json.dumps(order),
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                timeout=limit,
                errors="replace",
            )
            stderr.seek(0)
            run.stderr = stderr.read()
        (facts,) = marked(run.stdout)
        first, last = facts.pop("clock")
        if facts.keys() != here.keys():
            raise KeyError(*(facts.keys() ^ here.keys()))
        # Its clock told the first after `before`, and the last before now.
        most, least = first - before, last - time.time()
        host.facts, host.offset = facts, ((most + least) / 2, (most - least) / 2)
    except subprocess.TimeoutExpired:
        fix = f"see whether `{shlex.join([*ssh, host.slots.name])} true` ends"
        host.problem = Finding(Status.FAILED, "does not answer in time", fix)
    except OSError as error:
        fix = "install it, or name what runs a command on another host with --ssh"
        host.problem = Finding(Status.FAILED, f"{ssh[0]} cannot be started: {error.strerror}", fix)
    except (KeyError, TypeError, ValueError):
        host.problem = _why(host.slots.name, python, run)


def _why(name: str, python: str, run: subprocess.CompletedProcess[str]) -> Finding:
    """Why a host does not answer, or not as this one would."""
    code, lines = run.returncode, run.stderr.strip().splitlines()
    last = lines[-1].strip() if lines else f"exit code {code}"
    if code == _SSH_FAILED or code < 0:  # or a signal, as of Ctrl-C, has ended it
        fix = (
            f"make `ssh -o BatchMode=yes {name} true` work: a key without a password, the host's key known, "
            "its name and port right, no firewall between"
        )
        return Finding(Status.FAILED, f"ssh fails: {last}", fix)
    if code in _NO_SUCH_PROGRAM:
        fix = "install it there, or name the Python that has multiring with --remote-python"
        return Finding(Status.FAILED, f"there is no {python}", fix)
    detail = f"multiring does not start there with {python}: {last}"
    with suppress(KeyError, TypeError, ValueError):
        (facts,) = marked(run.stdout)
        last = f"multiring {facts['versions']['multiring']}"
    if code == 0 or "No module named" in last:
        detail = f"{python} has no multiring there, or another version: {last}"
    fix = (
        "install the multiring of this host there, for Python "
        f"{sys.version_info.major}.{sys.version_info.minor}; --remote-python names another Python"
    )
    return Finding(Status.FAILED, detail, fix)


def _describe(host: Host) -> str:
    facts = host.facts or {}
    found = facts["versions"]
    addresses = ", ".join(f"{interface} {address}" for interface, address, _ in facts["addresses"])
    return (
        f"{host.slots.slots} rank{'s' * (host.slots.slots > 1)}, {facts['cores']} cores, "
        f"{facts['NUMA nodes']} NUMA node{'s' * (facts['NUMA nodes'] > 1)}; Python {found['python']}, "
        f"multiring {found.get('multiring')}, NumPy {found.get('numpy')}; {addresses}"
    )


def host_findings(host: Host, here: Mapping[str, Any], hosts: Sequence[Host]) -> list[Finding]:
    """What is to be fixed on a host.

    Args:
        host: The host, with what it tells.
        here: What this host tells.
        hosts: All of them.
    """
    facts, ranks = host.facts or {}, host.slots.slots
    offset, exact = host.offset or (0.0, 0.0)
    side = "ahead of" if offset > 0 else "behind"
    earlier = hosts[: next(index for index, each in enumerate(hosts) if each is host)]
    same = [each.name for each in earlier if each.facts and each.facts["machine"] == facts["machine"]]
    rows = [
        (
            not facts["directory"],
            Status.FAILED,
            "the directory that you are in is not there, or cannot be entered",
            "start the job from one that all hosts have by the same name, as on a shared file system",
        ),
        (
            ranks > facts["cores"],
            Status.WARNING,
            f"{ranks} ranks share {facts['cores']} cores",
            f"give it {facts['cores']} slots at most",
        ),
        (
            abs(offset) - exact > _MAX_SECONDS_APART,
            Status.WARNING,
            f"its clock is {abs(offset):.1f} s (+-{exact:.3f} s) {side} that of this host",
            "let chrony or another NTP client set the clocks",
        ),
        (
            bool(facts["no addresses"]),
            Status.FAILED,
            facts["no addresses"],
            "choose other interfaces with MULTIRING_INTERFACES, or bring one up",
        ),
        (
            bool(same),
            Status.WARNING,
            f"is the same machine as {' and '.join(same)}: their ranks share memory and processors",
            f"name it once, with the slots of both: {' '.join(same[:1])}:N",
        ),
    ]
    found = [Finding(status, detail, fix) for wrong, status, detail, fix in rows if wrong]
    checks = [
        Finding(Status(status), f"{name}: {detail}", fix) for name, status, detail, fix in facts["findings"]
    ]
    return _versions(facts["versions"], here["versions"]) + found + checks


def _versions(there: Mapping[str, str], here: Mapping[str, str]) -> list[Finding]:
    found = []
    for name in dict.fromkeys((*here, *there)):
        own, its = here.get(name), there.get(name)
        if own == its:
            continue
        has = f"{name} {its}" if its else f"no {name}"
        detail = f"has {has}; this host has {f'{name} {own}' if own else 'none'}"
        vital = name == "multiring" or (name == "python" and _minor(own) != _minor(its))
        fix = f"run `pip install {name}=={own}` there" if own else f"install {name} {its} here as well"
        if name == "python":
            fix = "name another Python with --remote-python"
        found.append(Finding(Status.FAILED if vital else Status.WARNING, detail, fix))
    return found


def _minor(version: str | None) -> list[str]:
    return (version or "").split(".")[:2]


def _links(args: argparse.Namespace, ssh: Sequence[str], hosts: Sequence[Host]) -> Iterator[Row]:
    """A job of one rank on each host calls, and measures."""
    names = [host.slots.name or "localhost" for host in hosts]
    host_list = ",".join(f"[{name}]:1" if ":" in name else f"{name}:1" for name in names)
    command = [
        sys.executable,
        "-P",
        "-m",
        "multiring",
        "run",
        "-H",
        host_list,
        "--engine",
        "ssh",
        "--no-tag-output",
    ]
    command += ["--ssh", shlex.join(ssh), "--remote-python", args.remote_python, "--address", args.address]
    command += [
        "--timeout",
        str(longer(_JOB_SECONDS, len(hosts))),
        "--env",
        "PYTHONSAFEPATH=1",
        "-m",
        _LINKS,
    ]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    results: dict[str, Any] = {}
    for found in marked(run.stdout):
        results |= found
        if "launcher" in found:
            rank, why = found["launcher"]
            detail = f"{hosts[rank].name} does not reach this host, where the launcher is: {why}"
            fix = (
                "open all TCP ports of this host for the others, or name another of its addresses with "
                "--address, here and for `multiring run`"
            )
            yield "launcher", Finding(Status.FAILED, detail, fix)
    if run.returncode != 0 or not results:
        last = [line for line in run.stderr.strip().splitlines() if line][-6:]
        detail = f"a job of one rank on each host ends with exit code {run.returncode}: {' / '.join(last)}"
        yield "job", Finding(Status.FAILED, detail, "fix what has failed above; if nothing has, report this")
    for unreached in results.get("unreached", []):
        yield _unreached(hosts, *unreached)
    if results.get("measured"):
        yield "links", Finding(Status.OK, "every host reaches every other one on all its interfaces")
        yield from rate_findings([host.name for host in hosts], results["measured"])


def _unreached(
    hosts: Sequence[Host], caller: int, own: Sequence[str], listener: int, other: Sequence[str], why: str
) -> Row:
    ends = [
        f"{f'{end[1]} ({end[0]}) of ' if end else ''}{hosts[rank].name}"
        for rank, end in ((caller, own), (listener, other))
    ]
    fix = "open all TCP ports between the two in the firewall"
    if not own:
        fix = "choose interfaces of a network that both share with MULTIRING_INTERFACES"
    elif any(len((hosts[rank].facts or {})["addresses"]) > 1 for rank in (caller, listener)):
        fix += f", or choose other interfaces on all hosts, as with MULTIRING_INTERFACES=^{other[0]}"
    return hosts[caller].name, Finding(Status.FAILED, f"{ends[0]} does not reach {ends[1]}: {why}", fix)


def rate_findings(names: Sequence[str], measured: Sequence[Measured]) -> Iterator[Row]:
    """What was measured, hosts that send or receive at less than half the rate of the others, and
    links with less than half of what both ends reach with others."""
    hosts = range(len(names))
    for host in hosts:
        to = [f"{names[t]} {_rate(rate)} {late * 1e3:.2f} ms" for s, t, rate, late in measured if s == host]
        yield names[host], Finding(Status.OK, f"sends to {', '.join(to)}")
    sends = {host: max(rate for sender, _, rate, _ in measured if sender == host) for host in hosts}
    takes = {host: max(rate for _, taker, rate, _ in measured if taker == host) for host in hosts}
    for best, verb in ((sends, "sends"), (takes, "receives")):
        median = statistics.median(best.values())
        for host, rate in best.items():
            if rate < _SLOW * median:
                detail = f"{verb} {_rate(rate)} at most; the median of the hosts is {_rate(median)}"
                fix = "look at its network card, cable and switch port (ethtool), and at who else uses them"
                yield names[host], Finding(Status.WARNING, detail, fix)
    for sender, taker, rate, _ in measured:
        reached = min(sends[sender], takes[taker])
        if rate < _SLOW * reached:
            detail = (
                f"{names[sender]} -> {names[taker]}: {_rate(rate)}; with others both reach {_rate(reached)}"
            )
            fix = "look at what is between the two: cables, switches, routes (traceroute)"
            yield "links", Finding(Status.WARNING, detail, fix)


def _rate(rate: float) -> str:
    """Bytes per second as networks have it: "9.4 Gbit/s"."""
    bits = rate * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
