"""A rank that is killed in the middle of collectives on a device."""

from __future__ import annotations

import pytest

from tests.gpu import stand_in
from tests.support import run_job

SCRIPT = """
import os, signal, sys
import numpy as np
import multiring
from tests.support import Stopwatch
{library}

comm = multiring.init()
x = {make}
if comm.rank == 1:
    import threading
    threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
comm.allreduce(x, out=x)
while True:
    stopwatch = Stopwatch()
    try:
        works = [comm.allreduce_async(x, "average") for _ in range(3)]
        comm.allreduce(x, "average", out=x)
        for work in works:
            work.wait()
    except multiring.PeerLostError as error:
        print("TOLD", comm.rank, error.peer, round(stopwatch.seconds(), 1), flush=True)
        sys.exit(3)
"""
MAKE = {
    "cupy": ("import cupy", "cupy.ones(1 << 22, 'float32')"),
    "fake": ("from tests.gpu import fake_arrays", "fake_arrays.full(1 << 22, 1)"),
    "torch": ("import torch", "torch.ones(1 << 22, device='cuda')"),
}


@pytest.mark.parametrize("library", MAKE)
def test_a_killed_rank(library: str) -> None:
    imported, make = MAKE[library]
    env = stand_in.environment() if library == "fake" else {"PYTHONPATH": stand_in.python_path()}
    ended = run_job(3, SCRIPT.format(library=imported, make=make), code=None, env=env)
    assert ended.returncode != 0
    told = [line.split("TOLD ")[1].split() for line in ended.stdout.splitlines() if "TOLD" in line]
    assert sorted(words[0] for words in told) == ["0", "2"], ended.stdout + ended.stderr
    for _, peer, seconds in told:
        assert peer == "1"
        assert float(seconds) < 5
