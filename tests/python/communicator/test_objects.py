"""Python objects between ranks."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest

from multiring import Communicator
from multiring.errors import UsageError
from tests.on_ranks import on_ranks

OBJECTS: list[Any] = [
    None,
    0,
    "text äöü",
    b"",
    {"a": [1, 2.5, (None, {3})], "nested": {"b": np.arange(3).tolist()}},
    list(range(1000)),
    b"x" * 3_000_000,
]


@on_ranks(3)
def test_broadcast(comm: Communicator) -> None:
    for root in range(comm.size):
        for number, obj in enumerate(OBJECTS):
            mine = obj if comm.rank == root else ("ignored", number)
            received = comm.broadcast_object(mine, root)
            assert received == obj
            assert (received is mine) == (comm.rank == root)


@on_ranks(3)
def test_allgather(comm: Communicator) -> None:
    for shift in range(len(OBJECTS)):
        wanted = [OBJECTS[(rank + shift) % len(OBJECTS)] for rank in range(comm.size)]
        assert comm.allgather_object(wanted[comm.rank]) == wanted
    for rank, received in enumerate(comm.allgather_object(np.arange(6.0) * comm.rank)):
        np.testing.assert_array_equal(received, np.arange(6.0) * rank)
        received[0] = -1  # writable, and nobody else's


@on_ranks(3)
def test_unpicklable_objects(comm: Communicator) -> None:
    if comm.rank == 1:
        with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
            comm.allgather_object(lambda: None)
    else:
        with pytest.raises(UsageError, match=r"rank 1 could not send its object \(.*lambda"):
            comm.allgather_object(comm.rank)
    assert comm.allgather_object(comm.rank) == list(range(comm.size))


MIB = 1 << 20


class Unloadable:
    """Can be pickled everywhere and unpickled on some ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.rank,)


RANK = [-1]


def _load(rank: int) -> Unloadable:
    if RANK[0] == rank:
        raise LookupError("no such class here")
    return Unloadable(rank)


def test_sizes(comm: Communicator) -> None:
    """Around the sizes at which pieces are joined and cut."""
    for size in (64 << 10, MIB - 1, MIB, MIB + 1, 8 * MIB + 1):
        arrays = [(np.arange(size) % 251).astype(np.uint8), *(np.full(300, k) for k in range(size >> 12))]
        obj = [b"a" * size, bytearray(b"b" * size), "c" * size, "\n", 1 << (8 * size), *arrays]
        received = comm.broadcast_object(obj if comm.rank == 0 else None)
        assert received[:5] == obj[:5]
        for one, other in zip(received[5:], arrays, strict=True):
            np.testing.assert_array_equal(one, other)


def test_kinds_of_arrays(comm: Communicator) -> None:
    large = np.arange(3 * MIB // 8).reshape(3, -1) * 0.5
    constant = large + 1
    constant.setflags(write=False)
    every = [
        *(large, np.asfortranarray(large), large[:, ::2], large.T, constant, large[:0], np.array(1.5)),
        *(large.astype("datetime64[s]"), large.astype(object), large.astype("f2"), large.astype(">f8")),
        np.ma.masked_array(large, large > 5),
        np.zeros(3, [("a", "i4"), ("b", "f8")]),
    ]
    received = comm.broadcast_object(every if comm.rank == 1 else None, root=1)
    for one, other in zip(received, every, strict=True):
        assert (type(one), one.dtype, one.shape) == (type(other), other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)
        assert one.flags.writeable == (other is not constant)


def memory_beside(comm: Communicator, obj: Any) -> int:
    """Most bytes that a broadcast of `obj` has taken on this rank, less the object itself on a receiver."""
    mine = obj if comm.rank == 0 else None
    tracemalloc.start()
    try:
        received = comm.broadcast_object(mine)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert type(received) is type(obj)
    return peak - held


def test_a_broadcast_takes_no_second_copy(comm: Communicator) -> None:
    size = 48 * MIB
    array = np.ones(size, np.uint8)
    for obj in ({"x": array}, b"x" * size, bytearray(size), [array[: 200 << 10].copy() for _ in range(200)]):
        assert memory_beside(comm, obj) < 12 * MIB


@on_ranks(3)
def test_a_failing_root(comm: Communicator) -> None:
    """All ranks are told, whatever has left before, and the next call works."""
    before: list[list[Any]] = [[], [np.ones(3 * MIB)], [bytes([k]) * 100_000 for k in range(30)]]
    for number, found in enumerate(before):
        obj = [*found, lambda: None]
        if comm.rank == 0:
            with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
                comm.broadcast_object(obj)
        else:
            with pytest.raises(UsageError, match=r"rank 0 could not pickle its object \(.*lambda"):
                comm.broadcast_object(None)
        assert comm.broadcast_object(number) == number


@on_ranks(3)
def test_a_failing_receiver(comm: Communicator) -> None:
    """The rank that fails takes what the root still sends."""
    RANK[0] = comm.rank
    try:
        for after in (b"", b"x" * (20 * MIB)):
            obj = [b"x" * MIB, Unloadable(1), after]
            if comm.rank == 1:
                with pytest.raises(LookupError, match="no such class here"):
                    comm.broadcast_object(None)
            else:
                assert comm.broadcast_object(obj)[2] == after
            assert comm.broadcast_object(comm.rank) == 0
    finally:
        RANK[0] = -1
