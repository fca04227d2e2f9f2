"""Ctrl-C at the right moment: while a rank waits inside an operation."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np

from multiring import Communicator
from tests.nursery import note
from tests.support import wait_until

__all__ = ["interrupt_inside", "tell"]


def tell(comm: Communicator, peer: int) -> None:
    """Says that this rank's next call is the one to be interrupted. Returns at once."""
    comm.send(np.array([os.getpid()]), peer)


def interrupt_inside(comm: Communicator, victim: int) -> None:
    """Interrupts a rank that has called `tell` as soon as it sleeps: it does so inside an operation only."""
    pid = int(comm.recv(victim)[0])
    wait_until(lambda: _state(pid) == "S", f"process {pid} to wait")
    note("interrupted")
    os.kill(pid, signal.SIGINT)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
