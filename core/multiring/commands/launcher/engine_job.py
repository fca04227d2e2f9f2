"""`multiring run` by an engine: starts it, serves the store, passes signals on, and judges the end.

The engine starts engine_rank.py once for each rank, which reports to our store how its rank has ended and
hears from it which signals have arrived. So a job ends as it does when we start the ranks ourselves, whatever
the engine makes of signals and exit codes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from multiring import errors
from multiring.commands.launcher import engine_rank
from multiring.commands.launcher.console.multiplexer import Multiplexer
from multiring.commands.launcher.descriptors import enough_descriptors
from multiring.commands.launcher.devices import check_devices
from multiring.commands.launcher.directory import job_directory
from multiring.commands.launcher.engines import SRUN, Engine
from multiring.commands.launcher.hosts import address_towards
from multiring.commands.launcher.job import (
    EXIT_TIMED_OUT,
    job_environment,
    none_joined,
    say,
    store_url,
)
from multiring.commands.launcher.process import RankProcess, signal_name
from multiring.commands.launcher.rank_starter import (
    EXIT_NOT_EXECUTABLE,
    JobOptions,
    ProgramError,
    may_read_stdin,
    passed_on,
)
from multiring.commands.launcher.remote_ranks import current_directory
from multiring.commands.launcher.report import RankEnd, blame, exit_code, failure_report
from multiring.commands.launcher.supervisor import Outcome, Supervisor, passed_on_signals
from multiring.rendezvous.joined import EXPLAINED_KEY, JOINED_KEY
from multiring.store import Store, TcpStore, TcpStoreServer, address_to_listen_on

__all__ = ["heard_ends", "run_by_engine"]

# An engine that has started no rank for so long may wait for something, and be quiet about it.
_START_SECONDS = 10.0
# Of a rank that has started us: an engine would tell its own ranks the same.
_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def run_by_engine(options: JobOptions, engine: Engine) -> int:
    """Runs the job to its end and returns the launcher's exit code.

    Raises:
        UsageError: An option or a variable of multiring has a value that is not accepted.
        ProgramError: The engine cannot be started.
    """
    check_devices(options.devices, max(host.slots for host in engine.hosts))
    environ = job_environment(options)
    for name in _PLACE:
        environ.pop(f"MULTIRING_{name}", None)
    job_id, secret = secrets.token_hex(8), secrets.token_bytes(32)
    remote = options.remote_hosts
    address = options.address or (address_towards(remote) if remote else "127.0.0.1")
    with (
        # Of each rank and of what starts it there are three connections to the store, each as two.
        enough_descriptors(6 * engine.ranks, f"{engine.ranks} ranks"),
        passed_on_signals() as signals,
        selectors.PollSelector() as selector,
        job_directory(job_id) as (_, guard),
        TcpStoreServer(address_to_listen_on(address), 0, secret) as server,
        TcpStore(address, server.port, secret) as store,
    ):
        environ |= {
            "MULTIRING_STORE": store_url(address, server.port),
            "MULTIRING_SECRET": secret.hex(),
            "MULTIRING_JOB_ID": job_id,
        }
        process = _start(options, engine, environ, address, store)
        guard.watch(process.pid)
        outputs = Multiplexer(selector, tagged=False, directory=None, warn=lambda message: say([message]))
        for name, descriptor in process.outputs().items():
            outputs.add(0, name, descriptor)
        supervisor = Supervisor([process], outputs, selector, signals, guard.finish, lambda rank: False)
        supervisor.after(_START_SECONDS, "start", lambda: _tell_of_waiting(engine, store))
        began = time.monotonic()
        try:
            supervisor.run(options.timeout)
        finally:
            for _ in range(2):  # the first one is for ranks
                process.signal_group(signal.SIGKILL)
            guard.join()
            process.release()
        ends = heard_ends(server, store)
        explained = EXPLAINED_KEY in server
        code = _judge(options, engine, supervisor, process, ends, time.monotonic() - began, explained)
        if code == 0 and JOINED_KEY not in server:
            say(none_joined(engine.ranks, options.environment))
        return code


def _start(
    options: JobOptions, engine: Engine, environ: dict[str, str], address: str, store: Store
) -> _EngineProcess:
    # Open MPI 5.0 passes on what comes and never its end.
    stdin = engine.kind == SRUN and may_read_stdin()
    order = {
        "program": list(options.program),
        "module": options.module,
        "bind": options.bind,
        "devices": options.devices,
        "directory": current_directory(),
        "output_dir": None if options.output_dir is None else str(options.output_dir.absolute()),
        "tag_output": options.tag_output,
        "coloured": os.isatty(1) and "NO_COLOR" not in os.environ,
        "stdin": stdin,
        "hosts": [host.slots for host in engine.hosts],
    }
    # -P: what lies in the directory of the job, or of the engine, is none of our modules.
    rank = [options.python or sys.executable, "-P", "-m", engine_rank.__name__, json.dumps(order)]
    variables = sorted({*passed_on(environ), *options.environment})
    command = engine.command(rank, variables, address)
    try:
        return _EngineProcess(command, engine.environ(environ, options.ssh), stdin, store)
    except OSError as error:
        raise ProgramError(f"{engine.path} cannot be started: {error}", EXIT_NOT_EXECUTABLE) from error


def _tell_of_waiting(engine: Engine, store: Store) -> None:
    if _value(store, engine_rank.STARTED) is not None:
        return
    reason = "it is still on its way to other hosts, or cannot get there"
    if engine.kind == SRUN:
        reason = "it waits, perhaps for other steps of this allocation, which `squeue --steps` shows"
    say([f"{engine.path} has not started a rank within {_START_SECONDS:g} s: {reason}; Ctrl-C ends it"])


class _EngineProcess(RankProcess):
    """The engine. Signals go to the ranks by the store; the engine ends when they have."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], stdin: bool, store: Store) -> None:
        super().__init__(0, command, environ, cpus=None, stdin=stdin, piped=True)
        self._store = store
        self._signals_sent = 0
        self._killed = False

    def signal(self, number: int) -> None:
        """Sends a signal to the ranks."""
        self._tell_ranks(number)

    def signal_group(self, number: int) -> None:
        """Sends a signal to the ranks and what they have started; SIGKILL a second time ends the engine."""
        if number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGCONT):
            super().signal_group(number)  # the engine alone: a job on several hosts does not stop at once
        elif number != signal.SIGKILL:
            self._tell_ranks(number)
            if _value(self._store, engine_rank.STARTED) is None:  # it is still about to start them
                super().signal_group(number)
        elif self._killed:
            super().signal_group(number)
        else:
            self._killed = True
            self._tell_ranks(number)
            super().signal_group(signal.SIGTERM)  # for ranks that have not started

    def _tell_ranks(self, number: int) -> None:
        with contextlib.suppress(errors.MultiringError):
            self._store.set(engine_rank.signal_key(self._signals_sent), b"%d" % number)
            self._signals_sent += 1


