"""One rank as a process of this host."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import signal
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from multiring.commands.launcher.descriptors import limits_of_children

__all__ = ["PIPE_BYTES", "RankProcess", "signal_name"]

PIPE_BYTES = 1 << 20  # what every user may have in a pipe
_PR_SET_PDEATHSIG = 1


def signal_name(number: int) -> str:
    """The name of a signal, as "SIGKILL"; "signal 40" where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class RankProcess:
    """Starts the process of one rank in a session and process group of its own.

    It dies with the launcher, even if that is killed with SIGKILL. Its process id stays reserved until
    `release`, so that signals to its group can never hit other processes.

    Args:
        rank: The rank.
        command: Program and arguments.
        environ: Its environment.
        cpus: Processors it may run on, or None for those of the launcher.
        stdin: Whether it gets our stdin; otherwise /dev/null.
        piped: Whether stdout and stderr are pipes to us; otherwise they are our own.
        first_input: What its stdin, then a pipe from us, begins with; None: it is none.
        kept: Descriptors of ours that it gets as well.

    Raises:
        OSError: The program cannot be started.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        cpus: frozenset[int] | None,
        stdin: bool,
        piped: bool,
        first_input: str | None = None,
        kept: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        self.code: int | None = None  # exit code, or minus the signal that ended it; None while it runs
        output = subprocess.PIPE if piped else None
        with warnings.catch_warnings():
            # Python warns of running code between fork and exec where native libraries have made threads;
            # ours only makes system calls there.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = subprocess.Popen(
                command,
                env=environ,
                bufsize=0,
                stdin=subprocess.PIPE if first_input is not None else None if stdin else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=kept,
                preexec_fn=_before_exec(os.getpid(), cpus),
            )
        self.pid = self._process.pid
        if first_input is not None:
            assert self._process.stdin is not None
            # The launcher waits for nobody: all of it has to fit into the pipe.
            with contextlib.suppress(PermissionError):  # all pipes of a user have a limit, too
                fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            if len(first_input) > fcntl.fcntl(self._process.stdin, fcntl.F_GETPIPE_SZ):
                self.signal_group(signal.SIGKILL)
                raise OSError(
                    errno.EPERM,
                    "the kernel gives no pipe for the command line and --env variables "
                    "(/proc/sys/fs/pipe-user-pages-soft): put them into a file",
                )
            os.set_blocking(self._process.stdin.fileno(), False)
            with contextlib.suppress(OSError):  # it has ended already, and its exit code tells why
                self.tell(first_input)

    def tell(self, text: str) -> None:
        """Writes to its stdin, which has to be a pipe; not more than `PIPE_BYTES` that are not read yet.

        Raises:
            OSError: It does not read any more, or too slowly.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())

    def outputs(self) -> dict[str, int]:
        """The reading ends of its pipes "stdout" and "stderr", if it has any; the caller closes them."""

        def give_away(stream: IO[bytes] | None) -> int:
            assert stream is not None
            descriptor = os.dup(stream.fileno())
            stream.close()
            return descriptor

        if self._process.stdout is None:
            return {}
        return {"stdout": give_away(self._process.stdout), "stderr": give_away(self._process.stderr)}

    @property
    def is_running(self) -> bool:
        """Whether it had not ended when `look` was last called."""
        return self.code is None

    def look(self) -> bool:
        """Whether it has ended since the last look."""
        if self.code is not None:
            return False
        # WNOWAIT leaves the zombie, which keeps the process id and with it the group's number from being
        # reused.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return False
        self.code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return True

    def signal(self, number: int) -> None:
        """Sends a signal to the process alone."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Sends a signal to the process and to what it has started in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def release(self) -> None:
        """Collects the ended process; from then on it cannot be signalled."""
        if self.code is not None:
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def _before_exec(launcher: int, cpus: frozenset[int] | None) -> Callable[[], None]:
    """What the child does between fork and exec; everything it needs is looked up here, before the fork."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    limits = limits_of_children()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # the launcher died before the line above
            os._exit(1)
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
        if limits is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    return prepare
