"""Several hosts on one machine: network namespaces on bridges, with links of given rates.

    with EmulatedHosts(2, rates=["1gbit"]) as hosts:
        process = subprocess.Popen(hosts.command(0, ["python", "-c", "..."]))
        hosts.cut(1)

They share processors, memory and files. A namespace has no name: it lives as long as a process in it, and the
first one in each dies with the process that made it. So nothing is left behind, whatever becomes of that.

Needs root, iproute2 and util-linux; `why_not()` says what is missing.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["CABLES", "EmulatedHosts", "command_in", "why_not"]

# The devices of a host's cables, to the next host and to the one before.
CABLES = ("next", "previous")

_TOOLS = ("ip", "tc", "nsenter", "unshare", "setpriv")
_PATIENCE = 10.0  # seconds
# Of the token bucket that limits a link: enough for a timer's tick at 10 Gbit/s.
_BURST = "256kb"
_LATENCY = "50ms"
# The same where the switch's queue is short, which the burst adds to: a packet of the largest size.
_QUEUE_BURST = "64kb"


@functools.cache
def why_not() -> str | None:
    """Why hosts cannot be emulated here; None: they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in _TOOLS if not shutil.which(tool)]:
        return f"{' and '.join(missing)} are not installed (iproute2, util-linux)"
    try:
        with EmulatedHosts(1, ["1gbit"]):
            return None
    except OSError as error:
        return f"network namespaces cannot be made: {error}"


def command_in(process_id: int, command: Sequence[str]) -> list[str]:
    """The command that runs `command` in the namespaces of a process."""
    return ["nsenter", "--target", str(process_id), "--net", "--uts", "--", *command]


