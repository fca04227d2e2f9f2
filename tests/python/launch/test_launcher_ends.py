"""`multiring run`: failures, signals and time limits, and that nothing is left however a job ends."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import resource
import signal
import socket
import termios
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multiring.commands.launcher.job import finish_job
from multiring.commands.launcher.process import RankProcess
from multiring.commands.launcher.rank_starter import JobOptions, RankStarter
from tests.support import (
    Job,
    Stopwatch,
    executable,
    open_descriptors,
    process_exists,
    run_job,
    start_job,
    state_of,
    wait_until,
)

# A rank that has said where it is and then does nothing. MODE decides how it takes signals.
IDLE = """
import os, pathlib, signal, subprocess, sys, time

rank = os.environ["MULTIRING_RANK"]
directory = pathlib.Path(os.environ["TEST_DIRECTORY"])

def tell(name, text):
    part = directory / f".{name}.{rank}"
    part.write_text(str(text))
    part.rename(directory / name)

def await_file(name):
    while not (directory / name).exists():
        time.sleep(0.005)

def everybody():
    for peer in range(int(os.environ["MULTIRING_SIZE"])):
        await_file(f"ready-{peer}")

"""
READY_AND_SLEEP = """
tell(f"ready-{rank}", os.getpid())
time.sleep(600)
"""
READY_AND_GO = """
tell(f"ready-{rank}", os.getpid())
await_file("go")
"""
# Until all are full on the way to the reader, who does not read.
FILL_OUTPUT = """
os.set_blocking(1, False)
written = tries = 0
while tries < 100:
    try:
        written += os.write(1, b"%09d\\n" % (written // 10))
        tries = 0
    except BlockingIOError:
        tries += 1
        time.sleep(0.01)
os.set_blocking(1, True)
"""
DEAF = """
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
"""
# A child in the rank's session, one in a session of its own, both deaf and holding the output open.
FAMILY = """
for number, apart in enumerate((False, True)):
    code = ("import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)];"
            "print('child is here', flush=True); time.sleep(600)")
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=apart)
    tell(f"child-{rank}-{number}", child.pid)
"""


def ranks_of(job: Job, n: int) -> list[int]:
    """Process ids of the ranks, once all are there. They sleep for minutes, and do not end by themselves."""
    return [int(job.wait_for_file(f"ready-{rank}")) for rank in range(n)]


def test_when_a_rank_fails_the_others_are_ended_and_it_is_blamed() -> None:
    """Also those that take no notice."""
    fail = """
if rank == "1":
    tell("ready-1", 0)
    everybody()
    print("some output")
    for number in range(30):
        print("line", number, file=sys.stderr)
    sys.exit(7)
"""
    deaf = f'if rank == "2":{textwrap.indent(DEAF, "    ")}'
    result = run_job(3, IDLE + deaf + fail + READY_AND_SLEEP, code=7)
    assert "multiring: rank 1 (process" in result.stderr
    assert "failed with exit code 7" in result.stderr
    assert "  | line 29\n" in result.stderr
    assert "  | line 5\n" not in result.stderr
    for rank, number in ((0, "SIGTERM"), (2, "SIGKILL")):
        assert f"rank {rank}: ended by the launcher (signal {number})" in result.stderr
    assert "[1] some output" in result.stdout


def test_a_rank_that_takes_long_to_exit_is_blamed_all_the_same() -> None:
    """It left the communicator, and the others failed of that, while its exit was still under way."""
    script = """
import atexit, os, sys, time
if os.environ["MULTIRING_RANK"] == "1":
    atexit.register(time.sleep, 1.0)  # runs after multiring's own
import numpy as np, multiring
comm = multiring.init()
comm.allreduce(np.ones(3))
if comm.rank == 1:
    sys.exit(3)
comm.allreduce(np.ones(3))
"""
    result = run_job(3, script, code=3)
    assert "multiring: rank 1 (process" in result.stderr
    assert "ended by the launcher" not in result.stderr


@pytest.mark.parametrize("code", [0, 3])
def test_children_of_ranks_end_with_the_job(code: int) -> None:
    """And do not hold it up, though they have its output open."""
    end = f"tell(f'ready-{{rank}}', 0)\neverybody()\nif rank == '0': sys.exit({code})\n"
    with start_job(2, IDLE + FAMILY + end + ("time.sleep(600)\n" if code else "")) as job:
        names = [f"child-{rank}-{number}" for rank in range(2) for number in range(2)]
        children = [int(job.wait_for_file(name)) for name in names]
        job.ended(code)
    assert not any(process_exists(pid) for pid in children)


@pytest.mark.parametrize(("n", "family"), [(1, ""), (2, FAMILY)], ids=["alone", "family"])
def test_nothing_is_left_when_the_launcher_is_killed(n: int, family: str) -> None:
    with start_job(n, IDLE + DEAF + family + READY_AND_SLEEP) as job:
        ranks_of(job, n)
        job.process.kill()
        job.ended(-signal.SIGKILL)


@pytest.fixture
def caller() -> Iterator[tuple[socket.socket, int]]:
    """The two ends of a connection, that of a job with a number as in a program with many open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    ours, theirs = socket.socketpair()
    high = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 1100)
    theirs.close()
    yield ours, high
    ours.close()
    os.close(high)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("by_caller", "at"), [(False, 1), (True, 1), (True, -1)])
