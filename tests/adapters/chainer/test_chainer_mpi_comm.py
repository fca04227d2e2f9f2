"""`comm.mpi_comm`: mpi4py's methods for Python objects, as ChainerMN's programs call them."""

from __future__ import annotations

import copy
import logging
import operator
import pickle
import types
from typing import Any

import numpy as np
import pytest

import multiring.chainer  # before Chainer
from multiring import Communicator
from multiring.errors import UsageError
from tests.on_ranks import Pool, on_ranks

UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


@on_ranks(3)
def test_collectives(comm: Communicator) -> None:
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
    assert mpi.gather({rank}, root=root) == ([{r} for r in range(size)] if rank == root else None)
    assert mpi.scatter([[r] for r in range(size)] if rank == root else None, root=root) == [rank]
    assert mpi.alltoall([(rank, r) for r in range(size)]) == [(r, rank) for r in range(size)]
    assert mpi.allreduce([rank]) == list(range(size))
    assert mpi.allreduce(rank, op=max) == size - 1
    assert mpi.reduce(str(rank), operator.add, root) == (
        "".join(map(str, range(size))) if rank == root else None
    )
    np.testing.assert_array_equal(mpi.allreduce(np.full(2, rank)), np.full(2, sum(range(size))))


def test_messages(comm: Communicator) -> None:
    """`send_obj` and `mpi_comm.send` are one channel, as in ChainerMN."""
    mn = multiring.chainer.create_communicator(comm)
    mpi, status = mn.mpi_comm, types.SimpleNamespace()
    if mn.rank == 0:
        mpi.send("first", dest=1, tag=4)
        mn.send_obj("second", 1, tag=5)
        mpi.ssend(b"x" * 1000, 1)
    else:
        assert mpi.recv(source=0, tag=5) == "second"
        assert mn.recv_obj(0, status) == "first"
        assert (status.source, status.tag) == (0, 4)
        assert mpi.recv(source=0, status=status) == b"x" * 1000
        assert (status.source, status.tag) == (0, 0)
        assert 1000 < status.count < 1100
        with pytest.raises(UsageError, match="no receiving from any rank"):
            mpi.recv()
    mpi.send([mn.rank], dest=mn.rank, tag=9)
    assert mn.recv_obj(mn.rank, status=status) == [mn.rank]
    assert (status.source, status.tag) == (mn.rank, 9)


def test_communicators_of_the_same_ranks_share_messages(comm: Communicator) -> None:
    """What one has put aside is there for the other."""
    one, other = (multiring.chainer.create_communicator(comm) for _ in range(2))
    if comm.rank == 0:
        one.send_obj("one", 1, tag=1)
        other.send_obj("other", 1, tag=2)
    else:
        assert other.recv_obj(0, tag=2) == "other"
        assert one.recv_obj(0, tag=1) == "one"


def fill_a_status_of_mpi4py(comm: Communicator) -> None:
    from mpi4py import MPI

    mn = multiring.chainer.create_communicator(comm)
    status = MPI.Status()
    mn.send_obj("word", mn.rank, tag=6)
    assert mn.recv_obj(mn.rank, status=status, tag=MPI.ANY_TAG) == "word"
    assert (status.Get_source(), status.Get_tag(), status.Get_error()) == (mn.rank, 6, MPI.SUCCESS)
    assert status.Get_count() == status.count == len(pickle.dumps("word"))
    assert mn.mpi_comm.allreduce(mn.rank, op=MPI.MAX) == mn.size - 1
    assert mn.mpi_comm.Split(MPI.UNDEFINED) is None


def test_a_status_of_mpi4py_is_filled(ranks: Pool) -> None:
    pytest.importorskip("mpi4py")
    ranks(1).run(fill_a_status_of_mpi4py)


@on_ranks(3)
def test_groups(comm: Communicator) -> None:
    mn = multiring.chainer.create_communicator(comm)
    half = mn.split(mn.rank % 2, mn.rank)
    members = [rank for rank in range(mn.size) if rank % 2 == mn.rank % 2]
    assert half is not None
    assert half.mpi_comm.allgather(mn.rank) == members
    turned = half.mpi_comm.Split(key=-half.rank)
    assert turned.allgather(mn.rank) == members[::-1]
    assert mn.mpi_comm.Split(-1) is None
    holder = copy.deepcopy([mn.mpi_comm])
    assert holder[0] is mn.mpi_comm
    with pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(mn.mpi_comm)


@on_ranks(3)
def test_failures(comm: Communicator) -> None:
    """An object that one rank cannot send is an error on all that wait for it, and the next call works."""
    mpi = multiring.chainer.create_communicator(comm).mpi_comm

    def fails(rank: int, call: Any, *others: int) -> None:
        if comm.rank == rank:
            with pytest.raises(UNPICKLABLE):
                call()
        elif comm.rank in others:
            with pytest.raises(UsageError, match=f"rank {rank} could not (send|pickle) its object .*lambda"):
                call()
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
    with pytest.raises(UsageError, match=r"scatter of 1 objects to 3 ranks"):
        mpi.scatter([1], root=2)
    with pytest.raises((UsageError, TypeError), match=r"NoneType"):
        mpi.scatter(None, root=2)
    with pytest.raises(AttributeError, match=r"no 'Allreduce': it sends objects only.*MPI.COMM_WORLD"):
        mpi.Allreduce(np.ones(1), np.ones(1))
    assert not hasattr(mpi, "isend")


def names(comm: Communicator) -> list[str]:
    """What is logged about names that ChainerMN's programs pass."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("multiring")
    logger.addHandler(handler)
    try:
        for name in (
            "pure_nccl",
            "hierarchical",
            "two_dimensional",
            "single_node",
            "non_cuda_aware",
            "naive",
        ):
            assert multiring.chainer.create_communicator(name).size == comm.size
        named = multiring.chainer.create_communicator(communicator_name="flat", batched_copy=False)
        assert named.allreduce(x=np.ones(1)) == comm.size
    finally:
        logger.removeHandler(handler)
    return lines


def test_names_of_chainermn_are_accepted(ranks: Pool) -> None:
    lines, others = ranks(2).run(names)
    assert len(lines) == 7
    assert all("one kind of communicator, which is used: 2 ranks on " in line for line in lines)
    assert "'pure_nccl'" in lines[0]
    assert "'flat'" in lines[-1]
    assert others == []
