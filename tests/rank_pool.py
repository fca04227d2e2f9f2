"""Ranks that are started once and run many test functions.

Where a test looks at what every rank returns, it gets a pool from the fixture `ranks`:
`ranks(2).run(function, *args)`, with a function at the top level of the test's module. Other tests are
functions of a rank (on_ranks.py).

The pools of a session have their ranks in the same processes (`RankProcesses`): a world of two is made of the
first two, so that a framework is imported once in each process and not once in each pool.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MethodType
from typing import Any

from multiring.errors import AbortedError, PeerLostError
from tests.support import REPOSITORY, Job, process_exists

_START_SECONDS = 60.0
_LOAD_SECONDS = 120.0
_END_SECONDS = 30.0  # from the moment when they are told to end
# A rank that waits for nothing says so before the test's own time limit.
_COLLECTIVE_SECONDS = "60"

Call = Callable[..., Any]
Answer = dict[str, Any]  # of a rank: its value, or its error and the traceback (tests/rank_worker.py)


class UnpicklableError(Exception):
    """Stands for what cannot travel between processes; its text holds the traceback."""


class RanksFailed(AssertionError):
    """A function failed on at least one rank; `errors` has the exception of each."""

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


class RanksTimedOut(AssertionError):
    """Some ranks have not answered in time; the text holds their stacks."""


class RankPool:
    """A world of `n` ranks that run functions, in processes that other pools may use as well.

    After a call that broke the communicator all ranks leave it and make a new one. They take themselves to be
    spread over so many hosts, one after the other. Without `processes` the pool has its own, with `env`.
    """

    def __init__(
        self,
        n: int,
        env: dict[str, str] | None = None,
        hosts: int = 1,
        processes: RankProcesses | None = None,
    ) -> None:
        self.n = n
        self.hosts = min(n, hosts)
        self._processes = processes or RankProcesses(n, env)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Call, *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """Calls `function(comm, *args, **kwargs)` on every rank; what it returns, by rank.

        Ranks have to be able to import the function; arguments are pickled.

        Raises:
            RanksFailed: It raised on some rank; shows the traceback of every one.
            RanksTimedOut: A rank has not answered in so many seconds; all are ended.
        """
        answers = self._call((function, args, kwargs), timeout, abort=True)
        _check(getattr(function, "__qualname__", repr(function)), answers)
        return [answer["value"] for answer in answers]

    def run_expecting_errors(
        self, function: Call, *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Like `run`, but what a rank raises comes back in the list in place of what it returns."""
        answers = self._call((function, args, kwargs), timeout, abort=False)
        return [answer["error"] or answer["value"] for answer in answers]

    def pids(self) -> list[int]:
        """The process ids of the ranks."""
        self._processes.start()
        return self._processes.pids[: self.n]

    def close(self) -> None:
        """Ends the processes; a later call starts new ones."""
        self._processes.close()

    def _call(self, call: tuple[Call, Any, Any], timeout: float, *, abort: bool) -> list[Answer]:
        request = {"kind": "call", "module": _module_of(call[0]), "path": list(sys.path), "abort": abort}
        request["call"] = pickle.dumps(call)
        return self._processes.call(self.n, self.hosts, request, timeout)


