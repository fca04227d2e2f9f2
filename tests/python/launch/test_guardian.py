"""What ends the processes that are left of a job: it finds and kills all of them, and no others."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from multiring.commands.launcher import guardian
from tests.support import wait_until


class Processes:
    """In place of the system for the guard: a clock, and what is found and killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.pause = 0.0
        self.killed: list[int] = []
        self.others: set[int] = set()  # of another user
        monkeypatch.setattr(guardian, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))
        monkeypatch.setattr(guardian, "os", SimpleNamespace(kill=self._kill))

    def _sleep(self, seconds: float) -> None:
        self.now += self.pause

    def _kill(self, pid: int, number: int) -> None:
        if pid in self.others:
            raise PermissionError
        self.killed.append(pid)

    def end(self, monkeypatch: pytest.MonkeyPatch, look: Callable[[], list[int]]) -> None:
        monkeypatch.setattr(guardian.JobProcesses, "look", lambda self: look())
        guardian.end_processes(b"", set())


def test_processes_are_ended_as_long_as_some_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where thousands end, one of them may take longer than the patience with one."""
    system = Processes(monkeypatch)
    system.pause = 4.0
    rounds = iter([[1, 2, 3], [2, 3], [2, 3], [3], []])
    system.end(monkeypatch, lambda: next(rounds))
    assert next(rounds, None) is None
    rounds = iter([[1]] * 100)
    system.end(monkeypatch, lambda: next(rounds))
    assert len(list(rounds)) > 90


@pytest.mark.parametrize("look_seconds", [6, 61])
def test_processes_are_killed_however_long_it_takes_to_find_them(
    monkeypatch: pytest.MonkeyPatch, look_seconds: float
) -> None:
    system = Processes(monkeypatch)
    rounds = iter([[1], [1, 2], [2], []])

    def look() -> list[int]:
        system.now += look_seconds
        return next(rounds)

    system.end(monkeypatch, look)
    assert {1, 2} <= set(system.killed)


def test_what_may_not_be_killed_is_waited_for_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it starts others that end: they are not of our making."""
    system = Processes(monkeypatch)
    system.pause = 0.5
    system.others = {7, *range(100, 200)}
    system.end(monkeypatch, lambda: [7, 100 + int(system.now)])
    assert system.now < 10


def test_a_session_that_is_empty_is_forgotten(tmp_path: Path) -> None:
    """Its number may be given to one of another program. One is not whose first process alone has ended."""
    child = tmp_path / "child"
    command = f"sleep 600 & echo $! > {child}.new; mv {child}.new {child}; wait"
    leader = subprocess.Popen(["sh", "-c", command], start_new_session=True)
    try:
        job = guardian.JobProcesses(b"-", {leader.pid})
        wait_until(child.exists, "the child")
        pid = int(child.read_text())
        assert {leader.pid, pid} <= set(job.look())
        os.kill(leader.pid, signal.SIGKILL)
        leader.wait()
        assert job.look() == job.look() == job.look() == [pid]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not (job.look() or job._sessions), "its end")
    finally:
        leader.kill()
        leader.wait()


def test_a_session_is_kept_while_processes_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> tuple[bytes, int]:
        raise OSError(errno.ENFILE, "too many open files")

    job = guardian.JobProcesses(b"-", {os.getsid(0)})
    with monkeypatch.context() as patch:
        patch.setattr(guardian, "_state_and_session", fail)
        assert job.look() == job.look() == job.look() == []
    assert job._sessions
