"""What becomes of the ranks of a job on Ray."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from multiring import errors
from multiring.errors import AbortedError, PeerLostError, RankError
from multiring.ray.worker import Location
from ray.exceptions import RayActorError, RayError, RayTaskError

__all__ = ["gather"]

# As in the launcher's supervisor: the failure that is seen first need not be the first one, and as long
# as all have failed because they lost another rank, that other one is still to be heard of.
_JUDGE_SECONDS = 0.2
_CAUSE_SECONDS = 5.0


def gather(calls: Sequence[Any], locations: Sequence[Location], timeout: float | None) -> list[Any]:
    """What all ranks return.

    Args:
        calls: For each rank, what Ray will put its result into.
        locations: Where each rank is.
        timeout: Seconds to wait; None: for ever.

    Raises:
        RankError: A rank failed.
        TimeoutError: Ranks have not returned in time.
    """
    began = time.monotonic()
    until = None if timeout is None else began + timeout
    ranks = {call: rank for rank, call in enumerate(calls)}
    pending = list(calls)
    results: dict[int, Any] = {}
    failures: dict[int, RayError] = {}
    while pending and (until is None or time.monotonic() < until):
        left = None if until is None else max(0.0, until - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=1, timeout=left)
        for call in ready:
            try:
                results[ranks[call]] = ray.get(call)
            except RayError as error:
                seconds = _CAUSE_SECONDS if _is_consequence(error) else _JUDGE_SECONDS
                latest = time.monotonic() + seconds
                until = min(until, latest) if failures and until is not None else latest
                failures[ranks[call]] = error
    if failures:
        raise _blame(failures, locations)
    if pending:
        late = ", ".join(str(ranks[call]) for call in pending)
        raise errors.TimeoutError(
            f"the job took longer than timeout={timeout:g} s; ranks that had not returned: {late}",
            elapsed=time.monotonic() - began,
        )
    return [results[rank] for rank in range(len(calls))]


def _is_consequence(error: RayError) -> bool:
    """Whether a rank failed because it lost another."""
    return isinstance(error, RayTaskError) and isinstance(error.cause, PeerLostError | AbortedError)


def _blame(failures: Mapping[int, RayError], locations: Sequence[Location]) -> RankError:
    """An error about the rank that has most likely failed by itself."""

    def likelihood(rank: int) -> tuple[bool, bool]:
        return _is_consequence(failures[rank]), not isinstance(failures[rank], RayActorError)

    rank = min(failures, key=likelihood)  # of equal ones the first
    error, location = failures[rank], locations[rank]
    who = f"rank {rank} (process {location.process} on {location.address})"
    if isinstance(error, RayTaskError):
        raised = error.cause
        message = f"{who} raised {type(raised).__name__}: {raised}"
    else:
        message = f"{who} died: {' '.join(str(error).split())}"
    others = [str(other) for other in sorted(failures) if other != rank]
    if others:
        message += f"; then failed as well: rank {', '.join(others)}"
    failed = RankError(message, rank=rank, host=location.address)
    failed.__cause__ = error
    return failed
