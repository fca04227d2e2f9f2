"""Every collective against the NumPy oracle: what Python passes on, and how results come back. Numbers of
ranks, orders of additions, special values and segments: tests/cpp/collective."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from multiring import Communicator, UsageError
from tests.on_ranks import on_ranks
from tests.python.collectives.array_kinds import assert_same_bits
from tests.python.collectives.oracle import DTYPES, OPS, Bits, Reduction, blocks, random_bits, storage
from tests.python.collectives.registry import COLLECTIVES, uneven_splits

COUNTS = (0, 1, 63, 1001)
NUMPY_DTYPES = tuple(dtype for dtype in DTYPES if dtype != "bfloat16")  # that one comes in test_array_kinds
# More than one segment of staging memory, and no multiple of anything.
LARGE_BYTES = 5 * (1 << 19) + 24


def inputs_of(comm: Communicator, seed: int, shape: tuple[int, ...], dtype: str) -> list[Bits]:
    """The same on all ranks: what each of them puts in."""
    return [random_bits(seed * 100 + rank, shape, dtype) for rank in range(comm.size)]


@on_ranks(1, 3)
def test_reductions(comm: Communicator) -> None:
    check_reductions(comm, COUNTS)


def check_reductions(comm: Communicator, counts: Sequence[int]) -> None:
    for op, dtype in itertools.product(OPS, NUMPY_DTYPES):
        if (op, dtype) == ("average", "bool"):
            continue
        for count in counts:
            inputs = inputs_of(comm, count, (count,), dtype)
            wanted = Reduction(op).apply(inputs, dtype)
            assert_same_bits(comm.allreduce(inputs[comm.rank], op), wanted)
            assert_same_bits(comm.reduce_scatter(inputs[comm.rank], op), blocks(wanted, comm.size)[comm.rank])
            assert_same_bits(comm.allreduce_async(inputs[comm.rank], op).wait(), wanted)


@on_ranks(3)
def test_scales(comm: Communicator) -> None:
    for dtype in ("int32", "float16", "float64"):
        inputs = inputs_of(comm, 5, (97,), dtype)
        for prescale, postscale in ((0.5, 1.0), (1.0, 3.0), (-1.7, 1 / 3)):
            scales = {"prescale": prescale, "postscale": postscale}
            wanted = Reduction("sum", prescale, postscale).apply(inputs, dtype)
            assert_same_bits(comm.allreduce(inputs[comm.rank], **scales), wanted)
            block = comm.reduce_scatter(inputs[comm.rank], **scales)
            assert_same_bits(block, blocks(wanted, comm.size)[comm.rank])
            assert_same_bits(comm.allreduce_async(inputs[comm.rank], **scales).wait(), wanted)


def check_shape(
    comm: Communicator, name: str, lengths: Sequence[int], tail: tuple[int, ...], dtype: str
) -> None:
    """A collective of arrays of so many rows on each rank; all equal unless it takes them as they come."""
    collective = COLLECTIVES[name]
    rows = lengths if collective.rows is not None else lengths[:1] * comm.size
    inputs = [random_bits(rank, (length, *tail), dtype) for rank, length in enumerate(rows)]
    result = collective.call(comm, inputs[comm.rank])
    wanted = collective.expected(inputs, comm.rank, dtype)
    if wanted is None:
        assert result is None
    else:
        assert_same_bits(result, wanted)


def check_segments(comm: Communicator) -> None:
    for name, dtype in itertools.product(COLLECTIVES, ("float32", "uint8")):
        rows = LARGE_BYTES // storage(dtype).itemsize // 4
        check_shape(comm, name, [rows + 1000 * rank for rank in range(comm.size)], (4,), dtype)


@on_ranks(1, 3)
def test_rows(comm: Communicator) -> None:
    for rows in (0, 1, comm.size - 1, comm.size, 2 * comm.size + 1):
        for name, tail in itertools.product(COLLECTIVES, ((), (3,), (2, 0), (2, 1, 3))):
            check_shape(comm, name, [rows * (1 - rank % 2) for rank in range(comm.size)], tail, "int32")


@on_ranks(1, 3)
def test_roots(comm: Communicator) -> None:
    inputs = inputs_of(comm, 3, (5, 2), "float64")
    mine = inputs[comm.rank]
    for root in range(comm.size):
        assert_same_bits(comm.broadcast(mine, root), inputs[root])
        in_place = mine.copy()
        assert comm.broadcast(in_place, root, out=in_place) is in_place
        assert_same_bits(in_place, inputs[root])
        gathered = comm.gather(mine, root)
        assert (gathered is None) == (comm.rank != root)
        if gathered is not None:
            assert_same_bits(gathered, np.concatenate(inputs))
        scattered = comm.scatter(mine if comm.rank == root else None, root)
        assert_same_bits(scattered, blocks(inputs[root], comm.size)[comm.rank])
        # What the others give is ignored.
        assert_same_bits(comm.scatter(mine, root), scattered)


@on_ranks(1, 3)
def test_alltoall_splits(comm: Communicator) -> None:
    for rows in (0, 1, 9, 200):
        inputs = [random_bits(rank, (rows + rank, 3), "float32") for rank in range(comm.size)]
        splits = [uneven_splits(rank, comm.size, rows + rank) for rank in range(comm.size)]
        starts = [np.cumsum([0, *counts]) for counts in splits]
        wanted = [
            bits[begin[comm.rank] : begin[comm.rank + 1]] for bits, begin in zip(inputs, starts, strict=True)
        ]
        joined, received = comm.alltoall(inputs[comm.rank], splits[comm.rank])
        assert_same_bits(joined, np.concatenate(wanted))
        assert_same_bits(received, np.array([len(part) for part in wanted], np.int64))
        joined, _ = comm.alltoall_async(inputs[comm.rank], np.array(splits[comm.rank])).wait()
        assert_same_bits(joined, np.concatenate(wanted))


def check_bits(comm: Communicator) -> None:
    """The bits of an element depend on nothing but that element's inputs."""
    inputs = inputs_of(comm, 9, (70_001,), "float32")
    mine = inputs[comm.rank]
    whole = comm.allreduce(mine)
    assert_same_bits(whole, Reduction().apply(inputs, "float32"))
    for begin, end in ((0, 1), (1, 18), (3, 4099), (17, 70_001)):
        assert_same_bits(comm.allreduce(mine[begin:end]), whole[begin:end])
        out = np.empty(end - begin + 5, np.float32)[5:]  # aligned differently
        assert_same_bits(comm.allreduce(mine[begin:end], out=out), whole[begin:end])
    in_place = mine.copy()
    assert_same_bits(comm.allreduce(in_place, out=in_place), whole)
    assert_same_bits(comm.reduce_scatter(mine), np.array_split(whole, comm.size)[comm.rank])
    fused = [comm.allreduce_async(piece) for piece in np.array_split(mine, 50)]
    assert_same_bits(np.concatenate([work.wait() for work in fused]), whole)


