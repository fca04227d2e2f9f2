"""Containers give little: a /dev/shm of 64 KB, a read-only one, or none that can be used."""

from __future__ import annotations

import sys

import pytest

from multiring.benchmarks.emulation.hosts import why_not
from tests.support import Job

SCRIPT = """
import os
import numpy as np
import multiring

free = os.statvfs("/dev/shm")
comm = multiring.init()
region = comm.symmetric_empty(4_000_000)  # 16 MB
region[:] = comm.rank
assert (comm.allreduce(region, out=region) == sum(range(comm.size))).all()
assert comm.allgather(np.ones(1_000_000))[-1] == 1
print("done with", free.f_frsize * free.f_blocks, "bytes")
"""


@pytest.mark.parametrize("options", ["size=64k", "size=64k,ro"])
def test_a_small_dev_shm(options: str) -> None:
    if reason := why_not():
        pytest.skip(reason)

    def command(root: object) -> list[str]:
        script = f"{root}/script.py"
        with open(script, "w") as file:
            file.write(SCRIPT)
        mount = f"mount -t tmpfs -o {options} tmpfs /dev/shm"
        run = f'exec {sys.executable} -m multiring run -np 2 "{script}"'
        return ["unshare", "--mount", "sh", "-c", f"{mount} && {run}"]

    result = Job(command).run(code=0)
    assert result.stdout.count("done with 65536 bytes") == 2
