"""torchrun on two emulated hosts, with the script that runs everywhere and no variable set."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from multiring.benchmarks.emulation.hosts import EmulatedHosts
from tests.support import REPOSITORY, Job

pytest.importorskip("torch.distributed.run", reason="torchrun comes with torch, an optional dependency")

# Joins the job twice, so that the second time meets where the first one has just left.
SUM = """
import hashlib, json, os, sys
import numpy as np, multiring
for turn in range(2):
    multiring.shutdown()
    comm = multiring.init()
    assert comm.allreduce(np.full(10, comm.rank + 1.0)).tolist() == [10.0] * 10
place = [comm.rank, comm.size, comm.local_rank, comm.local_size, comm.cross_rank, comm.cross_size]
found = place, os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, ("\\nfound " + json.dumps(found) + "\\n").encode())  # at once: ranks share a pipe
comm.barrier()
"""
# What comes before it where the last rank fails once, when all have met.
FAILS_ONCE = """
import os, sys, time
import multiring
failed = os.environ["TEST_DIRECTORY"] + "/failed"
if not os.path.exists(failed):
    comm = multiring.init()
    comm.barrier()
    if comm.rank == 3:
        open(failed, "w").close()
        sys.exit(3)
    {others}
"""


def words_for(hosts: EmulatedHosts, backend: str, host: int) -> list[str]:
    """Where the host of that number finds the other, whose name it does not know."""
    first = hosts.address(0)
    if backend == "static":
        return ["--node-rank", str(host), "--master-addr", first, "--master-port", "29500"]
    return [
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29500", "--rdzv-id", "job 1"),
        *("--local-addr", hosts.address(host), "--rdzv-conf", f"is_host={1 - host}"),
    ]


@pytest.mark.parametrize(
    ("backend", "others", "restarts"),
    [
        # Their own torchrun sees them fail.
        ("static", "comm.barrier()", ["1", "1", "1", "1"]),
        # It starts them anew because the other one does, and counts nothing.
        ("c10d", "time.sleep(3600)", ["0", "0", "1", "1"]),
    ],
)
def test_ranks_of_hosts_find_each_other_after_a_restart_too(
    hosts: EmulatedHosts, tmp_path: Path, backend: str, others: str, restarts: list[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS_ONCE.format(others=others) + SUM)
    environ = {"PYTHONPATH": str(REPOSITORY), "TEST_DIRECTORY": str(tmp_path)}
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    with ExitStack() as stack:
        jobs = []
        for host in range(2):
            words = [*start, "--max-restarts", "1", *words_for(hosts, backend, host), str(script)]
            jobs.append(stack.enter_context(Job(hosts.command(host, words), environ, cwd=tmp_path)))
        done = [job.finish(90) for job in jobs]
        for job in jobs:
            job.assert_nothing_left()
    assert [each.returncode for each in done] == [0, 0], done
    assert (tmp_path / "failed").exists()
    lines = [line for each in done for line in each.stdout.splitlines()]
    found = [line.removeprefix("found ") for line in lines if line.startswith("found ")]
    places = [[rank, 4, rank % 2, 2, rank // 2, 2] for rank in range(4)]
    assert sorted(map(json.loads, found)) == [list(each) for each in zip(places, restarts, strict=True)]
