"""Collectives and messages of Python objects through ChainerMN's communicator."""

from __future__ import annotations

import operator
import pickle
import types
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import multiring.chainer
from multiring import Communicator
from multiring.errors import UsageError
from tests.on_ranks import on_ranks, refuses

UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


@on_ranks(3)
def test_collectives_of_objects(comm: Communicator) -> None:
    mn = multiring.chainer.create_communicator(comm)
    mpi = mn.mpi_comm
    rank, size, root = mn.rank, mn.size, mn.size - 1
    assert (mpi.rank, mpi.size, mpi.Get_rank(), mpi.Get_size()) == (rank, size, rank, size)
    mpi.Barrier()
    mpi.barrier()
    sent = {"lr": 0.1, "units": [rank], "weights": np.arange(3.0) + rank}
    found = mpi.bcast(sent if rank == root else None, root=root)
    np.testing.assert_array_equal(found.pop("weights"), np.arange(3.0) + root)
    assert found == {"lr": 0.1, "units": [root]}
    assert mpi.bcast((True, 7)) == (True, 7)
    assert mpi.allgather(f"study {rank}") == [f"study {r}" for r in range(size)]
    for gather in (mpi.gather, mn.gather_obj):
        assert gather({rank}, root=root) == ([{r} for r in range(size)] if rank == root else None)
    for scatter in (mpi.scatter, mn.scatter_obj):
        assert scatter([[r] for r in range(size)] if rank == root else None, root=root) == [rank]
    assert mn.bcast_obj("x" * rank * 1000 if rank == root else None, max_buf_len=10, root=root) == "x" * 2000
    assert mpi.alltoall([(rank, r) for r in range(size)]) == [(r, rank) for r in range(size)]
    assert mpi.allreduce([rank]) == mn.allreduce_obj([rank]) == list(range(size))
    assert mn.allreduce_obj(0.5) == 0.5 * size
    assert mn.allreduce_obj(np.float32(2)).dtype == np.float32
    assert mpi.allreduce(rank, op=max) == size - 1
    assert mpi.reduce(str(rank), operator.add, root) == ("012" if rank == root else None)
    np.testing.assert_array_equal(mpi.allreduce(np.full(2, rank)), np.full(2, sum(range(size))))


def test_messages_of_objects(comm: Communicator) -> None:
    """`send_obj` and `mpi_comm.send` are one channel, as in ChainerMN, also of two communicators of the same
    ranks: what one has put aside is there for the other."""
    mn, other = (multiring.chainer.create_communicator(comm) for _ in range(2))
    mpi, status = mn.mpi_comm, types.SimpleNamespace()
    if mn.rank == 0:
        mpi.send("first", dest=1, tag=4)
        other.send_obj("second", 1, tag=5)
        mpi.ssend(b"x" * 1000, 1)
    else:
        assert mpi.recv(source=0, tag=5) == "second"
        assert other.recv_obj(0, status) == "first"
        assert (status.source, status.tag) == (0, 4)
        assert mpi.recv(source=0, status=status) == b"x" * 1000
        assert (status.source, status.tag) == (0, 0)
        assert 1000 < status.count < 1100
        refuses(UsageError, "no receiving from any rank", mpi.recv)
    mpi.send([mn.rank], dest=mn.rank, tag=9)
    assert mn.recv_obj(mn.rank, status=status) == [mn.rank]
    assert (status.source, status.tag) == (mn.rank, 9)


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is missing")
@on_ranks(1)
def test_a_status_of_mpi4py_is_filled(comm: Communicator) -> None:
    from mpi4py import MPI

    mn = multiring.chainer.create_communicator(comm)
    status = MPI.Status()
    mn.send_obj("word", mn.rank, tag=6)
    assert mn.recv_obj(mn.rank, status=status, tag=MPI.ANY_TAG) == "word"
    assert (status.Get_source(), status.Get_tag(), status.Get_error()) == (mn.rank, 6, MPI.SUCCESS)
    assert status.Get_count() == status.count == len(pickle.dumps("word"))
    assert mn.mpi_comm.allreduce(mn.rank, op=MPI.MAX) == mn.size - 1
    assert mn.mpi_comm.Split(MPI.UNDEFINED) is None


@on_ranks(3)
def test_objects_that_cannot_be_sent(comm: Communicator) -> None:
    """An error on all that wait for one, and the next call works."""
    mpi = multiring.chainer.create_communicator(comm).mpi_comm

    def fails(rank: int, call: Any, *others: int) -> None:
        if comm.rank == rank:
            refuses(UNPICKLABLE, "lambda", call)
        elif comm.rank in others:
            refuses(UsageError, f"rank {rank} could not (send|pickle) its object .*lambda", call)
        else:
            call()
        assert mpi.allreduce(1) == comm.size

    bad = [lambda: None] * comm.size
    good: list[Any] = [0] * comm.size
    fails(0, lambda: mpi.bcast(bad), 1, 2)
    fails(1, lambda: mpi.allgather(bad if comm.rank == 1 else 0), 0, 2)
    fails(1, lambda: mpi.allreduce(bad if comm.rank == 1 else good), 0, 2)
    fails(1, lambda: mpi.gather(bad if comm.rank == 1 else 0), 0)
    fails(2, lambda: mpi.scatter(bad, root=2), 0, 1)
    fails(0, lambda: mpi.alltoall(bad if comm.rank == 0 else good), 1, 2)
    refuses(UsageError, "scatter of 1 objects to 3 ranks", mpi.scatter, [1], root=2)
    refuses((UsageError, TypeError), "NoneType", mpi.scatter, None, root=2)
    refuses(AttributeError, "'Allreduce': it sends objects only.*MPI.COMM_WORLD", lambda: mpi.Allreduce)
    assert not hasattr(mpi, "isend")
