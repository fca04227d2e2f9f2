"""Nothing is left behind: no process, descriptor, mapping, thread or file, however a job ends."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import multiring
from multiring import Communicator, MultiringError
from tests.faults.interrupts import be_interrupted, interrupt
from tests.nursery import Nursery
from tests.support import open_descriptors, start_job, wait_until

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
    comm.allreduce(np.ones(25_001, np.float32))
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


def again_and_again(rank: int, jobs: int) -> tuple[Holdings, Holdings, int]:
    """What there is after some jobs and at the end, and by how many bytes the memory in use has grown."""
    for number in range(jobs):
        use(multiring.init())
        multiring.shutdown()
        if number == jobs // 5:  # by then all modules are loaded
            before, used = holdings(), allocated()
    after = holdings()
    return before, after, allocated() - used


def allocated() -> int:
    """Bytes that malloc has given out, in all arenas. What is resident depends on when other threads ran."""
    fields = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    kind = type(
        "mallinfo2", (ctypes.Structure,), {"_fields_": [(f, ctypes.c_size_t) for f in fields.split()]}
    )
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = kind
    told = mallinfo2()
    return int(told.uordblks + told.hblkhd)


# Between three ranks on two hosts there is a plan, which connects a network of its own.
@pytest.mark.parametrize(("size", "hosts"), [(2, 1), (2, 2), (3, 2)])
def test_many_generations(nursery: Nursery, tmp_path: Path, size: int, hosts: int) -> None:
    shared, jobs = os.listdir("/dev/shm"), 40
    options = {"init": False, "hosts": hosts, "env": {"TMPDIR": str(tmp_path)}}
    for before, after, grown in nursery.values(size, again_and_again, jobs, **options):
        assert before["mappings"] == []
        assert len(before["threads"]) == 1
        assert after == before
        assert grown < 1000 * jobs
    assert list(tmp_path.iterdir()) == []
    assert {name for name in os.listdir("/dev/shm") if name not in shared and "multiring" in name} == set()


def _break(comm: Communicator, how: str) -> None:
    if how == "kill" and comm.rank == 1:
        comm.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "mismatch":
        comm.allreduce(np.ones(3 + comm.rank))
    if how == "timeout":
        if comm.rank != 1:
            comm.allreduce(np.ones(3), timeout=0.1)
        wait_until(lambda: comm.is_broken, "the deadline")
    if how == "abort" and comm.rank == 1:
        comm.abort("for a test")
    if how == "interrupt" and comm.rank == 1:
        be_interrupted(comm, 0, comm.barrier)
    if how == "interrupt" and comm.rank == 0:
        interrupt(comm, 1)
    comm.barrier()
    comm.allgather(np.ones(300_000))


def after_errors(rank: int, kinds: list[str]) -> tuple[Holdings, Holdings]:
    """The same processes start anew after each kind of error."""
    use(multiring.init())
    multiring.shutdown()
    before = holdings()
    for how in kinds:
        comm = multiring.init()
        use(comm)
        group = comm.split(0)
        region = group.symmetric_empty(100_000)
        pending = group.allreduce_async(region, out=region)  # is never waited for
        with contextlib.suppress(MultiringError, KeyboardInterrupt):
            _break(comm, how)
        assert comm.is_broken
        multiring.shutdown()
        del comm, group, region, pending
    return before, holdings()


@pytest.mark.parametrize("kinds", [["kill"], ["mismatch", "timeout", "interrupt", "abort"]], ids=str)
def test_after_errors(nursery: Nursery, kinds: list[str], tmp_path: Path) -> None:
    outcomes = nursery.run(3, after_errors, kinds, init=False, env={"TMPDIR": str(tmp_path)})
    for outcome in outcomes[::2] if kinds == ["kill"] else outcomes:
        assert outcome.error is None, outcome.trace
        before, after = outcome.value
        assert after == before
    assert list(tmp_path.iterdir()) == []


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
import os
import numpy as np
import multiring

comm = multiring.init()
region = comm.symmetric_empty(1_000_000)
path = f"{os.environ['TEST_DIRECTORY']}/{comm.rank}"
with open(path + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(path + ".new", path)
while True:
    comm.allreduce_async(region, out=region).wait()
    comm.allreduce(region, out=region)
"""


@pytest.mark.parametrize("victims", [[1], [0, 1, 2]])
def test_killed_jobs(victims: list[int]) -> None:
    with start_job(3, ENDLESS) as job:
        for pid in [int(job.wait_for_file(str(rank))) for rank in victims]:
            os.kill(pid, signal.SIGKILL)
        assert job.finish().returncode != 0
        job.assert_nothing_left()
