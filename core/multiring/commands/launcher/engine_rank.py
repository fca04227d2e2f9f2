"""What an engine (srun, mpirun) starts for `multiring run`: starts one rank and sees it through.

Which rank, is in the engine's variables. The store of the launcher tells of signals that have arrived there,
and is told how the rank has ended: at once that it has failed, and then how, both before the engine knows.
When the launcher is gone the rank gets SIGTERM and soon SIGKILL.

Usage: python -m multiring.commands.launcher.engine_rank ORDER
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multiring import errors, machine
from multiring.commands.launcher import binding
from multiring.commands.launcher.console.multiplexer import Multiplexer
from multiring.commands.launcher.devices import device_environments
from multiring.commands.launcher.foreign_variables import horovod_variables
from multiring.commands.launcher.guardian import end_processes
from multiring.commands.launcher.hosts import RankSlot
from multiring.commands.launcher.process import RankProcess
from multiring.commands.launcher.rank_starter import (
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    ProgramError,
    command_of,
    defaults,
    enter_directory,
    own_python_first,
    placement_variables,
)
from multiring.commands.launcher.report import RankEnd, exit_code
from multiring.commands.launcher.supervisor import Outcome, Supervisor, passed_on_signals
from multiring.errors import MultiringError, UsageError
from multiring.rendezvous import launch_environment
from multiring.rendezvous.launch_environment import Placement
from multiring.store import Store, open_store

__all__ = ["STARTED", "end_key", "exit_key", "failure_key", "is_end_key", "main", "signal_key"]

STARTED = "launcher/started"  # set when a rank has
_CAUSE = "launcher/cause"  # set when a rank has failed, and not because it lost another
# A rank that has lost another waits so long for that one to fail: the engine ends all when the first one has.
_CAUSE_SECONDS = 3.0
_MARK = "REMOTE_RANK_MARK"  # in the environment of the rank and of what it starts
_WAIT_SECONDS = 3600.0
# A launcher that could not be heard any more is told so if it can be reached within so many seconds.
_AGAIN_SECONDS = 1.0


def signal_key(number: int) -> str:
    """Where the launcher says which signal has arrived; `number` counts them."""
    return f"launcher/signal-{number}"


def end_key(rank: int) -> str:
    """Where a rank's end is told."""
    return f"launcher/end-{rank}"


def is_end_key(key: str) -> bool:
    """Whether `end_key` gives such a key."""
    return key.startswith(end_key(0)[:-1])


def failure_key(rank: int) -> str:
    """Set as soon as a rank has failed; `end_key` follows when its output has come."""
    return f"launcher/failure-{rank}"


def exit_key(rank: int) -> str:
    """Set when the engine is about to hear that a rank has failed."""
    return f"launcher/exit-{rank}"


@dataclass(frozen=True)
class _Assignment:
    """Where the job has this rank: engines may see it otherwise."""

    rank: int
    size: int
    slot: RankSlot
    job_id: str


def main() -> int:
    """Returns the exit code of the rank as a shell gives it."""
    order = json.loads(sys.argv[1])
    try:
        given = launch_environment.detect()
        assignment = _assignment(order["hosts"], given)
        if assignment is None:
            return 0
        # Apart, so that each has its connection: a launcher that stands still takes no new ones.
        telling, hearing = (open_store(given.store_url, given.secret, answer_timeout=None) for _ in range(2))
    except MultiringError as error:
        return _refuse(error, 2)
    with telling, hearing:
        end = _run(order, assignment, telling, hearing)
        try:
            if not end.why:
                _report(end, telling)
            else:
                with open_store(given.store_url, given.secret, _AGAIN_SECONDS) as anew:
                    _report(end, anew)
        except MultiringError as error:
            _refuse(error, 1)
    return exit_code(1 if end.code is None else end.code)


def _assignment(hosts: Sequence[int], given: Placement) -> _Assignment | None:
    """This rank's place on hosts of so many ranks each; None: there is no rank for this process."""
    size = sum(hosts)
    if given.launcher == "slurm":  # has started as many on each host as on the one with the most
        host, local = given.cross_rank, given.local_rank
        if host < len(hosts) and local >= hosts[host]:
            return None
        rank = sum(hosts[:host]) + local
    else:  # fills the hosts in their order, and may number the ranks of one otherwise
        rank, local = given.rank, given.local_rank
        host = next((host for host in range(len(hosts)) if rank < sum(hosts[: host + 1])), len(hosts))
    wanted = max(hosts) * len(hosts) if given.launcher == "slurm" else size
    if host == len(hosts) or given.size != wanted or local >= hosts[host]:
        raise UsageError(
            f"the engine says that this is rank {given.rank} of {given.size}, and the job has {size} ranks "
            f"on {len(hosts)} hosts: start it by --engine ssh, and report this with the engine's version"
        )
    return _Assignment(rank, size, RankSlot("", local, hosts[host], host, len(hosts)), given.job_id)