def test_a_signal_ends_a_job_of_which_not_all_ranks_are_started(
    monkeypatch: pytest.MonkeyPatch, caller: tuple[socket.socket, int], by_caller: bool, at: int
) -> None:
    started: list[int] = []
    start = RankStarter.__call__
    ours, theirs = caller

    def interrupt() -> None:
        if by_caller:
            ours.send(bytes([signal.SIGTERM]))
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def start_and_interrupt(self: RankStarter, rank: int, piped: bool) -> RankProcess:
        started.append(rank)
        if rank == at:
            interrupt()
        return start(self, rank, piped)

    monkeypatch.setattr(RankStarter, "__call__", start_and_interrupt)
    if at < 0:
        interrupt()
    watch = Stopwatch()
    end = finish_job(JobOptions(5, ["sleep", "600"], caller=theirs if by_caller else None))
    assert end.code == 128 + signal.SIGTERM
    assert started == list(range(at + 1))
    assert watch.seconds() < 5


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_launcher_killed_while_it_starts_leaves_nothing(processes: int) -> None:
    with start_job(4, IDLE + READY_AND_SLEEP) as job:
        wait_until(lambda: len(job.processes()) >= processes, "the start of processes")
        job.process.kill()
        job.ended(-signal.SIGKILL)


def test_nothing_is_left_when_the_guardian_is_killed() -> None:
    with start_job(2, IDLE + READY_AND_GO) as job:
        ranks_of(job, 2)
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in job.processes()}
        (guard,) = (pid for pid, line in lines.items() if b"guardian.py" in line)
        os.kill(guard, signal.SIGKILL)
        (job.directory / "go").touch()
        job.ended(0)


def test_signals_are_passed_on_and_give_the_exit_code() -> None:
    """User signals reach the ranks as well, and end nothing."""
    note = """
def note(number, frame):
    tell(f"got-{rank}-{number}", number)
    if number == signal.SIGHUP:
        sys.exit(0)
for number in (signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, note)
"""
    with start_job(2, IDLE + note + READY_AND_SLEEP) as job:
        ranks_of(job, 2)
        for number in (signal.SIGUSR1, signal.SIGHUP):
            job.process.send_signal(number)
            for rank in range(2):
                job.wait_for_file(f"got-{rank}-{int(number)}")
        assert "SIGHUP" in job.ended(129).stderr


