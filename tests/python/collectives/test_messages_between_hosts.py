"""Messages between two ranks that take themselves to be on several hosts."""

from __future__ import annotations

import os

import numpy as np

from multiring import (
    Communicator,
    PeerLostError,
)
from tests.nursery import Nursery
from tests.on_ranks import on_ranks
from tests.support import wait_until


@on_ranks((5, 5))
def test_ranks_connect_when_they_send_messages(comm: Communicator) -> None:
    """With each peer one control connection, and one for each of two channels, from the first message on."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    peers = [rank for rank in range(comm.size) if rank != comm.rank]
    held = len(os.listdir("/proc/self/fd"))
    for to, sources in [([after], [before]), ([after], [before]), (peers, peers)]:
        for peer in to:
            comm.send(np.full(3, comm.rank), peer)
        for peer in sources:
            assert comm.recv(peer)[0] == peer
        connections = 3 * len({*to, *sources})
        # Of calls that have crossed one is closed when its rank looks at its connections, which this does.
        wait_until(
            lambda wanted=held + connections: (
                not comm.is_broken and len(os.listdir("/proc/self/fd")) == wanted
            ),
            f"{connections} connections",
        )
        comm.barrier()


@on_ranks((4, 2))
def test_a_peer_in_another_group_takes_in_what_is_sent(comm: Communicator) -> None:
    """First messages to a rank that waits in another group, over hosts or of its host, and of two groups."""
    same = comm.split(0)
    reverse = comm.split(0, key=-comm.rank)
    local = comm.split(comm.cross_rank)
    if comm.rank == 0:
        comm.send(np.ones(3), 1)
    same.barrier()
    if comm.rank == 1:
        assert comm.recv(0).sum() == 3
    # Ranks 1 and 3 share a host; 3 comes to their group when rank 0 has sent.
    if comm.rank == 0:
        same.send(np.ones(3), 1)
        same.send(np.ones(3), 3)
    if comm.rank == 3:
        assert same.recv(0).sum() == 3
    local.barrier()
    if comm.rank == 1:
        assert same.recv(0).sum() == 3
    last = comm.size - 1  # ranks of `reverse` are counted from the other end
    if comm.rank == 2:
        reverse.send(np.ones(3), last - 3)
        same.send(np.ones(3), 3)
    if comm.rank == 3:
        assert same.recv(2).sum() == reverse.recv(last - 2).sum()
    comm.barrier()


def end_before_a_message(comm: Communicator) -> None:
    """Rank 1 ends before anything but rounds has passed between it and the others."""
    comm.barrier()
    if comm.rank == 1:
        os._exit(0)
    if comm.rank == 0:
        comm.recv(1)
    comm.send(np.ones(3), 1)


def test_a_message_to_or_from_a_rank_that_has_ended(nursery: Nursery) -> None:
    outcomes = nursery.run(3, end_before_a_message, hosts=3)
    for outcome in (outcomes[0], outcomes[2]):
        outcome.check_raised(PeerLostError, "lost rank 1 on")
