"""Runs the jobs of a plan: several at once where they fit, each watched, each ended in time.

No framework is loaded here. A job that crashes, hangs or is killed costs the task that it was at; a new job
does the rest of its tasks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from multiring.commands.launcher.process import signal_name
from multiring.models.regress.checks import Setup
from multiring.models.regress.outcome import Outcome, State, read_error, read_outcome
from multiring.models.regress.plan import Job
from multiring.models.regress.worker import NOW, STARTING, Order

__all__ = ["Runner"]

STARTER = "multiring.models.regress.start"
LOOK_SECONDS = 0.1
# From telling a job to end to killing it: longer than the launcher gives its ranks.
END_SECONDS = 12.0
# Loading a framework takes its time on a busy machine, and more often than not is none of its fault.
START_SECONDS = 120.0
TAIL_LINES = 40

Note = Callable[[Job, str, Outcome], None]


class Runner:
    """Runs jobs one after the other, or next to each other on processors of their own.

    Args:
        jobs: In the order in which they start.
        setup: The setting.
        cpus: The processors.
        time_limit: Seconds that one task may take.
        note: Is told of every task that has ended.
    """

    def __init__(
        self, jobs: Sequence[Job], setup: Setup, cpus: Sequence[int], time_limit: float, note: Note
    ) -> None:
        self._note = note
        self._waiting = deque(jobs)
        self._running: list[_RunningJob] = []
        self._setup = setup
        self._cpus = list(cpus)
        self._limit = time_limit

    def run(self) -> None:
        """Run all jobs.

        Raises:
            KeyboardInterrupt: Ctrl-C. Every job has been ended, and what they have handed over is there.
        """
        with tempfile.TemporaryDirectory(prefix="multiring-regress-") as directory:
            try:
                while self._waiting or self._running:
                    self._start(Path(directory))
                    for running in list(self._running):
                        self._look(running)
                    if self._running:
                        time.sleep(LOOK_SECONDS)
            finally:
                self._end_all()

    def _start(self, directory: Path) -> None:
        while self._waiting:
            job = self._waiting[0]
            free = [cpu for cpu in self._cpus if all(cpu not in other.cpus for other in self._running)]
            whole = job.undisturbed or job.ranks >= len(self._cpus)
            if len(free) < (len(self._cpus) if whole else job.ranks):
                return
            self._waiting.popleft()
            folder = Path(tempfile.mkdtemp(dir=directory))
            self._running.append(_RunningJob(job, self._setup, free if whole else free[: job.ranks], folder))

    def _look(self, running: _RunningJob) -> None:
        late = running.look() > running.limit(self._limit)
        self._collect(running)
        if late:
            running.end()
        if running.process.poll() is None:
            return
        self._running.remove(running)
        self._take(running, State.HUNG if late else State.FAILED)
        running.close()

    def _collect(self, running: _RunningJob) -> None:
        """Takes over what a job has finished."""
        while running.rest and (found := read_outcome(running.directory, running.rest[0])) is not None:
            self._note(running.job, running.rest.pop(0), found)

    def _take(self, running: _RunningJob, state: State) -> None:
        """Takes over what a job that has ended has left, and has the tasks that it did not get to done."""
        self._collect(running)
        job, rest = running.job, running.rest
        if not rest:
            return
        blamed = rest[:1] if running.task != STARTING else rest
        outcome = running.failure(state, self._limit)
        for task in blamed:
            self._note(job, task, outcome)
        left = rest[len(blamed) :]
        if left and state is not State.INTERRUPTED:
            self._waiting.appendleft(job.with_tasks(left))

    def _end_all(self) -> None:
        # A second Ctrl-C shortens the wait for each of them.
        for running in self._running:
            running.tell()
        for running in self._running:
            running.look()
            with contextlib.suppress(KeyboardInterrupt):
                running.end()
            running.kill()
            self._take(running, State.INTERRUPTED)
            running.close()
        self._running.clear()


class _RunningJob:
    """A job that has been started.

    Attributes:
        rest: Tasks whose results have not been taken over.
        task: The one that it is at.
        since: When that began.
    """

    def __init__(self, job: Job, setup: Setup, cpus: Sequence[int], directory: Path) -> None:
        self.job = job
        self.rest = list(job.tasks)
        self.cpus = list(cpus)
        self.directory = directory
        self.task = STARTING
        self.since = time.monotonic()
        order = Order(job.framework, job.tasks, setup, str(directory))
        path = directory / "order.json"
        path.write_text(order.to_json(), encoding="utf-8")
        reading, self._alive = os.pipe()
        words = [str(path), f"--ranks={job.ranks}", f"--alive={reading}", *(["--mpi"] if job.mpi else [])]
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cpus)  # the job inherits it
        try:
            with (directory / "log").open("wb") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", STARTER, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=[reading],
                    # The terminal's Ctrl-C comes to us alone.
                    start_new_session=True,
                )
        finally:
            os.sched_setaffinity(0, before)
            os.close(reading)

    def look(self) -> float:
        """Seconds that it has been at its task."""
        with contextlib.suppress(FileNotFoundError):
            task = (self.directory / NOW).read_text(encoding="utf-8")
            if task != self.task:
                self.task, self.since = task, time.monotonic()
        return time.monotonic() - self.since

    def limit(self, seconds: float) -> float:
        """How long it may be at its task if a task may take `seconds`."""
        return max(seconds, START_SECONDS) if self.task == STARTING else seconds

    def tell(self) -> None:
        """Asks it to end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Has it end, and waits for that."""
        self.tell()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kills it, if it is still there; its ranks die with it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        """Removes its files."""
        os.close(self._alive)
        shutil.rmtree(self.directory, ignore_errors=True)

    def failure(self, state: State, limit: float) -> Outcome:
        """Why it has not finished its task."""
        log = (self.directory / "log").read_text(encoding="utf-8", errors="replace")
        tail = "\n".join(log.splitlines()[-TAIL_LINES:])
        if state is State.INTERRUPTED:
            return Outcome(state, "interrupted")
        doing = "the start" if self.task == STARTING else "it"
        if state is State.HUNG:
            return Outcome(state, f"{doing} took longer than {self.limit(limit):g} s and was ended", tail)
        error = read_error(self.directory, self.task)
        if error is not None and not error.is_consequence:
            return Outcome(state, error.text, f"{error.trace}\n{tail}")
        # A rank that was killed says nothing; the launcher does.
        how = _last_words(log) or _how(self.process.returncode)
        return Outcome(state, how if error is None else f"{how} ({error.text})", tail)


def _how(code: int) -> str:
    number = code - 128 if code > 128 else -code
    if number > 0:
        return f"ended by {signal_name(number)}"
    return f"ended with exit code {code}" if code else "ended without a result"


def _last_words(log: str) -> str | None:
    """What the launcher says of the rank that failed first."""
    said = (line.removeprefix("multiring: ") for line in log.splitlines() if line.startswith("multiring: "))
    return next(said, None)
