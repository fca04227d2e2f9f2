"""Groups of ranks: several alive at once, overlapping, nested, and what they share with their parent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from multiring import AbortedError, Communicator, MismatchError, PeerLostError
from tests.on_ranks import on_ranks
from tests.python.collectives.array_kinds import assert_same_bits
from tests.python.collectives.oracle import Reduction, random_bits
from tests.rank_pool import RankPool

Pools = Callable[[int], RankPool]


@on_ranks(4)
def test_overlapping_sets(comm: Communicator) -> None:
    sets = [[0, 1], [2, 1, 0], [3], list(range(comm.size)), [comm.size - 1, 0]]
    groups = [comm.process_set(members) for members in sets]
    for members, group in zip(sets, groups, strict=True):
        assert (group is not None) == (comm.rank in members)
        if group is None:
            continue
        assert (group.size, group.rank) == (len(members), members.index(comm.rank))
        assert (group.local_rank, group.local_size) == (group.rank, group.size)
        assert (group.cross_rank, group.cross_size) == (0, 1)
        assert group.name.startswith("world/")
    for count in (1, 70_000):  # all are alive, and used in turn
        for members, group in zip(sets, groups, strict=True):
            if group is None:
                continue
            inputs = [random_bits(member, (count,), "float32") for member in members]
            wanted = Reduction().apply(inputs, "float32")
            assert_same_bits(group.allreduce(inputs[group.rank]), wanted)
            assert_same_bits(group.allreduce_async(inputs[group.rank]).wait(), wanted)
    comm.barrier()


@on_ranks(4)
def test_nested_sets(comm: Communicator) -> None:
    outer = comm.process_set(range(1, comm.size))
    if outer is None:
        return
    inner = outer.process_set([outer.size - 1, 0])
    if inner is None:
        return
    assert inner.allgather(np.array([comm.rank])).tolist() == [comm.size - 1, 1]
    again = inner.split(0, key=-inner.rank)
    assert again.allgather(np.array([comm.rank])).tolist() == [1, comm.size - 1]
    region = again.symmetric_empty(50_000, np.float64)
    region[:] = comm.rank
    assert (again.allreduce(region, out=region) == comm.size).all()
    assert again.broadcast_object({"from": comm.rank}, root=1) == {"from": comm.size - 1}


def check_error_stays_inside(comm: Communicator) -> str:
    group = comm.process_set([0, 1])
    text = ""
    if group is not None:
        with pytest.raises(MismatchError) as caught:
            group.allreduce(np.ones(3 + comm.rank))
        text = str(caught.value)
        assert group.is_broken
        with pytest.raises(AbortedError, match=r"communicator 'world/\d+\.0' is broken"):
            group.barrier()
    assert not comm.is_broken
    assert comm.allreduce(np.ones(1))[0] == comm.size
    other = comm.split(0)
    other.barrier()
    return text


def test_an_error_breaks_its_group_only(ranks: Pools) -> None:
    for text in ranks(3).run(check_error_stays_inside)[:2]:
        assert "communicator 'world/" in text


@on_ranks(3)
def test_closing_a_group_closes_those_inside(comm: Communicator) -> None:
    outer = comm.split(0)
    inner = outer.split(0)
    last = outer.split(0).split(0)  # no rank holds the group between
    inner.barrier()
    comm.barrier()
    outer.close()
    outer.close()  # idempotent
    comm.barrier()
    for group in (outer, inner, last):
        with pytest.raises(AbortedError, match="is closed"):
            group.barrier()
    assert comm.allreduce(np.ones(1))[0] == comm.size


@on_ranks(3)
def test_a_rank_that_closes_a_group_is_lost_to_it(comm: Communicator) -> None:
    group = comm.split(0)
    if comm.rank == 1:
        group.close()
    else:
        with pytest.raises(PeerLostError, match="lost rank 1.*it has shut down or exited"):
            group.barrier()
    assert not comm.is_broken
    comm.barrier()


@on_ranks(3)
def test_colors(comm: Communicator) -> None:
    alone = comm.split(comm.rank)
    assert (alone.size, alone.rank) == (1, 0)
    assert alone.allreduce(np.array([5.0]))[0] == 5.0
    assert comm.split(None) is None
    everybody = comm.split(np.int64(7), key=-comm.rank)
    assert everybody.rank == comm.size - 1 - comm.rank
    assert comm.process_set([]) is None
    assert (comm.process_set(np.array([0])) is None) == (comm.rank > 0)  # an array is a sequence too
