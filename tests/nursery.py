"""Ranks that are forked from a process that has imported everything: cheap, to be killed by the hundred.

    outcomes = nursery.run(3, scenario, 10)

with, at the top level of a module, `def scenario(comm, count): ...`. A scenario runs in a fresh process for
each rank and may do to it whatever it likes; no launcher watches. `RankPool` is the choice for ranks that
stay alive.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import os
import pickle
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import IO, Any

from tests.support import REPOSITORY, Stopwatch, pretend_places

_DESCRIPTOR = "TEST_NURSERY_DESCRIPTOR"
# So long that nothing but its cause ends a wait, however busy the machine is.
_COLLECTIVE_SECONDS = "60"


@dataclass
class Outcome:
    """How a rank ended."""

    value: Any = None  # what the scenario returned
    error: BaseException | None = None  # what it raised
    trace: str = ""  # the traceback of that
    ended: float | None = None  # when it returned or raised, on the clock of `time.monotonic`
    held_up: float = 0.0  # seconds of the scenario in which others had the processor (`Stopwatch`)
    status: int | None = None  # exit code, or the negative number of the signal that ended the process
    notes: dict[str, float] = field(default_factory=dict)  # what it called `note` with, and when

    def check_raised(
        self,
        kind: type[BaseException] | tuple[type[BaseException], ...],
        *texts: str,
        since: float = 0.0,
        within: float = 1e9,
    ) -> str:
        """Fails unless it raised an error of that kind, or of one of those, with these texts; gives its text.
        A bound `within` so many seconds is for tests that run alone: others assert the cause, with a long
        deadline."""
        assert isinstance(self.error, kind), self.trace or self
        message = str(self.error)
        for text in texts:
            assert text in message
        assert self.ended is not None
        assert self.ended - since - self.held_up < within, message
        return message


class Nursery:
    """A process that forks ranks on request."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        environ = {key: value for key, value in os.environ.items() if not key.startswith("MULTIRING_")}
        environ[_DESCRIPTOR] = str(there.fileno())
        # Threads of a numerical library do not survive a fork.
        environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.nursery"],
            env=environ,
            cwd=REPOSITORY,
            pass_fds=[there.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
        )
        there.close()
        self._connection = Connection(here.detach())

    def run(
        self,
        n: int,
        scenario: Callable[..., Any],
        *args: Any,
        init: bool = True,
        hosts: int | Sequence[int] = 1,
        env: Mapping[str, str] | None = None,
        timeout: float = 90.0,
    ) -> list[Outcome]:
        """Runs `scenario(comm, *args)` in `n` new processes, one for each rank; with `init` false
        `scenario(rank, *args)`, which calls `multiring.init()` itself. `hosts` is how many hosts the ranks
        take themselves to be on, one after the other, or the host of each. Fails if a process does not
        end."""
        places = [rank % hosts for rank in range(n)] if isinstance(hosts, int) else list(hosts)
        self._errors.seek(0)
        self._errors.truncate()
        call = pickle.dumps((scenario, args))
        request = (scenario.__module__, call, init, places, dict(env or {}), timeout)
        self._connection.send_bytes(pickle.dumps(request))
        assert self._connection.poll(timeout + 20), f"the nursery does not answer\n{self.output()}"
        try:
            outcomes: list[Outcome] = pickle.loads(self._connection.recv_bytes())
        except EOFError:
            raise AssertionError(f"the nursery has failed\n{self.output()}") from None
        late = [rank for rank, outcome in enumerate(outcomes) if outcome.status is None]
        assert not late, f"ranks {late} did not end within {timeout:g} s\n{self.output()}"
        return outcomes

    def values(self, n: int, scenario: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """What `scenario` returns on every rank, as `run` takes it; fails if one raises an error."""
        outcomes = self.run(n, scenario, *args, **options)
        for outcome in outcomes:
            assert outcome.error is None, outcome.trace + self.output()
        return [outcome.value for outcome in outcomes]

    def output(self) -> str:
        """What the ranks of the last run have printed."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        self._process.kill()
        self._process.wait()
        self._errors.close()


_report: Connection | None = None


def note(what: str) -> None:
    """Called in a scenario: tells the test that this rank has come here, and when."""
    assert _report is not None
    _report.send_bytes(pickle.dumps(("note", what, time.monotonic())))


class _Rank:
    """A forked rank, as the process that forked it sees it."""

    def __init__(self, pid: int, report: Connection) -> None:
        self.pid = pid
        self.process = os.pidfd_open(pid)
        self.report: Connection | None = report
        self.outcome = Outcome()

    def descriptors(self) -> list[int]:
        waited = [] if self.outcome.status is not None else [self.process]
        return waited if self.report is None else [*waited, self.report.fileno()]

    def look(self) -> None:
        """Takes what has come."""
        while self.report is not None and self.report.poll():
            try:
                self._take(pickle.loads(self.report.recv_bytes()))
            except EOFError:
                self.report.close()
                self.report = None
        if self.outcome.status is None and select.select([self.process], [], [], 0)[0]:
            self.outcome.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _take(self, message: tuple[Any, ...]) -> None:
        if message[0] == "note":
            self.outcome.notes[message[1]] = message[2]
        else:
            vars(self.outcome).update(message[1])

    def end(self) -> None:
        if self.outcome.status is None:
            os.kill(self.pid, signal.SIGUSR1)  # writes the stacks
            time.sleep(0.2)
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.close()

    def close(self) -> None:
        os.close(self.process)
        if self.report is not None:
            self.report.close()


def _serve(connection: Connection) -> None:
    while True:
        try:
            module, call, init, places, env, timeout = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        importlib.import_module(module)
        scenario, args = pickle.loads(call)
        directory = tempfile.mkdtemp(prefix="mrn-", dir="/tmp")
        environ = {
            "MULTIRING_STORE": f"file://{directory}",
            "MULTIRING_SECRET": secrets.token_hex(16),
            "MULTIRING_TIMEOUT": _COLLECTIVE_SECONDS,
            **env,
        }
        ranks: list[_Rank] = []
        while len(ranks) < len(places):
            ranks.append(_fork(connection, ranks, places, environ, partial(_live, init, scenario, args)))
        _watch(ranks, time.monotonic() + timeout)
        shutil.rmtree(directory, ignore_errors=True)  # the last rank to leave a store removes it
        connection.send_bytes(pickle.dumps([rank.outcome for rank in ranks]))


def _watch(ranks: list[_Rank], deadline: float) -> None:
    while any(rank.outcome.status is None for rank in ranks) and time.monotonic() < deadline:
        descriptors = [descriptor for rank in ranks for descriptor in rank.descriptors()]
        select.select(descriptors, [], [], max(0.0, deadline - time.monotonic()))
        for rank in ranks:
            rank.look()
    for rank in ranks:
        rank.look()
        rank.end()


def _fork(
    connection: Connection,
    elder: list[_Rank],
    places: list[int],
    environ: Mapping[str, str],
    live: Callable[[int], tuple[Any, ...]],
) -> _Rank:
    global _report
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid != 0:
        theirs.close()
        return _Rank(pid, Connection(ours.detach()))
    rank = len(elder)
    ours.close()
    connection.close()
    for other in elder:
        other.close()
    _report = Connection(theirs.detach())
    # A shell that puts pytest into the background has interrupts ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update({"MULTIRING_RANK": str(rank), "MULTIRING_SIZE": str(len(places))} | dict(environ))
    pretend_places(places)
    _report.send_bytes(pickle.dumps(live(rank)))
    # As at any exit, but without the time that it takes to free every module.
    atexit._run_exitfuncs()
    os._exit(0)


def _live(init: bool, scenario: Callable[..., Any], args: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    import multiring

    value, error, trace = None, None, ""
    watch = Stopwatch()
    try:
        first = multiring.init() if init else rank
        watch = Stopwatch()
        value = scenario(first, *args)
    except BaseException as caught:  # KeyboardInterrupt is what some scenarios are about
        trace = traceback.format_exc()
        error = caught.with_traceback(None)
        error.__cause__ = error.__context__ = None
    ended, held_up = time.monotonic(), watch.held_up()
    return "end", {"value": value, "error": error, "trace": trace, "ended": ended, "held_up": held_up}


def main() -> None:
    """Forks ranks until the other end of the connection is closed."""
    import numpy  # noqa: F401

    import multiring  # noqa: F401

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    descriptor = int(os.environ.pop(_DESCRIPTOR))
    _serve(Connection(descriptor))


if __name__ == "__main__":
    # Scenarios import this module by its name and have to find the same one.
    importlib.import_module("tests.nursery").main()
