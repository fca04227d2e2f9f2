"""Watches over the ranks of a job until the last one has ended: exits, signals, time limits, output.

One thread and one loop. A job ends in one of these ways: all ranks end well; a rank fails, and the others are
told to end; a signal arrives and is passed on; the time limit passes; the reader of the output closes it.
Ranks that are told to end and do not are killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from types import FrameType

from multiring.commands.launcher.console.multiplexer import Multiplexer
from multiring.commands.launcher.process import RankProcess

__all__ = ["ArrivedSignals", "Outcome", "Supervisor", "passed_on_signals"]

# After the first failure others are given this long to fail too: the first one seen need not be the first
# one.
_JUDGE_SECONDS = 0.2
# As long as all have failed because they lost another, that other one may be about to: what it does at its
# exit can take long, and it left the communicator before.
_CAUSE_SECONDS = 3.0
_EXIT_SECONDS = 15.0  # for one that has said that an uncaught exception ends it
_END_SECONDS = 3.0  # from SIGTERM to SIGKILL when a rank has failed
_INTERRUPT_SECONDS = 5.0  # from a signal that was passed on to SIGKILL
_STUCK_SECONDS = 5.0  # from SIGKILL to giving up on a process that the kernel does not let die
_DRAIN_SECONDS = 2.0  # for output that a process outside our reach keeps open

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class Outcome(Enum):
    """Why a job ended."""

    DONE = "every rank ended with exit code 0"
    FAILED = "a rank failed"
    INTERRUPTED = "a signal told the launcher to end"
    TIMED_OUT = "the time limit passed"
    UNREAD = "nobody reads the output any more"


class ArrivedSignals:
    """The signals that have arrived, in order; a descriptor becomes readable when one does."""

    def __init__(self) -> None:
        self.descriptor, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._kept: list[int] = []

    def arrived(self) -> list[int]:
        """Those since it was last called."""
        found, self._kept = self._kept + self._read(), []
        return found

    def is_to_end(self) -> bool:
        """Whether one of those that `arrived` will return tells the launcher to end."""
        self._kept += self._read()
        return any(number in _ENDING_SIGNALS for number in self._kept)

    def _read(self) -> list[int]:
        with contextlib.suppress(BlockingIOError):
            return list(os.read(self.descriptor, 4096))
        return []

    def wake(self) -> None:
        """As if one of our processes had ended: ranks on other hosts are none."""
        with contextlib.suppress(BlockingIOError):  # there is enough to wake up for
            os.write(self._writing, bytes([signal.SIGCHLD]))

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        def do_nothing(number: int, frame: FrameType | None) -> None:
            """Python writes the number to the pipe before it calls this."""

        before = {}
        for number in (*_ENDING_SIGNALS, *_USER_SIGNALS, signal.SIGTSTP, signal.SIGCHLD):
            # A signal that we were started with as ignored (nohup, background jobs) stays ignored.
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGCHLD:
                before[number] = signal.signal(number, do_nothing)
        wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            os.close(self.descriptor)
            os.close(self._writing)


@contextlib.contextmanager
def passed_on_signals() -> Iterator[ArrivedSignals]:
    """Collects the signals that `Supervisor` acts on, from before the first rank is started."""
    signals = ArrivedSignals()
    with signals.caught():
        yield signals


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


class Supervisor:
    """Runs the loop.

    Args:
        ranks: The started ranks; a rank added later (`ranks` is not copied) is watched as well.
        outputs: Their output.
        selector: The selector that `outputs` registers with.
        signals: The signals that have arrived and will arrive.
        end_leftovers: Called once when the last rank has ended, to kill what ranks have left running.
        is_consequence: Tells whether a rank that failed did so because it lost another.

    Attributes:
        outcome: Why the job ended.
        signal: The signal that ended it, with `Outcome.INTERRUPTED`.
        failures: The ranks that failed before the launcher told any to end, in the order this was seen.
        ended_by_us: The ranks that ended after they had been told to.
    """

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        outputs: Multiplexer,
        selector: selectors.BaseSelector,
        signals: ArrivedSignals,
        end_leftovers: Callable[[], None],
        is_consequence: Callable[[RankProcess], bool],
    ) -> None:
        self.outcome = Outcome.DONE
        self.signal = 0
        self.failures: list[RankProcess] = []
        self.ended_by_us: list[RankProcess] = []
        self._ranks = ranks
        self._outputs = outputs
        self._selector = selector
        self._signals = signals
        self._end_leftovers = end_leftovers
        self._is_consequence = is_consequence
        self._cause_since: float | None = None
        self._ending = False
        self._draining = False
        self._over = False
        self._caller: int | None = None
        self._due: dict[str, tuple[float, Callable[[], None]]] = {}  # by name: when, what
        selector.register(signals.descriptor, selectors.EVENT_READ, self._on_signals)

    def run(self, timeout: float | None) -> None:
        """Returns when every rank has ended and its output is written.

        Args:
            timeout: Seconds after which the job is ended, or None.
        """
        if timeout is not None:
            self.after(timeout, "time limit", lambda: self.end(Outcome.TIMED_OUT))
        # What came while the ranks were started.
        if self._caller is not None and _is_readable(self._caller):
            self._on_message(self._caller)
        self._on_signals()
        while not self._over:
            self._outputs.before_wait()
            if self._outputs.reader_is_gone:
                self.end(Outcome.UNREAD)
            if self._draining and self._outputs.is_finished:
                break
            for key, _ in self._selector.select(self._patience()):
                key.data()
            self._act()

    def end(self, outcome: Outcome) -> None:
        """Tells the ranks to end, kills them if they do not; the first reason stays."""
        if self._ending:
            return
        self._ending = True
        self.outcome = outcome
        self._tell(signal.SIGTERM)
        self.after(_END_SECONDS, "kill", self._kill)

    def obey(self, descriptor: int) -> None:
        """Takes numbers of signals from a connection, one byte each; that it closes counts as SIGTERM."""
        self._caller = descriptor
        self._selector.register(descriptor, selectors.EVENT_READ, partial(self._on_message, descriptor))

    def is_to_end(self) -> bool:
        """Before `run`: whether a signal or the connection will end the job."""
        return self._signals.is_to_end() or (self._caller is not None and _is_readable(self._caller))

    def after(self, seconds: float, name: str, act: Callable[[], None]) -> None:
        """Calls `act` once so many seconds from now, unless the ranks have ended before; a name has one."""
        self._due[name] = (time.monotonic() + seconds, act)

    def _patience(self) -> float | None:
        times = [when for when, _ in self._due.values()]
        if self._outputs.next_deadline is not None:
            times.append(self._outputs.next_deadline)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _act(self) -> None:
        now = time.monotonic()
        for name, (when, act) in list(self._due.items()):
            if when <= now and name in self._due:
                del self._due[name]
                act()

    def _look(self) -> None:
        for rank in self._ranks:
            if not rank.look():
                continue
            self._outputs.rank_ended(rank.rank, rank.code, was_told=self._ending)
            if self._ending:
                self.ended_by_us.append(rank)
            elif rank.code != 0:
                self.failures.append(rank)
                if len(self.failures) == 1 or self._cause_since is not None:
                    self.after(_JUDGE_SECONDS, "judge", self._judge)
        if not self._draining and not any(rank.is_running for rank in self._ranks):
            if self.failures:
                self._judge()
            self._drain()

    def _judge(self) -> None:
        if running := [rank for rank in self._ranks if rank.is_running]:
            if all(map(self._is_consequence, self.failures)):
                now = time.monotonic()
                self._cause_since = self._cause_since or now
                is_ending = any(self._outputs.is_ending(rank.rank) for rank in running)
                until = self._cause_since + (_EXIT_SECONDS if is_ending else _CAUSE_SECONDS)
                if now < until:
                    self.after(until - now, "judge", self._judge)
                    return
            self.end(Outcome.FAILED)
        elif not self._ending:
            self._ending = True
            self.outcome = Outcome.FAILED

    def _drain(self) -> None:
        self._draining = True
        self._due.clear()
        for rank in self._ranks:
            rank.signal_group(signal.SIGKILL)
        self._end_leftovers()
        self.after(_DRAIN_SECONDS, "drain", self._outputs.end)

    def _tell(self, number: int) -> None:
        for rank in self._ranks:
            if rank.is_running:
                rank.signal_group(number)
                rank.signal_group(signal.SIGCONT)  # a stopped process would not notice

    def _kill(self) -> None:
        self._tell(signal.SIGKILL)
        self.after(_STUCK_SECONDS, "stuck", self._give_up)

    def _give_up(self) -> None:
        self._drain()
        self._outputs.end()

    def _on_signals(self) -> None:
        for number in self._signals.arrived():
            if number in _ENDING_SIGNALS:
                self._on_ending_signal(number)
            elif number == signal.SIGTSTP:
                self._pause()
            elif number in _USER_SIGNALS:
                for rank in self._ranks:
                    rank.signal(number)
        self._look()

    def _on_message(self, descriptor: int) -> None:
        numbers = b""
        with contextlib.suppress(ConnectionResetError):
            numbers = os.read(descriptor, 64)
        if not numbers:
            self._selector.unregister(descriptor)
        for number in numbers or [signal.SIGTERM]:
            self._on_ending_signal(number)

    def _on_ending_signal(self, number: int) -> None:
        if self._draining:  # only output is left, and nobody wants to wait for it
            self._outputs.discard()
            self._over = True
        elif self._ending:
            self._kill()
        else:
            self._ending = True
            self.outcome = Outcome.INTERRUPTED
            self.signal = number
            if number == signal.SIGINT:
                self._outputs.leave_out_interrupts()
            self._tell(number)
            self.after(_INTERRUPT_SECONDS, "kill", self._kill)

    def _pause(self) -> None:
        """Stops the ranks and then the launcher, as Ctrl-Z asks, and goes on when the launcher does."""
        began = time.monotonic()
        # They are no children of the shell: SIGTSTP would be ignored, only SIGSTOP stops them.
        for rank in self._ranks:
            rank.signal_group(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in self._ranks:
            rank.signal_group(signal.SIGCONT)
        slept = time.monotonic() - began
        self._due = {name: (when + slept, act) for name, (when, act) in self._due.items()}
