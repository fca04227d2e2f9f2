"""Tidies up after a job, however its launcher has ended. Run as a program of its own, without the package.

The launcher holds the writing end of our stdin. When that closes, because the job is over or because the
launcher was killed, every process of the job that is left is killed and the job's directory is removed.
Processes of the job are those that carry its id in their environment and those in the session of a rank; the
launcher writes the ranks' process ids to the pipe.

Usage: guardian.py JOB_ID DIRECTORY < pipe
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

_TRY_SECONDS = 5.0  # in which none of them ends
_ALL_SECONDS = 60.0  # however many do: one may start others again and again


class JobProcesses:
    """The living processes of a job, zombies left out.

    A session in which two looks see none, nor a zombie, is taken to have ended: its number may be given to
    another one. A zombie holds the number, as ranks do for their launcher.

    Args:
        mark: What they have in their environment.
        sessions: Or the numbers of the sessions that they are in.
    """

    def __init__(self, mark: bytes, sessions: set[int]) -> None:
        self._mark = mark
        self._sessions = sessions
        self._missed: set[int] = set()  # in the last look

    def look(self) -> list[int]:
        """Their process ids.

        None where /proc is not mounted (a container): then those alone are ended that the launcher knows.
        """
        found: list[int] = []
        seen: set[int] = set()
        is_complete = True
        try:
            names = os.listdir("/proc")
        except OSError:
            return found
        for name in names:
            if not name.isdigit() or int(name) == os.getpid():
                continue
            try:
                state, session = _state_and_session(name)
            except (FileNotFoundError, ProcessLookupError):
                continue  # gone meanwhile
            except (OSError, ValueError):
                is_complete = False
                continue
            seen.add(session)
            if state not in (b"Z", b"X") and (session in self._sessions or self._has_mark(name)):
                found.append(int(name))
        missed = self._sessions - seen if is_complete else set()
        self._sessions = self._sessions - (missed & self._missed)
        self._missed = missed
        return found

    def _has_mark(self, name: str) -> bool:
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                return self._mark in file.read().split(b"\0")
        except OSError:
            return False  # gone meanwhile, or another user's


def _state_and_session(name: str) -> tuple[bytes, int]:
    with open(f"/proc/{name}/stat", "rb") as file:
        state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
    return state, int(session)


def end_processes(mark: bytes, sessions: set[int]) -> None:
    """Kills every process of the job until none is left, or those that are do not end."""
    job = JobProcesses(mark, sessions)
    began: float | None = None
    progress = 0.0
    killed: set[int] = set()
    left: set[int] = set()  # of those
    while found := job.look():
        here: set[int] = set()
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                here.add(pid)
        # To look for them takes long where there are many.
        now = time.monotonic()
        if began is None:
            began = progress = now
        if here - killed or left - here:  # of thousands the last one ends late
            progress = now
        killed |= here
        left = here
        if now - progress > _TRY_SECONDS or now - began > _ALL_SECONDS:
            return
        time.sleep(0.005)


def main() -> None:
    """Waits for the end of the job and tidies up."""
    job_id, directory = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    sessions = {int(line) for line in sys.stdin.buffer.read().split()}
    end_processes(b"MULTIRING_JOB_ID=" + job_id.encode(), sessions)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
