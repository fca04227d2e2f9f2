"""The collectives, registered once: how each is called, and what it has to give to every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from multiring import Communicator, Work
from tests.python.collectives.oracle import Bits, Reduction


@dataclass(frozen=True)
class Collective:
    """How it is called: whether with a root (rank size - 1), which may give an array alone, the rows of a
    rank's input (None: any number that is the same everywhere), and whether it takes `out`. `expected` makes
    its result of (inputs of all ranks, rank, dtype), None without one."""

    name: str
    expected: Callable[[Sequence[Bits], int, str], Bits | None]
    rooted: bool = False
    rows: Callable[[int], int] | None = None
    takes_out: bool = False
    only_root: bool = False

    def options(self, dtype: str) -> dict[str, str]:
        """Return what a call of this dtype has to give: bool has no sum."""
        return {"op": "max"} if dtype == "bool" and self.name in ("allreduce", "reduce_scatter") else {}

    def call(self, comm: Communicator, x: Any, *, asynchronous: bool = False, **options: Any) -> Any:
        """Calls it and returns its result."""
        if self.only_root and comm.rank != comm.size - 1:
            x = None
        arguments = (comm.size - 1,) if self.rooted else ()
        if not asynchronous:
            return getattr(comm, self.name)(x, *arguments, **options)
        work = getattr(comm, f"{self.name}_async")(x, *arguments, **options)
        assert isinstance(work, Work)
        return work.wait()


def _reduced(inputs: Sequence[Bits], rank: int, dtype: str) -> Bits:
    return Reduction("max" if dtype == "bool" else "sum").apply(inputs, dtype)


def _reduce_scattered(inputs: Sequence[Bits], rank: int, dtype: str) -> Bits:
    return np.array_split(_reduced(inputs, rank, dtype), len(inputs))[rank]


def _joined_at_root(inputs: Sequence[Bits], rank: int, dtype: str) -> Bits | None:
    return np.concatenate(inputs) if rank == len(inputs) - 1 else None


def _block_of_root(inputs: Sequence[Bits], rank: int, dtype: str) -> Bits:
    return np.array_split(inputs[-1], len(inputs))[rank]


def _exchanged(inputs: Sequence[Bits], rank: int, dtype: str) -> Bits:
    return np.concatenate([np.array_split(bits, len(inputs))[rank] for bits in inputs])


def _unequal(rank: int) -> int:
    return (rank * 3 + 2) % 5 + 1


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective("allreduce", _reduced, takes_out=True),
        Collective("reduce_scatter", _reduce_scattered, takes_out=True),
        Collective("allgather", lambda inputs, *_: np.concatenate(inputs), rows=_unequal, takes_out=True),
        Collective("broadcast", lambda inputs, *_: inputs[-1], rooted=True, takes_out=True),
        Collective("alltoall", _exchanged, rows=lambda rank: 7 - rank % 4),
        Collective("gather", _joined_at_root, rooted=True, rows=_unequal),
        Collective("scatter", _block_of_root, rooted=True, only_root=True),
    )
}