def _value(store: Store, key: str) -> bytes | None:
    with contextlib.suppress(errors.MultiringError):
        return store.get(key, 0.0)
    return None


def _judge(
    options: JobOptions,
    engine: Engine,
    supervisor: Supervisor,
    process: RankProcess,
    ends: Sequence[RankEnd],
    seconds: float,
    explained: bool,
) -> int:
    if supervisor.outcome is Outcome.INTERRUPTED:
        say([f"{signal_name(supervisor.signal)} received after {seconds:.1f} s; all ranks have ended"])
        return 128 + supervisor.signal
    if supervisor.outcome is Outcome.TIMED_OUT:
        say([f"the job took longer than --timeout {options.timeout:g}; ended by it"])
        return EXIT_TIMED_OUT
    if supervisor.outcome is Outcome.UNREAD:
        return 128 + signal.SIGPIPE
    if process.code == 0:
        return 0
    if failures := [end for end in ends if end.code and not end.by_launcher]:
        culprit = blame(failures)
        own = socket.gethostname()
        if not explained or culprit.code is None or culprit.code < 0:
            say(failure_report(culprit, ends, host=own, seconds=seconds, oom_kills=0, by_ssh=False))
        return exit_code(culprit.code or 0)
    end = RankEnd(0, process.pid, process.code, False, [])
    say([f"{engine.path} ended with {end.how()} after {seconds:.1f} s, and no rank has failed"])
    return exit_code(1 if process.code is None else process.code)


def heard_ends(server: TcpStoreServer, store: Store) -> list[RankEnd]:
    """How the ranks have ended that have said so, in the order in which we heard that they had.

    No clock is compared: we have heard first of the rank that failed first, up to the time that word takes
    from host to host. Of those that failed because of it, their last words tell, and a rank whose last words
    are such is kept from the engine until we have heard of another (or 3 seconds have passed). Once the
    engine hears of one it ends the others, and we hear before it does: a rank that fails after that, by a
    signal with which engines do so, was ended by us, as it were.
    """
    keys = server.keys()
    heard = {key: index for index, key in enumerate(keys)}
    ends = [RankEnd(**json.loads(store.get(key, 0.0))) for key in keys if engine_rank.is_end_key(key)]
    heard_at = {end.rank: heard[engine_rank.end_key(end.rank)] for end in ends}
    failed_at = {rank: heard.get(engine_rank.failure_key(rank), at) for rank, at in heard_at.items()}
    exits = [heard[key] for key in map(engine_rank.exit_key, heard_at) if key in heard]
    first_exit = min(exits, default=len(keys))
    judged = []
    for end in sorted(ends, key=lambda end: failed_at[end.rank]):
        engine_knew = first_exit < failed_at[end.rank]
        by_engine = engine_knew and end.code in (-signal.SIGTERM, -signal.SIGKILL)
        host = "" if end.host == socket.gethostname() else end.host
        judged.append(dataclasses.replace(end, by_launcher=end.by_launcher or by_engine, host=host))
    return judged
