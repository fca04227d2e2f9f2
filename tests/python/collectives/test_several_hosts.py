"""Ranks that take themselves to be on several hosts: shared memory within each, TCP between them."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
from pathlib import Path

import numpy as np
import pytest

import multiring
from multiring import AbortedError, Communicator, TimeoutError, UsageError
from tests.nursery import Nursery
from tests.on_ranks import on_ranks
from tests.python.collectives.test_collectives import check_all
from tests.support import held_port, wait_until


@pytest.mark.parametrize("places", [(0, 1), (0, 1, 1, 1), (0, 0, 1, 2, 2)], ids=str)
def test_every_collective(nursery: Nursery, places: tuple[int, ...]) -> None:
    nursery.values(len(places), check_all, hosts=places, timeout=200.0)


@on_ranks((4, 3))
def test_places(comm: Communicator) -> None:
    """Ranks 0 and 3 share a host."""
    group = comm.split(0 if comm.rank < 3 else 1, key=-comm.rank)
    for one, wanted in (
        (comm, [(0, 0, 2, 0, 3), (1, 0, 1, 1, 3), (2, 0, 1, 2, 3), (3, 1, 2, 0, 3)]),
        (group, [(2, 0, 1, 2, 3), (1, 0, 1, 1, 3), (0, 0, 1, 0, 3), (0, 0, 1, 0, 1)]),
    ):
        place = (one.rank, one.local_rank, one.local_size, one.cross_rank, one.cross_size)
        assert place == wanted[comm.rank]
    group.barrier()


@on_ranks((2, 2))
def test_memory_of_another_host_cannot_be_seen(comm: Communicator) -> None:
    mine = comm.symmetric_empty(5, np.float32)
    mine[:] = 1
    comm.barrier()
    assert comm.allreduce(mine, out=mine)[0] == comm.size
    with pytest.raises(UsageError, match=f"rank {1 - comm.rank} is on another host"):
        comm.symmetric_peer(mine, 1 - comm.rank)
    comm.barrier()


def in_mode(rank: int, mode: str, other: str) -> None:
    os.environ["MULTIRING_MODE"] = mode if rank % 2 == 0 else other
    comm = multiring.init()
    for each in (comm, comm.split(color=comm.rank // 3)):
        assert each.allreduce(np.ones(100_000))[0] == each.size


def test_a_mode_that_is_asked_for(nursery: Nursery) -> None:
    nursery.values(4, in_mode, "2tx2d", "2tx2d", init=False, hosts=2)


def test_modes_that_differ(nursery: Nursery) -> None:
    """One that does not fit: tests/cpp/collective/allreduce_test.cpp."""
    first, *others = nursery.run(4, in_mode, "2x2", "2x2d", init=False, hosts=2)
    first.check_raised(UsageError, "rank 1 has MULTIRING_MODE='2x2d', rank 0 '2x2'")
    for outcome in others:
        outcome.check_raised(UsageError)


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


def stop_within_an_operation(comm: Communicator) -> None:
    """Rank 2 stops rank 0, of its host, when that has told that it waits for it: it has come, and does
    nothing more. Then rank 2 comes."""
    pids = comm.allgather_object(os.getpid())
    try:
        if comm.rank == 2:  # what all ranks print is in one file
            wait_until(lambda: b"rank 0 on" in os.pread(2, 1 << 20, 0), "rank 0 to warn of its wait")
            os.kill(pids[0], signal.SIGSTOP)
        comm.allreduce(np.ones(2_000_000, np.float32), timeout=2 if comm.rank == 2 else 60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)  # it could not end by itself


def test_a_rank_that_stops_within_a_plan(nursery: Nursery) -> None:
    """Who it is, is known to those only who wait for it themselves. One that ends: test_emulated_hosts.py."""
    env = {"MULTIRING_STALL_WARNING": "0.2"}
    for outcome in nursery.run(4, stop_within_an_operation, hosts=2, env=env)[1:]:
        outcome.check_raised(TimeoutError, "one of them is stopped, which may be another one")


def abort_beside_one_that_computes(comm: Communicator, busy: int) -> bool:
    """Rank 3 stops all while rank 1, of its host, or rank 2 computes: the one on the other host that it is
    connected with. Whether the others had ended meanwhile."""
    waiting = [os.pidfd_open(pid) for pid in comm.allgather_object(os.getpid())[:3]]
    with contextlib.suppress(AbortedError):  # some may still be in it when the first is out of it
        comm.barrier()
    if comm.rank == 3:
        comm.abort("enough")
    if comm.rank != busy:
        comm.allreduce(np.ones(3))
    del waiting[busy]
    ended = all(select.select([process], [], [], 30.0)[0] for process in waiting)
    wait_until(lambda: comm.is_broken, "this rank to hear of it")
    return ended


@pytest.mark.parametrize("busy", [1, 2])
def test_an_abort_passes_a_rank_that_computes(nursery: Nursery, busy: int) -> None:
    outcomes = nursery.run(4, abort_beside_one_that_computes, busy, hosts=2)
    assert outcomes[busy].value is True, outcomes[busy]
    for rank in {0, 1, 2} - {busy}:
        outcomes[rank].check_raised(AbortedError, "rank 3 stopped all ranks", "enough")


def start_by_hand(rank: int, given: dict[str, str]) -> float:
    """As under a launcher that knows nothing of multiring, on two hosts."""
    size = int(os.environ["MULTIRING_SIZE"])
    for name in [name for name in os.environ if name.startswith("MULTIRING_")]:
        if name != "MULTIRING_TIMEOUT":
            del os.environ[name]
    os.environ |= {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "PMIX_NAMESPACE": "test",
        "PMIX_SERVER_URI2": f"the daemon of host {rank}",
        "MULTIRING_HOST": f"host{rank}",
    } | given
    return float(multiring.init().allreduce(np.array([rank + 1.0]))[0])


def test_rank_0_serves_the_store_of_a_foreign_launcher(nursery: Nursery) -> None:
    """A rank that does not come there: tests/python/rendezvous/test_store.py."""
    with held_port() as port:
        given = {"MULTIRING_STORE": f"tcp://127.0.0.1:{port}", "MULTIRING_SECRET": secrets.token_hex(32)}
        assert nursery.values(2, start_by_hand, given, init=False) == [3.0, 3.0]


def test_no_secret(nursery: Nursery, tmp_path: Path) -> None:
    given = {"MULTIRING_STORE": (tmp_path / "store").as_uri()}
    for outcome in nursery.run(2, start_by_hand, given, init=False):
        outcome.check_raised(UsageError, "MULTIRING_SECRET is not set")
