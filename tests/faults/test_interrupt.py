"""Ctrl-C while a rank waits: KeyboardInterrupt there, an error on its peers. How soon: test_in_time.py."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

import multiring
from multiring import AbortedError, Communicator, MultiringError
from tests.faults.interrupts import be_interrupted, interrupt, interrupt_asleep, tell
from tests.faults.operations import OPERATIONS
from tests.nursery import Nursery


def interrupt_soon(delay: float) -> None:
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()


def waiting(comm: Communicator, name: str) -> None:
    """Ranks 1 and 2 wait for rank 0, which does not come."""
    step = OPERATIONS[name](comm)
    comm.barrier()
    if comm.rank == 0:
        interrupt(comm, 1)
    if comm.rank == 1:
        be_interrupted(comm, 0, step)
    step()


@pytest.mark.parametrize("name", ["allreduce", "alltoall", "broadcast_object", "send and recv", "split"])
def test_while_waiting(nursery: Nursery, name: str) -> None:
    outcomes = nursery.run(3, waiting, name)
    outcomes[1].check_raised(KeyboardInterrupt)
    for rank in (0, 2):
        outcomes[rank].check_raised(AbortedError, "rank 1 on ", "was interrupted in")


def busy(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == 1:
        interrupt_soon(0.03)
    while True:
        comm.allreduce(np.ones(1_500_000, np.float32))


def test_while_working(nursery: Nursery) -> None:
    outcomes = nursery.run(3, busy)
    outcomes[1].check_raised(KeyboardInterrupt)
    for rank in (0, 2):  # between two operations there is nothing to break: the rank leaves
        outcomes[rank].check_raised(MultiringError)


def waiting_for_work(comm: Communicator) -> None:
    other = comm.split(0)
    comm.barrier()
    if comm.rank == 1:
        work = comm.allreduce_async(np.ones(3))
        with pytest.raises(KeyboardInterrupt):
            tell(comm, 0)
            work.wait()
        assert not comm.is_broken  # it is the wait that was interrupted; the operation goes on
        other.barrier()
    else:
        if comm.rank == 0:
            interrupt_asleep(comm, 1)
        other.barrier()
        work = comm.allreduce_async(np.ones(3))
    assert work.wait().tolist() == [3.0] * 3


def test_while_waiting_for_work(nursery: Nursery) -> None:
    nursery.values(3, waiting_for_work)


def in_init(rank: int) -> None:
    if rank == 1:
        interrupt_soon(0.1)
        multiring.init()


def test_in_init(nursery: Nursery) -> None:
    nursery.run(2, in_init, init=False)[1].check_raised(KeyboardInterrupt)


def shut_down_in_handler(comm: Communicator) -> None:
    """A handler runs on the stack of the operation that it interrupts, and must not wait for it. Rank 0 ends
    when it has run. One that starts an operation: tests/cpp/engine/interrupt_test.cpp."""

    def on_signal(number: int, _: object) -> None:
        multiring.shutdown()
        os.kill(int(pids[0]), number)

    pids = comm.allgather(np.array([os.getpid()]))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    comm.barrier()
    if comm.rank == 0:
        interrupt_asleep(comm, 1, signal.SIGUSR2)
        signal.sigwait([signal.SIGUSR2])
        return
    signal.signal(signal.SIGUSR2, on_signal)
    tell(comm, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
    comm.barrier()


def test_a_handler_ends_the_operation_it_interrupts(nursery: Nursery) -> None:
    nursery.run(2, shut_down_in_handler)[1].check_raised(AbortedError, "closed")
