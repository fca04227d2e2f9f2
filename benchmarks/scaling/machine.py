"""The machine that is simulated, and who does an allreduce on it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "CONTENDERS",
    "MACHINE",
    "OURS",
    "OUR_RING",
    "Machine",
    "environment",
    "is_left_out",
    "is_ours",
    "is_timing_only",
]

OURS = "multiring"
OUR_RING = "multiring's ring"

# SimGrid's options that choose how MPI_Allreduce works (its names: lr, rdb, and the selectors' tables).
CONTENDERS: dict[str, tuple[str, ...]] = {
    OURS: (),
    OUR_RING: (),
    "ring": ("--cfg=smpi/allreduce:lr",),
    "recursive doubling": ("--cfg=smpi/allreduce:rdb",),
    "Open MPI's choice": ("--cfg=smpi/coll-selector:ompi",),
    "MPICH's choice": ("--cfg=smpi/coll-selector:mpich",),
}

# Those that add in a copy of the arrays on each rank: 27 GB of copies on 1,024 ranks, 13 GB on half of them.
_COPYING = ("recursive doubling", "Open MPI's choice", "MPICH's choice")
_MAX_RANKS_WITH_COPIES = 512


@dataclass(frozen=True)
class Machine:
    """Hosts with the same number of ranks, each with one link to a switch that is never the bottleneck.

    Attributes:
        ranks_per_host: Ranks, and processors, of a host.
        bytes_per_second: Of a host's link in each direction.
        usable: The part of it that messages get.
        latency: Of a link, in seconds; two are between hosts.
        message_seconds: Of the processor for each message sent, and for each received.
        memory_bytes_per_second: That one rank reads and writes while it adds and copies.
    """

    ranks_per_host: int = 4
    bytes_per_second: float = 12.5e9
    usable: float = 0.95
    latency: float = 0.5e-6
    message_seconds: float = 1e-6
    memory_bytes_per_second: float = 20e9

    def platform(self, hosts: int) -> str:
        """The machine with so many hosts in SimGrid's language."""
        return f"""<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <cluster id="cluster" prefix="node-" suffix="" radical="0-{hosts - 1}" speed="1Gf"
           core="{self.ranks_per_host}" bw="{self.bytes_per_second:.0f}Bps" lat="{self.latency}s"
           loopback_bw="{self.memory_bytes_per_second / 2:.0f}Bps" loopback_lat="0.2us"/>
</platform>
"""

    def costs(self) -> str:
        """The same as the line of a tuning: a rank sends, and receives, each of its messages."""
        costs = {
            "latency": 2 * self.latency,
            "bytes_per_second": self.bytes_per_second * self.usable,
            "synchronisation": 0.0,
            "message_seconds": 2 * self.message_seconds,
            "memory_bytes_per_second": self.memory_bytes_per_second,
        }
        return "costs " + " ".join(f"{name}={value!r}" for name, value in costs.items())

    def memory_seconds(self, nbytes: int) -> float:
        """What the core's additions and copies of an allreduce of `nbytes` take a rank.

        It copies what it has to its host's memory, reads its share of all, adds, and copies the results out:
        about five bytes read or written for each of its own.
        """
        return 5.0 * nbytes / self.memory_bytes_per_second

    def memory_seconds_per_byte_sent(self, hosts: int) -> float:
        """The same for each byte that a rank sends to other hosts."""
        sent = 2.0 * (hosts - 1) / hosts / self.ranks_per_host
        return self.memory_seconds(1) / sent

    def addition_seconds(self, nbytes: int) -> float:
        """What a library's additions of an allreduce of `nbytes` take at least.

        For each byte two are read and one is written. What it copies between the ranks of a host is
        simulated: a message is read and written once.
        """
        return 3.0 * nbytes / self.memory_bytes_per_second


# As the system of 2017 is described: 64 hosts of 4 ranks with 100 Gbit/s InfiniBand; then more of them.
MACHINE = Machine()


def is_ours(contender: str) -> bool:
    """Whether the core runs, not a library that SimGrid has."""
    return contender in (OURS, OUR_RING)


def environment(contender: str, machine: Machine, hosts: int) -> dict[str, str]:
    """What the core is told: the costs of the machine, which jobs measure; or a ring, which a user forces."""
    if contender == OUR_RING:
        return {"MULTIRING_MODE": f"{machine.ranks_per_host}px{hosts}r", "MULTIRING_ORDER": "any"}
    return {"MULTIRING_TUNING": machine.costs()} if contender == OURS else {}


def is_left_out(contender: str, ranks: int) -> bool:
    """The core on one host, which sends no messages; and rings of many hosts, whose hops take hours."""
    return (is_ours(contender) and ranks == MACHINE.ranks_per_host) or (contender == OUR_RING and ranks > 256)


def is_timing_only(contender: str, ranks: int) -> bool:
    """Whether the messages that are measured carry no data, for want of memory; times are the same."""
    return contender in _COPYING and ranks > _MAX_RANKS_WITH_COPIES
