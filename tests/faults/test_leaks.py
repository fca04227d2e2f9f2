"""Nothing is left behind: no process, descriptor, mapping, thread or file, however a job ends."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import multiring
from multiring import Communicator, MultiringError
from tests.faults.interrupts import interrupt_inside, tell
from tests.nursery import Nursery
from tests.support import open_descriptors, start_job

Holdings = dict[str, list[str]]


def holdings() -> Holdings:
    """What this process has of the system."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": sorted(f"{number}: {what}" for number, what in open_descriptors().items()),
        "mappings": [line for line in maps if "memfd:multiring" in line],
        "threads": sorted(os.listdir("/proc/self/task")),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(),
    }


def use(comm: Communicator) -> None:
    """Everything that takes something of the system."""
    comm.allreduce(np.ones(3))
    comm.allreduce_async(np.ones(100_000)).wait()
    region = comm.symmetric_empty(50_000)
    comm.allreduce(region, out=region)
    group = comm.split(0)
    group.allreduce_async(np.ones(3)).wait()
    pair = comm.process_set([0, 1])
    if pair is not None:
        pair.symmetric_empty(10)
    if comm.rank == 0:
        comm.send(np.ones(100_000), 1)
    elif comm.rank == 1:
        comm.recv(0)


def again_and_again(rank: int) -> tuple[Holdings, Holdings]:
    use(multiring.init())  # the first time loads modules
    multiring.shutdown()
    before = holdings()
    for _ in range(100):
        use(multiring.init())
        multiring.shutdown()
    return before, holdings()


def test_a_hundred_generations(nursery: Nursery, tmp_path: Path) -> None:
    shared = os.listdir("/dev/shm")
    outcomes = nursery.run(2, again_and_again, init=False, env={"TMPDIR": str(tmp_path)}, timeout=60.0)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        before, after = outcome.value
        assert before["mappings"] == []
        assert before["threads"] == [before["threads"][0]]
        assert after == before
    assert list(tmp_path.iterdir()) == []
    assert {name for name in os.listdir("/dev/shm") if name not in shared and "multiring" in name} == set()


def jobs_of_two_hosts(rank: int, jobs: int, count: int) -> tuple[Holdings, Holdings, int]:
    """What there is after some of them and at the end, and by how many KiB the memory in use has grown."""
    for number in range(jobs):
        comm = multiring.init()
        assert comm.allreduce(np.ones(count, np.float32))[0] == comm.size
        multiring.shutdown()
        del comm
        if number == jobs // 10:
            before, resident = holdings(), resident_kib()
    return before, holdings(), resident_kib() - resident


def resident_kib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") // 1024


# Small ones; and such with a plan, which connects a network of its own (between two ranks there is none).
@pytest.mark.parametrize(("size", "jobs", "count"), [(2, 300, 3), (3, 60, 25_001)])
def test_many_connects_between_hosts(nursery: Nursery, size: int, jobs: int, count: int) -> None:
    outcomes = nursery.run(size, jobs_of_two_hosts, jobs, count, init=False, hosts=2, timeout=120.0)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        before, after, grown = outcome.value
        assert after == before
        assert grown < 2048


def without_shutdown(rank: int) -> tuple[Holdings, Holdings]:
    """Who lets go of the world's parts alone keeps nothing of them."""
    comm = multiring.init()
    comm.barrier()
    before = holdings()
    for _ in range(50):
        group = comm.split(0)
        region = group.symmetric_empty(1000)
        group.allreduce_async(region, out=region).wait()
    del group, region
    comm.barrier()
    return before, holdings()


@pytest.mark.parametrize("hosts", [1, 2])
def test_groups_and_memory_that_are_let_go(nursery: Nursery, hosts: int) -> None:
    for before, after in nursery.values(3, without_shutdown, init=False, hosts=hosts):
        assert after == before


