"""`multiring.run`: has a function called on every rank of a job, and hands over what it returns there."""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from multiring.commands.functions import memory, pickling
from multiring.commands.functions.job import Order
from multiring.commands.functions.launched import run_launcher
from multiring.commands.functions.outcome import JobReport, raised
from multiring.commands.launcher.job import EXIT_TIMED_OUT
from multiring.console.traceback_hook import shown_if_uncaught
from multiring.errors import MultiringError, RankError, TimeoutError, UsageError

__all__ = ["LauncherKeywords", "launch", "run"]

T = TypeVar("T")

_BINDINGS = ("core", "none", None)


class LauncherKeywords(TypedDict, total=False):
    """Options of `multiring run` for what the ranks print, and for where they run."""

    output_dir: str | os.PathLike[str] | None
    tag_output: bool | None
    bind: str | None
    devices: str | None


class LaunchKeywords(LauncherKeywords, total=False):
    """The keywords of `run` besides."""

    kwargs: Mapping[str, Any] | None
    env: Mapping[str, str] | None
    timeout: float | None


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    **options: Unpack[LauncherKeywords],
) -> list[T]:
    """Calls `fn(*args, **kwargs)` on every rank of a job of `np` ranks on this host, and returns what the
    ranks return, in the order of the ranks.

    Each rank is a new process, started as `multiring run` starts them; `multiring.init()` in `fn` finds its
    place. What the ranks print goes to `sys.stdout` and `sys.stderr`, in a notebook, too. Ctrl-C ends the
    ranks, and so does the end of this process. Nothing of the job is left when this returns or raises.

    Args:
        fn: What each rank calls. It is pickled, as are its arguments and what it returns: by cloudpickle
            where that is installed, which functions and classes of the main script or of a notebook need.
        args: Arguments of `fn`.
        kwargs: Arguments of `fn` by name.
        np: Number of ranks.
        env: Environment variables of the ranks, besides those of this process.
        timeout: Seconds that the job may take; None: any.
        options: `output_dir`: where to write each rank's output as well, as rank.K.stdout and rank.K.stderr;
            `tag_output`: whether lines begin with "[rank]" (where there are several ranks); `bind`: "core"
            gives each rank an equal share of the processors, "none" leaves that to the kernel ("core" if
            there is a processor for each rank); `devices`: the GPU that each rank sees, "auto" or as "0,1"
            (all see all).

    Returns:
        What `fn` has returned on each rank; None of a rank on which it has called `sys.exit(0)`.

    Raises:
        UsageError: An argument is wrong or cannot be pickled, or the ranks cannot be started.
        RankError: `fn` raised an exception on a rank, which is the cause of this error, or the process of a
            rank ended; the others are ended.
        TimeoutError: The job took longer than `timeout`.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
    """
    settings = _settings(np, env, timeout, options)
    try:
        with shown_if_uncaught(), memory.anonymous_files(np + 2) as (order_file, call_file, *results):
            _write_call(call_file, fn, tuple(args), dict(kwargs or {}))
            memory.write(order_file, Order(call_file, results, settings))
            report = run_launcher(order_file, (order_file, call_file, *results))
            _raise_failure(report, results, timeout)
            return [_value(rank, file) for rank, file in enumerate(results)]
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise UsageError(
            f"np={np} needs {np + 2} open files, more than this process may have: raise `ulimit -n`"
        ) from error


def launch(
    fn: Callable[..., T], args: Sequence[Any] = (), np: int = 2, **options: Unpack[LaunchKeywords]
) -> list[T]:
    """Starts `np` ranks on this host from a script or a notebook, without a launcher, each of which calls
    `fn(*args)`; `multiring.run` with two ranks unless more are asked for.

    Args:
        fn: What each rank calls, in a new process.
        args: Its arguments.
        np: Number of ranks.
        options: Those of `multiring.run`: `kwargs`, `env`, `timeout`, `output_dir`, `tag_output`, `bind`,
            `devices`.

    Returns:
        What `fn` has returned on each rank, in their order.

    Raises:
        UsageError: See `multiring.run`, as for the others.
        RankError: `fn` raised an exception on a rank, whose traceback this shows, or a rank's process ended.
        TimeoutError: The job took longer than `timeout`.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
    """
    return run(fn, args, np=np, **options)


