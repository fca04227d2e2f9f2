"""Ranks on hosts that have networks of their own, and a host that vanishes."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time

import pytest

from multiring.models.bench.emulated_hosts import EmulatedHosts
from tests.support import REPOSITORY

# After five seconds without an answer a peer is taken for lost; the kernels' probes are a second apart.
SECONDS = 12.0

CHECK = """
import multiring
from tests.python.test_several_hosts import check_all
comm = multiring.init()
assert comm.cross_size == 2, comm.cross_size
check_all(comm)
"""

LOOP = """
import json, time
import numpy as np
import multiring
comm = multiring.init()
comm.barrier()
print("running", flush=True)
try:
    while True:
        comm.allreduce(np.ones(100_000, np.float32))
except multiring.MultiringError as error:
    print(json.dumps([type(error).__name__, str(error), time.monotonic()]), flush=True)
"""


def start(hosts: EmulatedHosts, layout: list[int], script: str) -> list[subprocess.Popen[str]]:
    """Ranks as mpirun would start them, host by host."""
    shared = {
        "OMPI_COMM_WORLD_SIZE": str(sum(layout)),
        "PMIX_NAMESPACE": "test",
        "MULTIRING_STORE": f"tcp://{hosts.address(0)}:29400",
        "MULTIRING_SECRET": secrets.token_hex(32),
        "MULTIRING_TIMEOUT": "60",
        "OMP_NUM_THREADS": "1",
    }
    places = [(host, local) for host, count in enumerate(layout) for local in range(count)]
    return [
        subprocess.Popen(
            hosts.command(host, [sys.executable, "-c", script]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={
                **os.environ,
                **shared,
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
                "OMPI_COMM_WORLD_LOCAL_SIZE": str(layout[host]),
            },
        )
        for rank, (host, local) in enumerate(places)
    ]


@pytest.mark.parametrize("layout", [[1, 1], [1, 3], [2, 1]])
def test_every_collective(hosts: EmulatedHosts, layout: list[int]) -> None:
    ranks = start(hosts, layout, CHECK)
    for rank, process in enumerate(ranks):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, f"rank {rank}: {errors}"


def test_a_host_that_vanishes_is_lost_on_every_rank(hosts: EmulatedHosts) -> None:
    ranks = start(hosts, [2, 2], LOOP)
    for process in ranks:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n", process.communicate()
    time.sleep(0.2)  # somewhere in the middle
    cut = time.monotonic()
    hosts.cut(1)
    for rank, process in enumerate(ranks):
        output, errors = process.communicate(timeout=60)
        kind, message, at = json.loads(output or "[]") or ("", errors, 0.0)
        assert kind == "PeerLostError", message
        others = (2, 3) if rank < 2 else (0, 1)
        assert any(f"lost rank {other} on {hosts.name(other // 2)}" in message for other in others), message
        assert at - cut < SECONDS
