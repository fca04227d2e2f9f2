"""The collectives beside allreduce: who has which block of the array before and after, and what has to cross
from host to host.

The array is made of as many blocks as there are ranks, all of them equally long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from multiring.benchmarks.collectives.cases import Crossing
from multiring.benchmarks.contenders import FloatArray
from multiring.benchmarks.emulation.start import Emulation

__all__ = ["COLLECTIVES", "ROOT", "Blocks", "Buffers", "Collective"]

ROOT = 0
# Numbers small enough for the sums over some hundred ranks to be exact, and different for neighbours.
_ITERATIONS, _PLACES = 32, 1021


@dataclass(frozen=True)
class Collective:
    """One of them.

    Attributes:
        name: Its name, which is that of the method of `Communicator`.
        takes: Whether a rank's input is the whole array; otherwise it is one block.
        gives: Whether a rank's result is the whole array.
        root_takes: Whether nobody but the root has an input.
        root_gives: Whether nobody but the root has a result.
        in_place: Whether the result replaces the input.
        source: For a rank and a block of its result, whose input it is from (None: the sum of all ranks') and
            which block of it that is.
        crossing: What has to cross from host to host, in units of the array's size, for a number of hosts and
            of ranks on each.
    """

    name: str
    takes: bool
    gives: bool
    source: Callable[[int, int], tuple[int | None, int]]
    crossing: Callable[[int, int], Crossing]
    root_takes: bool = False
    root_gives: bool = False
    in_place: bool = False

    def blocks_in(self, rank: int, ranks: int) -> int:
        """Blocks of a rank's input."""
        if self.root_takes and rank != ROOT:
            return 0
        return ranks if self.takes else 1

    def blocks_out(self, rank: int, ranks: int) -> int:
        """Blocks of a rank's result."""
        if self.root_gives and rank != ROOT:
            return 0
        return ranks if self.gives else 1

    def crossing_of(self, emulation: Emulation, size: int) -> Crossing:
        """Bytes that have to cross for an array of `size` bytes."""
        one = self.crossing(emulation.hosts, emulation.ranks)
        return Crossing(one.busiest * size, one.together * size)


def _share(hosts: int) -> float:
    """Of the array, what does not belong to a host's own ranks."""
    return (hosts - 1) / hosts


_ALL = (
    Collective(
        "broadcast",
        takes=True,
        gives=True,
        source=lambda rank, block: (ROOT, block),
        # Every other host receives the array once, and the root's sends it once where they pass it on.
        crossing=lambda hosts, ranks: Crossing(1.0, hosts - 1.0),
        in_place=True,
    ),
    Collective(
        "allgather",
        takes=False,
        gives=True,
        source=lambda rank, block: (block, 0),
        # Every host receives what the ranks of the others have.
        crossing=lambda hosts, ranks: Crossing(_share(hosts), hosts - 1.0),
    ),
    Collective(
        "reduce_scatter",
        takes=True,
        gives=False,
        source=lambda rank, block: (None, rank),
        # Every host sends its ranks' sum of the blocks that belong to others.
        crossing=lambda hosts, ranks: Crossing(_share(hosts), hosts - 1.0),
    ),
    Collective(
        "alltoall",
        takes=True,
        gives=True,
        source=lambda rank, block: (block, rank),
        # Each of a host's ranks has an array of its own, of which it keeps its host's share.
        crossing=lambda hosts, ranks: Crossing(ranks * _share(hosts), ranks * (hosts - 1.0)),
    ),
    Collective(
        "scatter",
        takes=True,
        gives=False,
        source=lambda rank, block: (ROOT, rank),
        # The root's host sends what belongs to the ranks of others.
        crossing=lambda hosts, ranks: Crossing(_share(hosts), _share(hosts)),
        root_takes=True,
    ),
    Collective(
        "gather",
        takes=False,
        gives=True,
        source=lambda rank, block: (block, 0),
        # The root's host receives what the ranks of others have.
        crossing=lambda hosts, ranks: Crossing(_share(hosts), _share(hosts)),
        root_gives=True,
    ),
)

COLLECTIVES = {collective.name: collective for collective in _ALL}
"""By name, in the order of the table."""


@dataclass(frozen=True)
class Buffers:
    """Arrays of a rank; empty where it has no input or no result.

    Attributes:
        x: The input.
        out: For the result, unless the call returns it; `x` itself in a collective that works in place.
    """

    x: FloatArray
    out: FloatArray

    @classmethod
    def of(cls, collective: Collective, rank: int, ranks: int, count: int) -> Buffers:
        """New ones, of blocks of `count` elements."""
        x = np.zeros(collective.blocks_in(rank, ranks) * count, np.float32)
        if collective.in_place:
            return cls(x, x)
        return cls(x, np.zeros(collective.blocks_out(rank, ranks) * count, np.float32))


class Blocks:
    """What is written into the blocks of a collective, and what has to come out; a `measure.Task`.

    Every block of every rank has a number of its own, and another one in the next iteration, so that blocks
    that have been mixed up and results that are left from before are found.

    Args:
        collective: Which one.
        rank: This rank.
        ranks: How many there are.
    """

    def __init__(self, collective: Collective, rank: int, ranks: int) -> None:
        self._collective, self._rank, self._ranks = collective, rank, ranks
        self._blocks_in = collective.blocks_in(rank, ranks)
        self._blocks_out = collective.blocks_out(rank, ranks)

    def write(self, arrays: Buffers, iteration: int) -> None:
        """As `Task`."""
        if self._blocks_in:
            blocks = arrays.x.reshape(self._blocks_in, -1)
            for block in range(self._blocks_in):
                blocks[block] = self._value(iteration, self._rank, block)

    def wrong(self, arrays: Buffers, result: object, iteration: int) -> str:
        """As `Task`."""
        name, count = self._collective.name, self._blocks_out
        if count == 0:
            return ""
        # Libraries that fill an array that they are given return nothing of interest.
        found = result if isinstance(result, np.ndarray) else arrays.out
        if found.size != arrays.out.size:
            return f"{name} gives {found.size} elements where {arrays.out.size} are right"
        blocks = found.reshape(count, -1)
        seen = blocks[:, [0, blocks.shape[1] // 2, -1]]
        for block in range(count):
            right = self._expected(iteration, block)
            if not (seen[block] == right).all():
                first, middle, last = seen[block]
                return f"block {block} of {name} is {first}, {middle}, {last} where {right} is right"
        return ""

    def _value(self, iteration: int, rank: int, block: int) -> int:
        """In a block of a rank's input."""
        position = (rank * self._ranks + block) % _PLACES
        return iteration % _ITERATIONS + _ITERATIONS * position

    def _expected(self, iteration: int, block: int) -> int:
        """In a block of this rank's result."""
        source, at = self._collective.source(self._rank, block)
        if source is not None:
            return self._value(iteration, source, at)
        return sum(self._value(iteration, rank, at) for rank in range(self._ranks))
