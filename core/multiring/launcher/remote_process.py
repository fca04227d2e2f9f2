"""A rank on another host: the process of ssh here, and what it says to remote_rank.py there."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from multiring.errors import UsageError
from multiring.launcher.process import PIPE_BYTES, RankProcess

__all__ = ["SSH", "RemoteProcess", "current_directory"]

# No terminal, which would echo what is said; a host that is gone is noticed within 15 seconds.
SSH = (
    "ssh -T -x -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 "
    "-o ClearAllForwardings=yes"
)
_MODULE = "multiring.launcher.remote_rank"
_MOST_SIGNALS = 64


class RemoteProcess(RankProcess):
    """Starts a rank on another host by ssh, in the directory of the same name.

    What the rank is to do goes there on ssh's standard input, which nobody else can read, and so do signals.
    When that ends, because ssh or we do, the rank is ended there.

    Args:
        rank: The rank.
        ssh: The command that runs a command on a host, with its options.
        host: The host.
        python: The Python there that has multiring.
        program: The program and its arguments; the module's where there is one.
        module: The module to run instead of a program.
        bind: "core", "none" or None, as `rank_starter.JobOptions` has it.
        environ: What is added to the environment there.

    Raises:
        OSError: ssh cannot be started.
        UsageError: There is more to say than a pipe holds.
    """

    def __init__(
        self,
        rank: int,
        *,
        ssh: Sequence[str],
        host: str,
        python: str,
        program: Sequence[str],
        module: str | None,
        bind: str | None,
        environ: Mapping[str, str],
    ) -> None:
        order = {
            "rank": rank,
            "directory": current_directory(),
            "program": list(program),
            "module": module,
            "bind": bind,
            "environ": dict(environ),
        }
        command = [*ssh, host, f"exec {shlex.quote(python or sys.executable)} -m {_MODULE}"]
        told = json.dumps(order) + "\n"
        if len(told) > PIPE_BYTES // 2:
            raise UsageError(
                f"arguments and --env variables take {len(told)} bytes, too many for ranks on other hosts: "
                "put them into a file"
            )
        super().__init__(rank, command, os.environ, cpus=None, stdin=False, piped=True, told=told)
        self._killed = False

    def look(self) -> bool:
        """Whether it has ended since the last look. A shell's code for a signal is taken for one."""
        ended = super().look()
        if ended and self.code is not None and 128 < self.code <= 128 + _MOST_SIGNALS:
            self.code = 128 - self.code
        return ended

    def signal(self, number: int) -> None:
        """Sends a signal to the process there alone."""
        self._say(f"process {number}", number)

    def signal_group(self, number: int) -> None:
        """Sends a signal to the process there and to what it has started in its group."""
        self._say(f"group {number}", number)

    def _say(self, line: str, number: int) -> None:
        if number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGCONT):
            return super().signal_group(number)  # ssh alone: a job on several hosts does not stop at once
        with contextlib.suppress(OSError, ValueError):
            self.tell(line + "\n")
        if number == signal.SIGKILL:
            # ssh ends when the rank has; one that does not listen is ended the next time.
            if self._killed:
                super().signal_group(number)
            self._killed = True
        return None


def current_directory() -> str:
    """The current directory by the name that the user gave it, which other hosts may know it by, too."""
    named = os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(named) and os.path.samefile(named, "."):
            return named
    return str(Path.cwd())
