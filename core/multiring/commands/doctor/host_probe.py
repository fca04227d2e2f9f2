"""What `multiring doctor -H` runs on each host: it answers questions, one line of JSON each.

Answers begin with a mark, so that what a shell prints on its start is not taken for one.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from multiring import machine
from multiring.commands.doctor.checks import CHECKS, Finding, Status
from multiring.commands.env import versions
from multiring.errors import MultiringError

__all__ = ["MARK", "MODULE", "HostProbe", "Listener", "call_seconds", "main"]

MARK = "multiring-doctor "
MODULE = "multiring.commands.doctor.host_probe"

# The first is about one host alone, the others are told for each host in another way.
_NOT_HERE = ("self-test", "processors", "launcher")
# Enough for what a firewall lets pass, and twice sent again.
_CALL_SECONDS = 4.0
_CALLS_AT_ONCE = 64
_TOKEN_BYTES = 16


class Listener:
    """Listens on addresses of this host and sends each client a token; threads do it until it is closed.

    Args:
        addresses: The addresses.
        token: Of `_TOKEN_BYTES` bytes; a client that gets another one has reached another process.

    Attributes:
        ports: Where, for each address.

    Raises:
        OSError: An address cannot be listened on.
    """

    def __init__(self, addresses: Sequence[str], token: bytes) -> None:
        self._token = token
        self._sockets: list[socket.socket] = []
        try:
            for address in addresses:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                self._sockets.append(socket.create_server((address, 0), family=family))
        except OSError:
            self.close()
            raise
        self.ports: list[int] = [listening.getsockname()[1] for listening in self._sockets]
        for listening in self._sockets:
            threading.Thread(target=self._serve, args=(listening,), daemon=True).start()

    def close(self) -> None:
        """Listens no more."""
        for listening in self._sockets:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()

    def _serve(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                caller, _ = listening.accept()
                with caller, contextlib.suppress(OSError):
                    caller.settimeout(_CALL_SECONDS)
                    caller.sendall(self._token)


class HostProbe:
    """Looks at the host that it runs on."""

    def __init__(self) -> None:
        self._listener: Listener | None = None
        self._answers: dict[str, Callable[..., Any]] = {
            "facts": self._facts,
            "clock": time.time,
            "listen": self._listen,
            "call": self._call,
        }

    def answer(self, question: str, **details: Any) -> Any:
        """What JSON can hold.

        Raises:
            OSError: The system does not let us find out.
        """
        return self._answers[question](**details)

    def close(self) -> None:
        """Lets go of what it listens on."""
        if self._listener is not None:
            self._listener.close()

    def _facts(self, directory: str, environ: dict[str, str]) -> dict[str, Any]:
        os.environ.update(environ)
        found = {name: text for name, text in versions().items() if name != "native library"}
        addresses, problem = _addresses()
        checks = {name: check for name, check in CHECKS.items() if name not in _NOT_HERE}
        findings = [(name, _run(check)) for name, check in checks.items()]
        return {
            "host": socket.gethostname(),
            "machine": _machine(),
            "versions": {**found, "python": platform.python_version()},
            "cores": machine.core_allowance(),
            "NUMA nodes": len(machine.numa_nodes()),
            "directory": os.path.isdir(directory) and os.access(directory, os.X_OK),
            "addresses": addresses,
            "no addresses": problem,
            "findings": [
                [name, finding.status.value, finding.detail, finding.fix]
                for name, finding in findings
                if finding.status is not Status.OK
            ],
        }

    def _listen(self, addresses: list[str], token: str) -> list[int]:
        self._listener = Listener(addresses, bytes.fromhex(token))
        return self._listener.ports

    def _call(self, targets: list[list[Any]]) -> list[str]:
        if not targets:
            return []
        with ThreadPoolExecutor(min(_CALLS_AT_ONCE, len(targets))) as pool:
            return list(pool.map(_reach, targets))


def call_seconds(count: int) -> float:
    """How long calls to so many targets may take: none of them may answer."""
    return -(-count // _CALLS_AT_ONCE) * 2 * _CALL_SECONDS  # to connect, and to hear the token


def _reach(target: Sequence[Any]) -> str:
    """Why the other end, from an address, at an address and a port, with a token, is not reached, or ""."""
    source, address, port, token = target
    try:
        with socket.create_connection(
            (address, port), _CALL_SECONDS, (source, 0) if source else None
        ) as call:
            call.settimeout(_CALL_SECONDS)
            heard = call.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
    except TimeoutError:
        return f"no answer within {_CALL_SECONDS:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "" if heard == bytes.fromhex(token) else "somebody else answers there"


def _addresses() -> tuple[list[tuple[str, str, int]], str]:
    """Where ranks of this host would listen, or why nowhere."""
    try:
        from multiring import _core, config

        return _core.interface_addresses(config.load().interfaces), ""
    except (ImportError, MultiringError) as error:
        return [], str(error)


def _machine() -> str:
    """The same for two names of what ranks take for one host."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


def _run(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # it says something about the host, too
        return Finding(Status.FAILED, f"{type(error).__name__}: {error}", "report this")


def main() -> int:
    """Answers until standard input ends."""
    probe = HostProbe()
    for line in sys.stdin:
        try:
            told = {"answer": probe.answer(**json.loads(line))}
        except OSError as error:
            told = {"error": str(error)}
        print(f"\n{MARK}{json.dumps(told)}", flush=True)
    probe.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
