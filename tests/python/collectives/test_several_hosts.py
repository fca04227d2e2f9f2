"""Ranks that take themselves to be on several hosts: shared memory within each, TCP between them."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiring
from multiring import (
    AbortedError,
    Communicator,
    MultiringError,
    PeerLostError,
    TimeoutError,
    UsageError,
)
from tests.faults.operations import OPERATIONS
from tests.faults.test_kill import waiting
from tests.nursery import Nursery, note
from tests.python.collectives import test_collectives as checks
from tests.python.collectives.registry import COLLECTIVES
from tests.rank_pool import RankPool
from tests.support import HOSTS, pretend_hosts, wait_until

# Ranks and hosts: one rank each, 2 + 1, 2 + 1 + 1, 4 + 3.
LAYOUTS = ((2, 2), (3, 2), (4, 3), (7, 2))
SECONDS = 5.0

Pools = Callable[[int, int], RankPool]


def check_all(comm: Communicator) -> None:
    for op in ("sum", "average", "max"):
        checks.check_reductions(comm, op)
    checks.check_roots(comm)
    checks.check_alltoall_splits(comm)
    checks.check_same_bits(comm)
    checks.check_ring(comm)
    for name in COLLECTIVES:
        checks.check_rows(comm, name)
        checks.check_large(comm, name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_collective(spread: Pools, layout: tuple[int, int]) -> None:
    spread(*layout).run(check_all)


def places(comm: Communicator) -> list[tuple[int, ...]]:
    group = comm.split(0 if comm.rank < 3 else 1, key=-comm.rank)
    assert group is not None
    found = [(c.rank, c.local_rank, c.local_size, c.cross_rank, c.cross_size) for c in (comm, group)]
    group.barrier()
    return found


def test_places(spread: Pools) -> None:
    world, groups = zip(*spread(4, 3).run(places), strict=True)  # ranks 0 and 3 share a host
    assert world == ((0, 0, 2, 0, 3), (1, 0, 1, 1, 3), (2, 0, 1, 2, 3), (3, 1, 2, 0, 3))
    assert groups == ((2, 0, 1, 2, 3), (1, 0, 1, 1, 3), (0, 0, 1, 0, 3), (0, 0, 1, 0, 1))


def many_groups(comm: Communicator) -> int:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(10):
        group = comm.split(0)
        assert group is not None
        assert group.allreduce(np.array([number]))[0] == number * comm.size
        group.close()
        comm.barrier()
        del group
    return len(os.listdir("/proc/self/fd")) - before


def test_groups_leave_no_descriptors(spread: Pools) -> None:
    assert spread(3, 2).run(many_groups) == [0, 0, 0]


def abort_while_a_partner_computes(rank: int) -> None:
    """Rank 2 is the only one on the other host that rank 3 is connected with."""
    pretend_hosts()
    comm = multiring.init()
    comm.barrier()
    if comm.rank == 3:
        comm.abort("enough")
    if comm.rank == 2:
        time.sleep(SECONDS)
        note("woke")
        return
    comm.allreduce(np.ones(3))


def abort_while_others_wait_in_another_group(rank: int) -> None:
    """Rank 3 waits for rank 0; those connected with rank 0, or on its host, wait for rank 3 elsewhere."""
    pretend_hosts()
    comm = multiring.init()
    other = comm.split(0)
    assert other is not None
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
    outcomes = nursery.run(4, abort_while_others_wait_in_another_group, init=False, env={HOSTS: "2"})
    assert isinstance(outcomes[3].error, AbortedError), outcomes[3].trace or outcomes[3]
    assert "rank 0 stopped all ranks" in str(outcomes[3].error)
    assert outcomes[3].ended is not None
    assert outcomes[3].ended < outcomes[0].notes["woke"]


def test_an_abort_reaches_a_host_whose_partner_computes(nursery: Nursery) -> None:
    outcomes = nursery.run(4, abort_while_a_partner_computes, init=False, env={HOSTS: "2"})
    for outcome in (outcomes[0], outcomes[1]):
        assert isinstance(outcome.error, AbortedError), outcome.trace or outcome
        assert "rank 3 stopped all ranks" in str(outcome.error)
        assert outcome.ended is not None
        assert outcome.ended < outcomes[2].notes["woke"]


def look_elsewhere(comm: Communicator) -> None:
    mine = comm.symmetric_empty(5, np.float32)
    mine[:] = 1
    comm.barrier()
    assert comm.allreduce(mine, out=mine)[0] == comm.size
    with pytest.raises(UsageError, match=f"rank {1 - comm.rank} is on another host"):
        comm.symmetric_peer(mine, 1 - comm.rank)
    comm.barrier()


def test_memory_of_another_host_cannot_be_seen(spread: Pools) -> None:
    spread(2, 2).run(look_elsewhere)


def in_mode(rank: int, mode: str, other: str) -> str:
    pretend_hosts()
    os.environ["MULTIRING_MODE"] = mode if rank % 2 == 0 else other
    comm = multiring.init()
    check_all(comm)
    group = comm.split(color=comm.rank // 3)
    assert group is not None
    assert group.allreduce(np.ones(100_000))[0] == group.size
    return "done"


@pytest.mark.parametrize("mode", ["2x2", "2tx2d"])
def test_a_mode_that_is_asked_for(nursery: Nursery, mode: str) -> None:
    outcomes = nursery.run(4, in_mode, mode, mode, init=False, env={HOSTS: "2"})
    assert [outcome.value for outcome in outcomes] == ["done"] * 4, outcomes


@pytest.mark.parametrize(
    ("mode", "other", "told"),
    [
        ("2x3", "2x3", "mode 2x3 is for 6 ranks, but there are"),
        ("2x2", "2x2d", "rank 1 has MULTIRING_MODE='2x2d', rank 0 '2x2'"),
    ],
)
def test_modes_that_do_not_fit(nursery: Nursery, mode: str, other: str, told: str) -> None:
    outcomes = nursery.run(4, in_mode, mode, other, init=False, env={HOSTS: "2"})
    assert all(isinstance(outcome.error, UsageError) for outcome in outcomes), outcomes
    assert told in str(outcomes[0].error)


def die_before(rank: int, name: str) -> Any:
    pretend_hosts()
    comm = multiring.init()
    step = OPERATIONS[name](comm)
    comm.barrier()
    if comm.rank == 1:
        note("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        step()


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rank_that_is_killed(nursery: Nursery, name: str) -> None:
    outcomes = nursery.run(3, die_before, name, init=False, env={HOSTS: "2"})
    assert outcomes[1].status == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, PeerLostError), outcome.trace or outcome
        assert f"lost rank 1 on {os.uname().nodename} (process " in str(outcome.error)
        assert outcome.ended is not None
        assert outcome.ended - outcomes[1].notes["killed"] < SECONDS


def die_while_waiting(rank: int, name: str) -> None:
    """Rank 1, which shares a host with rank 3 and receives for it, dies while it waits for rank 0."""
    pretend_hosts()
    waiting(multiring.init(), name)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.startswith("send and recv")])
def test_a_rank_that_is_killed_while_it_waits(nursery: Nursery, name: str) -> None:
    outcomes = nursery.run(4, die_while_waiting, name, init=False, env={HOSTS: "2"})
    assert outcomes[1].status == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2], outcomes[3]):
        assert isinstance(outcome.error, PeerLostError), outcome.trace or outcome
        assert "lost rank 1 on" in str(outcome.error)
        assert outcome.ended is not None
        assert outcome.ended - outcomes[1].notes["killed"] < SECONDS


def end_in_the_middle(rank: int, number: int) -> None:
    """Rank 3 gets a signal while all are in large allreduces, and so most likely within a plan."""
    pretend_hosts()
    comm = multiring.init()
    victim = comm.allgather_object(os.getpid())[3]
    data = np.ones(2_000_000, np.float32)
    comm.barrier()
    if comm.rank == 3:
        threading.Timer(0.3, os.kill, (victim, number)).start()
    try:
        while True:
            comm.allreduce(data, timeout=2)
    except MultiringError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)  # it could not end by itself
        raise


@pytest.mark.parametrize(
    ("number", "kind", "told"),
    [
        (signal.SIGKILL, PeerLostError, "lost rank 3 on "),
        # Who it is, is known to those only who wait for it themselves.
        (signal.SIGSTOP, TimeoutError, "one of them is stopped, which may be another one"),
    ],
)
def test_a_rank_that_ends_or_stops_within_a_plan(
    nursery: Nursery, number: int, kind: type[Exception], told: str
) -> None:
    outcomes = nursery.run(4, end_in_the_middle, number, init=False, env={HOSTS: "2"})
    for outcome in outcomes[:3]:
        assert isinstance(outcome.error, kind), outcome.trace or outcome
        assert told in str(outcome.error)


def abort_elsewhere(comm: Communicator) -> str:
    """Rank 3 stops all while rank 1 of its host computes, which is whom rank 0 exchanges with."""
    start = time.monotonic()
    try:
        comm.barrier()  # which some may still be in when the first is out of it
        if comm.rank == 3:
            comm.abort("enough")
        if comm.rank == 1:
            wait_until(lambda: comm.is_broken, "rank 1 to hear of it")
            return "broken: enough"
        comm.allreduce(np.ones(3))
    except AbortedError as error:
        assert time.monotonic() - start < SECONDS
        return str(error)
    return "nothing"


def test_an_abort_reaches_ranks_that_do_not_exchange_with_its_origin(spread: Pools) -> None:
    first, second, third, _ = spread(4, 2).run_expecting_errors(abort_elsewhere)
    assert "enough" in first
    assert "enough" in second
    assert "enough" in third


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
    assert isinstance(outcomes[1].error, UsageError), outcomes[1].trace
    assert "MULTIRING_SECRET differs between ranks" in str(outcomes[1].error)
    assert isinstance(outcomes[0].error, multiring.TimeoutError), outcomes[0].trace
    assert "for rank 1: they have not called multiring.init()" in str(outcomes[0].error)


def test_no_secret(nursery: Nursery, tmp_path: Path) -> None:
    given = {"MULTIRING_STORE": (tmp_path / "store").as_uri()}
    for outcome in nursery.run(2, start_by_hand, {0: given, 1: given}, init=False):
        assert isinstance(outcome.error, UsageError), outcome.trace
        assert "MULTIRING_SECRET is not set" in str(outcome.error)