def _settings(
    np: int, env: Mapping[str, str] | None, timeout: float | None, options: LauncherKeywords
) -> dict[str, Any]:
    """The arguments of `JobOptions`.

    Raises:
        UsageError: One is wrong.
        TypeError: There is no such option.
    """
    if unknown := options.keys() - LauncherKeywords.__annotations__:
        raise TypeError(f"run() got an unexpected keyword argument {min(unknown)!r}")
    if isinstance(np, bool) or not isinstance(np, int) or np < 1:
        raise UsageError(f"np={np!r}: give the number of ranks, at least 1")
    if timeout is not None and not (timeout > 0 and math.isfinite(timeout)):
        raise UsageError(f"timeout={timeout!r}: give seconds, more than 0, or None")
    if options.get("bind") not in _BINDINGS:
        raise UsageError(f"bind={options['bind']!r}: give 'core', 'none' or None")
    devices = options.get("devices")
    if not (devices is None or isinstance(devices, str)):
        raise UsageError(f"devices={devices!r}: give text, as 'auto' or '0,1', or None")
    if wrong := [pair for pair in (env or {}).items() if not all(isinstance(part, str) for part in pair)]:
        raise UsageError(f"env: {wrong[0][0]!r} is {wrong[0][1]!r}; names and values are text")
    if not sys.executable:
        raise UsageError("this Python does not know its own path (sys.executable), so it cannot start ranks")
    directory = options.get("output_dir")
    return {
        "environment": dict(env or {}),
        "timeout": timeout,
        "output_dir": None if directory is None else Path(directory),
        "tag_output": options.get("tag_output"),
        "bind": options.get("bind"),
        "devices": devices,
    }


def _write_call(file: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not callable(fn):
        raise UsageError(f"fn={fn!r}: give a function")
    try:
        memory.write(file, list(sys.argv), (fn, args, kwargs))
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise UsageError(
            f"{name} or its arguments cannot be pickled, {type(error).__name__}: {error}{pickling.ADVICE}"
        ) from error


def _raise_failure(report: JobReport, results: Sequence[int], timeout: float | None) -> None:
    """Raises what the job has failed with, if it has.

    Raises:
        MultiringError: It has.
    """
    if report.wrong:
        raise UsageError(report.wrong)
    if report.rank is not None:
        raise _rank_error(report, results[report.rank])
    said = "\n".join(report.lines)
    if report.code == EXIT_TIMED_OUT:
        raise TimeoutError(said.replace("--timeout ", "timeout="), elapsed=timeout)
    if report.code == 128 + signal.SIGPIPE:
        raise BrokenPipeError(errno.EPIPE, "the reader of the output has exited")
    if report.code:
        raise MultiringError(f"the launcher ended with exit code {report.code}: {said}")


def _rank_error(report: JobReport, file: int) -> RankError:
    outcome = raised(file)
    if outcome is None:
        return RankError("\n".join(report.lines), rank=report.rank, host=report.host)
    failed = RankError(f"{report.who} raised {outcome.what}", rank=report.rank, host=report.host)
    failed.__cause__ = outcome.exception()
    return failed


def _value(rank: int, file: int) -> Any:
    if memory.is_empty(file):
        raise RankError(f"rank {rank} ended with exit code 0 before its function had returned", rank=rank)
    try:
        outcome = next(memory.read(file))
    except Exception as error:
        raise RankError(
            f"what rank {rank} has returned cannot be unpickled here, {type(error).__name__}: {error}",
            rank=rank,
        ) from error
    os.ftruncate(file, 0)  # its memory may be needed for the next
    return outcome.value
