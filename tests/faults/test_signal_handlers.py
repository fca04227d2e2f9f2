"""A signal handler runs on the stack of the operation that it interrupts, and must not wait for it."""

from __future__ import annotations

from tests.support import run_job

SHUTDOWN_IN_HANDLER = """
import os, signal, sys, threading
import numpy as np
import multiring

comm = multiring.init()
if comm.rank == 1:
    # Ends with the job; rank 0 waits for it until its own handler leaves the job.
    signal.pause()
signal.signal(signal.SIGALRM, lambda number, frame: multiring.shutdown())
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    comm.allreduce(np.ones(3))
except multiring.AbortedError as error:
    assert "closed" in str(error), error
    assert not multiring.is_initialized()
    print("left", flush=True)
    os._exit(7)
"""

COLLECTIVE_IN_HANDLER = """
import os, signal
import numpy as np
import multiring

comm = multiring.init()
if comm.rank == 1:
    signal.pause()

def handler(number, frame):
    try:
        comm.barrier()
    except multiring.UsageError as error:
        assert "signal handler" in str(error), error
        print("refused", flush=True)
        os._exit(7)

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.2)
comm.allreduce(np.ones(3))
"""


def test_shutdown_in_a_handler_ends_the_operation_it_interrupts() -> None:
    result = run_job(2, SHUTDOWN_IN_HANDLER, timeout=30)
    assert "left" in result.stdout
    assert result.returncode == 7


def test_a_collective_in_a_handler_is_refused() -> None:
    result = run_job(2, COLLECTIVE_IN_HANDLER, timeout=30)
    assert "refused" in result.stdout
    assert result.returncode == 7
