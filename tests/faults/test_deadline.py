"""A rank that does not come: an error after the deadline that says who is missing."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

import multiring
from multiring import Communicator, MultiringError
from tests.faults.operations import OPERATIONS, SMALL, each
from tests.nursery import Nursery, Outcome, note

LATE = 1
# A machine that does other things as well may come back to a rank this much later than asked for.
PATIENCE = 2.0


def _partner(comm: Communicator) -> int:
    return 0 if comm.rank == LATE else LATE


CALLS: dict[str, Callable[[Communicator, float], object]] = {
    "allreduce": lambda comm, timeout: comm.allreduce(np.ones(3), name="grad", timeout=timeout),
    "reduce_scatter": lambda comm, timeout: comm.reduce_scatter(np.ones(3), timeout=timeout),
    "allgather": lambda comm, timeout: comm.allgather(np.ones(3), timeout=timeout),
    "broadcast": lambda comm, timeout: comm.broadcast(np.ones(3), timeout=timeout),
    "alltoall": lambda comm, timeout: comm.alltoall(np.ones(3), timeout=timeout),
    "gather": lambda comm, timeout: comm.gather(np.ones(3), timeout=timeout),
    "scatter": lambda comm, timeout: comm.scatter(np.ones(3), timeout=timeout),
    "barrier": lambda comm, timeout: comm.barrier(timeout=timeout),
    "send": lambda comm, timeout: comm.send(np.ones(100_000), _partner(comm), timeout=timeout),
    "recv": lambda comm, timeout: comm.recv(_partner(comm), timeout=timeout),
}


def late(comm: Communicator, name: str, timeout: float) -> None:
    """Rank 0 gives the operation little time, rank 2 much; rank 1 comes when rank 0 has given up."""
    comm.barrier()
    if comm.rank == LATE:
        while not comm.is_broken:
            time.sleep(0.01)
    note("called")
    CALLS[name](comm, timeout if comm.rank == 0 else 20.0)


def check_timed_out(outcome: Outcome, timeout: float, called: float | None = None) -> None:
    error = outcome.error
    assert isinstance(error, multiring.TimeoutError), outcome.trace or outcome
    assert isinstance(error, TimeoutError)
    waited = outcome.ended - (called or outcome.notes["called"])
    assert timeout <= waited < timeout + PATIENCE
    assert "MULTIRING_TIMEOUT or the timeout argument set how long to wait" in str(error)


@pytest.mark.parametrize("name", CALLS)
def test_timeout_argument(nursery: Nursery, name: str) -> None:
    outcomes = nursery.run(3, late, name, 0.1)
    check_timed_out(outcomes[0], 0.1)
    error = outcomes[0].error
    assert isinstance(error, MultiringError)
    text = str(error)
    assert f"rank 0 on {os.uname().nodename}, in {name}" in text
    assert (error.rank, error.peer, error.operation) == (0, LATE, name)
    assert error.elapsed >= 0.1
    if name not in ("send", "recv"):
        assert "waited 0.1 s for rank 1; ranks 0, 2 came and waited as well" in text
        assert "alive) was last in barrier" in text
        assert error.tensor == ("grad" if name == "allreduce" else None)
    for rank in (1, 2):  # they need not wait for a deadline of their own
        other = outcomes[rank]
        assert isinstance(other.error, MultiringError), other
        assert "waited 0.1 s for" in str(other.error)
        assert outcomes[0].ended is not None
        assert other.ended - outcomes[0].ended < PATIENCE


def never(comm: Communicator, name: str) -> None:
    step = OPERATIONS[name](comm)
    comm.barrier(60.0)  # a rank may start late
    if comm.rank == LATE:
        while not comm.is_broken:
            time.sleep(0.01)
    note("called")
    while True:  # one message fits into a mailbox
        step()


@pytest.mark.parametrize("name", each(SMALL))
def test_default_timeout(nursery: Nursery, name: str) -> None:
    outcomes = nursery.run(3, never, name, env={"MULTIRING_TIMEOUT": "0.2"})
    waited = [outcome for rank, outcome in enumerate(outcomes) if rank != LATE]
    for outcome in waited:
        assert isinstance(outcome.error, MultiringError), outcome
    # The deadline of the rank that came first ends the wait of both.
    called = min(outcome.notes["called"] for outcome in waited)
    check_timed_out(min(waited, key=lambda outcome: outcome.ended or 0.0), 0.2, called)


def pids_then_stop(comm: Communicator) -> None:
    """A rank that is stopped (a debugger, a batch system) lives, so this is a matter of the deadline."""
    pids = comm.allgather(np.array([os.getpid()]))
    comm.barrier()
    if comm.rank == LATE:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    note("called")
    try:
        comm.allgather(np.ones(4), timeout=0.2)
    finally:
        with contextlib.suppress(ProcessLookupError):  # another rank was faster, and it has ended
            os.kill(int(pids[LATE]), signal.SIGCONT)


def test_a_stopped_rank(nursery: Nursery) -> None:
    outcomes = nursery.run(3, pids_then_stop)
    errors = [outcomes[rank].error for rank in (0, 2)]
    assert all(isinstance(error, multiring.TimeoutError) for error in errors), outcomes
    assert any("for rank 1" in str(error) and "alive) was last in" in str(error) for error in errors)


def asynchronous(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == LATE:
        while not comm.is_broken:
            time.sleep(0.01)
        return
    note("called")
    work = comm.allreduce_async(np.ones(3), name="grad")
    work.wait()


def test_asynchronous_operations_have_the_default(nursery: Nursery) -> None:
    outcomes = nursery.run(3, asynchronous, env={"MULTIRING_TIMEOUT": "0.2"})
    called = min(outcomes[rank].notes["called"] for rank in (0, 2))
    for rank in (0, 2):
        check_timed_out(outcomes[rank], 0.2, called)
        assert "allreduce 'grad' sum float64[3]" in str(outcomes[rank].error)
        assert "for rank 1" in str(outcomes[rank].error)


def missing_at_init(rank: int) -> None:
    if rank == LATE:
        return
    note("called")
    multiring.init()


def test_init(nursery: Nursery) -> None:
    outcomes = nursery.run(3, missing_at_init, init=False, env={"MULTIRING_TIMEOUT": "0.5"})
    for rank in (0, 2):
        outcome = outcomes[rank]
        outcome.check_raised(MultiringError, since=outcome.notes["called"], within=0.5 + PATIENCE)
    texts = [str(outcomes[rank].error) for rank in (0, 2)]
    assert any("in init for rank(s) 1 of 3: they have not started" in text for text in texts), texts


def slow(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == LATE:
        time.sleep(0.6)
    comm.allreduce(np.ones(3), name="grad")


def test_a_long_wait_is_warned_of(nursery: Nursery) -> None:
    nursery.values(3, slow, env={"MULTIRING_STALL_WARNING": "0.2"})
    text = nursery.output()
    assert text.count("has waited 0.") == 1, text  # rank 0 speaks for rank 2
    assert "in allreduce 'grad' sum float64[3] (24 bytes) of communicator 'world', has waited" in text
    assert "for rank 1; rank 1 (process " in text
    assert ") was last in barrier; set MULTIRING_STALL_WARNING to change or silence this warning" in text
    line = slow.__code__.co_firstlineno + 4
    assert f" (this rank is at {__file__}:{line})" in text
