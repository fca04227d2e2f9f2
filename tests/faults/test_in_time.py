"""How soon ranks learn what has happened. These are bounds on a wall clock, so they run alone; that ranks
learn it, and of what, is asserted in the other files."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import multiring
from multiring import AbortedError, Communicator, PeerLostError
from tests.faults.test_interrupt import waiting
from tests.nursery import Nursery, note
from tests.support import Stopwatch, wait_until


def lose_a_rank(comm: Communicator) -> float:
    comm.barrier()
    if comm.rank == 1:
        note("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        comm.allreduce(np.ones(3))
    note("told")
    watch = Stopwatch()
    multiring.shutdown()
    return watch.seconds()


@pytest.mark.parametrize(("hosts", "within"), [(1, 2.0), (2, 5.0)])
def test_a_loss(nursery: Nursery, hosts: int, within: float) -> None:
    """On several hosts it takes as long as a peer's end may take to be seen there."""
    outcomes = nursery.run(4, lose_a_rank, hosts=hosts)
    for rank in (0, 2, 3):
        outcome = outcomes[rank]
        assert outcome.error is None, outcome.trace
        assert outcome.notes["told"] - outcomes[1].notes["killed"] - outcome.held_up < within
        assert outcome.value < 2.0


def test_an_interrupt(nursery: Nursery) -> None:
    outcomes = nursery.run(3, waiting, "allreduce")
    since = outcomes[0].notes["interrupted"]
    outcomes[1].check_raised(KeyboardInterrupt, since=since, within=1.0)
    for rank in (0, 2):
        outcomes[rank].check_raised(AbortedError, since=since, within=2.0)


def time_out(comm: Communicator) -> None:
    """Rank 0 gives the operation little time, rank 2 much."""
    comm.barrier()
    note("called")
    if comm.rank == 1:
        wait_until(lambda: comm.is_broken, "rank 0 to give up")
    else:
        comm.allreduce(np.ones(3), timeout=0.2 if comm.rank == 0 else 60.0)


def test_a_deadline(nursery: Nursery) -> None:
    outcomes = nursery.run(3, time_out)
    for rank in (0, 2):
        since = outcomes[0].notes["called"]
        outcomes[rank].check_raised(multiring.TimeoutError, since=since, within=2.2)
