"""Messages between two ranks that take themselves to be on several hosts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import multiring
from multiring import (
    Communicator,
    PeerLostError,
)
from tests.nursery import Nursery
from tests.rank_pool import RankPool
from tests.support import HOSTS, pretend_hosts, wait_until

SECONDS = 5.0

Pools = Callable[[int, int], RankPool]


def send_first(comm: Communicator) -> None:
    """As much as mailboxes hold is sent before anything is received."""
    peer = 1 - comm.rank
    for count in (1, 1000, 16 * 1024):
        comm.send(np.full(count, comm.rank, np.float32), peer)
        assert (comm.recv(peer) == peer).all()


def test_both_send_first(spread: Pools) -> None:
    spread(2, 2).run(send_first)


def connect_for_messages(comm: Communicator) -> None:
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


def test_ranks_connect_when_they_send_messages(spread: Pools) -> None:
    spread(5, 5).run(connect_for_messages)


def send_to_those_in_other_groups(comm: Communicator) -> None:
    """First messages to a rank that waits in another group, over hosts or of its host, and of two groups."""
    same = comm.split(0)
    reverse = comm.split(0, key=-comm.rank)
    local = comm.split(comm.cross_rank)
    assert same is not None
    assert reverse is not None
    assert local is not None
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


def test_a_peer_in_another_group_takes_in_what_is_sent(spread: Pools) -> None:
    spread(4, 2).run(send_to_those_in_other_groups)


def end_before_a_message(rank: int) -> None:
    """Rank 1 ends before anything but rounds has passed between it and the others."""
    pretend_hosts()
    comm = multiring.init()
    comm.barrier()
    if comm.rank == 1:
        os._exit(0)
    if comm.rank == 0:
        comm.recv(1)
    comm.send(np.ones(3), 1)


def test_a_message_to_or_from_a_rank_that_has_ended(nursery: Nursery) -> None:
    outcomes = nursery.run(3, end_before_a_message, init=False, env={HOSTS: "3"})
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, PeerLostError), outcome.trace or outcome
        assert "lost rank 1 on" in str(outcome.error)


def send_into_a_barrier(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.send(np.ones(32 * 1024, np.float32), 1)
    comm.barrier()
    if comm.rank == 1:
        assert comm.recv(0).sum() == 32 * 1024


def test_a_peer_in_a_collective_takes_in_what_is_sent(spread: Pools) -> None:
    spread(2, 2).run(send_into_a_barrier)


def exchange_with_all(comm: Communicator) -> float:
    """A thread for each peer and direction."""
    start = time.monotonic()
    with ThreadPoolExecutor() as pool:
        peers = [rank for rank in range(comm.size) if rank != comm.rank]
        sent = [pool.submit(comm.send, np.full(300_000, comm.rank, np.float32), peer) for peer in peers]
        received = [pool.submit(comm.recv, peer) for peer in peers]
        for peer, future in zip(peers, received, strict=True):
            assert (future.result() == peer).all()
        for future in sent:
            future.result()
    return time.monotonic() - start


def test_threads_that_send_and_receive_at_once(spread: Pools) -> None:
    assert max(spread(4, 3).run(exchange_with_all)) < 20