def _report(end: RankEnd, store: Store) -> None:
    store.set(end_key(end.rank), json.dumps({**vars(end), "stderr": list(end.stderr)}).encode())
    if end.code == 0 or end.by_launcher:
        return
    if end.is_secondary:
        with contextlib.suppress(errors.TimeoutError):
            store.get(_CAUSE, _CAUSE_SECONDS)
    else:
        store.set(_CAUSE, b"")
    store.set(exit_key(end.rank), b"")


class _Rank(RankProcess):
    """The rank. That it has failed is told as soon as it is seen: others may fail because of it."""

    store: Store

    def look(self) -> bool:
        ended = super().look()
        if ended and self.code != 0:
            with contextlib.suppress(MultiringError):
                self.store.set(failure_key(self.rank), b"")
        return ended


def _warn(message: str) -> None:
    print(f"multiring: on {socket.gethostname()}: {message}", file=sys.stderr, flush=True)


def _refuse(error: Exception, code: int) -> int:
    _warn(str(error))
    return code


def _run(order: Mapping[str, Any], assignment: _Assignment, store: Store, hearing: Store) -> RankEnd:
    tagged = assignment.size > 1 if order["tag_output"] is None else order["tag_output"]
    directory = None if order["output_dir"] is None else Path(order["output_dir"])
    host = socket.gethostname()
    mark = f"{assignment.job_id}-{assignment.rank}"
    with passed_on_signals() as signals, selectors.PollSelector() as selector:
        try:
            process = _start(
                order, assignment, mark, piped=tagged or directory is not None or assignment.size > 1
            )
            if not order["coloured"]:  # Open MPI lends terminals, wherever its own output goes
                os.environ["NO_COLOR"] = "1"
            outputs = Multiplexer(selector, tagged=tagged, directory=directory, warn=_warn)
        except (ProgramError, MultiringError, OSError) as error:
            code = EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE
            code = 2 if isinstance(error, UsageError) else getattr(error, "code", code)
            return RankEnd(assignment.rank, os.getpid(), _refuse(error, code), False, [], host)
        try:
            for name, descriptor in process.outputs().items():
                outputs.add(assignment.rank, name, descriptor)
            process.store = store
            store.set(STARTED, b"")
        except (MultiringError, OSError) as error:
            process.signal_group(signal.SIGKILL)
            code = _refuse(error, 2 if isinstance(error, UsageError) else EXIT_NOT_EXECUTABLE)
            return RankEnd(assignment.rank, os.getpid(), code, False, [], host)
        listener = _Listener(hearing, process)
        threading.Thread(target=listener.run, daemon=True).start()
        supervisor = Supervisor(
            [process],
            outputs,
            selector,
            signals,
            lambda: end_processes(f"{_MARK}={mark}".encode(), {process.pid}),
            lambda rank: False,
        )
        supervisor.run(None)
        by_launcher = supervisor.outcome is Outcome.INTERRUPTED and not listener.lost
        process.release()
    tail = outputs.tail(assignment.rank)
    return RankEnd(assignment.rank, process.pid, process.code, by_launcher, tail, host, listener.lost)


def _start(order: Mapping[str, Any], assignment: _Assignment, mark: str, *, piped: bool) -> _Rank:
    enter_directory(order["directory"])
    environ = {
        **defaults(assignment.rank),
        **os.environ,
        **placement_variables(assignment.rank, assignment.size, assignment.slot),
        _MARK: mark,
    }
    environ |= horovod_variables(environ)
    environ["PATH"] = own_python_first(environ)
    local_rank, local_size = assignment.slot.local_rank, assignment.slot.local_size
    shares = binding.shares(machine.allowed_cpus(), local_size, order["bind"])
    environ |= binding.thread_environment(machine.core_allowance(), local_size, environ)
    environ |= device_environments(order["devices"], local_size, environ)[local_rank]
    command = command_of(order["program"], order["module"], environ)
    manager = os.environ.get("PMI_FD", "")  # by which MPI's library in the rank talks to the engine
    return _Rank(
        assignment.rank,
        command,
        environ,
        cpus=None if shares is None else shares[local_rank],
        stdin=assignment.rank == 0 and order["stdin"],
        piped=piped,
        kept=[int(manager)] if manager.isdecimal() else [],
    )


class _Listener:
    """Passes on the signals that arrive at the launcher; its own end is one.

    That it does not answer is no proof of its end: it may be stopped. Its kernel tells, or there is none.

    Attributes:
        lost: How the rank had to be ended without the launcher; empty: it has not been.
    """

    def __init__(self, store: Store, process: RankProcess) -> None:
        self.lost = ""
        self._store = store
        self._process = process

    def run(self) -> None:
        signals = 0
        while True:
            try:
                number = int(self._store.get(signal_key(signals), _WAIT_SECONDS))
            except errors.TimeoutError:
                continue
            except MultiringError as error:
                if self._process.is_running:  # else it is we who leave
                    self.lost = f"ended on its host, because the launcher was lost: {error}"
                    os.kill(os.getpid(), signal.SIGTERM)
                return
            signals += 1
            if number == signal.SIGKILL:
                self._process.signal_group(number)
            else:
                os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main())
