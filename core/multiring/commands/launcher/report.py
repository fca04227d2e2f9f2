"""Which rank is to blame when a job fails, and what to tell about it."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from multiring.commands.launcher.process import signal_name

__all__ = ["RankEnd", "blame", "exit_code", "failure_report", "who"]

_SSH_FAILED = 255  # what ssh ends with if it, and not what it has started, fails

_HINTS: dict[int, str] = {
    signal.SIGKILL: "killed from outside; most often by the kernel's out-of-memory killer: look at `dmesg`, "
    "use fewer ranks or a smaller batch, or raise the memory limit",
    signal.SIGSEGV: "native code touched memory that is not there; stacks of Python threads are in stderr",
    signal.SIGBUS: "a memory mapping lost its backing: a full file system or a memory limit of the container",
    signal.SIGABRT: "native code gave up; the reason is in stderr",
    signal.SIGILL: "an instruction that this processor lacks: a library was built for another one",
    signal.SIGTERM: "asked to end by somebody other than the launcher",
}

# How Python begins the message of the exception that ends it, and what a rank raises because another one
# failed: itself, or within the message of a framework's error.
_EXCEPTION = re.compile(r"(?<!\w)(\w*(?:Error|Exception|Interrupt|Exit))(?=:|$)")
_SECONDARY = re.compile(r"(?<!\w)(?:PeerLostError|AbortedError)(?=:|$)")
# JAX writes one of these when its coordinator, in rank 0, has ended; then it aborts the process.
_COORDINATOR_GONE = re.compile(
    r"JAX distributed service detected fatal errors|CoordinationService/PollForError"
)
_TRACEBACK = "Traceback (most recent call last):"
# What Python writes between an exception and the one that was raised because of it.
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: The rank.
        pid: Its process id.
        code: Exit code, minus the signal that ended it, or None if it cannot be ended.
        by_launcher: Whether it ended after the launcher had told it to.
        stderr: The last lines of its stderr.
        host: Another host that it was on; empty: this one.
        why: What is known of the reason; empty: nothing else.
        is_shown: Whether the exception that ended it is shown after the report.
    """

    rank: int
    pid: int
    code: int | None
    by_launcher: bool
    stderr: Sequence[str]
    host: str = ""
    why: str = ""
    is_shown: bool = False

    @property
    def is_secondary(self) -> bool:
        """Whether its last words are that another rank was lost, or an exception or JAX's abort that came of
        that."""
        if any(_COORDINATOR_GONE.search(line) for line in self.stderr):
            return True
        words = [line for line in self.stderr if _EXCEPTION.search(line) or line.startswith(_CHAINED)]
        while len(words) > 2 and words[-2].startswith(_CHAINED):
            del words[-2:]
        return bool(words and _SECONDARY.search(words[-1]))

    def how(self) -> str:
        """ "exit code 3" or "signal SIGKILL"."""
        if self.code is None:
            return "cannot be ended (stuck in the kernel)"
        if self.code < 0:
            return f"signal {signal_name(-self.code).removeprefix('signal ')}"
        ended = _signal_of(self.code)
        what = f" (128 + {ended}: {signal_name(ended)} ended what the rank had started)" if ended else ""
        return f"exit code {self.code}{what}"


def _signal_of(code: int | None) -> int:
    """The signal that has ended the rank, or what a shell in it had started (128 + signal); 0: none."""
    if code is None or code in range(129):
        return 0
    number = -code if code < 0 else code - 128
    return number if code < 0 or number in set(signal.Signals) else 0


def blame(failures: Sequence[RankEnd]) -> RankEnd:
    """The rank that failed first, of `failures` in the order they were seen.

    Those that failed because another had come within milliseconds of it and may be seen first; their last
    lines give them away. A signal is no such consequence, but where JAX ends its processes by one.
    """

    def likelihood(index: int) -> tuple[bool, bool, int]:
        end = failures[index]
        return (end.is_secondary, (end.code or 0) > 0, index)

    return failures[min(range(len(failures)), key=likelihood)]


def exit_code(code: int) -> int:
    """A process's end as a shell gives it: 128 plus the signal."""
    return 128 - code if code < 0 else code


def failure_report(
    culprit: RankEnd,
    others: Sequence[RankEnd],
    *,
    host: str,
    seconds: float,
    oom_kills: int,
    by_ssh: bool = True,
) -> list[str]:
    """The lines that tell which rank failed and how, without the launcher's name before them.

    Args:
        culprit: That rank.
        others: All ranks.
        host: The launcher's host.
        seconds: How long the job took.
        oom_kills: How many processes the kernel has killed on that host meanwhile for want of memory.
        by_ssh: Whether ranks on other hosts were started by ssh.
    """
    lines = [f"{who(culprit, host)} failed with {culprit.how()} after {seconds:.1f} s"]
    if culprit.why:
        lines.append(f"  {culprit.why}")
    elif number := _signal_of(culprit.code):
        hint = _HINTS.get(number)
        if oom_kills and number == signal.SIGKILL:
            hint = (
                "the kernel's out-of-memory killer struck in this container during the job: use fewer ranks "
                "or a smaller batch, or raise the memory limit"
            )
        lines += [f"  {hint}"] if hint else []
    if by_ssh and culprit.host and culprit.code == _SSH_FAILED:
        lines.append(f"  perhaps ssh itself: does `ssh -o BatchMode=yes {culprit.host} true` work?")
    if culprit.stderr and not culprit.is_shown:
        lines.append(f"last lines of rank {culprit.rank}'s stderr:")
        begins = [number for number, line in enumerate(culprit.stderr) if _TRACEBACK in line]
        lines += [f"  | {line}" for line in culprit.stderr[begins[-1] if begins else 0 :]]
    lines += _others(culprit, others)
    return lines


def who(end: RankEnd, host: str) -> str:
    """A rank with its process and host; `host` is the launcher's."""
    where = f"on {end.host}" if end.host else f"process {end.pid} on {host}"
    return f"rank {end.rank} ({where})"


def _others(culprit: RankEnd, others: Sequence[RankEnd]) -> list[str]:
    groups: dict[str, list[int]] = {}
    for end in others:
        if end.rank == culprit.rank:
            continue
        if end.code == 0:
            how = "had ended with exit code 0" if not end.by_launcher else "ended when told to"
        elif end.code is None:
            how = end.how()
        elif end.by_launcher and _signal_of(end.code):
            how = f"ended by the launcher ({end.how()})"
        else:
            how = f"failed as well ({end.how()})"
        groups.setdefault(how, []).append(end.rank)
    return [
        f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, sorted(ranks)))}: {how}"
        for how, ranks in groups.items()
    ]
