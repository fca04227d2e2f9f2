"""Starts the ranks of a benchmark on emulated hosts, by `multiring run` or by Open MPI's `mpirun`.

As a program it is what both start in place of a rank or of a remote shell: it enters the host and becomes
what was meant.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from multiring.benchmarks import launch
from multiring.benchmarks.emulation.hosts import CABLES, EmulatedHosts, command_in, why_not
from multiring.commands.launcher.job import run_job
from multiring.commands.launcher.rank_starter import JobOptions
from multiring.errors import UsageError

__all__ = ["HOSTS", "Emulation", "bytes_per_second", "rank_environment", "start"]

MODULE = "multiring.benchmarks.emulation.start"
_STORE_PORT = 29400
# Process ids, one in each host. Not MULTIRING_..., which would be settings.
HOSTS = "EMULATED_HOSTS"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Emulation:
    """Hosts that are alike.

    Attributes:
        hosts: How many.
        ranks: On each of them.
        rates: Of each link of a host, as `tc` takes it.
        cables: "ring" or "line": there is no switch, and the one rate is that of cables between neighbours.
        switch_queue: What the switch keeps for each host, as `tc` takes it; empty: 50 ms of the rate.
    """

    hosts: int
    ranks: int
    rates: tuple[str, ...]
    cables: str = ""
    switch_queue: str = ""

    @classmethod
    def parse(cls, layout: str, rates: str) -> Emulation:
        """From `--emulate 2x4` and `--rate 1gbit`, `--rate 500mbit,500mbit` or `--rate 1gbit --cables ring`.

        Raises:
            argparse.ArgumentTypeError: A text is something else.
        """
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", layout)
        if match is None or not 2 <= int(match[1]) <= 250:
            raise argparse.ArgumentTypeError(
                f"{layout!r} is no layout: give hosts x ranks on each, such as 2x4; from 2 to 250 hosts"
            )
        rates, _, switch_queue = rates.partition(" --switch-queue ")
        rates, _, cables = rates.partition(" --cables ")
        links = tuple(rates.split(","))
        if cables and (len(links) > 1 or int(match[1]) < 3):
            raise argparse.ArgumentTypeError("--cables is for three hosts or more, and takes one --rate")
        for rate in links:
            bytes_per_second(rate)
        return cls(int(match[1]), int(match[2]), links, cables, switch_queue)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks

    @property
    def bytes_per_second(self) -> float:
        """Of a host's links together, in each direction."""
        return sum(map(bytes_per_second, self.links.values()))

    @property
    def links(self) -> dict[str, str]:
        """The rate of each link of a host, by its device."""
        if self.cables:
            return dict.fromkeys(CABLES, self.rates[0])
        return {f"eth{link}": rate for link, rate in enumerate(self.rates)}

    def connect(self) -> EmulatedHosts:
        """The hosts, to be entered."""
        if self.cables:
            return EmulatedHosts(self.hosts, None, self.cables, self.rates[0])
        return EmulatedHosts(self.hosts, self.rates, switch_queue=self.switch_queue)

    def settings(self) -> dict[str, str]:
        """Variables of the ranks."""
        if not self.cables:
            return {}
        return {
            "MULTIRING_HOST_LINKS": self.cables,
            "MULTIRING_INTERFACES": EmulatedHosts.cables_network(),
        }

    def __str__(self) -> str:
        """As it is written on the command line."""
        cables = f" --cables {self.cables}" if self.cables else ""
        queue = f" --switch-queue {self.switch_queue}" if self.switch_queue else ""
        return f"{self.hosts}x{self.ranks} --rate {','.join(self.rates)}{cables}{queue}"


def bytes_per_second(rate: str) -> float:
    """What `tc` makes of a rate such as "500mbit".

    Raises:
        argparse.ArgumentTypeError: The text is no rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{rate!r} is no rate: give such as 1gbit or 500mbit, for each link")
    return float(match[1]) * _UNITS[match[2]] / 8


def start(emulation: Emulation, arguments: Sequence[str], *, mpi: bool) -> int:
    """Runs `multiring bench` with `arguments` as a job on emulated hosts; returns its exit code.

    Args:
        emulation: The hosts.
        arguments: The words after `multiring bench`.
        mpi: Whether the ranks need MPI.

    Raises:
        UsageError: Hosts cannot be emulated here, or MPI cannot be started.
    """
    if reason := why_not():
        raise UsageError(f"hosts cannot be emulated here: {reason}")
    if mpi and (vendor := launch.find_mpirun().vendor) != launch.OPEN_MPI:
        raise UsageError(
            f"MPI is started on emulated hosts by Open MPI's mpirun only, not by {vendor or 'another'}'s"
        )
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(emulation.connect())
        except OSError as error:
            raise UsageError(f"the hosts {emulation} cannot be emulated: {error}") from error
        environ = {
            HOSTS: ",".join(map(str, hosts.process_ids)),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **emulation.settings(),
        }
        if mpi:
            return _start_mpi(emulation, hosts, arguments, environ)
        words = ["rank", str(emulation.ranks), *arguments]
        return run_job(
            JobOptions(
                emulation.size, words, module=MODULE, bind="none", tag_output=False, environment=environ
            )
        )


def _start_mpi(
    emulation: Emulation, hosts: EmulatedHosts, arguments: Sequence[str], environ: Mapping[str, str]
) -> int:
    shell = f"{sys.executable} -m {MODULE} shell"
    host_list = ",".join(f"{hosts.address(host)}:{emulation.ranks}" for host in range(emulation.hosts))
    meeting = {
        "MULTIRING_STORE": f"tcp://{hosts.address(0)}:{_STORE_PORT}",
        "MULTIRING_SECRET": secrets.token_hex(32),
    }
    command = [
        str(launch.find_mpirun().path),
        *("--prtemca", "plm_ssh_agent", shell),
        *("--host", host_list, "--map-by", f"ppr:{emulation.ranks}:node:oversubscribe", "--bind-to", "none"),
        *(word for name in (*environ, *meeting) for word in ("-x", name)),
        *("-n", str(emulation.size)),
        *(sys.executable, "-u", "-m", launch.MODULE, *arguments),
    ]
    return launch.run_mpi(
        hosts.command(0, command), launch.mpi_environment({**os.environ, **environ, **meeting})
    )


def rank_environment(environ: Mapping[str, str], per_host: int) -> dict[str, str]:
    """The place of a rank of `multiring run` on hosts of so many ranks each, in place of that on one host."""
    rank, size = int(environ["MULTIRING_RANK"]), int(environ["MULTIRING_SIZE"])
    settings = {
        "LOCAL_RANK": rank % per_host,
        "LOCAL_SIZE": per_host,
        "CROSS_RANK": rank // per_host,
        "CROSS_SIZE": size // per_host,
    }
    return {**environ, **{f"MULTIRING_{name}": str(value) for name, value in settings.items()}}


def main(words: Sequence[str]) -> None:
    """`rank RANKS_PER_HOST ARGUMENT...` or `shell ADDRESS COMMAND...`; becomes what it starts."""
    what, where, *rest = words
    environ = dict(os.environ)
    if what == "rank":
        environ = rank_environment(environ, int(where))
        host = int(environ["MULTIRING_CROSS_RANK"])
        command = [sys.executable, "-u", "-m", launch.MODULE, *rest]
    else:
        host = int(where.rpartition(".")[2]) - 1
        command = ["sh", "-c", " ".join(rest)]  # as ssh does
    inside = command_in(int(environ[HOSTS].split(",")[host]), command)
    os.execvpe(inside[0], inside, environ)


if __name__ == "__main__":
    main(sys.argv[1:])
