"""Asks a `HostProbe`: here, or on another host by ssh."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from multiring.commands.doctor.checks import Finding, Status
from multiring.commands.doctor.host_probe import MARK, MODULE, HostProbe

__all__ = ["HostSession", "RemoteSession", "SessionError"]

_SSH_FAILED = 255
_NO_SUCH_PROGRAM = (126, 127)
_VERSIONS = (
    f"import platform; print('\\n{MARK}' + platform.python_version()); "
    f"import importlib.metadata as m; print('{MARK}' + m.version('multiring'))"
)


class SessionError(Exception):
    """A host cannot be asked; `finding` tells why and what to fix."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.detail)
        self.finding = finding


class HostSession:
    """Asks this host."""

    def __init__(self) -> None:
        self._probe = HostProbe()

    def ask(self, question: str, timeout: float, **details: Any) -> Any:
        """The answer of `HostProbe.answer`.

        Raises:
            SessionError: There is none within `timeout` seconds.
        """
        try:
            # As it comes from another host.
            return json.loads(json.dumps(self._probe.answer(question, **details)))
        except OSError as error:
            raise SessionError(_unexpected(str(error))) from error

    def close(self) -> None:
        """Ends it."""
        self._probe.close()


class RemoteSession(HostSession):
    """Asks another host.

    Args:
        host: Its name.
        ssh: The command that runs a command on a host, with its options.
        python: The Python there; empty: at the place of this one.
    """

    def __init__(self, host: str, ssh: Sequence[str], python: str) -> None:
        self._host, self._ssh, self._python = host, list(ssh), python or sys.executable
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed by close()
        self._read = b""
        self._late = 0  # answers that are still to come, and nobody waits for any more
        try:
            self._process = subprocess.Popen(
                [*self._ssh, host, f"exec {shlex.quote(self._python)} -P -m {MODULE}"],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except OSError as error:
            self._errors.close()
            fix = "install it, or name what runs a command on another host with --ssh"
            raise SessionError(
                Finding(Status.FAILED, f"{ssh[0]} cannot be started: {error.strerror}", fix)
            ) from error

    def ask(self, question: str, timeout: float, **details: Any) -> Any:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which reading tells
            self._process.stdin.write(json.dumps({"question": question, **details}).encode() + b"\n")
        deadline = time.monotonic() + timeout
        self._late += 1  # there is one answer to each question, and they come in order
        while True:
            line = self._line(deadline)
            if not line.startswith(MARK):
                continue
            self._late -= 1
            if self._late == 0:
                told = json.loads(line.removeprefix(MARK))
                if "error" in told:
                    raise SessionError(_unexpected(told["error"]))
                return told["answer"]

    def close(self) -> None:
        """Ends it: the end of its input tells it to."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def _line(self, deadline: float) -> str:
        assert self._process.stdout is not None
        while b"\n" not in self._read:
            with selectors.PollSelector() as selector:  # with hundreds of hosts, beyond what select() takes
                selector.register(self._process.stdout, selectors.EVENT_READ)
                ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise SessionError(
                    Finding(
                        Status.FAILED,
                        "does not answer in time",
                        f"see whether `{shlex.join(self._ssh)} {self._host} true` ends",
                    )
                )
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise SessionError(self._end())
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        return line.decode(errors="replace")

    def _end(self) -> Finding:
        """Why it has ended."""
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = lines[-1].strip() if lines else f"exit code {code}"
        if code == _SSH_FAILED or code < 0:  # or a signal, as of Ctrl-C, has ended it
            fix = (
                f"make `ssh -o BatchMode=yes {self._host} true` work: a key without a password, the host's "
                "key known, its name and port right, no firewall between"
            )
            return Finding(Status.FAILED, f"ssh fails: {last}", fix)
        there = self._versions_there()
        if not there:
            fix = "install it there, or name the Python that has multiring with --remote-python"
            if code in _NO_SUCH_PROGRAM:
                return Finding(Status.FAILED, f"there is no {self._python}", fix)
            return Finding(Status.FAILED, f"{self._python} does not run there: {last}", fix)
        if not re.search(r"No module named '?multiring", last):
            return Finding(
                Status.FAILED, f"multiring does not start there with Python {there[0]}: {last}", _INSTALL
            )
        has = f"multiring {there[1]}, another version," if there[1:] else "no multiring"
        return Finding(Status.FAILED, f"{self._python}, Python {there[0]}, has {has} there", _INSTALL)

    def _versions_there(self) -> list[str]:
        """Those of Python and multiring, as far as they are to be had."""
        command = f"exec {shlex.quote(self._python)} -c {shlex.quote(_VERSIONS)}"
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            run = subprocess.run(
                [*self._ssh, self._host, command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )
            lines = run.stdout.splitlines()
            return [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
        return []


_INSTALL = (
    "install the multiring of this host there, for Python "
    f"{sys.version_info.major}.{sys.version_info.minor}; --remote-python names another Python"
)


def _unexpected(text: str) -> Finding:
    return Finding(Status.FAILED, text, "look at what the system of this host says; then report this")
