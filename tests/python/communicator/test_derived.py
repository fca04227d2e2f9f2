"""What a communicator has one of for each purpose, asked for by several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from multiring import Communicator
from multiring.derived import derived, shared_queue
from tests.rank_pool import RankPool

Pool = Callable[[int], RankPool]


def asked_for_by_threads(comm: Communicator) -> None:
    """Three threads ask for two groups and two queues, in another order on each rank."""
    found: list[dict[str, object]] = [{}, {}, {}]
    start = threading.Barrier(len(found))
    purposes = ["a", "b", "a queue", "b queue"]

    def ask(place: int) -> None:
        start.wait()
        for number in range(len(purposes)):
            purpose = purposes[(number + place + comm.rank) % len(purposes)]
            make = shared_queue if "queue" in purpose else derived
            found[place][purpose] = make(comm, purpose)

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    groups = [{one[purpose] for one in found} for purpose in ("a", "b")]
    assert [len(each) for each in groups] == [1, 1]
    assert len({shared_queue(comm, purpose).address for purpose in ("a queue", "b queue")}) == 2
    for purpose, value in (("a", 1), ("b", 10)):
        group = derived(comm, purpose)
        assert group in groups[purpose == "b"]
        np.testing.assert_array_equal(group.allreduce(np.array([value])), value * comm.size)
        queue = shared_queue(comm, purpose + " queue")
        np.testing.assert_array_equal(queue.allreduce(np.array([value]), name="x"), value * comm.size)


def test_threads_of_all_ranks_get_one_part_for_each_purpose(ranks: Pool) -> None:
    for _ in range(5):
        ranks(3).run(in_a_group_of_its_own)


def in_a_group_of_its_own(comm: Communicator) -> None:
    group = comm.split(0)
    assert group is not None
    asked_for_by_threads(group)
