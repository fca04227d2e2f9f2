"""What becomes of a function on a rank: it returns, or raises, or its process ends before that."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

from multiring.commands.functions import memory, pickling
from multiring.console.traceback_hook import RankTraceback

__all__ = ["JobReport", "Raised", "RankTraceback", "Returned", "raised"]


@dataclass(frozen=True)
class Returned:
    """What a rank returned."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """What a rank raised.

    Attributes:
        what: Kind and message, as "ValueError: text".
        traceback: As Python prints it.
        pickled: The exception; None where it cannot be pickled.
    """

    what: str
    traceback: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException, text: str) -> Raised:
        """What is told of an exception whose traceback is `text`."""
        what = "".join(traceback.format_exception_only(error)).strip()
        return cls(what, text, _safely_pickled(error))

    def exception(self) -> BaseException:
        """The exception itself, with its traceback as the cause; that alone where it cannot be had."""
        shown = RankTraceback(self.traceback)
        if self.pickled is None:
            return shown
        try:
            error = pickle.loads(self.pickled)
        except Exception:  # its module is there on the rank alone, say
            return shown
        if not isinstance(error, BaseException):
            return shown
        error.__cause__ = shown
        return error


@dataclass(frozen=True)
class JobReport:
    """What the launcher tells the caller.

    Attributes:
        code: The exit code that `multiring run` would have.
        lines: What it would say about the end of the job.
        rank: The rank that failed first; None: none did.
        who: That rank, with process and host.
        host: Its host.
        wrong: Why the job was not started; empty: it was.
    """

    code: int
    lines: tuple[str, ...] = ()
    rank: int | None = None
    who: str = ""
    host: str = ""
    wrong: str = ""


def raised(file: int) -> Raised | None:
    """What a rank has raised, of the file for its result; None: it has raised nothing."""
    outcome = None if memory.is_empty(file) else next(memory.read(file))
    return outcome if isinstance(outcome, Raised) else None


def _safely_pickled(error: BaseException) -> bytes | None:
    """An exception, if it can be pickled and made of that again: many cannot, by how they are constructed."""
    try:
        data = pickling.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data
