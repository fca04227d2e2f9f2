"""`multiring doctor -H`: checks that hosts can run a job together and says what to fix."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from multiring.commands.doctor.checks import Finding, Status
from multiring.commands.doctor.host_findings import LINKS_MARK, Row, host_findings, rate_findings
from multiring.commands.doctor.host_probe import Listener, call_seconds
from multiring.commands.doctor.host_session import HostSession, RemoteSession, SessionError
from multiring.commands.doctor.host_tables import hosts_table, rates_table
from multiring.commands.launcher.descriptors import enough_descriptors
from multiring.commands.launcher.hosts import HostSlots, address_towards
from multiring.commands.launcher.options import split_ssh
from multiring.commands.launcher.remote_ranks import current_directory
from multiring.errors import UsageError
from multiring.store import address_to_listen_on

__all__ = ["main"]

_FACTS_SECONDS = 90.0  # the native library is loaded, perhaps from a slow network file system
_ANSWER_SECONDS = 30.0
_JOB_SECONDS = 120.0
_CLOCK_QUESTIONS = 8
# All are asked at once, from here, and perhaps load from one file server: with so many more hosts, everything
# may take as long again.
_HOSTS_IN_TIME = 64
_DESCRIPTORS_OF_SESSION = 3
_LINKS = "multiring.commands.doctor.links"  # not imported: it needs the native library


@dataclass
class _Host:
    """One of the hosts.

    Attributes:
        slots: As it was given; an empty name is this one.
        name: What it is called in what is printed.
        session: Who is asked; None where nobody can be.
        facts: What it is like; None if it cannot be told.
        offset: Seconds that its clock is ahead of this one's, and how exact that is.
        ports: Where it listens, for each of its addresses.
        token: What it tells those who call.
    """

    slots: HostSlots
    name: str
    session: HostSession | None = None
    facts: dict[str, Any] | None = None
    offset: tuple[float, float] | None = None
    ports: list[int] = field(default_factory=list)
    token: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def addresses(self) -> list[tuple[str, str, int]]:
        """Interface, address and network bits of what its ranks would listen on."""
        return [] if self.facts is None else [tuple(one) for one in self.facts["addresses"]]


def main(args: argparse.Namespace, slots: Sequence[HostSlots], show: Callable[[Row], None]) -> list[Finding]:
    """Checks hosts.

    Args:
        args: The options of `launcher.options.add_host_arguments`.
        slots: The hosts.
        show: Shows a line of what was found.

    Returns:
        What was found.

    Raises:
        UsageError: An option cannot be understood.
    """
    ssh = split_ssh(args.ssh)
    hosts = [_Host(host, host.name or os.uname().nodename) for host in slots]
    needed = _DESCRIPTORS_OF_SESSION * len(hosts)
    with (
        enough_descriptors(needed, f"{len(hosts)} hosts"),
        contextlib.closing(_Doctor(args, ssh, hosts)) as doctor,
    ):
        rows = []
        for row in doctor.rows():
            show(row)
            rows.append(row)
        return [row.finding for row in rows]


class _Doctor:
    def __init__(self, args: argparse.Namespace, ssh: list[str], hosts: list[_Host]) -> None:
        self._args, self._ssh, self._hosts = args, ssh, hosts
        self._own = HostSession()
        self._patience = 1.0 + len(hosts) / _HOSTS_IN_TIME

    def close(self) -> None:
        self._own.close()
        for host in self._hosts:
            if host.session is not None:
                host.session.close()

    def rows(self) -> Iterator[Row]:
        """Prints the tables as they come, and gives what was found."""
        environ = {name: text for name, text in os.environ.items() if name.startswith("MULTIRING_")}
        ask = {"directory": current_directory(), "environ": environ}
        here = self._own.ask("facts", _FACTS_SECONDS * self._patience, **ask)
        problems = _at_once(self._hosts, lambda host: self._look_at(host, ask, here))
        print(hosts_table([(host.name, host.slots.slots, host.facts, host.offset) for host in self._hosts]))
        print(flush=True)
        known = {host.name: host.facts for host in self._hosts if host.facts is not None}
        for host in self._hosts:
            found = [row.finding for row in problems if row.about == host.name]
            if host.facts is not None:
                found += host_findings(host.name, host.slots.slots, host.facts, host.offset, here, known)
            ranks = f"{host.slots.slots} rank{'s' * (host.slots.slots > 1)}"
            fit = Finding(Status.OK, f"is fit for {ranks}")
            yield from (Row(host.name, finding) for finding in found or [fit])
        yield from self._connections(here["versions"].get("multiring"))

    def _look_at(self, host: _Host, ask: Mapping[str, Any], here: dict[str, Any]) -> None:
        if not host.slots.name:
            host.session, host.facts = self._own, here
            return
        host.session = RemoteSession(host.slots.name, self._ssh, self._args.remote_python)
        facts = host.session.ask("facts", _FACTS_SECONDS * self._patience, **ask)
        offsets = [_offset(host.session, _ANSWER_SECONDS * self._patience) for _ in range(_CLOCK_QUESTIONS)]
        host.offset = min(offsets, key=lambda offset: offset[1])
        host.facts = facts

    def _connections(self, version: str | None) -> Iterator[Row]:
        able = [host for host in self._hosts if host.addresses]
        if all(not host.slots.name for host in self._hosts):
            return
        problems = _at_once(able, self._listen)
        problems += self._way_to_the_launcher(able)
        problems += self._calls([host for host in able if host.ports])
        yield from problems
        if len(able) < 2:
            return
        same = all(host.facts and host.facts["versions"].get("multiring") == version for host in able)
        if problems or not same or len(able) < len(self._hosts):
            fix = "fix what has failed above, and run this again"
            yield Row("rates", Finding(Status.WARNING, "not measured", fix))
            return
        yield Row("links", Finding(Status.OK, "every host reaches every other one on all its interfaces"))
        yield from self._rates()

    def _listen(self, host: _Host) -> None:
        assert host.session is not None
        addresses = [address for _, address, _ in host.addresses]
        host.ports = host.session.ask(
            "listen", _ANSWER_SECONDS * self._patience, addresses=addresses, token=host.token
        )

    def _way_to_the_launcher(self, hosts: Sequence[_Host]) -> Iterator[Row]:
        """Ranks of other hosts meet at a port of the launcher."""
        others = [host for host in hosts if host.slots.name]
        if not others:
            return
        try:
            address = self._args.address or address_towards([host.slots.name for host in others])
            listener = Listener([address_to_listen_on(address)], token := secrets.token_bytes(16))
        except (UsageError, OSError) as error:
            fix = "name an address of this host that the others reach with --address"
            yield Row("launcher", Finding(Status.FAILED, f"nobody can reach this host: {error}", fix))
            return
        target = ["", address, listener.ports[0], token.hex()]
        with contextlib.closing(listener):
            answers = self._call([(host, [target]) for host in others])
        for host, (why,) in zip(others, answers, strict=True):
            if why:
                fix = (
                    "open all TCP ports of this host for the others, or name another of its addresses with "
                    "--address, here and for `multiring run`"
                )
                detail = f"{host.name} does not reach this host, where the launcher would be, at {address}: "
                yield Row("launcher", Finding(Status.FAILED, detail + why, fix))

    def _calls(self, hosts: Sequence[_Host]) -> list[Row]:
        """Every host calls every other one as ranks would; the rows of those who do not get through."""
        try:
            from multiring import _core
        except ImportError as error:
            return [
                Row("launcher", Finding(Status.FAILED, str(error), "see `multiring doctor` on this host"))
            ]
        rows, plan, ends = [], [], []
        for caller in hosts:
            targets: list[list[Any]] = []
            for listener in hosts:
                if listener is caller or _same_machine(caller, listener):
                    continue
                pairs = _core.pair_addresses(caller.addresses, listener.addresses)
                if not pairs:
                    rows.append(_no_pair(caller, listener))
                for mine, its in pairs:
                    own, other = caller.addresses[mine], listener.addresses[its]
                    targets.append([own[1], other[1], listener.ports[its], listener.token])
                    ends.append((caller, own, listener, other))
            plan.append((caller, targets))
        whys = [why for answers in self._call(plan) for why in answers]
        return rows + [_unreached(*end, why) for end, why in zip(ends, whys, strict=True) if why]

    def _call(self, plan: Sequence[tuple[_Host, list[list[Any]]]]) -> list[list[str]]:
        """For each host why it does not reach its targets, with "" for those that it reaches."""

        def call(entry: tuple[_Host, list[list[Any]]]) -> list[str]:
            host, targets = entry
            assert host.session is not None
            timeout = _ANSWER_SECONDS * self._patience + call_seconds(len(targets))
            try:
                return [str(why) for why in host.session.ask("call", timeout, targets=targets)]
            except SessionError as error:
                return [error.finding.detail] * len(targets)

        with ThreadPoolExecutor(max(1, len(plan))) as pool:
            return list(pool.map(call, plan))

    def _rates(self) -> Iterator[Row]:
        """A job of one rank on each host measures."""
        names = [host.slots.name or "localhost" for host in self._hosts]
        places = ",".join(f"[{name}]:1" if ":" in name else f"{name}:1" for name in names)
        command = [sys.executable, "-P", "-m", "multiring", "run", "-H", places]
        command += ["--ssh", shlex.join(self._ssh), "--env", "PYTHONSAFEPATH=1"]
        command += ["--remote-python", self._args.remote_python, "--address", self._args.address]
        command += [
            "--engine",
            "ssh",
            "--no-tag-output",
            "--timeout",
            str(_JOB_SECONDS * self._patience),
            "-m",
            _LINKS,
        ]
        run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        found = [line for line in run.stdout.splitlines() if line.startswith(LINKS_MARK)]
        if run.returncode != 0 or not found:
            last = [line for line in run.stderr.strip().splitlines() if line][-6:]
            fix = "fix what has failed above; if nothing has, report this: " + " / ".join(last)
            detail = f"a job of one rank on each host ends with exit code {run.returncode}"
            yield Row("job", Finding(Status.FAILED, detail, fix))
            return
        measured = [tuple(row) for row in json.loads(found[-1].removeprefix(LINKS_MARK))]
        shown = [host.name for host in self._hosts]
        print(f"\n{rates_table(shown, measured)}\n", flush=True)
        yield from rate_findings(shown, measured)


def _at_once(hosts: Sequence[_Host], action: Callable[[_Host], None]) -> list[Row]:
    """Does something with all hosts at once; what keeps it from being done."""

    def run(host: _Host) -> Row | None:
        try:
            action(host)
        except SessionError as error:
            return Row(host.name, error.finding)
        except (KeyError, TypeError, ValueError) as error:
            detail = f"does not answer as this host would: {type(error).__name__}: {error}"
            return Row(host.name, Finding(Status.FAILED, detail, "install the multiring of this host there"))
        return None

    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return [row for row in pool.map(run, hosts) if row is not None]


def _same_machine(one: _Host, other: _Host) -> bool:
    return bool(one.facts and other.facts and one.facts["machine"] == other.facts["machine"])


def _offset(session: HostSession, timeout: float) -> tuple[float, float]:
    """Seconds that its clock is ahead of ours, and how exact that is."""
    before = time.time()
    there = session.ask("clock", timeout)
    after = time.time()
    return there - (before + after) / 2, (after - before) / 2


def _unreached(
    caller: _Host, own: tuple[str, str, int], listener: _Host, other: tuple[str, str, int], why: str
) -> Row:
    ends = [f"{end[1]} ({end[0]}) of {host.name}" for end, host in ((own, caller), (other, listener))]
    fix = "open all TCP ports between the two in the firewall"
    if len(caller.addresses) > 1 or len(listener.addresses) > 1:
        fix += f", or choose other interfaces on all hosts, as with MULTIRING_INTERFACES=^{other[0]}"
    return Row(caller.name, Finding(Status.FAILED, f"{ends[0]} does not reach {ends[1]}: {why}", fix))


def _no_pair(caller: _Host, listener: _Host) -> Row:
    detail = f"has no address of a family (IPv4, IPv6) that {caller.name} has as well"
    fix = "choose interfaces of a network that both share with MULTIRING_INTERFACES"
    return Row(listener.name, Finding(Status.FAILED, detail, fix))
