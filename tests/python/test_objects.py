"""Python objects between ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from multiring import Communicator
from tests.rank_pool import RankPool

Pools = Callable[[int], RankPool]

OBJECTS: list[Any] = [
    None,
    0,
    "text äöü",
    b"",
    {"a": [1, 2.5, (None, {3})], "nested": {"b": np.arange(3).tolist()}},
    list(range(1000)),
    b"x" * 3_000_000,
]


def check_broadcast(comm: Communicator) -> None:
    for root in range(comm.size):
        for number, obj in enumerate(OBJECTS):
            mine = obj if comm.rank == root else ("ignored", number)
            received = comm.broadcast_object(mine, root)
            assert received == obj
            assert (received is mine) == (comm.rank == root)


@pytest.mark.parametrize("size", [1, 3])
def test_broadcast(ranks: Pools, size: int) -> None:
    ranks(size).run(check_broadcast)


def check_allgather(comm: Communicator) -> None:
    for shift in range(len(OBJECTS)):
        wanted = [OBJECTS[(rank + shift) % len(OBJECTS)] for rank in range(comm.size)]
        assert comm.allgather_object(wanted[comm.rank]) == wanted


@pytest.mark.parametrize("size", [1, 3, 4])
def test_allgather(ranks: Pools, size: int) -> None:
    ranks(size).run(check_allgather)


def check_arrays(comm: Communicator) -> None:
    array = np.arange(6.0).reshape(2, 3) * comm.rank
    for rank, received in enumerate(comm.allgather_object(array)):
        np.testing.assert_array_equal(received, np.arange(6.0).reshape(2, 3) * rank)
        received[0] = -1  # writable, and nobody else's


def test_arrays_in_objects(ranks: Pools) -> None:
    ranks(3).run(check_arrays)


def check_unpicklable(comm: Communicator) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        comm.allgather_object(lambda: None)
    assert comm.allgather_object(comm.rank) == list(range(comm.size))  # nothing had been sent


def test_unpicklable_objects(ranks: Pools) -> None:
    ranks(3).run(check_unpicklable)
