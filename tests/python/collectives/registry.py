"""The collectives, registered once: how each is called, and what it has to give to every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from multiring import Communicator, Work
from tests.python.collectives.oracle import Bits, Reduction, blocks


@dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
        name: Its name; the asynchronous form is called `name`_async.
        expected: `(inputs of all ranks, this rank, dtype)` to its result on this rank, or None without one.
        arguments: Positional arguments after the array.
        rows: Rows of a rank's input, or None for any number that is the same everywhere.
        takes_out: Whether it has an argument `out`.
        reduces: Whether it takes a reduction.
        only_root: Whether the root (rank size - 1) alone gives an array.
    """

    name: str
    expected: Callable[[Sequence[Bits], int, str], Bits | None]
    arguments: Callable[[Communicator], tuple[Any, ...]] = lambda comm: ()
    rows: Callable[[int], int] | None = None
    takes_out: bool = False
    reduces: bool = False
    only_root: bool = False

    def call(self, comm: Communicator, x: Any, *, asynchronous: bool = False, **options: Any) -> Any:
        """Calls it and returns its result."""
        if self.only_root and comm.rank != comm.size - 1:
            x = None
        arguments = self.arguments(comm)
        if not asynchronous:
            return getattr(comm, self.name)(x, *arguments, **options)
        work = getattr(comm, f"{self.name}_async")(x, *arguments, **options)
        assert isinstance(work, Work)
        return work.wait()


def uneven_splits(rank: int, size: int, rows: int) -> list[int]:
    """Splits of `rows` rows for an alltoall that differ from rank to rank, zeros among them."""
    cuts = sorted((rank * 7 + peer * 5) % (rows + 1) for peer in range(size - 1))
    return np.diff([0, *cuts, rows]).tolist()


def _reduced(inputs: Sequence[Bits], rank: int, dtype: str) -> Bits:
    return Reduction("sum").apply(inputs, dtype)


def _reduce_scattered(inputs: Sequence[Bits], rank: int, dtype: str) -> Bits:
    return blocks(_reduced(inputs, rank, dtype), len(inputs))[rank]


def _joined(inputs: Sequence[Bits], rank: int, dtype: str) -> Bits:
    return np.concatenate(inputs)


def _joined_at_root(inputs: Sequence[Bits], rank: int, dtype: str) -> Bits | None:
    return np.concatenate(inputs) if rank == len(inputs) - 1 else None


def _of_root(inputs: Sequence[Bits], rank: int, dtype: str) -> Bits:
    return inputs[-1]


def _block_of_root(inputs: Sequence[Bits], rank: int, dtype: str) -> Bits:
    return blocks(inputs[-1], len(inputs))[rank]


def _exchanged(inputs: Sequence[Bits], rank: int, dtype: str) -> Bits:
    return np.concatenate([blocks(bits, len(inputs))[rank] for bits in inputs])


def _last(comm: Communicator) -> tuple[int]:
    return (comm.size - 1,)


def _unequal(rank: int) -> int:
    return (rank * 3 + 2) % 5 + 1


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective("allreduce", _reduced, takes_out=True, reduces=True),
        Collective("reduce_scatter", _reduce_scattered, takes_out=True, reduces=True),
        Collective("allgather", _joined, rows=_unequal, takes_out=True),
        Collective("broadcast", _of_root, _last, takes_out=True),
        Collective("alltoall", _exchanged, rows=lambda rank: 7 - rank % 4),
        Collective("gather", _joined_at_root, _last, rows=_unequal),
        Collective("scatter", _block_of_root, _last, only_root=True),
    )
}
