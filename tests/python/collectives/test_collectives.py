"""Every collective against the NumPy oracle: what Python passes on, and how results come back. All dtypes,
numbers of ranks, orders of additions, special values and segments: tests/cpp/collective."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import pytest

import multiring
from multiring import Communicator, UsageError
from tests.on_ranks import on_ranks
from tests.python.collectives.array_kinds import assert_same_bits
from tests.python.collectives.oracle import Reduction, random_bits
from tests.python.collectives.registry import COLLECTIVES

EXACT = [Reduction(op) for op in ("sum", "min", "max", "product")]
SCALED = [Reduction("average"), Reduction("average", 0.5), Reduction("sum", -1.7, 1 / 3)]
BITWISE = [Reduction(f"bitwise_{op}") for op in ("and", "or", "xor")]
REDUCTIONS = {
    "int64": EXACT + BITWISE,
    "bool": EXACT[1:] + BITWISE,
    "float16": EXACT + SCALED,
    "float64": EXACT + SCALED,
    "complex64": [EXACT[0], EXACT[3], *SCALED],
    "complex128": [EXACT[0], EXACT[3], *SCALED],
}


@on_ranks(1, 3)
def test_reductions(comm: Communicator) -> None:
    for dtype, reductions in REDUCTIONS.items():
        for reduction, count in itertools.product(reductions, (0, 1, 63, 1001)):
            inputs = [random_bits(count + rank, (count,), dtype) for rank in range(comm.size)]
            mine, options = inputs[comm.rank], asdict(reduction)
            wanted = reduction.apply(inputs, dtype)
            assert_same_bits(comm.allreduce(mine, **options), wanted)
            assert_same_bits(comm.allreduce_async(mine, **options).wait(), wanted)
            block = np.array_split(wanted, comm.size)[comm.rank]
            assert_same_bits(comm.reduce_scatter(mine, **options), block)


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
    """More than one segment of staging memory, and no multiple of anything."""
    for name, (dtype, rows) in itertools.product(COLLECTIVES, [("float32", 163_841), ("uint8", 655_366)]):
        check_shape(comm, name, [rows + 1000 * rank for rank in range(comm.size)], (4,), dtype)


@on_ranks(1, 3)
def test_rows(comm: Communicator) -> None:
    for rows in (0, 1, comm.size - 1, comm.size, 2 * comm.size + 1):
        for name, tail in itertools.product(COLLECTIVES, ((), (3,), (2, 0), (2, 1, 3))):
            check_shape(comm, name, [rows * (1 - rank % 2) for rank in range(comm.size)], tail, "int32")


@on_ranks(1, 3)
def test_roots(comm: Communicator) -> None:
    inputs = [random_bits(rank, (5, 2), "float64") for rank in range(comm.size)]
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
        assert_same_bits(scattered, np.array_split(inputs[root], comm.size)[comm.rank])
        # What the others give is ignored.
        assert_same_bits(comm.scatter(mine, root), scattered)


@on_ranks(1, 3)
def test_alltoall_splits(comm: Communicator) -> None:
    """Rank r sends r * p rows to rank p."""
    rank, size = comm.rank, comm.size
    splits = [[sender * receiver for receiver in range(size)] for sender in range(size)]
    inputs = [random_bits(sender, (sum(counts), 3), "float32") for sender, counts in enumerate(splits)]
    parts = [np.split(bits, np.cumsum(counts))[rank] for bits, counts in zip(inputs, splits, strict=True)]
    joined, received = comm.alltoall(inputs[rank], splits[rank])
    assert_same_bits(joined, np.concatenate(parts))
    assert_same_bits(received, np.array([len(part) for part in parts], np.int64))
    joined, _ = comm.alltoall_async(inputs[rank], np.array(splits[rank])).wait()
    assert_same_bits(joined, np.concatenate(parts))


@on_ranks(2, 3)
def test_send_and_receive(comm: Communicator) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (0, 1, 100_000):
        mine, theirs = (random_bits(rank, (count, 2), "float64") for rank in (comm.rank, left))
        # A long message waits for its receiver, so somebody has to receive first.
        if comm.rank % 2 == 0:
            comm.send(mine, right, tag=count)
            assert_same_bits(comm.recv(left, tag=count), theirs)
        else:
            received = comm.recv(left, tag=count)
            comm.send(mine, right, tag=count)
            assert_same_bits(received, theirs)


@on_ranks(3, (4, 2))
def test_messages_of_any_rank(comm: Communicator) -> None:
    if comm.rank > 0:
        comm.send(np.full(comm.rank, comm.rank, np.int16), 0, tag=comm.rank)
        comm.barrier()
        if comm.rank == 1:
            comm.send(np.zeros((2, 0)), 0, tag=9)
        return
    sources = set()
    for _ in range(1, comm.size):
        message = comm.probe()
        assert (message.tag, message.dtype, message.shape) == (message.source, "int16", (message.source,))
        assert comm.recv(message.source, tag=message.tag).tolist() == [message.source] * message.source
        sources.add(message.source)
    assert sources == set(range(1, comm.size))
    with pytest.raises(multiring.TimeoutError, match="for a message of any of ranks 1"):
        comm.probe(timeout=0.05)
    comm.barrier()  # nothing is broken
    message = comm.probe(1)
    assert (message.source, message.tag, message.shape, message.count) == (1, 9, (2, 0), 0)
    assert comm.recv(1, tag=9).shape == (2, 0)


@on_ranks(1, 3)
def test_usage(comm: Communicator) -> None:
    x, queue = np.ones(3), comm.named_queue()
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: comm.allreduce(x, "mean"), "op is 'mean'; accepted: sum, average, min, max, product"),
        (lambda: comm.allreduce(x, None), "op is None"),  # type: ignore[arg-type]
        (lambda: comm.allreduce(x > 0), "bool has no sum; use max .* integer dtype to count"),
        (lambda: comm.allreduce_async([True]), "bool has no sum"),
        (lambda: comm.reduce_scatter(x > 0), "bool has no sum"),
        (lambda: comm.allreduce(x > 0, "average"), "bool has no average"),
        (lambda: queue.allreduce(x, name="x", op="mean"), "op is 'mean'"),  # type: ignore[arg-type]
        (lambda: queue.allreduce(x > 0, name="x", op="average"), "bool has no average"),
        (lambda: comm.allreduce(x + 1j, "max"), r"complex numbers have no max.*x\.real and x\.imag"),
        (lambda: comm.reduce_scatter(x + 1j, "bitwise_or"), "complex numbers have no bitwise_or"),
        (lambda: comm.reduce_scatter(x > 0, "max", prescale=2.0), "bool cannot be scaled"),
        (lambda: comm.allreduce(x > 0, "max", postscale=2.0), "bool cannot be scaled"),
        (lambda: comm.allreduce(x, "bitwise_and"), "takes integers or bool"),
        (lambda: comm.allreduce(x > 0, "bitwise_or", prescale=2.0), "cannot be scaled"),
        (
            lambda: comm.allreduce(x, comm_dtype="int8"),
            "comm_dtype is 'int8'; accepted: float32, float16, b",
        ),
        (lambda: comm.allreduce(x, comm_dtype="float16"), "only an allreduce of float32 can be sent as"),
        (lambda: comm.send(x, comm.rank - 1, timeout=-1), "timeout is -1"),
        (lambda: comm.recv(comm.rank - 1, timeout=-1), "timeout is -1"),
        *((partial(each.call, comm, x, timeout=-1), "timeout is -1") for each in COLLECTIVES.values()),
        (lambda: comm.barrier(timeout=float("nan")), "timeout is nan"),
        (lambda: comm.broadcast(x, comm.size), f"rank {comm.size} is not in communicator 'world' of size"),
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
    assert queue.allreduce(x, name="x")[0] == comm.size
    comm.barrier()


def check_all(comm: Communicator) -> None:
    """Everything, for ranks that are connected in another way."""
    test_reductions(comm)
    test_roots(comm)
    test_alltoall_splits(comm)
    test_send_and_receive(comm)
    test_rows(comm)
    check_segments(comm)


@on_ranks(3)
def test_names(comm: Communicator) -> None:
    for name in ("", "a", "gradient/ünïcödé", "x" * 1000, "é" * 200, None):
        assert comm.allreduce(np.ones(2), name=name)[0] == comm.size
        assert comm.allgather_async(np.ones(2), name=name).wait().size == 2 * comm.size