@on_ranks(2, 3)
def test_send_and_receive(comm: Communicator) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (0, 1, 1000, 100_000):
        mine, theirs = (random_bits(rank, (count, 2), "float64") for rank in (comm.rank, left))
        # A long message waits for its receiver, so somebody has to receive first.
        if comm.rank % 2 == 0:
            comm.send(mine, right, tag=count)
            assert_same_bits(comm.recv(left, tag=count), theirs)
        else:
            received = comm.recv(left, tag=count)
            comm.send(mine, right, tag=count)
            assert_same_bits(received, theirs)
    for number in range(2):  # short ones are buffered
        comm.send(np.array([number]), right)
    for number in range(2):
        assert comm.recv(left)[0] == number


@on_ranks(1, 3)
def test_usage(comm: Communicator) -> None:
    x = np.ones(3)
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: comm.allreduce(x, "mean"), "op is 'mean'; accepted: sum, average, min, max, product"),
        (lambda: comm.allreduce(x, None), "op is None"),  # type: ignore[arg-type]
        (lambda: comm.allreduce(x > 0, "average"), "bool has no average"),
        (lambda: comm.reduce_scatter(x > 0, prescale=2.0), "bool cannot be scaled"),
        (lambda: comm.allreduce(x > 0, postscale=2.0), "bool cannot be scaled"),
        (lambda: comm.send(x, comm.rank - 1, timeout=-1), "timeout is -1"),
        (lambda: comm.recv(comm.rank - 1, timeout=-1), "timeout is -1"),
        *((partial(each.call, comm, x, timeout=-1), "timeout is -1") for each in COLLECTIVES.values()),
        (lambda: comm.barrier(timeout=float("nan")), "timeout is nan"),
        (lambda: comm.broadcast(x, comm.size), f"rank {comm.size} is not in communicator 'world' of size"),
        (lambda: comm.gather(x, -1), "rank -1 is not in"),
        (lambda: comm.scatter(x, 99), "rank 99 is not in"),
        (lambda: comm.send(x, comm.rank), "cannot send to or receive from itself"),
        (lambda: comm.recv(comm.rank), "cannot send to or receive from itself"),
        (lambda: comm.send(x, comm.size), "is not in communicator"),
        (lambda: comm.recv(-1), "is not in communicator"),
        (lambda: comm.alltoall(x, [1] * (comm.size + 1)), "splits"),
        (lambda: comm.alltoall(x, [4] + [0] * (comm.size - 1)), "add up to the 3 rows"),
        (lambda: comm.alltoall(x, [-1] * comm.size), "splits are .* at least 0"),
        (lambda: comm.broadcast_object(1, comm.size), "is not in communicator"),
        (lambda: comm.split(-1), "color is -1"),
        (lambda: comm.process_set([0, 0]), "different ranks"),
        (lambda: comm.process_set([comm.size]), "different ranks from 0 to"),
    ]
    for call, pattern in wrong:
        with pytest.raises(UsageError, match=pattern) as caught:
            call()
        assert isinstance(caught.value, ValueError)
    with pytest.raises(UsageError, match="root of a scatter"):
        comm.scatter(None, comm.rank)
    assert not comm.is_broken  # nothing was sent
    comm.barrier()


@on_ranks(3)
def test_names(comm: Communicator) -> None:
    for name in ("", "a", "gradient/ünïcödé", "x" * 1000, "é" * 200, None):
        assert comm.allreduce(np.ones(2), name=name)[0] == comm.size
        assert comm.allgather_async(np.ones(2), name=name).wait().size == 2 * comm.size


def check_all(comm: Communicator) -> None:
    """Everything, for ranks that are connected in another way."""
    check_reductions(comm, (63, 1001))
    test_roots(comm)
    test_alltoall_splits(comm)
    test_send_and_receive(comm)
    test_rows(comm)
    check_segments(comm)
    check_bits(comm)
