"""Descriptors enough for all ranks: the launcher holds several for each, and is often allowed 1024."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

from multiring.errors import UsageError

__all__ = ["allow_descriptors", "enough_descriptors", "limits_of_children"]

# For what is open for a moment: the pipes of a process that is being started, files that are read.
_SPARE = 32
_STARTED_WITH = resource.getrlimit(resource.RLIMIT_NOFILE)


@contextlib.contextmanager
def enough_descriptors(needed: int, purpose: str) -> Iterator[None]:
    """Lets this process open so many more descriptors than it has, within.

    Args:
        needed: How many are needed at the same time.
        purpose: What for, for the error.

    Raises:
        UsageError: The hard limit does not allow it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if total := allow_descriptors(needed):
            raise UsageError(
                f"{purpose} need {total} descriptors in this process, and its hard limit is {hard}: "
                "raise it (LimitNOFILE of the service that has started this shell, "
                "/etc/security/limits.conf, `docker run --ulimit nofile`), or take fewer"
            )
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def allow_descriptors(needed: int) -> int:
    """Lets this process open so many more descriptors than it has, or as many as its hard limit allows.

    Returns:
        0; or, where the hard limit is too low, what it would have to be.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    total = needed + _open_descriptors() + _SPARE
    if soft == resource.RLIM_INFINITY or soft >= total:
        return 0
    is_enough = hard == resource.RLIM_INFINITY or hard >= total
    resource.setrlimit(resource.RLIMIT_NOFILE, (total if is_enough else hard, hard))
    return 0 if is_enough else total


def _open_descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # not mounted
        return 3


def limits_of_children() -> tuple[int, int] | None:
    """What a child of ours has to set, to have the limits that we were started with; None: nothing.

    With more than 1024, programs that call `select` would write beyond its sets.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before, _ = _STARTED_WITH
    return None if soft == before or before == resource.RLIM_INFINITY else (min(before, soft), hard)
