"""A rank of a library that cannot be in the process of the others, such as a second MPI.

    python companion.py DIRECTORY

The library's own launcher starts this file in the library's own Python, so it imports nothing of multiring.
By a socket in the directory it takes orders from the rank of the benchmark whose number it has: while that
one sleeps, it does iterations on the same processor, as `measure` does them, and answers with their times.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

__all__ = ["LINE", "Barrier", "flags_of", "map_flags"]

# A look takes some 50 ns: ranks that are a few microseconds apart do not sleep.
_LOOKS = 4000
_SLEEP = 20e-6  # seconds
_PATIENCE = 300.0  # seconds that a contender may take at least
LINE = 8  # flags of a cache line


class Flag(Protocol):
    """A number that ranks share."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


class Barrier:
    """A barrier that belongs to no library: flags in memory of all ranks that Python reads and writes.

    Args:
        mine: Of this rank; zero at first.
        theirs: Of the others.
        crowded: Whether there are more ranks than processors.
    """

    failure: type[Exception] = RuntimeError

    def __init__(self, mine: Flag, theirs: Sequence[Flag], *, crowded: bool) -> None:
        self._mine, self._theirs = mine, theirs
        self._crowded = crowded
        self._round = 0

    def __call__(self) -> None:
        """Returns when all ranks have called it."""
        self._round = here = self._round + 1
        self._mine[0] = here
        for flag in self._theirs:
            looks = 0
            while flag[0] < here:
                looks += 1
                if looks > _LOOKS:
                    self._sleep(looks)
                elif self._crowded:
                    os.sched_yield()

    def _sleep(self, looks: int) -> None:
        """Leaves the processor: a contender's own thread may have to run on it before the peer can come, and
        would wait for the end of this thread's time slice."""
        time.sleep(_SLEEP)
        if looks * _SLEEP > _PATIENCE:
            raise self.failure(f"a rank has not come back from a contender for {_PATIENCE:.0f} s")


def map_flags(path: str) -> memoryview:
    """The flags of all ranks in a file, each in a cache line of its own."""
    # Not np.memmap, whose element is looked up slowly.
    with open(path, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")


def flags_of(flags: memoryview, rank: int, size: int) -> tuple[memoryview, list[memoryview]]:
    """The flag of a rank, and those of the others."""
    each = [flags[one * LINE : one * LINE + 1] for one in range(size)]
    return each[rank], [flag for other, flag in enumerate(each) if other != rank]


class Companion:
    """What the orders are about: MPI, the array, and the barrier of the companions."""

    def __init__(self, cpus: list[int], size: int, flags: str, *, crowded: bool) -> None:
        # Before MPI starts threads, which then stay on this processor, too.
        os.sched_setaffinity(0, cpus)
        import numpy as np
        from mpi4py import MPI

        self._numpy, self._mpi, self._world = np, MPI, MPI.COMM_WORLD
        self.rank, self.size = self._world.Get_rank(), size
        if self._world.Get_size() != size:
            raise RuntimeError(f"MPI sees {self._world.Get_size()} ranks instead of {size}")
        self._world.Barrier()
        unlink_shared_memory()
        self._meeting = Barrier(*flags_of(map_flags(flags), self.rank, size), crowded=crowded)
        self._x = np.zeros(0, np.float32)

    def describe(self) -> dict[str, Any]:
        """What has been started, and where."""
        vendor, version = self._mpi.get_vendor()
        return {
            "rank": self.rank,
            "vendor": vendor,
            "version": ".".join(map(str, version)),
            "network": os.stat("/proc/self/ns/net").st_ino,
        }

    def prepare(self, count: int) -> None:
        """Takes an array of `count` elements."""
        self._x = self._numpy.zeros(count, self._numpy.float32)

    def iterate(self, first: int, count: int) -> list[tuple[int, int]]:
        """Iterations from the number `first` on; when this rank entered and left each, in nanoseconds."""
        x, meeting, clock = self._x, self._meeting, time.perf_counter_ns
        reduce, in_place, op = self._world.Allreduce, self._mpi.IN_PLACE, self._mpi.SUM
        buffer = [x, self._mpi.FLOAT]
        times = []
        for iteration in range(first, first + count):
            x.fill(float(iteration % 64 + self.rank))
            meeting()
            begin = clock()
            reduce(in_place, buffer, op)
            times.append((begin, clock()))
            self._check(iteration)
        return times

    def _check(self, iteration: int) -> None:
        x, size = self._x, self.size
        expected = size * (iteration % 64) + size * (size - 1) // 2
        if x.size and not (x[0] == x[x.size // 2] == x[-1] == expected):
            raise RuntimeError(
                f"the sum of {x.size} elements is {x[0]}, {x[x.size // 2]}, {x[-1]} where {expected} is right"
            )


def unlink_shared_memory() -> None:
    """Takes their names from the files that MPI has mapped, which else stay if this process is killed.

    Every rank of the host has mapped them by now.
    """
    with open("/proc/self/maps", encoding="utf-8") as maps:
        names = {name for line in maps if (name := line.rstrip("\n").partition("/dev/shm/")[2])}
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # another rank was first
            os.unlink(f"/dev/shm/{name}")


def main(directory: str) -> None:
    """Does what it is told until it is told no more."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(Path(directory) / os.environ["PMI_RANK"]))
        with connection.makefile("rw", encoding="utf-8") as stream:
            companion = None
            for line in stream:
                what, arguments = json.loads(line)
                answer: Any = None
                try:
                    if companion is None:
                        companion = Companion(**arguments)
                        answer = companion.describe()
                    else:
                        answer = getattr(companion, what)(**arguments)
                    reply = {"answer": answer}
                except Exception as error:
                    reply = {"error": f"{type(error).__name__}: {error}"}
                stream.write(json.dumps(reply) + "\n")
                stream.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
