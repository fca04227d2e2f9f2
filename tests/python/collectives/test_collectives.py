"""Every collective against the NumPy oracle: rank counts, lengths, reductions and roots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from multiring import Communicator, UsageError
from tests.on_ranks import on_ranks
from tests.python.collectives.array_kinds import assert_same_bits
from tests.python.collectives.oracle import DTYPES, OPS, Bits, Reduction, blocks, random_bits, storage
from tests.python.collectives.registry import COLLECTIVES, uneven_splits
from tests.rank_pool import RankPool

Pools = Callable[[int], RankPool]

# With four ranks the tree is full, with three and with seven it is not.
SIZES = (1, 2, 3, 4, pytest.param(7, marks=pytest.mark.full))
COUNTS = (0, 1, 63, 1001)
NUMPY_DTYPES = tuple(dtype for dtype in DTYPES if dtype != "bfloat16")  # that one comes in test_array_kinds
# More than one segment of staging memory, and no multiple of anything.
LARGE_BYTES = 5 * (1 << 19) + 24


def inputs_of(comm: Communicator, seed: int, shape: tuple[int, ...], dtype: str) -> list[Bits]:
    """The same on all ranks: what each of them puts in."""
    return [random_bits(seed * 100 + rank, shape, dtype) for rank in range(comm.size)]


@pytest.mark.parametrize("op", OPS)
@on_ranks(*SIZES)
def test_reductions(comm: Communicator, op: str) -> None:
    for dtype in NUMPY_DTYPES:
        if (op, dtype) == ("average", "bool"):
            continue
        for count in COUNTS:
            inputs = inputs_of(comm, count, (count,), dtype)
            wanted = Reduction(op).apply(inputs, dtype)
            assert_same_bits(comm.allreduce(inputs[comm.rank], op), wanted)
            assert_same_bits(comm.reduce_scatter(inputs[comm.rank], op), blocks(wanted, comm.size)[comm.rank])
            assert_same_bits(comm.allreduce_async(inputs[comm.rank], op).wait(), wanted)


@on_ranks(2)
def test_averages_of_integers_do_not_wrap(comm: Communicator) -> None:
    top, deep = np.iinfo(np.uint64).max, np.iinfo(np.int64).min
    for dtype, mine, theirs, wanted in [
        ("int8", [127, -128, -3, 3], [127, -128, -4, 4], [127, -128, -3, 3]),
        ("uint32", [2**32 - 1, 1], [2**32 - 1, 2], [2**32 - 1, 1]),
        ("int64", [deep, 2**53 + 1, deep, -1], [deep, 2**53 + 1, -1, 0], [deep, 2**53 + 1, -(2**62), 0]),
        ("uint64", [top, top, 0], [top, top - 1, 1], [top, top - 1, 0]),
    ]:
        array = np.array(mine if comm.rank == 0 else theirs, dtype)
        np.testing.assert_array_equal(comm.allreduce(array, "average"), np.array(wanted, dtype))
    strided = np.full((4, 6), 120, np.int8)[::2, ::3]
    np.testing.assert_array_equal(comm.allreduce(strided, "average"), strided)


@on_ranks(1, 3)
def test_scales(comm: Communicator) -> None:
    for dtype in NUMPY_DTYPES[1:]:
        inputs = inputs_of(comm, 5, (97,), dtype)
        for op in OPS:
            for prescale, postscale in ((0.5, 1.0), (1.0, 3.0), (-1.7, 1 / 3)):
                reduction = Reduction(op, prescale, postscale)
                scales = {"prescale": prescale, "postscale": postscale}
                wanted = reduction.apply(inputs, dtype)
                assert_same_bits(comm.allreduce(inputs[comm.rank], op, **scales), wanted)
                block = comm.reduce_scatter(inputs[comm.rank], op, **scales)
                assert_same_bits(block, blocks(wanted, comm.size)[comm.rank])
                assert_same_bits(comm.allreduce_async(inputs[comm.rank], op, **scales).wait(), wanted)


@on_ranks(2, 3)
def test_special_values(comm: Communicator) -> None:
    for dtype in ("float16", "float32", "float64"):
        info = np.finfo(dtype)
        specials = [
            0.0,
            -0.0,
            1.0,
            np.nan,
            np.inf,
            -np.inf,
            info.max,
            info.tiny,
            info.smallest_subnormal,
            -info.max,
        ]
        values = np.array(specials, dtype)
        # Every pair of values meets on every pair of ranks.
        inputs = [np.roll(np.tile(values, len(values)), rank) for rank in range(comm.size)]
        inputs[0] = np.repeat(values, len(values))
        for op in OPS:
            wanted = Reduction(op).apply(inputs, dtype)
            result = comm.allreduce(inputs[comm.rank], op)
            np.testing.assert_array_equal(result, wanted)  # the sign of a zero is not compared in min and max
            if op in ("sum", "product", "average"):
                assert_same_bits(result, wanted)
            for begin in range(0, values.size, 7):  # elsewhere in a vector
                assert_same_bits(comm.allreduce(inputs[comm.rank][begin:], op), result[begin:])
            for theirs in np.split(comm.allgather(result), comm.size):
                assert_same_bits(theirs, result)


@pytest.mark.parametrize("name", COLLECTIVES)
@on_ranks(*SIZES)
def test_many_segments(comm: Communicator, name: str) -> None:
    collective = COLLECTIVES[name]
    for dtype in ("float32", "uint8"):
        rows = LARGE_BYTES // storage(dtype).itemsize // 4
        shapes = []
        for rank in range(comm.size):
            extra = 0 if collective.rows is None else 1000 * rank
            shapes.append((rows + extra, 4))
        inputs = [random_bits(rank, shape, dtype) for rank, shape in enumerate(shapes)]
        result = collective.call(comm, inputs[comm.rank])
        wanted = collective.expected(inputs, comm.rank, dtype)
        if wanted is None:
            assert result is None
        else:
            assert_same_bits(result, wanted)


@pytest.mark.parametrize("name", COLLECTIVES)
@on_ranks(*SIZES)
def test_rows(comm: Communicator, name: str) -> None:
    collective = COLLECTIVES[name]
    for rows in (0, 1, comm.size - 1, comm.size, 2 * comm.size + 1):
        for tail in ((), (3,), (2, 0), (2, 1, 3)):
            lengths = [rows if collective.rows is None else rows * (rank % 2) for rank in range(comm.size)]
            inputs = [random_bits(rank, (length, *tail), "int32") for rank, length in enumerate(lengths)]
            result = collective.call(comm, inputs[comm.rank])
            wanted = collective.expected(inputs, comm.rank, "int32")
            if wanted is not None:
                assert_same_bits(result, wanted)


@on_ranks(*SIZES)
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


@on_ranks(*SIZES)
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


@on_ranks(*SIZES)
def test_same_bits(comm: Communicator) -> None:
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


@on_ranks(2, 3, 4)
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
        (lambda: comm.allreduce(x, timeout=-1), "timeout is -1"),
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
    if comm.rank == 0:
        with pytest.raises(UsageError, match="root of a scatter"):
            comm.scatter(None, 0)
    assert not comm.is_broken  # nothing was sent
    comm.barrier()


@on_ranks(3)
def test_names(comm: Communicator) -> None:
    for name in ("", "a", "gradient/ünïcödé", "x" * 1000, "é" * 200, None):
        assert comm.allreduce(np.ones(2), name=name)[0] == comm.size
        assert comm.allgather_async(np.ones(2), name=name).wait().size == 2 * comm.size