def _break(comm: Communicator, how: str) -> None:
    if how == "kill" and comm.rank == 1:
        comm.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "mismatch":
        comm.allreduce(np.ones(3 + comm.rank))
    if how == "timeout" and comm.rank != 1:
        comm.allreduce(np.ones(3), timeout=0.1)
    if how == "interrupt" and comm.rank == 1:
        tell(comm, 0)
    if how == "abort" and comm.rank == 1:
        comm.abort("for a test")
    if how == "timeout":
        while not comm.is_broken:
            os.sched_yield()
    if how == "interrupt" and comm.rank == 0:
        interrupt_inside(comm, 1)
        while not comm.is_broken:
            os.sched_yield()
    comm.barrier()
    comm.allgather(np.ones(300_000))


def after_an_error(rank: int, how: str) -> tuple[Holdings, Holdings]:
    use(multiring.init())
    multiring.shutdown()
    before = holdings()
    comm = multiring.init()
    use(comm)
    group = comm.split(0)
    region = group.symmetric_empty(100_000)
    # Work that is never waited for.
    pending = group.allreduce_async(region, out=region)
    with contextlib.suppress(MultiringError, KeyboardInterrupt):
        _break(comm, how)
    assert comm.is_broken
    multiring.shutdown()
    del comm, group, region, pending
    return before, holdings()


@pytest.mark.parametrize("how", ["kill", "mismatch", "timeout", "interrupt", "abort"])
def test_after_an_error(nursery: Nursery, how: str, tmp_path: Path) -> None:
    outcomes = nursery.run(3, after_an_error, how, init=False, env={"TMPDIR": str(tmp_path)})
    for rank, outcome in enumerate(outcomes):
        if how == "kill" and rank == 1:
            assert outcome.status == -signal.SIGKILL
            continue
        assert outcome.error is None, outcome.trace
        before, after = outcome.value
        assert after == before
    assert list(tmp_path.iterdir()) == []


def join_again(comm: Communicator) -> int:
    """After every kind of error that leaves all alive, the same processes start anew."""
    for how in ("mismatch", "timeout", "interrupt", "abort"):
        with contextlib.suppress(MultiringError, KeyboardInterrupt):
            _break(comm, how)
        assert comm.is_broken
        multiring.shutdown()
        comm = multiring.init()
        assert not comm.is_broken
        use(comm)
    return int(comm.allreduce(np.array(comm.rank)))


def test_a_new_start_after_an_error(nursery: Nursery) -> None:
    for value in nursery.values(3, join_again):
        assert value == 3


def held_by_the_script(rank: int) -> Holdings:
    """`shutdown` closes what the script still refers to; the memory goes with the last reference."""
    comm = multiring.init()
    use(comm)
    region = comm.symmetric_empty(10)
    multiring.shutdown()
    assert holdings()["threads"] == [str(os.getpid())]
    region[:] = 1
    del comm
    assert len(holdings()["mappings"]) == 1
    del region
    return holdings()


def test_references_after_shutdown(nursery: Nursery) -> None:
    for value in nursery.values(2, held_by_the_script, init=False):
        assert value["mappings"] == []
        assert not [what for what in value["descriptors"] if "pidfd" in what]


ENDLESS = """
import os, sys
import numpy as np
import multiring

comm = multiring.init()
region = comm.symmetric_empty(1_000_000)
comm.barrier()
if comm.rank == 0:
    path = os.path.join(os.environ["TEST_DIRECTORY"], "pids")
    pids = comm.allgather(np.array([os.getpid()]))
    with open(path + ".new", "w") as file:
        file.write(" ".join(map(str, pids.tolist())))
    os.rename(path + ".new", path)
else:
    comm.allgather(np.array([os.getpid()]))
while True:
    comm.allreduce_async(region, out=region).wait()
    comm.allreduce(region, out=region)
"""


@pytest.mark.parametrize("victims", [[1], [0, 1, 2]])
def test_killed_jobs(victims: list[int]) -> None:
    with start_job(3, ENDLESS) as job:
        pids = [int(pid) for pid in job.wait_for_file("pids").split()]
        for victim in victims:
            os.kill(pids[victim], signal.SIGKILL)
        result = job.finish()
        assert result.returncode != 0
        job.assert_nothing_left()
