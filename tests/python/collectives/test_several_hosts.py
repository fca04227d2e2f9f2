"""Ranks that take themselves to be on several hosts: shared memory within each, TCP between them."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import multiring
from multiring import (
    AbortedError,
    Communicator,
    MultiringError,
    TimeoutError,
    UsageError,
)
from tests.nursery import Nursery, note
from tests.on_ranks import on_ranks
from tests.python.collectives import test_collectives as checks
from tests.python.collectives.registry import COLLECTIVES
from tests.rank_pool import RankPool
from tests.support import wait_until

# Ranks and hosts: one rank each, 2 + 1, 2 + 1 + 1, 4 + 3.
LAYOUTS = ((2, 2), (3, 2), (4, 3), (7, 2))
SECONDS = 5.0

Pools = Callable[[int, int], RankPool]


def check_all(comm: Communicator) -> None:
    for op in ("sum", "average", "max"):
        checks.test_reductions(comm, op)
    checks.test_roots(comm)
    checks.test_alltoall_splits(comm)
    checks.test_same_bits(comm)
    checks.test_send_and_receive(comm)
    for name in COLLECTIVES:
        checks.test_rows(comm, name)
        checks.test_many_segments(comm, name)


@on_ranks(*LAYOUTS)
def test_every_collective(comm: Communicator) -> None:
    check_all(comm)


def places(comm: Communicator) -> list[tuple[int, ...]]:
    group = comm.split(0 if comm.rank < 3 else 1, key=-comm.rank)
    found = [(c.rank, c.local_rank, c.local_size, c.cross_rank, c.cross_size) for c in (comm, group)]
    group.barrier()
    return found


def test_places(spread: Pools) -> None:
    world, groups = zip(*spread(4, 3).run(places), strict=True)  # ranks 0 and 3 share a host
    assert world == ((0, 0, 2, 0, 3), (1, 0, 1, 1, 3), (2, 0, 1, 2, 3), (3, 1, 2, 0, 3))
    assert groups == ((2, 0, 1, 2, 3), (1, 0, 1, 1, 3), (0, 0, 1, 0, 3), (0, 0, 1, 0, 1))


def abort_while_others_wait_in_another_group(comm: Communicator) -> None:
    """Rank 3 waits for rank 0; those connected with rank 0, or on its host, wait for rank 3 elsewhere."""
    other = comm.split(0)
    comm.barrier()
    if comm.rank == 0:
        comm.abort("enough")
        time.sleep(SECONDS)
        note("woke")
    elif comm.rank == 3:
        comm.barrier()
    else:
        other.barrier()


def test_an_abort_passes_ranks_that_wait_in_another_group(nursery: Nursery) -> None:
    outcomes = nursery.run(4, abort_while_others_wait_in_another_group, hosts=2)
    outcomes[3].check_raised(AbortedError, "rank 0 stopped all ranks")
    assert outcomes[3].ended < outcomes[0].notes["woke"]


@on_ranks((2, 2))
def test_memory_of_another_host_cannot_be_seen(comm: Communicator) -> None:
    mine = comm.symmetric_empty(5, np.float32)
    mine[:] = 1
    comm.barrier()
    assert comm.allreduce(mine, out=mine)[0] == comm.size
    with pytest.raises(UsageError, match=f"rank {1 - comm.rank} is on another host"):
        comm.symmetric_peer(mine, 1 - comm.rank)
    comm.barrier()


def in_mode(rank: int, mode: str, other: str) -> str:
    os.environ["MULTIRING_MODE"] = mode if rank % 2 == 0 else other
    comm = multiring.init()
    check_all(comm)
    group = comm.split(color=comm.rank // 3)
    assert group.allreduce(np.ones(100_000))[0] == group.size
    return "done"


@pytest.mark.parametrize("mode", ["2x2", "2tx2d"])
def test_a_mode_that_is_asked_for(nursery: Nursery, mode: str) -> None:
    outcomes = nursery.run(4, in_mode, mode, mode, init=False, hosts=2, timeout=200.0)
    assert [outcome.value for outcome in outcomes] == ["done"] * 4, outcomes


@pytest.mark.parametrize(
    ("mode", "other", "told"),
    [
        ("2x3", "2x3", "mode 2x3 is for 6 ranks, but there are"),
        ("2x2", "2x2d", "rank 1 has MULTIRING_MODE='2x2d', rank 0 '2x2'"),
    ],
)
def test_modes_that_do_not_fit(nursery: Nursery, mode: str, other: str, told: str) -> None:
    outcomes = nursery.run(4, in_mode, mode, other, init=False, hosts=2)
    assert all(isinstance(outcome.error, UsageError) for outcome in outcomes), outcomes
    assert told in str(outcomes[0].error)


def stop_in_the_middle(comm: Communicator) -> None:
    """Rank 3 is stopped while all are in large allreduces, and so most likely within a plan."""
    victim = comm.allgather_object(os.getpid())[3]
    data = np.ones(2_000_000, np.float32)
    comm.barrier()
    if comm.rank == 3:
        threading.Timer(0.3, os.kill, (victim, signal.SIGSTOP)).start()
    try:
        while True:
            comm.allreduce(data, timeout=2)
    except MultiringError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)  # it could not end by itself
        raise


def test_a_rank_that_stops_within_a_plan(nursery: Nursery) -> None:
    """Who it is, is known to those only who wait for it themselves. One that ends: test_emulated_hosts.py."""
    for outcome in nursery.run(4, stop_in_the_middle, hosts=2)[:3]:
        outcome.check_raised(TimeoutError, "one of them is stopped, which may be another one")


def abort_beside_one_that_computes(comm: Communicator, busy: int) -> None:
    """Rank 3 stops all while rank 1, of its host, or rank 2 computes: the one on the other host that it is
    connected with."""
    pids = comm.allgather_object(os.getpid())
    with contextlib.suppress(AbortedError):  # some may still be in it when the first is out of it
        comm.barrier()
    if comm.rank == 3:
        comm.abort("enough")
    if comm.rank == busy:
        for waiting in {0, 1, 2} - {busy}:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                select.select([os.pidfd_open(pids[waiting])], [], [], SECONDS)
        note("woke")
        wait_until(lambda: comm.is_broken, "this rank to hear of it")
    else:
        comm.allreduce(np.ones(3))


@pytest.mark.parametrize("busy", [1, 2])
def test_an_abort_passes_a_rank_that_computes(nursery: Nursery, busy: int) -> None:
    outcomes = nursery.run(4, abort_beside_one_that_computes, busy, hosts=2)
    for rank in {0, 1, 2} - {busy}:
        woke = outcomes[busy].notes["woke"]
        outcomes[rank].check_raised(AbortedError, "rank 3 stopped all ranks", "enough", within=woke)


def start_by_hand(rank: int, changes: dict[int, dict[str, str]]) -> float:
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
    } | changes[rank]
    return float(multiring.init().allreduce(np.array([rank + 1.0]))[0])


def variables() -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return {"MULTIRING_STORE": f"tcp://127.0.0.1:{port}", "MULTIRING_SECRET": secrets.token_hex(32)}


def test_rank_0_serves_the_store_of_a_foreign_launcher(nursery: Nursery) -> None:
    given = variables()
    outcomes = nursery.run(2, start_by_hand, {0: given, 1: given}, init=False)
    assert [outcome.value for outcome in outcomes] == [3.0, 3.0], outcomes


def test_another_secret(nursery: Nursery) -> None:
    given = variables()
    outcomes = nursery.run(
        2,
        start_by_hand,
        {0: given, 1: given | {"MULTIRING_SECRET": secrets.token_hex(32)}},
        init=False,
        env={"MULTIRING_TIMEOUT": "3"},
    )
    outcomes[1].check_raised(UsageError, "MULTIRING_SECRET differs between ranks")
    outcomes[0].check_raised(multiring.TimeoutError, "for rank 1: they have not called multiring.init()")


def test_no_secret(nursery: Nursery, tmp_path: Path) -> None:
    given = {"MULTIRING_STORE": (tmp_path / "store").as_uri()}
    for outcome in nursery.run(2, start_by_hand, {0: given, 1: given}, init=False):
        outcome.check_raised(UsageError, "MULTIRING_SECRET is not set")
