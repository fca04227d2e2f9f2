"""Which hosts a job runs on, and how many ranks each of them gets."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiring.errors import UsageError
from multiring.launcher.interfaces import has_address

__all__ = ["HostSlots", "Seat", "address_towards", "is_here", "parse_hostfile", "parse_hosts", "seats"]

_HOST = re.compile(r"(?P<host>[^\s:=]+)(?::(?P<slots>\d+))?")
_KNOWN = ("slots", "max_slots", "max-slots")


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
class Seat:
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
    line; `#` begins a comment.

    Raises:
        UsageError: The file cannot be read or has other lines.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hostfile {path}: {error}") from error
    stripped = [(number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1)]
    hosts = [_parse(line, f"--hostfile {path}, line {number}") for number, line in stripped if line]
    if not hosts:
        raise UsageError(f"--hostfile {path} names no host")
    return _merged(hosts)


def _parse(text: str, where: str) -> HostSlots:
    name, *pairs = re.sub(r"\s*=\s*", "=", text).split() or [""]
    bracketed = re.fullmatch(r"\[([0-9a-fA-F:.]+)\](.*)", name)
    match = _HOST.fullmatch(f"v6{bracketed[2]}" if bracketed else name)
    given = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    known = len(given) == len(pairs) and set(given) <= set(_KNOWN)
    if match is None or match["host"].startswith("-") or not known:
        raise UsageError(f"{where}: {text!r} is no host: give host, host:4, [address]:4 or `host slots=4`")
    slots = match["slots"] or given.get("slots", "1")
    if not slots.isdecimal() or int(slots) < 1:
        raise UsageError(f"{where}: {text!r} has no slots; leave the host out")
    return HostSlots(bracketed[1] if bracketed else match["host"], int(slots))


def _merged(hosts: Sequence[HostSlots]) -> list[HostSlots]:
    """Each host once; this one has many names."""
    slots: dict[str, int] = {}
    for host in hosts:
        name = "" if is_here(host.name) else host.name
        slots[name] = slots.get(name, 0) + host.slots
    return [HostSlots(name, count) for name, count in slots.items()]


def is_here(host: str) -> bool:
    """Whether a name or an address is that of the host that this process runs on."""
    own = socket.gethostname()
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


def _look_up(host: str) -> list[tuple[Any, ...]]:
    with contextlib.suppress(OSError, UnicodeError):
        return list(socket.getaddrinfo(host.rpartition("@")[2], 9, type=socket.SOCK_DGRAM))
    return []


def seats(hosts: Sequence[HostSlots], ranks: int | None) -> list[Seat]:
    """A seat for each rank: the first host is filled first.

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
        Seat(name, local, count, number, len(taken))
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