class EmulatedHosts:
    """Hosts, gone at the end with what has been limited and connected.

    Args:
        count: How many.
        rates: For each link of a host, in both directions, as `tc` takes it ("1gbit"); None: one link, as
            fast as the machine. All hosts have the same links, and each link a network of its own.
        cables: "ring" or "line": besides, each host and the next, and in a ring the last and the first, have
            a cable of their own, a network of two. Nothing passes from cable to cable.
        cable_rate: Of each cable, as `rates`.
        switch_queue: What the switch keeps for each host at most, as `tc` takes it ("64kb"); what comes
            when it is full is lost. Empty: as much as is sent in 50 ms.

    Raises:
        OSError: They cannot be made; says what went wrong.
    """

    def __init__(
        self,
        count: int,
        rates: Sequence[str] | None = None,
        cables: str = "",
        cable_rate: str | None = None,
        switch_queue: str = "",
    ) -> None:
        self.count = count
        ends = {"": 0, "ring": count, "line": count - 1}[cables]
        self._cables = [(host, (host + 1) % count) for host in range(ends)]
        self._cable_rate = cable_rate
        self._switch_queue = switch_queue
        self._rates: list[str | None] = [None] if rates is None else list(rates)
        self._cleanup = ExitStack()
        self._holders: list[int] = []  # of the hosts, and behind them that of the switches

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    @staticmethod
    def address(host: int, link: int = 0) -> str:
        """The host's address on a link."""
        return f"10.93.{link}.{host + 1}"

    @staticmethod
    def name(host: int) -> str:
        """What the host calls itself."""
        return f"emulated{host}"

    @property
    def process_ids(self) -> list[int]:
        """For each host a process that is in it."""
        return self._holders[: self.count]

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on a host."""
        return command_in(self._holders[host], command)

    def cut(self, host: int) -> None:
        """The host's links are down, without anybody being told."""
        for link in range(len(self._rates)):
            self._run(self.count, "ip", "link", "set", _port(host, link), "down")
        for pair in self._cables:
            if host in pair:
                self._run(host, "ip", "link", "set", CABLES[pair.index(host)], "down")

    def slow_down(self, host: int, rate: str, queue: str = "1500kb") -> None:
        """What the host sends takes this rate from now on, behind a queue of so many bytes as switches have.
        For links that were made with a rate."""
        for link in range(len(self._rates)):
            # No less burst than before: a packet that waits and is larger would never leave.
            limit = ["root", "tbf", "rate", rate, "burst", _BURST, "limit", queue]
            self._run(host, "tc", "qdisc", "change", "dev", _device(link), *limit)

    @staticmethod
    def cables_network() -> str:
        """The network that all cables are in, as MULTIRING_INTERFACES takes it."""
        return "10.94.0.0/16"

    def sent_bytes(self, host: int, link: int) -> int:
        """Bytes that have left the host by a link, with all headers."""
        path = f"/sys/class/net/{_device(link)}/statistics/tx_bytes"
        # sysfs shows the devices of who mounted it: of the host only in a mount of its own.
        script = f"mount -t sysfs sysfs /sys && cat {path}"
        return int(self._run(host, "unshare", "--mount", "sh", "-c", script))

    def _make(self) -> None:
        for host in range(self.count + 1):
            self._holders.append(self._hold())
            self._run(host, "ip", "link", "set", "lo", "up")
            if host < self.count:
                self._run(host, "hostname", self.name(host))
        for link, rate in enumerate(self._rates):
            bridge = f"bridge{link}"
            self._run(self.count, "ip", "link", "add", bridge, "type", "bridge")
            self._run(self.count, "ip", "link", "set", bridge, "up")
            for host in range(self.count):
                self._connect(host, link, bridge, rate)

        for number, pair in enumerate(self._cables):
            self._lay_cable(number, pair)
        for pair in self._cables:
            for host, device in zip(pair, CABLES, strict=True):
                self._await_carrier(host, device)

    def _lay_cable(self, number: int, hosts: tuple[int, int]) -> None:
        holders = [str(self._holders[host]) for host in hosts]
        ends = ["netns", holders[0], "type", "veth", "peer", "name", CABLES[1], "netns", holders[1]]
        _run("ip", "link", "add", CABLES[0], *ends)
        for end, (host, device) in enumerate(zip(hosts, CABLES, strict=True)):
            self._run(host, "ip", "addr", "add", f"10.94.{number}.{end + 1}/24", "dev", device)
            self._run(host, "ip", "link", "set", device, "up")
            if self._cable_rate is not None:
                limit = ["root", "tbf", "rate", self._cable_rate, "burst", _BURST, "latency", _LATENCY]
                self._run(host, "tc", "qdisc", "add", "dev", device, *limit)

    def _await_carrier(self, host: int, device: str) -> None:
        """The kernel tells a little later that both ends are up."""
        until = time.monotonic() + _PATIENCE
        while "LOWER_UP" not in self._run(host, "ip", "-brief", "link", "show", device):
            if time.monotonic() > until:
                raise OSError(f"the cable {device!r} of host {host} is not up after {_PATIENCE:.0f} s")
            time.sleep(0.01)

    def _connect(self, host: int, link: int, bridge: str, rate: str | None) -> None:
        port, device, switch = _port(host, link), _device(link), self.count
        holder, switch_holder = str(self._holders[host]), str(self._holders[switch])
        ends = [device, "netns", holder, "type", "veth", "peer", "name", port, "netns", switch_holder]
        _run("ip", "link", "add", *ends)
        self._run(switch, "ip", "link", "set", port, "master", bridge, "up")
        self._run(host, "ip", "addr", "add", f"{self.address(host, link)}/24", "dev", device)
        self._run(host, "ip", "link", "set", device, "up")
        if rate is None:
            return
        limit = ["root", "tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY]
        self._run(host, "tc", "qdisc", "add", "dev", device, *limit)
        if self._switch_queue:
            limit = ["root", "tbf", "rate", rate, "burst", _QUEUE_BURST, "limit", self._switch_queue]
        self._run(switch, "tc", "qdisc", "add", "dev", port, *limit)

    def _hold(self) -> int:
        """The id of a process in new namespaces, which ends with this one: by the signal, or, where this one
        is gone before it is asked for, by the end of its input."""
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "cat", "-"]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert holder.stdin is not None
        self._cleanup.callback(holder.stdin.close)
        self._cleanup.callback(holder.wait)
        self._cleanup.callback(holder.kill)
        # It becomes `cat` when it is in the namespaces.
        until = time.monotonic() + _PATIENCE
        while Path(f"/proc/{holder.pid}/comm").read_text().strip() != "cat":
            if holder.poll() is not None:
                raise OSError(f"`{' '.join(command)}` ended with exit code {holder.returncode}")
            if time.monotonic() > until:
                raise OSError(f"`{' '.join(command)}` did not start in {_PATIENCE:.0f} s")
            time.sleep(0.001)
        return holder.pid

    def _run(self, host: int, *command: str) -> str:
        return _run(*command_in(self._holders[host], command))


def _port(host: int, link: int) -> str:
    return f"p{host}l{link}"


def _device(link: int) -> str:
    return f"eth{link}"


def _run(*command: str) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "; ".join(part.strip() for part in (done.stderr, done.stdout) if part.strip())
        raise OSError(
            f"`{' '.join(command)}` failed with exit code {done.returncode}: {said or 'it says nothing'}"
        )
    return done.stdout
