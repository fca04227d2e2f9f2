"""The launcher of `multiring.run`, a process of its own: `main([ORDER, CALLER])`.

It takes signals, which a library must not do in its user's process. The numbers are those of inherited
descriptors: ORDER is a file with an `Order`. CALLER is a connection to the process that wants the job: it
receives a `JobReport` in the end, and what it sends are numbers of signals, one byte each. Where it closes,
the job ends.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multiring.commands.functions import memory
from multiring.commands.functions.outcome import JobReport, Raised, raised
from multiring.commands.launcher import JobOptions, ProgramError
from multiring.commands.launcher.console.tracebacks import encoded
from multiring.commands.launcher.job import finish_job, write
from multiring.commands.launcher.report import who
from multiring.errors import UsageError

__all__ = ["Order", "main", "python_command"]


@dataclass(frozen=True)
class Order:
    """What to start.

    Attributes:
        call: Descriptor of the file with what every rank calls.
        results: For each rank, that of the file for its result.
        options: Arguments of `JobOptions`.
    """

    call: int
    results: Sequence[int]
    options: Mapping[str, Any]


def python_command(module: str, *arguments: int) -> list[str]:
    """Runs `main` of a module in a Python that finds modules where this one does."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    # PYTHONPATH may have more for that one; "" is there because of -c.
    code = (
        f"import sys; path = {path!r}; "
        "sys.path[:] = path + [each for each in sys.path if each not in ['', *path]]; "
        f"from {module} import main; sys.exit(main(sys.argv[1:]))"
    )
    return [sys.executable, *_interpreter_flags(), "-u", "-c", code, *map(str, arguments)]


def _interpreter_flags() -> list[str]:
    """Options that this Python was started with, as multiprocessing hands them on."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def main(arguments: Sequence[str]) -> None:
    """Runs the job to its end."""
    order_file, channel = map(int, arguments)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that called may have blocked some
    with socket.socket(fileno=channel) as caller:
        caller.set_inheritable(False)
        (order,) = memory.read(order_file)
        report = _run(order, caller)
        with contextlib.suppress(OSError):  # the caller has ended
            caller.sendall(pickle.dumps(report))


def _run(order: Order, caller: socket.socket) -> JobReport:
    module = "multiring.commands.functions.rank"
    try:
        end = finish_job(
            JobOptions(
                ranks=len(order.results),
                program=python_command(module, order.call, *order.results),
                descriptors=(order.call, *order.results),
                caller=caller.fileno(),
                **order.options,
            )
        )
    except (UsageError, ProgramError) as error:
        return JobReport(getattr(error, "code", 2), wrong=str(error))
    lines = list(end.lines)
    if end.failed is not None and end.failed.is_shown:
        outcome = _raised(order.results[end.failed.rank])
        if outcome is None:
            lines += [encoded(line).decode(errors="replace") for line in end.error_lines()]
            end.errors, end.note = (), ""
        elif end.errors and end.errors[-1][1].strip() == outcome.traceback.strip():
            end.errors = end.errors[:-1]  # the caller raises it
            end.note = end.note if end.errors else ""
    write(end.error_lines())
    if end.failed is None:
        return JobReport(end.code, tuple(lines))
    host = socket.gethostname()
    return JobReport(end.code, tuple(lines), end.failed.rank, who(end.failed, host), host)


def _raised(file: int) -> Raised | None:
    with contextlib.suppress(Exception):  # what a rank has returned may need modules that only ranks have
        return raised(file)
    return None
