"""Which hosts a job runs on, and how many ranks each of them gets."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pwd
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiring.commands.launcher.interfaces import has_address
from multiring.errors import UsageError

__all__ = [
    "HostSlots",
    "RankSlot",
    "address_towards",
    "assign_slots",
    "is_here",
    "parse_hostfile",
    "parse_hosts",
]

# A name or an address of IPv4, or one of IPv6 in brackets; with who is to log in, and with slots.
_HOST = re.compile(r"(?P<name>(?:[^\s:=,@-][^\s:=,@]*@)?\w[\w.-]*)(?::(?P<slots>.*))?")
_ADDRESS = re.compile(r"\[(?P<name>[^\]]*)\](?::(?P<slots>.*))?")
_KNOWN = {"slots": "slots", "max_slots": "max_slots", "max-slots": "max_slots"}
_MAX_DIGITS = 6  # more slots on a host are a mistake


@dataclass(frozen=True)
class HostSlots:
    """A host and the number of ranks that it may get.

    Attributes:
        name: As ssh understands it; an address of IPv6 without brackets.
        slots: At least 1.
    """

    name: str
    slots: int


@dataclass(frozen=True)
class RankSlot:
    """Where a rank runs.

    Attributes:
        host: Name of its host; empty: the launcher's own.
        local_rank: Rank among those of the host.
        local_size: Number of ranks on the host.
        cross_rank: Number of the host.
        cross_size: Number of hosts.
    """

    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def parse_hosts(text: str) -> list[HostSlots]:
    """The hosts of `-H host1:4,host2:4`; one slot where there is no number.

    Raises:
        UsageError: The text is something else.
    """
    return _merged([_parse(part.strip(), f"-H {text}") for part in text.split(",")])


def parse_hostfile(path: Path) -> list[HostSlots]:
    """The hosts of a file as Open MPI and Horovod have it: `host slots=4`, or `host:4` as MPICH has it, one a
    line; `#` begins a comment. A host that is named again gets the slots of both.

    Raises:
        UsageError: The file cannot be read or has other lines.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hostfile {path}: {error}") from error
    # Other ends of lines than these are none for those who count lines.
    stripped = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.split("\n"), 1)]
    hosts = [_parse(line, f"--hostfile {path}, line {number}") for number, line in stripped if line]
    if not hosts:
        raise UsageError(f"--hostfile {path} names no host")
    return _merged(hosts)


def _parse(text: str, where: str) -> HostSlots:
    """One host: `host`, `host:4`, `[address]:4` or `host slots=4 max_slots=8`."""
    try:
        return _host(*re.sub(r"\s*=\s*", "=", text).split() or [""])
    except ValueError as error:
        expected = "host, host:4, [address]:4 or `host slots=4`"
        raise UsageError(f"{where}: {text[:100]!r} is no host: {error}; give {expected}") from None


def _host(word: str, *pairs: str) -> HostSlots:
    match = (_ADDRESS if word.startswith("[") else _HOST).fullmatch(word)
    if match is None:
        raise ValueError(f"{word!r} is no name")
    name = match["name"]
    if word.startswith("["):
        ipaddress.IPv6Address(name)
    given = {} if match["slots"] is None else {"slots": match["slots"]}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or key not in _KNOWN:
            raise ValueError(f"{pair!r} is neither slots=N nor max_slots=N")
        if _KNOWN[key] in given:
            raise ValueError(f"{_KNOWN[key]} are given twice")
        given[_KNOWN[key]] = value
    counts = {key: _count(key, value) for key, value in given.items()}
    slots = counts.get("slots", 1)
    if slots > counts.get("max_slots", slots):
        raise ValueError(f"max_slots={counts['max_slots']} are fewer than its slots")
    return HostSlots(name, slots)


def _count(key: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS):
        raise ValueError(f"{key} are a number from 1 to {10**_MAX_DIGITS - 1} and not {value[:20]!r}")
    if int(value) == 0:
        raise ValueError("it has no slots, so leave it out")
    return int(value)


def _merged(hosts: Sequence[HostSlots]) -> list[HostSlots]:
    """Each host once; this one has many names."""
    slots: dict[str, int] = {}
    for host in hosts:
        name = "" if is_here(host.name) else host.name
        slots[name] = slots.get(name, 0) + host.slots
    return [HostSlots(name, count) for name, count in slots.items()]


def is_here(host: str) -> bool:
    """Whether a name or an address is that of the host that this process runs on, and nobody else is to log
    in there."""
    own = socket.gethostname()
    user, _, host = host.rpartition("@")
    if user and user != _own_user():
        return False
    if host in ("localhost", own, own.partition(".")[0]):
        return True
    for *_, address in _look_up(host):
        # Any address of the loopback network leads here; these are meant for us.
        if address[0] in ("127.0.0.1", "127.0.1.1", "::1"):
            return True
        with contextlib.suppress(OSError):
            if has_address(address):
                return True
    return False


def _own_user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # in a container, say
        return ""


def _look_up(host: str) -> list[tuple[Any, ...]]:
    with contextlib.suppress(OSError, UnicodeError):
        return list(socket.getaddrinfo(host.rpartition("@")[2], 9, type=socket.SOCK_DGRAM))
    return []


def assign_slots(hosts: Sequence[HostSlots], ranks: int | None) -> list[RankSlot]:
    """A slot for each rank: the first host is filled first.

    Args:
        hosts: Each once.
        ranks: How many; None: as many as there are slots.

    Raises:
        UsageError: There are more ranks than slots.
    """
    slots = sum(host.slots for host in hosts)
    left = slots if ranks is None else ranks
    if left > slots:
        raise UsageError(
            f"-np {ranks} needs more slots than the {slots} that the hosts have: give more, as host:{ranks}"
        )
    taken: list[tuple[str, int]] = []
    for host in hosts:
        if count := min(host.slots, left):
            taken.append((host.name, count))
            left -= count
    return [
        RankSlot(name, local, count, number, len(taken))
        for number, (name, count) in enumerate(taken)
        for local in range(count)
    ]


def address_towards(hosts: Sequence[str]) -> str:
    """This host's address on the way to the first of other hosts that leads out of it; no packet is sent.

    Raises:
        UsageError: There is no such host, or no way to it.
    """
    loopback = ""
    for host in hosts:
        try:
            found = _look_up(host)
            if not found:
                raise OSError("there is no such name")
            family, kind, protocol, _, target = found[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                address = str(probe.getsockname()[0])
        except OSError as error:
            raise UsageError(
                f"host {host} cannot be reached from {socket.gethostname()}: {error}. If ssh knows it by "
                "another name, say by --address where the ranks reach this host"
            ) from error
        if not (address.startswith("127.") or address == "::1"):
            return address
        loopback = address
    return loopback
