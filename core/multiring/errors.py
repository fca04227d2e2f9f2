"""The exceptions of multiring: one tree, mirrored from the native core.

Every exception carries what is known about its cause as attributes, so that a program need not parse the
message.
"""

from __future__ import annotations

import builtins
import sys

__all__ = [
    "AbortedError",
    "InternalError",
    "MismatchError",
    "MultiringError",
    "PeerLostError",
    "RankError",
    "TimeoutError",
    "UsageError",
]


class MultiringError(Exception):
    """Root of all errors raised by multiring.

    Attributes:
        rank: Rank that raised the error, as the communicator numbers it, or None where there is none. The
            message also tells the rank's number in the world where that is another.
        peer: Rank that caused it, numbered likewise, or None.
        host: Name of the host of `rank`, or None.
        operation: Collective in progress ("allreduce"), or None.
        tensor: Name of the tensor or operation as given by the caller, or None.
        nbytes: Bytes this rank contributed to the operation, or None.
        elapsed: Seconds from when the operation first had to wait to the error, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        host: str | None = None,
        operation: str | None = None,
        tensor: str | None = None,
        nbytes: int | None = None,
        elapsed: float | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.host = host
        self.operation = operation
        self.tensor = tensor
        self.nbytes = nbytes
        self.elapsed = elapsed
        # Frameworks that add to the text make an exception anew while they handle it.
        handled = sys.exc_info()[1]
        is_same = isinstance(handled, MultiringError) and type(handled) is type(self) and str(handled) != ""
        if is_same and set(vars(self).values()) == {None} and str(handled) in message:
            vars(self).update(vars(handled))


class UsageError(MultiringError, ValueError):
    """An argument or the state it is used in is wrong; nothing was sent and the communicator still works."""


class MismatchError(MultiringError):
    """The ranks asked for different things; raised on every rank, says who asked for what."""


class TimeoutError(MultiringError, builtins.TimeoutError):
    """A rank did not come before the deadline; says which ranks are missing."""


class PeerLostError(MultiringError, ConnectionError):
    """A rank died or left while others still needed it."""


class AbortedError(MultiringError):
    """The communicator is broken by an earlier error, or was aborted on purpose."""


class RankError(MultiringError, RuntimeError):
    """A rank of a job that this program has started failed: its function raised an exception, which is the
    cause of this one, or its process died.

    Attributes:
        rank: The rank.
        host: The name or address of its host.
    """


class InternalError(MultiringError):
    """A defect of multiring or a failing system call."""
