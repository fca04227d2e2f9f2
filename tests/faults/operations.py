"""Every operation that can wait for a peer, registered once, for the tests that let a peer fail.

An operation is a function that gets the communicator, makes what it needs (before anything goes wrong) and
returns a function to be called again and again. `LARGE` ones take many segments, so that a fault hits them
in the middle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from multiring import Communicator

__all__ = ["LARGE", "OPERATIONS", "SMALL", "each"]

Step = Callable[[], Any]
Operation = Callable[[Communicator], Step]

_MANY = 1_500_000  # float32: six segments of staging memory and more


def _array(comm: Communicator, count: int) -> np.ndarray[Any, Any]:
    return np.full((count // 4, 4), comm.rank, np.float32)


def _collective(name: str, count: int, *, asynchronous: bool = False, **options: Any) -> Operation:
    def make(comm: Communicator) -> Step:
        x = _array(comm, count)
        if asynchronous:
            return lambda: getattr(comm, f"{name}_async")(x, **options).wait()
        return lambda: getattr(comm, name)(x, **options)

    return make


def _in_symmetric_memory(comm: Communicator) -> Step:
    x = comm.symmetric_empty(_MANY, np.float32)
    x[:] = 0
    return lambda: comm.allreduce(x, out=x)


def _many_works(comm: Communicator) -> Step:
    x = [_array(comm, count) for count in (4, 8, 40_000, _MANY)]

    def step() -> None:
        for work in [comm.allreduce_async(piece, name=str(piece.size)) for piece in x]:
            work.wait()

    return step


def _point_to_point(count: int) -> Operation:
    """Rank 0 sends to rank 1, which sends to rank 2, and so on to the last."""

    def make(comm: Communicator) -> Step:
        x = _array(comm, count)

        def step() -> None:
            if comm.rank > 0:
                comm.recv(comm.rank - 1, out=x)
            if comm.rank < comm.size - 1:
                comm.send(x, comm.rank + 1)

        return step

    return make


def _split(comm: Communicator) -> Step:
    keys = itertools.count()

    def step() -> None:
        group = comm.split(0, next(keys) * comm.rank)
        group.close()

    return step


def _process_set(comm: Communicator) -> Step:
    def step() -> None:
        group = comm.process_set(range(comm.size))
        group.close()

    return step


OPERATIONS: dict[str, Operation] = {
    "allreduce": _collective("allreduce", 40),
    "allreduce, large": _collective("allreduce", _MANY),
    "allreduce, symmetric": _in_symmetric_memory,
    "reduce_scatter": _collective("reduce_scatter", 40),
    "reduce_scatter, large": _collective("reduce_scatter", _MANY),
    "allgather": _collective("allgather", 40),
    "allgather, large": _collective("allgather", _MANY),
    "broadcast": _collective("broadcast", 40),
    "broadcast, large": _collective("broadcast", _MANY, root=2),
    "alltoall": _collective("alltoall", 40),
    "alltoall, large": _collective("alltoall", _MANY),
    "gather": _collective("gather", 40),
    "gather, large": _collective("gather", _MANY, root=2),
    "scatter": _collective("scatter", 40),
    "scatter, large": _collective("scatter", _MANY, root=2),
    "barrier": lambda comm: comm.barrier,
    "send and recv": _point_to_point(40),
    "send and recv, large": _point_to_point(_MANY),
    "split": _split,
    "process_set": _process_set,
    "symmetric_empty": lambda comm: lambda: comm.symmetric_empty(100_000),
    "broadcast_object": lambda comm: lambda: comm.broadcast_object(list(range(1000))),
    "allgather_object": lambda comm: lambda: comm.allgather_object(list(range(1000))),
    "allreduce_async": _collective("allreduce", 40, asynchronous=True),
    "allreduce_async, large": _collective("allreduce", _MANY, asynchronous=True),
    "allreduce_async, several": _many_works,
    "reduce_scatter_async": _collective("reduce_scatter", _MANY, asynchronous=True),
    "allgather_async": _collective("allgather", _MANY, asynchronous=True),
    "broadcast_async": _collective("broadcast", _MANY, asynchronous=True),
    "alltoall_async": _collective("alltoall", _MANY, asynchronous=True),
    "gather_async": _collective("gather", _MANY, asynchronous=True),
    "scatter_async": _collective("scatter", _MANY, asynchronous=True),
    "barrier_async": lambda comm: lambda: comm.barrier_async().wait(),
}
LARGE = [name for name in OPERATIONS if "large" in name or "several" in name or "symmetric" in name]
SMALL = [name for name in OPERATIONS if name not in LARGE]
# One for each way to wait: what `make test` has of a test of each operation.
_HANDFUL = {
    *("allreduce", "allreduce, large", "alltoall, large", "barrier", "send and recv", "split"),
    *("broadcast_object", "allreduce_async, several", "gather_async"),
}


def each(names: Iterable[str]) -> list[Any]:
    """Parameters of a test of each of these operations; all but a handful are left to `full`."""
    return [pytest.param(name, marks=() if name in _HANDFUL else pytest.mark.full) for name in names]
