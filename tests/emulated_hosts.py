"""Several hosts on one machine: network namespaces on a bridge, with links of a given rate.

    with EmulatedHosts(2, rate="1gbit") as hosts:
        process = hosts.start(0, ["python", "-c", "..."], env)
        hosts.cut(1)

Needs root and iproute2; `why_not()` says what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tests.support import REPOSITORY

__all__ = ["EmulatedHosts", "why_not"]

_DEVICE = "eth0"


@functools.cache
def why_not() -> str | None:
    """Why hosts cannot be emulated here; None: they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not all(shutil.which(tool) for tool in ("ip", "tc")):
        return "ip and tc are not installed (iproute2)"
    try:
        with EmulatedHosts(1):
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"


class EmulatedHosts:
    """Namespaces, gone with all that runs in them at the end.

    Args:
        count: How many.
        rate: Of each host's link, in both directions, as `tc` takes it; None: as fast as the machine.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        self.count, self._rate = count, rate
        self._switch = f"mr{os.getpid()}s"
        self._names = [f"mr{os.getpid()}h{host}" for host in range(count)]
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()
        self._remove()

    @staticmethod
    def address(host: int) -> str:
        """The host's address."""
        return f"10.93.0.{host + 1}"

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """A process on a host; its output can be read."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._names[host], *command],
            env={**os.environ, **env},
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def cut(self, host: int) -> None:
        """The host's link is down, without anybody being told."""
        _run("ip", "-n", self._switch, "link", "set", f"p{host}", "down")

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self._names):
            port = f"p{host}"
            _run("ip", "netns", "add", name)
            ends = [_DEVICE, "netns", name, "type", "veth", "peer", "name", port, "netns", self._switch]
            _run("ip", "link", "add", *ends)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", _DEVICE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", _DEVICE, "up")
            for space, device in ((name, _DEVICE), (self._switch, port)):
                if self._rate is not None:
                    limit = ["rate", self._rate, "burst", "256kb", "latency", "50ms"]
                    _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *limit)

    def _remove(self) -> None:
        for name in (self._switch, *self._names):
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)


def _run(*command: str) -> Any:
    return subprocess.run(command, check=True, capture_output=True, text=True)
