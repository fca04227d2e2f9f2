"""64 ranks on 8 emulated hosts: all of it works with many ranks, however slowly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from multiring.benchmarks.emulation.hosts import EmulatedHosts
from tests.faults.remote import launch_on, script, shell_of

HOSTS, RANKS = 8, 8
# A text of its own: all that pytest needs, read by every rank, takes longer than what is tested.
MANY = """
import json, os
from pathlib import Path
import numpy as np
import multiring
from tests.support import open_descriptors

def held():
    maps = Path("/proc/self/maps").read_text()
    return [open_descriptors(), len(os.listdir("/proc/self/task")), maps.count("memfd:multiring")]

before = held()
comm = multiring.init()
ranks = np.arange(comm.size)
# Nothing, rounds, and plans in one and in several segments.
for count in (0, 1, 1001, 4097, 25_601, 1_000_003):
    values = np.arange(count, dtype=np.float32) % 7
    assert (comm.allreduce(values + comm.rank) == values * comm.size + ranks.sum()).all()
assert comm.allreduce_async(np.array([comm.rank]), "max").wait()[0] == comm.size - 1
# Of 63 peers seven have the same place on other hosts: two connections each for rounds, and two for plans.
assert len(open_descriptors()) - len(before[0]) < 28 + 63, open_descriptors()
group = comm.split(comm.rank % 5, key=-comm.rank)
assert (group.allreduce(np.full(25_601, comm.rank)) == ranks[comm.rank % 5 :: 5].sum()).all()
comm.barrier()
place = [comm.rank, comm.size, comm.local_rank, comm.local_size, comm.cross_rank, comm.cross_size]
multiring.shutdown()
del comm, group
print(json.dumps([place, before == held()]))
"""


def test_64_ranks_on_8_hosts(emulate: Callable[..., EmulatedHosts], tmp_path: Path) -> None:
    hosts = emulate(HOSTS)
    places = ",".join(f"{hosts.address(host)}:{RANKS}" for host in range(HOSTS))
    threads = ("--env", "OMP_NUM_THREADS=1", "--env", "OPENBLAS_NUM_THREADS=1")
    done = launch_on(places, hosts, shell_of(hosts), *threads, script(MANY, tmp_path)).run(
        timeout=200, code=0
    )
    lines = dict(line.removeprefix("[").split("] ", 1) for line in done.stdout.splitlines())
    for rank in range(HOSTS * RANKS):
        place = [rank, HOSTS * RANKS, rank % RANKS, RANKS, rank // RANKS, HOSTS]
        assert json.loads(lines[str(rank)]) == [place, True]
