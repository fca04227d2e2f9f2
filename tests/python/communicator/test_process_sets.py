"""Groups of ranks: several alive at once, overlapping, and what they share with their parent. Groups of
groups, and errors in one of them: tests/cpp/engine."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from multiring import AbortedError, Communicator
from multiring.derived import derived, shared_queue
from tests.on_ranks import on_ranks
from tests.python.collectives.array_kinds import assert_same_bits
from tests.python.collectives.oracle import Reduction, random_bits


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
def test_colors(comm: Communicator) -> None:
    assert comm.split(None) is None
    everybody = comm.split(np.int64(7), key=-comm.rank)
    assert everybody.rank == comm.size - 1 - comm.rank
    assert comm.process_set([]) is None
    assert (comm.process_set(np.array([0])) is None) == (comm.rank > 0)  # an array is a sequence too


# --- what a communicator has one of for each purpose

PURPOSES = ["a", "b", "a queue", "b queue"]


@on_ranks(3)
def test_threads_of_all_ranks_get_one_part_for_each_purpose(comm: Communicator) -> None:
    for _ in range(5):
        ask_by_threads(comm.split(0))


def ask_by_threads(comm: Communicator) -> None:
    """Three threads ask for two groups and two queues, in another order on each rank."""
    start = threading.Barrier(3)

    def ask(place: int) -> dict[str, object]:
        start.wait()
        order = [PURPOSES[(number + place + comm.rank) % 4] for number in range(4)]
        return {each: (shared_queue if "queue" in each else derived)(comm, each) for each in order}

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(ask, range(3)))
    groups = [{one[purpose] for one in found} for purpose in ("a", "b")]
    assert [len(each) for each in groups] == [1, 1]
    assert len({shared_queue(comm, purpose).address for purpose in ("a queue", "b queue")}) == 2
    for purpose, value in (("a", 1), ("b", 10)):
        group = derived(comm, purpose)
        assert group in groups[purpose == "b"]
        np.testing.assert_array_equal(group.allreduce(np.array([value])), value * comm.size)
        queue = shared_queue(comm, purpose + " queue")
        np.testing.assert_array_equal(queue.allreduce(np.array([value]), name="x"), value * comm.size)
