"""Joining and leaving the job, again and again; one rank without a launcher; what an import costs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

import multiring
from multiring import Communicator, UsageError
from multiring.commands.frameworks import FRAMEWORKS
from multiring.error_text import find_error, text_of
from tests.on_ranks import on_ranks
from tests.support import run_job, run_python

FOREIGN = {"mpi4py", "matplotlib", "sklearn"}.union(*(each.imports for each in FRAMEWORKS.values()))


@on_ranks(3)
def test_world(comm: Communicator) -> None:
    assert multiring.is_initialized()
    assert multiring.world() is comm
    assert multiring.init() is comm
    assert (multiring.rank(), multiring.size()) == (comm.rank, comm.size)
    assert (multiring.local_rank(), multiring.local_size()) == (comm.rank, comm.size)
    assert (multiring.cross_rank(), multiring.cross_size()) == (0, 1)
    assert comm.name == "world"
    assert comm.host == os.uname().nodename
    assert repr(comm) == f"<multiring.Communicator 'world' rank {comm.rank} of {comm.size}>"
    assert comm.allgather(np.array([comm.rank])).tolist() == list(range(comm.size))


@on_ranks(3)
def test_init_after_shutdown(comm: Communicator) -> None:
    for number in range(2):
        comm = multiring.init()
        group = comm.split(0)
        assert group is not None
        assert comm.allreduce_async(np.array([number])).wait()[0] == number * comm.size
        multiring.shutdown()
        multiring.shutdown()
        assert not multiring.is_initialized()
        for old in (comm, group):
            with pytest.raises(multiring.AbortedError, match="is closed"):
                old.barrier()
        with pytest.raises(UsageError, match="call multiring.init"):
            multiring.rank()
    multiring.init()


ALONE = """
import numpy as np
import multiring

comm = multiring.init()
assert (comm.rank, comm.local_rank, comm.cross_rank) == (0, 0, 0)
assert (comm.size, comm.local_size, comm.cross_size) == (1, 1, 1)
assert comm.allreduce(np.arange(5.0)).tolist() == [0, 1, 2, 3, 4]
assert comm.split(0).broadcast_object("x") == "x"
multiring.shutdown()
assert multiring.init() is not comm
print("done")
"""


def test_alone_without_a_launcher() -> None:
    result = run_python(ALONE)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


DAEMON = """
import ctypes, signal, threading, time
import multiring
from multiring import initialization

thread = threading.Thread(target=multiring.init, daemon=True)
thread.start()
while not initialization._joining:
    time.sleep(0.01)
print("end")
END
"""
# The thread is held up until Python is gone: `sleep(1)` is its handler of signal 1. The process is there for
# two seconds more: each function of `on_exit` gets the exit code.
OUTLIVES = """
libc = ctypes.CDLL(None)
for _ in range(2):
    libc.on_exit(libc.sleep, None)
libc.signal(signal.SIGHUP, libc.sleep)
libc.pthread_kill(ctypes.c_ulong(thread.ident), signal.SIGHUP)
raise SystemExit(1)
"""


@pytest.mark.parametrize("end", ["", "1 / 0", OUTLIVES], ids=["end", "error", "outlives"])
def test_a_daemon_thread_in_init_does_not_keep_the_process(tmp_path: Path, end: str) -> None:
    """It waits for a rank that never comes."""
    place = {"RANK": 0, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 2, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    env = {f"MULTIRING_{name}": str(value) for name, value in place.items()}
    env |= {"MULTIRING_STORE": tmp_path.as_uri(), "MULTIRING_TIMEOUT": "3600"}
    result = run_python(DAEMON.replace("END", end), env)
    assert (result.returncode, result.stdout) == (int(bool(end)), "end\n"), result.stderr


IMPORT = """
import sys
import multiring
multiring.init()
print(*sys.modules)
"""


def test_a_job_brings_no_framework() -> None:
    modules = set(run_job(2, IMPORT, code=0).stdout.split())
    assert "multiring._core" in modules
    loaded = {name.partition(".")[0] for name in modules}
    assert not loaded & {*FOREIGN, "pytest", "hypothesis", "rich", "asyncio"}


def test_the_public_names() -> None:
    for name in multiring.__all__:
        assert hasattr(multiring, name)
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", multiring.__version__)
    for name in ("Usage", "Mismatch", "Timeout", "PeerLost", "Aborted", "Internal"):
        assert issubclass(getattr(multiring, f"{name}Error"), multiring.MultiringError)
    assert issubclass(multiring.TimeoutError, TimeoutError)
    assert issubclass(multiring.PeerLostError, ConnectionError)
    assert issubclass(multiring.UsageError, ValueError)


def test_errors_keep_their_fields_where_a_framework_tells_a_text() -> None:
    error = multiring.PeerLostError("rank 0 lost rank 1", rank=0, peer=1)
    found = find_error(f"Graph: {text_of(error)} [Op:Sum]")
    assert isinstance(found, multiring.PeerLostError)
    assert (str(found), vars(found)) == (str(error), vars(error))
    for text in (
        text_of(error).replace("rank 0", "rank 2"),
        "multiring error 999: PeerLostError: rank 2 [[x",
    ):
        other = find_error(text)  # of another process, or of long ago
        assert isinstance(other, multiring.PeerLostError)
        assert (other.rank, str(other)[:6]) == (None, "rank 2")
    assert find_error("multiring: no error") is None
    try:
        raise error
    except multiring.PeerLostError as caught:
        assert type(caught)(f"{caught}, at node 7").peer == 1
