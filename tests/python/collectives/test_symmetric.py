"""Memory that all ranks have mapped."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import numpy as np
import pytest

from multiring import Communicator, UsageError
from tests.on_ranks import on_ranks
from tests.python.collectives.array_kinds import assert_same_bits
from tests.python.collectives.oracle import Bits, Reduction, random_bits
from tests.support import wait_until


def shared_regions() -> set[range]:
    """Where this process has mapped shared memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [line.split()[0].split("-") for line in lines if "memfd:multiring" in line]
    return {range(int(begin, 16), int(end, 16)) for begin, end in found}


def filled(comm: Communicator, count: int) -> tuple[Bits, list[Bits]]:
    inputs = [random_bits(rank, (count,), "float32") for rank in range(comm.size)]
    array = comm.symmetric_empty(count, np.float32)
    array[...] = inputs[comm.rank]
    return array, inputs


@on_ranks(1, 3)  # dtypes, operations and places: tests/cpp/collective/symmetric_test.cpp
def test_allreduce(comm: Communicator) -> None:
    for count in (0, 100, 200_003):  # from about 10,000 on it is used where it lies
        array, inputs = filled(comm, count)
        wanted = Reduction().apply(inputs, "float32")
        out = comm.symmetric_empty(count, np.float32)
        assert comm.allreduce(array, out=out) is out
        assert_same_bits(out, wanted)
        assert_same_bits(array, inputs[comm.rank])
        assert_same_bits(comm.reduce_scatter(array), np.array_split(wanted, comm.size)[comm.rank])
        assert_same_bits(comm.allreduce(array, out=np.empty_like(out)), wanted)
        assert_same_bits(comm.allreduce(inputs[comm.rank], out=out), wanted)
        assert comm.allreduce(array, out=array) is array
        assert_same_bits(array, wanted)


@on_ranks(3)
def test_memory_is_freed_with_the_last_view(comm: Communicator) -> None:
    gc.collect()
    before = shared_regions()  # some may go meanwhile, of communicators that were dropped
    array = comm.symmetric_empty((1000, 1000), np.float64)
    assert array.shape == (1000, 1000)
    new = shared_regions() - before
    assert sum(map(len, new)) >= comm.size * array.nbytes
    view = array[5:10]
    work = comm.allreduce_async(view, out=view)
    del array
    assert shared_regions() >= new  # the view keeps it, and the work
    work.wait()
    view[:] = 1
    del view, work
    # The thread that has run the operation lets go of it a moment after telling that it is done.
    wait_until(lambda: not shared_regions() & new, "memory that nothing refers to is freed")
    for _ in range(100):
        comm.symmetric_empty(1000)
    assert shared_regions() <= before


def test_shapes(comm: Communicator) -> None:
    for shape, dtype in ((5, np.float32), (np.int64(5), "int8"), ((), np.dtype("f8")), ([4, 0, 2], bool)):
        array = comm.symmetric_empty(shape, dtype)
        assert array.shape == np.empty(shape).shape
        assert array.dtype == np.dtype(dtype)
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.ctypes.data % 64 == 0


def test_refused(comm: Communicator) -> None:
    for shape, dtype, pattern in (
        ((-1,), "f4", r"shape \[-1\] has a negative extent"),
        ((2**62, 8), "f8", "more memory than there are addresses"),
        ((2**31, 2**31), "f8", "more memory than there are addresses"),
        ((3,), object, "dtype object cannot lie in symmetric memory"),
        ((3,), "S0", "cannot lie in symmetric memory"),
    ):
        with pytest.raises(UsageError, match=pattern):
            comm.symmetric_empty(shape, dtype)
    for shape in ("ab", 1.5, None):
        with pytest.raises(TypeError):
            comm.symmetric_empty(shape)  # type: ignore[arg-type]
    comm.barrier()


@on_ranks(1, 3)
def test_the_arrays_of_peers(comm: Communicator) -> None:
    x = comm.symmetric_empty((3, 1000), np.int32)
    x[...] = comm.rank
    comm.barrier()
    for rank, mine in itertools.product(range(comm.size), (x, x[1, 10:20])):
        theirs = comm.symmetric_peer(mine, rank)
        assert (theirs.shape, theirs.dtype) == (mine.shape, mine.dtype)
        assert (theirs == rank).all()
    comm.barrier()
    comm.symmetric_peer(x, (comm.rank + 1) % comm.size)[2, 5] = 100 + comm.rank
    comm.barrier()
    assert x[2, 5] == 100 + (comm.rank - 1) % comm.size
    x.flags.writeable = False
    assert not comm.symmetric_peer(x, 0).flags.writeable
    theirs = comm.symmetric_peer(x, 0)
    first = x[0, 0] if comm.rank == 0 else 0
    comm.barrier()
    del x
    gc.collect()
    assert theirs[0, 0] == first  # the memory of all ranks stays mapped


def test_arrays_that_have_no_peers(comm: Communicator) -> None:
    x = comm.symmetric_empty((10, 10))
    for rank in (-1, comm.size):
        with pytest.raises(UsageError, match=rf"rank is {rank}; expected 0 to {comm.size - 1}"):
            comm.symmetric_peer(x, rank)
    with pytest.raises(UsageError, match="does not lie in symmetric memory of 'world'"):
        comm.symmetric_peer(np.zeros(3), 0)
    with pytest.raises(UsageError, match="C order"):
        comm.symmetric_peer(x[:, ::2], 0)


@on_ranks(3)
def test_views(comm: Communicator) -> None:
    array, inputs = filled(comm, 90_000)
    wanted = Reduction().apply(inputs, "float32")
    for begin, end in ((0, 20_000), (20_000, 20_001), (20_001, 89_999)):
        view = array[begin:end].reshape(-1, 1)
        assert comm.allreduce(view, out=view) is view
    assert_same_bits(array[:89_999], wanted[:89_999])
    assert_same_bits(array[89_999:], inputs[comm.rank][89_999:])  # not touched
