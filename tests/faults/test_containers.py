"""Containers give little: a /dev/shm of 64 KB, a read-only one, or none that can be used; or no /proc."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from multiring.benchmarks.emulation.hosts import why_not
from tests.support import Job

SCRIPT = """
import os, sys
import numpy as np
import multiring

free = os.statvfs("/dev/shm")
comm = multiring.init()
region = comm.symmetric_empty(4_000_000)  # 16 MB
region[:] = comm.rank
assert (comm.allreduce(region, out=region) == sum(range(comm.size))).all()
assert comm.allgather(np.ones(1_000_000))[-1] == 1
print("done with", free.f_frsize * free.f_blocks, "bytes,", len(os.listdir("/proc")), "in /proc")
sys.exit(3 * comm.rank)
"""


@pytest.mark.parametrize(
    ("mount", "told"),
    [
        ("-o size=64k tmpfs /dev/shm", "done with 65536 bytes"),
        ("-o size=64k,ro tmpfs /dev/shm", "done with 65536 bytes"),
        ("none /proc", "0 in /proc"),
    ],
)
def test_what_is_not_there_is_not_needed(tmp_path: Path, mount: str, told: str) -> None:
    """A rank that fails is blamed all the same."""
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "script.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "multiring", "run", "-np", "2", str(tmp_path / "script.py")]
    command = f'mount -t tmpfs {mount} && exec "$@"'
    result = Job(["unshare", "--mount", "sh", "-c", command, "sh", *run]).run(code=3)
    assert result.stdout.count(told) == 2
    assert "multiring: rank 1 " in result.stderr
    assert "Traceback" not in result.stderr
