"""`multiring run`: starts the ranks of a job on this host and sees it through."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from multiring import config, machine
from multiring.commands.launcher.console.multiplexer import Multiplexer
from multiring.commands.launcher.console.tracebacks import (
    Tracebacks,
    encoded,
    fold,
    is_coloured,
    rank_list,
    tagged_lines,
)
from multiring.commands.launcher.descriptors import enough_descriptors
from multiring.commands.launcher.directory import Guard, job_directory
from multiring.commands.launcher.foreign_variables import MPI_LIBRARY, torch_meeting
from multiring.commands.launcher.hosts import address_towards
from multiring.commands.launcher.process import RankProcess, signal_name
from multiring.commands.launcher.rank_starter import (
    EXIT_NOT_EXECUTABLE,
    EXIT_NOT_FOUND,
    JobOptions,
    ProgramError,
    RankStarter,
)
from multiring.commands.launcher.report import RankEnd, blame, exit_code, failure_report
from multiring.commands.launcher.supervisor import ArrivedSignals, Outcome, Supervisor, passed_on_signals
from multiring.errors import MultiringError
from multiring.rendezvous.joined import EXPLAINED_KEY, HOSTS_KEY, JOINED_KEY, ending_key
from multiring.store import FileStore, TcpStoreServer, address_to_listen_on

__all__ = [
    "EXIT_TIMED_OUT",
    "JobEnd",
    "finish_job",
    "job_environment",
    "none_joined",
    "run_job",
    "say",
    "store_url",
    "write",
]

EXIT_TIMED_OUT = 124


_MEETING = ("MASTER_ADDR", "MASTER_PORT")


@dataclass
class JobEnd:
    """How a job ended.

    Attributes:
        code: The launcher's exit code.
        lines: What there is to say about it.
        explained: Whether a rank's own error has said it already.
        failed: The rank that failed first; None: none did.
        errors: The different exceptions with which ranks have ended, and which ranks: that of `failed` last.
        note: What to say of those that are left out; empty: none are.
        tagged: Whether lines of ranks begin with their ranks.
    """

    code: int = 0
    lines: Sequence[str] = ()
    explained: bool = False
    failed: RankEnd | None = None
    errors: Sequence[tuple[list[int], str]] = ()
    note: str = ""
    tagged: bool = True

    def error_lines(self) -> list[str]:
        """The lines that show `errors`."""
        shown = tagged_lines(self.errors, coloured=is_coloured(2), tagged=self.tagged)
        return [f"multiring: {self.note}", *shown] if self.note else shown


def run_job(options: JobOptions) -> int:
    """Runs the job to its end, says how it ended, and returns the launcher's exit code.

    Raises:
        UsageError: An option or a variable of multiring has a value that is not accepted.
        ProgramError: The program cannot be started.
    """
    end = finish_job(options)
    lines = [] if end.explained else [f"multiring: {line}" for line in end.lines]
    # What a failure comes down to is its message, which comes last.
    write([*lines, *end.error_lines()] if end.failed else [*end.error_lines(), *lines])
    return end.code


def finish_job(options: JobOptions) -> JobEnd:
    """Runs the job to its end.

    Raises:
        UsageError: An option or a variable of multiring has a value that is not accepted.
        ProgramError: The program cannot be started.
    """
    environ = job_environment(options)
    job_id, secret = secrets.token_hex(8), secrets.token_hex(32)
    start = RankStarter(options, environ)
    if start.notice:
        say([start.notice])
    with (
        enough_descriptors(_descriptors(options), f"{options.ranks} ranks"),
        passed_on_signals() as signals,
        selectors.PollSelector() as selector,
        job_directory(job_id) as (directory, guard),
        _store(options, directory, secret) as (store, address, is_set),
    ):
        start.shared = {
            **torch_meeting(options.slot(0).host, address),
            **_given_meeting(options),
            "MULTIRING_STORE": store,
            "MULTIRING_SECRET": secret,
            "MULTIRING_JOB_ID": job_id,
        }
        start.selector, start.wake = selector, signals.wake
        is_full = config.check(environ).get("traceback") == "full"
        return _Job(options, start, signals, selector, guard, is_set, is_full).run()


def _descriptors(options: JobOptions) -> int:
    """How many are open at once: of a rank here its two pipes, elsewhere both ends of two pipes; with other
    hosts the two connections of each rank to the store, as four, and of each ssh three pipes; and files."""
    elsewhere = sum(bool(options.slot(rank).host) for rank in range(options.ranks))
    files = 0 if options.output_dir is None else 2 * options.ranks
    return (
        2 * options.ranks
        + files
        + (4 * (elsewhere + options.ranks) if elsewhere else 0)
        + (3 * len(options.remote_hosts))
    )


def _given_meeting(options: JobOptions) -> dict[str, str]:
    """What the user has chosen by --env, such as a port that a firewall lets through."""
    return {name: options.environment[name] for name in _MEETING if name in options.environment}


def job_environment(options: JobOptions) -> dict[str, str]:
    """The environment that ranks of this host get, checked; opens standard descriptors that are closed.

    Raises:
        UsageError: A variable of multiring has a value that is not accepted.
    """
    _open_missing_standard_descriptors()
    environ = {**os.environ, **options.environment}
    config.check(environ)
    for name, meant in config.unknown_variables(environ).items():
        say([f"environment variable {name} is not known" + (f"; is {meant} meant?" if meant else "")])
    return environ


@contextlib.contextmanager
def _store(
    options: JobOptions, directory: Path, secret: str
) -> Iterator[tuple[str, str, Callable[[str], bool]]]:
    """Where the ranks meet: the job's directory, or where there are other hosts a port of ours; where ranks
    reach this host; and whether a rank has set a key there."""
    if not options.remote_hosts:
        yield directory.as_uri(), "127.0.0.1", lambda key: _has(directory, key)
        return
    address = options.address or address_towards(options.remote_hosts)
    with TcpStoreServer(address_to_listen_on(address), 0, bytes.fromhex(secret)) as server:
        hosts = [options.slot(rank).host or socket.gethostname() for rank in range(options.ranks)]
        server.set(HOSTS_KEY, "\n".join(hosts).encode())
        yield store_url(address, server.port), address, lambda key: key in server


def _has(directory: Path, key: str) -> bool:
    if not directory.is_dir():  # cleaned away as an old temporary file: do not claim that nobody has joined
        return key == JOINED_KEY
    with contextlib.suppress(MultiringError), FileStore(directory) as store:
        store.get(key, 0.0)
        return True
    return False


def store_url(host: str, port: int) -> str:
    """What ranks are told of a store."""
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


class _Job:
    """One run: the started ranks and the judgement at the end."""

    def __init__(
        self,
        options: JobOptions,
        start: Callable[[int, bool], RankProcess],
        signals: ArrivedSignals,
        selector: selectors.BaseSelector,
        guard: Guard,
        is_set: Callable[[str], bool],
        is_full: bool,
    ) -> None:
        self._options = options
        self._is_set, self._joined, self._explained = is_set, False, False
        self._start = start
        self._guard = guard
        self._signals = signals
        tagged = options.ranks > 1 if options.tag_output is None else options.tag_output
        # A lone rank without tags keeps the terminal itself, so that it looks as it does without us; but not
        # where a caller shows its error.
        is_kept = options.output_dir is not None or options.caller is not None
        self._piped = options.ranks > 1 or tagged or is_kept
        self._tagged = tagged
        self._tracebacks = Tracebacks(lambda rank: is_set(ending_key(rank)), is_full=is_full)
        self._outputs = Multiplexer(
            selector,
            tagged=tagged,
            directory=options.output_dir,
            warn=lambda message: say([message]),
            tracebacks=self._tracebacks,
        )
        self._ranks: list[RankProcess] = []
        self._supervisor = Supervisor(
            self._ranks, self._outputs, selector, signals, self._end_leftovers, self._is_consequence
        )
        if options.caller is not None:
            self._supervisor.obey(options.caller)

    def run(self) -> JobEnd:
        began = time.monotonic()
        oom_kills = machine.oom_kills()
        try:
            failure = self._start_ranks()
            if failure is not None:
                self._supervisor.end(Outcome.FAILED)
            self._supervisor.run(self._options.timeout)
        except BaseException:
            self._outputs.show_held()
            raise
        finally:
            # Only an error of ours comes here with ranks still running.
            for rank in self._ranks:
                rank.signal_group(signal.SIGKILL)
            self._guard.join()
            ends = {rank.rank: self._end_of(rank) for rank in self._ranks}
            for rank in self._ranks:
                rank.release()
        if failure is not None:
            self._outputs.show_held()
            raise failure
        end = self._judge(ends, time.monotonic() - began, machine.oom_kills() - oom_kills)
        self._add_errors(end, ends)
        if end.errors or (end.lines and not end.explained):
            self._outputs.finish_line()
        return end

    def _start_ranks(self) -> ProgramError | None:
        for number in range(self._options.ranks):
            # Many ranks take long to start. What runs on other hosts has to be known to be ended.
            if not self._options.remote_hosts and self._supervisor.is_to_end():
                break
            try:
                rank = self._start(number, self._piped)
                self._guard.watch(rank.pid)
                self._ranks.append(rank)
                for name, descriptor in rank.outputs().items():
                    self._outputs.add(number, name, descriptor)
            except OSError as error:
                code = EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE
                why = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
                limited = error.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
                hint = "; see what `multiring doctor` says about limits" if limited else ""
                return ProgramError(f"rank {number} cannot be started: {why}{hint}", code)
        return None

    def _end_leftovers(self) -> None:
        self._joined, self._explained = map(
            self._is_set, (JOINED_KEY, EXPLAINED_KEY)
        )  # before the directory goes
        self._guard.finish()

    def _is_consequence(self, rank: RankProcess) -> bool:
        return RankEnd(rank.rank, rank.pid, rank.code, False, self._last_words(rank.rank)).is_secondary

    def _last_words(self, rank: int) -> list[str]:
        return self._tracebacks.held_lines(rank) or self._outputs.tail(rank)

    def _end_of(self, rank: RankProcess) -> RankEnd:
        by_launcher = rank in self._supervisor.ended_by_us
        tail, host = self._last_words(rank.rank), self._options.slot(rank.rank).host
        is_shown = self._tracebacks.holds(rank.rank) or self._tracebacks.has_shown(rank.rank)
        return RankEnd(rank.rank, rank.pid, rank.code, by_launcher, tail, host, is_shown=is_shown)

    def _add_errors(self, end: JobEnd, ends: dict[int, RankEnd]) -> None:
        """Adds the exceptions with which ranks have ended, without those that came of one that is shown."""
        texts, culprit = self._tracebacks.texts(), end.failed
        if (
            culprit is not None
            and culprit.is_shown
            and not culprit.is_secondary
            and not self._tracebacks.is_full
        ):
            left_out = [rank for rank in texts if ends[rank].is_secondary]
            texts = {rank: text for rank, text in texts.items() if rank not in left_out}
            if left_out:
                ranks = f"rank{'s' if len(left_out) > 1 else ''} {rank_list(left_out)}"
                end.note = (
                    f"what {ranks} raised because of it is left out; MULTIRING_TRACEBACK=full shows all"
                )
        end.errors = fold(texts, None if culprit is None else culprit.rank)
        end.tagged = self._tagged

    def _judge(self, ends: dict[int, RankEnd], seconds: float, oom_kills: int) -> JobEnd:
        supervisor = self._supervisor
        if supervisor.outcome is Outcome.FAILED:
            culprit = blame([ends[rank.rank] for rank in supervisor.failures])
            others = [ends[rank] for rank in sorted(ends)]
            host = socket.gethostname()
            kills = 0 if culprit.host else oom_kills  # of this host
            lines = failure_report(culprit, others, host=host, seconds=seconds, oom_kills=kills)
            explained = self._explained and culprit.code is not None and culprit.code >= 0
            return JobEnd(exit_code(culprit.code or 0), lines, explained, culprit)
        stuck = [end for end in ends.values() if end.code is None]
        lines = [f"rank {end.rank} (process {end.pid}) {end.how()}" for end in stuck]
        if supervisor.outcome is Outcome.INTERRUPTED:
            name = signal_name(supervisor.signal)
            lines.append(f"{name} received after {seconds:.1f} s; all ranks have ended")
            return JobEnd(128 + supervisor.signal, lines)
        if supervisor.outcome is Outcome.TIMED_OUT:
            late = ", ".join(
                str(rank) for rank in sorted(end.rank for end in ends.values() if end.by_launcher)
            )
            limit = f"--timeout {self._options.timeout:g}"
            lines.append(f"the job took longer than {limit}; ended by it: ranks {late}")
            return JobEnd(EXIT_TIMED_OUT, lines)
        if supervisor.outcome is Outcome.UNREAD:
            return JobEnd(128 + signal.SIGPIPE, lines)
        if not self._joined:
            lines += none_joined(self._options.ranks, self._options.environment)
        return JobEnd(0, lines)


def _open_missing_standard_descriptors() -> None:
    # Where one is closed, the next file opened would take its number and get the output meant for it.
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > 2:
            os.close(descriptor)
            return
        os.set_inheritable(descriptor, True)


def none_joined(ranks: int, environment: Mapping[str, str]) -> list[str]:
    """Return what to say of a job that has ended well although no rank has joined it: each has trained alone.

    Args:
        ranks: Number of ranks.
        environment: Variables that the launcher has set for them.
    """
    if ranks == 1:
        return []
    call = "jax.distributed.initialize()" if MPI_LIBRARY in environment else "multiring.init()"
    what = f"none of the {ranks} ranks called {call} or made a process group of multiring"
    why = "unless another library joined them, each ran on its own, and nothing was reduced over ranks"
    advice = "Call it in the program, or start a program that is not distributed without `multiring run`"
    return [f"{what}: {why}. {advice}"]


def say(lines: Sequence[str]) -> None:
    """Writes a message of the launcher itself to stderr."""
    write([f"multiring: {line}" for line in lines])


def write(lines: Sequence[str]) -> None:
    """Writes lines to stderr."""
    left = memoryview(b"".join(encoded(line) + b"\n" for line in lines))
    writable = select.poll()
    writable.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):  # the reader of stderr has closed it
        while left:
            try:
                left = left[os.write(2, left) :]
            except BlockingIOError:  # another process has made it so
                writable.poll()