def pending(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return any(int(bits, 16) for bits in re.findall(r"(?:Shd|Sig)Pnd:\s*(\w+)", status))


def test_signals_that_were_ignored_at_the_start_stay_ignored() -> None:
    script = IDLE + READY_AND_GO
    with start_job(1, script, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as job:
        job.wait_for_file("ready-0")
        job.process.send_signal(signal.SIGHUP)
        wait_until(lambda: not pending(job.process.pid), "the signal to be dropped")
        (job.directory / "go").touch()
        job.ended(0)


def test_a_job_that_takes_too_long_is_ended() -> None:
    result = run_job(2, IDLE + READY_AND_SLEEP, launcher_args=["--timeout", "1.5"], code=124)
    assert "--timeout 1.5" in result.stderr
    assert "ranks 0, 1" in result.stderr


def test_stopping_and_continuing_the_launcher_does_so_to_the_ranks() -> None:
    with start_job(2, IDLE + READY_AND_SLEEP, launcher_args=["--timeout", "300"]) as job:
        pids = [*ranks_of(job, 2), job.process.pid]
        job.process.send_signal(signal.SIGTSTP)
        wait_until(lambda: [state_of(pid) for pid in pids] == ["T"] * 3, "all to stop")
        job.process.send_signal(signal.SIGCONT)
        wait_until(lambda: "T" not in [state_of(pid) for pid in pids], "all to go on")
        job.process.terminate()
        job.ended(143)


def test_stopped_ranks_are_ended_too() -> None:
    with start_job(2, IDLE + READY_AND_SLEEP) as job:
        pids = ranks_of(job, 2)
        os.kill(pids[1], signal.SIGSTOP)
        os.kill(pids[0], signal.SIGKILL)
        job.ended(137)


def test_when_nobody_reads_the_output_the_job_ends() -> None:
    with start_job(2, IDLE + "while True: print('line')\n") as job:
        job.process.stdout.readline()
        job.process.stdout.close()
        job.process.stdout = None
        job.ended(141)


def test_a_reader_that_stops_does_not_keep_a_failed_job_from_ending_its_ranks() -> None:
    fail = 'if rank == "1":\n    await_file("ready-0")\n    os.kill(os.getpid(), 9)\n'
    write = 'tell("ready-0", os.getpid())\nos.write(1, b"waits for the reader")\n'
    with start_job(2, IDLE + fail + FILL_OUTPUT + write) as job:  # nobody reads stdout for now
        pid = int(job.wait_for_file("ready-0"))
        wait_until(lambda: not process_exists(pid), "the end of the rank that writes")
        job.ended(137)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
def test_a_slow_reader_loses_nothing_of_ranks_that_have_ended(tmp_path: Path, elsewhere: bool) -> None:
    """Though who started the rank stops to read its pipe some time after its end."""
    tell = """tell("end", f"{written} {os.getppid()} {os.readlink('/proc/self/fd/1')}")\n"""
    options = ["--tag-output", "--output-dir", str(tmp_path / "out")]
    if elsewhere:  # no other host at all, but what starts ranks there
        ssh = executable(tmp_path / "ssh", 'exec sh -c "$2"')
        options += ["-H", "elsewhere.invalid", "--ssh", str(ssh), "--address", "127.0.0.1"]
    with start_job(1, IDLE + FILL_OUTPUT + tell, launcher_args=options) as job:
        count, starter, pipe = job.wait_for_file("end").split()
        wait_until(lambda: pipe not in open_descriptors(int(starter)).values(), "the end of reading")
        done = job.ended(0)
    same = done.stdout == "".join(f"[0] {n:09}\n" for n in range(int(count) // 10))
    assert same, f"the end is {done.stdout[-30:]!r}, and {count} bytes were written"
    assert (tmp_path / "out" / "rank.0.stdout").stat().st_size == int(count)


def test_on_a_terminal_ctrl_c_ends_the_job_and_prompts_are_shown() -> None:
    ask = "print('what? ', end='', flush=True) if rank == '0' else None\n"
    controller, terminal = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    options: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    options |= {"start_new_session": True, "preexec_fn": take_terminal, "env": {"TERM": "xterm"}}
    with start_job(2, IDLE + ask + READY_AND_SLEEP, **options) as job:
        os.close(terminal)
        ranks_of(job, 2)
        shown = b""
        while b"what? " not in shown:
            shown += os.read(controller, 1000)
        assert b"\x1b[36m[0]\x1b[0m what? " in shown
        os.write(controller, b"\x03")
        assert job.process.wait(30) == 130
        job.assert_nothing_left()
    os.close(controller)
