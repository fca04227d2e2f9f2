"""Operations that wait for a peer, registered once, for the tests that let a peer fail: one for each way in
which Python calls the core. Every collective in every moment: tests/cpp/engine/failure_test.cpp.

An operation is a function that gets the communicator, makes what it needs (before anything goes wrong) and
returns a function to be called again and again. Arrays take several segments, so that a fault hits them in
the middle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from multiring import Communicator

__all__ = ["OPERATIONS"]

Step = Callable[[], Any]
Operation = Callable[[Communicator], Step]

_MANY = 1_500_000  # float32: six segments of staging memory and more


def _collective(name: str) -> Operation:
    def make(comm: Communicator) -> Step:
        x = np.full((_MANY // 4, 4), comm.rank, np.float32)
        return lambda: getattr(comm, name)(x)

    return make


def _in_symmetric_memory(comm: Communicator) -> Step:
    x = comm.symmetric_empty(_MANY, np.float32)
    x[:] = 0
    return lambda: comm.allreduce(x, out=x)


def _many_works(comm: Communicator) -> Step:
    arrays = [np.full(count, comm.rank, np.float32) for count in (4, 8, 40_000, _MANY)]

    def step() -> None:
        for work in [comm.allreduce_async(x, name=str(x.size)) for x in arrays]:
            work.wait()

    return step


def _along_the_ranks(comm: Communicator) -> Step:
    """Rank 0 sends to rank 1, which sends to rank 2, and so on to the last."""
    x = np.full(_MANY, comm.rank, np.float32)

    def step() -> None:
        if comm.rank > 0:
            comm.recv(comm.rank - 1, out=x)
        if comm.rank < comm.size - 1:
            comm.send(x, comm.rank + 1)

    return step


def _split(comm: Communicator) -> Step:
    keys = itertools.count()
    return lambda: comm.split(0, next(keys) * comm.rank).close()


OPERATIONS: dict[str, Operation] = {
    "allreduce": _collective("allreduce"),
    "allreduce, symmetric": _in_symmetric_memory,
    "allreduce_async": _many_works,
    "alltoall": _collective("alltoall"),
    "broadcast_object": lambda comm: lambda: comm.broadcast_object(list(range(1000))),
    "send and recv": _along_the_ranks,
    "split": _split,
}
