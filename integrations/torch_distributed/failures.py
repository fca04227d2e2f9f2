"""What goes wrong in a process group, as errors that are both ours and torch.distributed's."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import DistBackendError

from multiring import errors
from multiring.errors import MultiringError

__all__ = [
    "AbortedError",
    "InternalError",
    "MismatchError",
    "PeerLostError",
    "TimeoutError",
    "UsageError",
    "as_torch_error",
    "describe_group",
]


class UsageError(errors.UsageError, DistBackendError):
    """`multiring.UsageError`, raised by a process group."""


class MismatchError(errors.MismatchError, DistBackendError):
    """`multiring.MismatchError`, raised by a process group."""


class TimeoutError(errors.TimeoutError, DistBackendError):
    """`multiring.TimeoutError`, raised by a process group."""


class PeerLostError(errors.PeerLostError, DistBackendError):
    """`multiring.PeerLostError`, raised by a process group."""


class AbortedError(errors.AbortedError, DistBackendError):
    """`multiring.AbortedError`, raised by a process group."""


class InternalError(errors.InternalError, DistBackendError):
    """`multiring.InternalError`, raised by a process group."""


# Programs for torch.distributed catch RuntimeError, of which DistBackendError is one; others catch ours.
_KINDS: dict[type[MultiringError], type[MultiringError]] = {
    errors.UsageError: UsageError,
    errors.MismatchError: MismatchError,
    errors.TimeoutError: TimeoutError,
    errors.PeerLostError: PeerLostError,
    errors.AbortedError: AbortedError,
    errors.InternalError: InternalError,
}


def describe_group(name: str, rank: int, ranks: Sequence[int]) -> str:
    """What is added to messages, which know ranks of the group only.

    Args:
        name: Of the process group, as torch calls it.
        rank: This rank in the group.
        ranks: The job's ranks, in the order of the group; empty: all.
    """
    if not ranks or list(ranks) == list(range(len(ranks))):
        return f"[process group {name!r}, rank {rank}]"
    numbers = ", ".join(map(str, ranks))
    return f"[process group {name!r} of the job's ranks {numbers}; rank {rank} in it]"


def as_torch_error(error: MultiringError, group: str) -> MultiringError:
    """The same error, as a RuntimeError too, that says in which group it happened.

    Args:
        error: Of any kind of multiring's.
        group: From `describe_group`.
    """
    if isinstance(error, DistBackendError):
        return error
    made = _KINDS[type(error)](f"{error} {group}")
    made.__dict__.update(error.__dict__)
    return made
