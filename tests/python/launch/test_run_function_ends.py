"""`multiring.run`: Ctrl-C, kills of the caller and of the launcher, and that nothing is left of a job."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

import multiring
from multiring import MultiringError
from tests.support import Job, process_exists, wait_until

CALLER = """
import os, pathlib, signal, sys, time
import multiring

def rank():
    comm = multiring.init()
    directory = pathlib.Path(os.environ["TEST_DIRECTORY"])
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    path = directory / f"ready-{comm.rank}"
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    time.sleep(600)
"""
INTERRUPTED = """
try:
    multiring.run(rank, np=2)
except KeyboardInterrupt:
    left = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")[:-1]]
    print("interrupted", [name for name in left if "memfd" in name or "socket" in name], flush=True)
"""
FORKED = """
if sys.argv[1] == "forked":  # another thread makes a process that outlives this one
    import threading
    def fork():
        while not (pathlib.Path(os.environ["TEST_DIRECTORY"]) / "ready-1").exists():
            time.sleep(0.01)
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
    threading.Thread(target=fork).start()
multiring.run(rank, np=2)
"""


def caller(script: str, how: str) -> Job:
    """A script that runs a job of two ranks, each with a process in another session."""
    pytest.importorskip("cloudpickle")

    def command(root: Path) -> list[str]:
        (root / "script.py").write_text(CALLER + script)
        return [sys.executable, str(root / "script.py"), how]

    return Job(command)


def test_ctrl_c_ends_the_ranks_and_is_raised() -> None:
    with caller(INTERRUPTED, "") as job:
        job.wait_for_file("ready-0")
        job.wait_for_file("ready-1")
        job.process.send_signal(signal.SIGINT)
        result = job.finish()
        assert not job.processes()
        job.assert_nothing_left()
    assert result.stdout == "interrupted []\n"


def test_ranks_end_with_the_caller() -> None:
    with caller(FORKED, "") as job:
        job.wait_for_file("ready-0")
        job.wait_for_file("ready-1")
        job.process.kill()
        job.process.wait()
        job.assert_nothing_left()


def test_ranks_end_with_the_caller_whatever_it_has_forked() -> None:
    with caller(FORKED, "forked") as job:
        job.wait_for_file("ready-0")
        ranks = [int(job.wait_for_file(f"ready-{rank}")) for rank in range(2)]
        wait_until(lambda: len(_children(job.process.pid)) == 2, "the fork beside the launcher")
        job.process.kill()
        job.process.wait()
        wait_until(lambda: not any(map(process_exists, ranks)), "the end of the ranks")


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_launcher_that_is_killed_is_an_error() -> None:
    def kill_parent() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    pytest.importorskip("cloudpickle")
    with pytest.raises(MultiringError, match=r"the launcher \(process \d+\) ended with signal SIGKILL"):
        multiring.run(kill_parent, np=1)