class RankProcesses:
    """At least n processes under one `multiring run`, the first of which are the ranks of one world at a
    time. They are started at the first use, and again after a crash, a hang, or where a world needs more."""

    def __init__(self, n: int, env: dict[str, str] | None = None) -> None:
        self._n = n
        self._env = {"MULTIRING_TIMEOUT": _COLLECTIVE_SECONDS, **(env or {})}
        self._job: Job | None = None
        self._connections: list[Connection] = []
        self._loaded: set[tuple[int, str]] = set()  # modules that processes have imported
        self._world = (0, 0)  # its numbers of ranks and hosts
        self._worlds = 0  # how many there were
        self.pids: list[int] = []

    def call(self, n: int, hosts: int, request: dict[str, Any], timeout: float) -> list[Answer]:
        """Has the ranks of a world do what `request` says (tests/rank_worker.py); their answers, by rank."""
        self._n = max(self._n, n)
        self.start()
        if self._world != (n, hosts):
            self._meet(n, hosts)
        module = request["module"]
        if any((rank, module) not in self._loaded for rank in range(n)):
            # On a busy machine one rank imports a framework seconds later than another: what others wait for
            # then is not what the deadlines of the call are for.
            _check(f"import {module}", self._exchange([{**request, "kind": "load"}] * n, _LOAD_SECONDS))
            self._loaded |= {(rank, module) for rank in range(n)}
        answers = self._exchange([request] * n, timeout)
        if any(answer["broken"] for answer in answers):
            self._meet(n, hosts)
        return answers

    def start(self) -> None:
        """Starts them, unless enough of them run."""
        running = self._job is not None and self._job.process.poll() is None
        if running and len(self._connections) >= self._n:
            return
        self.close()
        self._loaded.clear()
        directory = Path(tempfile.mkdtemp(prefix="mrp-", dir="/tmp"))
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(directory / "s"))
                listener.listen(self._n)
                listener.settimeout(0.1)
                self._job = self._launch(directory / "s")
                self._accept(listener)
        finally:
            shutil.rmtree(directory)

    def close(self) -> None:
        """Ends them.

        Raises:
            RanksTimedOut: One did not end by itself; the text holds its stack.
        """
        for connection in self._connections:
            connection.close()  # they end when they see it
        self._connections = []
        self._world = (0, 0)
        job = self._job
        if job is None:
            return
        try:
            job.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            late = [pid for pid in self.pids if process_exists(pid)]
            self._write_stacks(late)
            raise RanksTimedOut(f"processes {late} did not end\n{self._output()}") from None
        finally:
            self._job = None
            job.destroy()

    def _meet(self, n: int, hosts: int) -> None:
        """Makes a world of the first n."""
        self._worlds += 1
        places = [{"rank": rank, "size": n, "hosts": hosts, "number": self._worlds} for rank in range(n)]
        answers = self._exchange([{"kind": "join", "place": place} for place in places], _START_SECONDS)
        self._world = (n, hosts)
        if traces := [answer["trace"] for answer in answers if answer["error"] is not None]:
            self.close()
            raise AssertionError("\n".join([f"{n} ranks cannot make a new communicator", *traces]))

    def _exchange(self, requests: list[Answer], timeout: float) -> list[Answer]:
        """Sends the first processes a request each; their answers."""
        try:
            for connection, request in zip(self._connections, requests, strict=False):
                connection.send_bytes(pickle.dumps(request))
        except OSError:
            self._fail("a rank has ended before the call")
        n = len(requests)
        deadline = time.monotonic() + timeout
        answers: dict[int, Answer] = {}
        while len(answers) < n:
            late = {self._connections[rank]: rank for rank in range(n) if rank not in answers}
            ready = wait(list(late), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._time_out(n, timeout, sorted(late.values()), answers)
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    answers[late[connection]] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    self._fail(f"rank {late[connection]} has ended during the call")
        return [answers[rank] for rank in range(n)]

    def _launch(self, address: Path) -> Job:
        def command(root: Path) -> list[str]:
            launcher = [sys.executable, "-m", "multiring", "run", "-np", str(self._n)]
            # Files keep what the ranks write without anybody having to read it.
            return [*launcher, "--output-dir", str(root / "o"), "-m", "tests.rank_worker", str(address)]

        self._launcher_stderr = tempfile.TemporaryFile()  # noqa: SIM115
        streams = {"stdout": subprocess.DEVNULL, "stderr": self._launcher_stderr}
        # Ctrl-C at the terminal is for pytest, which then closes the pool.
        return Job(command, self._env, cwd=REPOSITORY, start_new_session=True, **streams)

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + _START_SECONDS
        found: dict[int, tuple[Connection, int]] = {}
        while len(found) < self._n:
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                assert self._job is not None
                if self._job.process.poll() is not None or time.monotonic() > deadline:
                    self._fail("the ranks did not start")
                continue
            connection = Connection(accepted.detach())
            rank, pid = pickle.loads(connection.recv_bytes())
            found[rank] = connection, pid
        self._connections = [found[rank][0] for rank in range(self._n)]
        self.pids = [found[rank][1] for rank in range(self._n)]

    def _time_out(self, n: int, timeout: float, late: list[int], answers: dict[int, Answer]) -> None:
        self._write_stacks([self.pids[rank] for rank in late])
        traces = [f"--- rank {rank}\n{answers[rank]['trace']}" for rank in answers if answers[rank]["trace"]]
        message = f"no answer from rank {', '.join(map(str, late))} of {n} within {timeout:g} s"
        raise RanksTimedOut("\n".join([message, *traces, self._destroy()]))

    def _write_stacks(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)  # writes the stacks to its stderr
        patience = time.monotonic() + 5.0
        # The outermost frame of a stack is written last.
        while self._output().count("in _run_module_as_main") < len(pids) and time.monotonic() < patience:
            time.sleep(0.02)

    def _fail(self, what: str) -> None:
        with contextlib.suppress(Exception):
            assert self._job is not None
            self._job.process.wait(10.0)
        raise AssertionError(f"pool of {self._n} ranks: {what}\n{self._destroy()}")

    def _destroy(self) -> str:
        """Ends processes that would not end by themselves; what they have written."""
        output = self._output()
        if self._job is not None:
            self._job.destroy()
        self.close()
        return output

    def _output(self) -> str:
        self._launcher_stderr.seek(0)
        return str(self._launcher_stderr.read().decode(errors="replace"))[-20000:]


def _module_of(function: Call) -> str:
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    if isinstance(inner, MethodType):
        return type(inner.__self__).__module__
    if "<" in inner.__qualname__:
        raise TypeError(f"{inner.__qualname__} is not at the top level of a module; ranks cannot import it")
    return str(inner.__module__)


def _check(what: str, answers: list[Answer]) -> None:
    failed = {rank: answer for rank, answer in enumerate(answers) if answer["error"] is not None}
    if not failed:
        return
    parts = [f"{what} failed on {len(failed)} of {len(answers)} ranks"]
    parts += [f"--- rank {rank}\n{answer['trace'].rstrip()}" for rank, answer in failed.items()]
    errors = {rank: answer["error"] for rank, answer in failed.items()}
    # What most likely came first does not say that another rank has failed.
    cause = min(errors.values(), key=lambda error: isinstance(error, AbortedError | PeerLostError))
    raise RanksFailed("\n".join(parts), errors) from cause
