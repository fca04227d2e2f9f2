"""How a bucket gets from the ranks to the ranks: as a whole, by one allreduce."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from multiring.errors import MultiringError, UsageError
from multiring.gradients.bucket_memory import BucketMemory
from multiring.gradients.options import ReducerOptions
from multiring.gradients.source import Gradient

if TYPE_CHECKING:
    from multiring.communicator import Communicator
    from multiring.work import Work

__all__ = ["BucketExchange", "DenseExchange", "Elsewhere", "Flags", "wait_for"]

Elsewhere = Mapping[int, Gradient]
"""Gradients that are not in their slots, by index."""

Flags = tuple[NDArray[np.bool_], NDArray[np.bool_]]
"""Of all ranks: per slot, any rank has produced it; per rank, it has data."""

# A raised flag crosses as about 1 / postscale, and float16 has nothing below 2^-24.
_MAX_POSTSCALE = 2.0**14


class BucketExchange(Protocol):
    """Reduces buckets, in the places where the gradients lie: in slots, but for those of `elsewhere`."""

    def send(
        self,
        number: int,
        elsewhere: Elsewhere,
        produced: Sequence[int],
        active: bool,
        kept: Collection[int],
    ) -> Work:
        """Let a bucket leave.

        Args:
            number: Number of the bucket.
            elsewhere: Gradients that are not in their slots.
            produced: Per slot of the bucket 1 or 0: this rank has a new gradient.
            active: This rank has data.
            kept: Indices of the gradients of earlier rounds that take part.
        """

    def receive(self, number: int, elsewhere: Elsewhere, work: Work) -> Flags:
        """When `work` has ended: the gradients are reduced, where any rank has produced them."""


class DenseExchange:
    """One allreduce of slots and flags together."""

    def __init__(self, comm: Communicator, memory: BucketMemory, options: ReducerOptions) -> None:
        # Within a host nothing is rounded.
        comm_dtype = (options.comm_dtype or comm.comm_dtype) if comm.cross_size > 1 else "float32"
        if comm_dtype == "float16" and abs(options.postscale) > _MAX_POSTSCALE:
            raise UsageError(
                f"postscale is {options.postscale:g}, with which gradients that cross hosts as float16 are "
                f"lost before they are scaled; it may be {_MAX_POSTSCALE:g} at most: scale more by prescale"
            )
        self._comm, self._memory, self._options = comm, memory, options

    def send(
        self,
        number: int,
        elsewhere: Elsewhere,
        produced: Sequence[int],
        active: bool,
        kept: Collection[int],
    ) -> Work:
        self._memory.raise_flags(number, produced, active)
        options, name = self._options, self._memory.names[number]
        pieces = self._memory.pieces(number, elsewhere)
        scaling = options.prescale, options.postscale
        crossing = options.crossing(self._memory.buckets[number].dtype == "float32")
        if pieces is not None:
            return self._comm.allreduce_pieces_async(pieces, options.op, name, *scaling, **crossing)
        array = self._memory.arrays[number]
        return self._comm.allreduce_async(array, options.op, array, name, *scaling, **crossing)

    def receive(self, number: int, elsewhere: Elsewhere, work: Work) -> Flags:
        return self._memory.read_flags(number)


def wait_for(works: Sequence[Work | None]) -> None:
    """Wait for all; raises what the first one that failed met.

    Works of one communicator end in their order. So the last one is waited for: to wake up for each takes the
    processor from the thread that reduces, in the middle of what the peers wait for.
    """
    if works and works[-1] is not None:
        with suppress(MultiringError):  # of an earlier one, more often than not
            works[-1].wait()
    for work in works:
        if work is not None:
            work.wait()
