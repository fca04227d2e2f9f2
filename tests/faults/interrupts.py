"""Ctrl-C at the right moment: while a rank waits inside an operation."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np

from multiring import Communicator
from tests.nursery import note
from tests.support import state_of, wait_until

__all__ = ["be_interrupted", "interrupt", "interrupt_asleep", "tell"]

_TURNS = 20


def tell(comm: Communicator, peer: int) -> None:
    """Says that this rank's next call is the one to be interrupted. Returns at once."""
    comm.send(np.array([os.getpid()]), peer)


def interrupt_asleep(comm: Communicator, victim: int, number: int = signal.SIGINT) -> None:
    """Interrupts a rank that has called `tell` as soon as it sleeps."""
    pid = int(comm.recv(victim)[0])
    wait_until(lambda: state_of(pid) == "S", f"process {pid} to wait")
    note("interrupted")
    os.kill(pid, number)


def be_interrupted(comm: Communicator, peer: int, call: Callable[[], Any]) -> None:
    """Makes a call in which rank `peer`, by `interrupt`, interrupts this one. It may have slept elsewhere:
    then nothing is broken, and it is interrupted again."""
    for _ in range(_TURNS):
        try:
            tell(comm, peer)
            call()
        except KeyboardInterrupt:
            if comm.is_broken:
                raise
    raise AssertionError("this rank was never interrupted inside the call")


def interrupt(comm: Communicator, victim: int) -> None:
    """Interrupts a rank until it was inside its operation; then raises what all are told of that."""
    while True:
        interrupt_asleep(comm, victim)
