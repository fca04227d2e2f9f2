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


def processes_of_job(mark: bytes, sessions: set[int]) -> list[int]:
    """Living processes, zombies left out, with `mark` in their environment or in one of `sessions`.

    Sessions in which there is none, nor a zombie, are taken out of `sessions`: the number may be given to
    another one. None where /proc is not mounted (a container): then those alone are ended that the launcher
    knows.
    """
    found: list[int] = []
    seen: set[int] = set()
    try:
        names = os.listdir("/proc")
    except OSError:
        return found
    for name in names:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
            seen.add(int(session))
            if state in (b"Z", b"X"):
                continue
            if int(session) not in sessions:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark not in file.read().split(b"\0"):
                        continue
        except (OSError, ValueError):
            continue  # gone meanwhile, or another user's
        found.append(int(name))
    sessions &= seen
    return found


def end_processes(mark: bytes, sessions: set[int]) -> None:
    """Kills every process of the job until none is left, or those that are do not end."""
    began: float | None = None  # at the first kill: to look for them takes long where there are many
    progress = 0.0
    killed: set[int] = set()
    while found := processes_of_job(mark, sessions):
        now = time.monotonic()
        if began is None:
            began = progress = now
        if killed - set(found):  # of thousands the last one ends late
            progress = now
        if now - progress > _TRY_SECONDS or now - began > _ALL_SECONDS:
            return
        killed = set()
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
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
