"""What a rank does after it has joined: it takes part with zeros in the allreduces that the others wait for.

A rank that has joined says so by aborting a communicator that carries nothing: the others see that while they
wait, and the ranks meet, over and over, until all have joined. In each meeting those that have joined
learn which allreduces the others wait for, and submit zeros to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from multiring.horovod.pending import Key, Pending, RankReport, auto_number
from multiring.horovod.request import Request, join_refusal, mismatch
from multiring.named_queue import NamedQueue
from multiring.work import Work

__all__ = ["Joining", "Zeros", "active_ranks", "awaited", "refusals"]

Zeros = Callable[[Request], Any]


def _numpy_zeros(request: Request) -> Any:
    """Zeros of the dtype and shape of a request."""
    return np.zeros(request.shape, request.dtype)


class Joining:
    """Whether this rank has joined the operations of a process set.

    Attributes:
        zeros: Makes its tensors when it has.
        since: How many meetings there had been then; None: it has not.
        last: The rank that was the last to join, once all have.
        ends: How often all ranks have joined.
    """

    def __init__(self) -> None:
        self.zeros: Zeros = _numpy_zeros
        self.since: int | None = None
        self.last = -1
        self.ends = 0
        self._given: set[Key] = set()  # zeros for operations without a name

    def has_given(self, key: Key) -> bool:
        """Whether this rank has submitted zeros for an operation that the program has given no name."""
        return key in self._given

    def contribution(self, request: Request, key: Key) -> Pending:
        """Zeros for an allreduce of the others; to be submitted."""
        tensor = self.zeros(request)

        def start(queue: NamedQueue) -> Work:
            op: Any
            op, scale = request.reduction(queue.size)
            return queue.allreduce_async(
                tensor, out=tensor, op=op, name=request.name, asked=request.asked, **scale
            )

        if auto_number(request.name) is not None:
            self._given.add(key)
        return Pending(request, key, start)

    def end(self, reports: Sequence[RankReport]) -> None:
        """To be called when all ranks have joined; `reports` are theirs."""
        _, self.last = max((each.joined_in or 0, rank) for rank, each in enumerate(reports))
        self.since = None
        self.ends += 1
        self._given.clear()


def active_ranks(reports: Sequence[RankReport]) -> dict[int, RankReport]:
    """The reports of those that have not joined."""
    return {rank: each for rank, each in enumerate(reports) if each.joined_in is None}


def awaited(active: Mapping[int, RankReport]) -> set[Key]:
    """The operations that all of them wait for."""
    return set.intersection(*(set(each.pending) for each in active.values()))


def refusals(wanted: Collection[Key], active: Mapping[int, RankReport]) -> dict[Key, str]:
    """Why operations fail that ranks which have joined are to take part in."""
    found = {}
    for key in wanted:
        requests = {rank: each.pending[key] for rank, each in active.items()}
        if text := mismatch(requests) or join_refusal(requests[min(requests)]):
            found[key] = text
    return found
