"""Ranks that are started once and run many test functions.

Where a test looks at what every rank returns, it gets a pool from the fixture `ranks`:
`ranks(2).run(function, *args)`, with a function at the top level of the test's module. Other tests are
functions of a rank (on_ranks.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from multiring.errors import AbortedError, PeerLostError
from tests.support import HOSTS, REPOSITORY, Job

__all__ = ["RankPool", "RanksFailed", "RanksTimedOut", "UnpicklableError"]

_START_SECONDS = 60.0
_LOAD_SECONDS = 120.0
_RESET_SECONDS = 30.0
# Shorter than the default: a rank that waits for nothing in a test should say so before the test's own time
# limit.
_COLLECTIVE_SECONDS = "60"


class UnpicklableError(Exception):
    """Stands for what cannot travel between processes; its text holds the traceback."""


class RanksFailed(AssertionError):
    """A function failed on at least one rank.

    Attributes:
        errors: The exception of each rank that failed.
    """

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


class RanksTimedOut(AssertionError):
    """Some ranks have not answered in time; the text holds their stacks."""


class RankPool:
    """`n` ranks under `multiring run`, started at the first use and again after a crash or a hang.

    After a call that broke the communicator all ranks leave it and make a new one.

    Args:
        n: Number of ranks.
        env: Variables to set for the ranks.
        hosts: How many hosts the ranks take themselves to be spread over, one after the other.
    """

    def __init__(self, n: int, env: dict[str, str] | None = None, hosts: int = 1) -> None:
        self.n = n
        hosts = int(os.environ.get("TEST_HOSTS", hosts))
        self._env = {"MULTIRING_TIMEOUT": _COLLECTIVE_SECONDS, **(env or {})}
        if hosts > 1:
            self._env[HOSTS] = str(hosts)
        self._job: Job | None = None
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._loaded: set[str] = set()  # modules that the ranks have imported

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Calls `function(comm, *args, **kwargs)` on every rank; what it returns, by rank.

        Args:
            function: Defined at the top level of a module, so that ranks can import it.
            args: Anything that can be pickled.
            timeout: Seconds; then the ranks are ended.
            kwargs: Likewise.

        Raises:
            RanksFailed: It raised on some rank; shows the traceback of every one.
            RanksTimedOut: A rank has not answered in time.
        """
        answers = self._call(function, args, kwargs, timeout, abort=True)
        _check(getattr(function, "__qualname__", repr(function)), answers)
        return [answer["value"] for answer in answers]

    def run_expecting_errors(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Like `run`, but what a rank raises comes back in the list in place of what it returns."""
        answers = self._call(function, args, kwargs, timeout, abort=False)
        return [answer["error"] or answer["value"] for answer in answers]

    def pids(self) -> list[int]:
        """The process ids of the ranks."""
        self._start()
        return list(self._pids)

    def close(self) -> None:
        """Ends the ranks; a later call starts new ones."""
        for connection in self._connections:
            connection.close()  # the ranks end when they see it
        self._connections = []
        job, self._job = self._job, None
        if job is not None:
            with contextlib.suppress(Exception):
                job.process.wait(10.0)
            job.destroy()

    def _call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
        *,
        abort: bool,
    ) -> list[dict[str, Any]]:
        module = _module_of(function)
        file = getattr(sys.modules[module], "__file__", None)
        request = {
            "kind": "call",
            "module": module,
            "file": file,
            "path": list(sys.path),
            "call": pickle.dumps((function, args, kwargs)),
            "abort": abort,
        }
        self._start()
        if module not in self._loaded:
            # On a busy machine one rank imports a framework seconds later than another: what others wait for
            # then is not what the deadlines of the call are for.
            _check(f"import {module}", self._exchange({**request, "kind": "load"}, _LOAD_SECONDS))
            self._loaded.add(module)
        answers = self._exchange(request, timeout)
        if any(answer["broken"] for answer in answers):
            self._reset()
        return answers

    def _reset(self) -> None:
        answers = self._exchange({"kind": "reset"}, _RESET_SECONDS)
        traces = [answer["trace"] for answer in answers if answer["error"] is not None]
        if traces:
            self.close()
            raise AssertionError(
                "the ranks cannot make a new communicator after an error\n" + "\n".join(traces)
            )

    def _exchange(self, request: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        message = pickle.dumps(request)
        try:
            for connection in self._connections:
                connection.send_bytes(message)
        except OSError:
            self._fail("a rank has ended before the call")
        return self._answers(timeout)

    def _answers(self, timeout: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < self.n:
            late = {self._connections[rank]: rank for rank in range(self.n) if rank not in answers}
            ready = wait(list(late), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._time_out(timeout, sorted(late.values()), answers)
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    answers[late[connection]] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    self._fail(f"rank {late[connection]} has ended during the call")
        return [answers[rank] for rank in range(self.n)]

    def _start(self) -> None:
        if self._job is not None and self._job.process.poll() is None:
            return
        self.close()
        self._loaded.clear()
        directory = Path(tempfile.mkdtemp(prefix="mrp-", dir="/tmp"))
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(directory / "s"))
                listener.listen(self.n)
                listener.settimeout(0.1)
                self._job = self._launch(directory / "s")
                self._accept(listener)
        finally:
            shutil.rmtree(directory)
        traces = [answer["trace"] for answer in self._answers(_START_SECONDS) if answer["error"] is not None]
        if traces:
            self.close()
            raise AssertionError("multiring.init() failed in the pool\n" + "\n".join(traces))

    def _launch(self, address: Path) -> Job:
        def command(root: Path) -> list[str]:
            launcher = [sys.executable, "-m", "multiring", "run", "-np", str(self.n)]
            # Files keep what the ranks write without anybody having to read it.
            return [*launcher, "--output-dir", str(root / "o"), "-m", "tests.rank_worker", str(address)]

        # Ctrl-C at the terminal is for pytest, which then closes the pool.
        quiet = {"stdout": open(os.devnull, "w"), "stderr": tempfile.TemporaryFile()}  # noqa: SIM115
        job = Job(command, self._env, cwd=REPOSITORY, start_new_session=True, **quiet)
        self._launcher_stderr = quiet["stderr"]
        quiet["stdout"].close()
        return job

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + _START_SECONDS
        found: dict[int, tuple[Connection, int]] = {}
        while len(found) < self.n:
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
        self._connections = [found[rank][0] for rank in range(self.n)]
        self._pids = [found[rank][1] for rank in range(self.n)]

    def _time_out(self, timeout: float, late: list[int], answers: dict[int, dict[str, Any]]) -> None:
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)  # writes the stacks to its stderr
        patience = time.monotonic() + 5.0
        # The outermost frame of a stack is written last.
        while self._output().count("in _run_module_as_main") < len(late) and time.monotonic() < patience:
            time.sleep(0.02)
        traces = [f"--- rank {rank}\n{answers[rank]['trace']}" for rank in answers if answers[rank]["trace"]]
        message = f"no answer from rank {', '.join(map(str, late))} of {self.n} within {timeout:g} s"
        output = self._output()
        if self._job is not None:
            self._job.destroy()  # it would not end by itself
        self.close()
        raise RanksTimedOut("\n".join([message, *traces, output]))

    def _fail(self, what: str) -> None:
        with contextlib.suppress(Exception):
            assert self._job is not None
            self._job.process.wait(10.0)
        output = self._output()
        self.close()
        raise AssertionError(f"pool of {self.n} ranks: {what}\n{output}")

    def _output(self) -> str:
        self._launcher_stderr.seek(0)
        return str(self._launcher_stderr.read().decode(errors="replace"))[-20000:]


def _module_of(function: Callable[..., Any]) -> str:
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    if isinstance(inner, MethodType):
        return type(inner.__self__).__module__
    if isinstance(inner, FunctionType) and "<" in inner.__qualname__:
        raise TypeError(
            f"{inner.__qualname__} is not at the top level of a module, so ranks cannot import it"
        )
    return str(inner.__module__ if hasattr(inner, "__module__") else type(inner).__module__)


def _check(what: str, answers: list[dict[str, Any]]) -> None:
    failed = {rank: answer for rank, answer in enumerate(answers) if answer["error"] is not None}
    if not failed:
        return
    parts = [f"{what} failed on {len(failed)} of {len(answers)} ranks"]
    parts += [f"--- rank {rank}\n{answer['trace'].rstrip()}" for rank, answer in failed.items()]
    errors = {rank: answer["error"] for rank, answer in failed.items()}
    raise RanksFailed("\n".join(parts), errors) from _first_cause(errors)


def _first_cause(errors: dict[int, BaseException]) -> BaseException:
    """The error that most likely came first: not one that says another rank failed."""
    first = [error for error in errors.values() if not isinstance(error, AbortedError | PeerLostError)]
    return (first or list(errors.values()))[0]
