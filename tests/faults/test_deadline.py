"""A rank that does not come: an error after the deadline that says who is missing. Of two ranks, so that
nobody else can be late; who is named among more, and what those learn: tests/cpp."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest

import multiring
from multiring import Communicator
from tests.faults.operations import OPERATIONS
from tests.nursery import Nursery, Outcome, note
from tests.support import state_of, wait_until

LATE = 1
Call = Callable[[Communicator, float], object]

CALLS: dict[str, Call] = {
    "allreduce": lambda comm, timeout: comm.allreduce(np.ones(3), name="grad", timeout=timeout),
    "gather": lambda comm, timeout: comm.gather(np.ones(3), timeout=timeout),
    "send": lambda comm, timeout: comm.send(np.ones(100_000), LATE, timeout=timeout),
    "recv": lambda comm, timeout: comm.recv(LATE, timeout=timeout),
}


def wait_alone(comm: Communicator, call: Callable[[], object]) -> None:
    """Rank 0 calls; the other rank is stopped (by a debugger, a batch system) until it has given up."""
    late = int(comm.allgather(np.array([os.getpid()]))[LATE])
    comm.barrier()
    if comm.rank == LATE:
        os.kill(late, signal.SIGSTOP)
        with pytest.raises(multiring.TimeoutError, match="for rank 1"):
            comm.barrier()
        return
    wait_until(lambda: state_of(late) == "T", "the other rank to be stopped")
    note("called")
    try:
        call()
    finally:
        os.kill(late, signal.SIGCONT)


def check_timed_out(outcomes: list[Outcome], timeout: float) -> multiring.MultiringError:
    waiting, late = outcomes
    assert late.error is None, late.trace
    waiting.check_raised(TimeoutError, "MULTIRING_TIMEOUT or the timeout argument set how long to wait")
    assert isinstance(waiting.error, multiring.TimeoutError)
    assert waiting.ended - waiting.notes["called"] >= timeout
    return waiting.error


def given_a_timeout(comm: Communicator, name: str) -> None:
    wait_alone(comm, lambda: CALLS[name](comm, 0.1))


@pytest.mark.parametrize("name", CALLS)
def test_timeout_argument(nursery: Nursery, name: str) -> None:
    error = check_timed_out(nursery.run(2, given_a_timeout, name), 0.1)
    assert f"rank 0 on {os.uname().nodename}, in {name}" in str(error)
    assert (error.rank, error.peer, error.operation) == (0, LATE, name)
    assert error.elapsed >= 0.1
    assert error.tensor == ("grad" if name == "allreduce" else None)
    if name not in ("send", "recv"):
        assert "for rank 1; " in str(error)
        assert "alive) was last in barrier" in str(error)


def by_default(comm: Communicator, name: str) -> None:
    wait_alone(comm, OPERATIONS[name](comm))


@pytest.mark.full  # the ranks have to find each other within this time as well
@pytest.mark.parametrize("name", ["allreduce_async", "split"])
def test_default_timeout(nursery: Nursery, name: str) -> None:
    check_timed_out(nursery.run(2, by_default, name, env={"MULTIRING_TIMEOUT": "4"}), 4.0)


def stay_away(rank: int) -> None:
    if rank != LATE:
        multiring.init()


def test_init(nursery: Nursery) -> None:
    env = {"MULTIRING_TIMEOUT": "0.5", "MULTIRING_STALL_WARNING": "0.2"}
    outcome = nursery.run(2, stay_away, init=False, env=env)[0]
    outcome.check_raised(multiring.TimeoutError, "in init for rank 1 of 2: they have not started")
    assert "multiring: warning: rank 0 on " in (text := nursery.output())
    assert " s in init for rank 1 of 2, still importing, not started, " in text


def come_when_missed(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == LATE:  # what all ranks print is in one file
        wait_until(lambda: b" has waited " in os.pread(2, 1 << 20, 0), "the warning")
    comm.allreduce(np.ones(3), name="grad")


def run_out_of_batches(comm: Communicator) -> None:
    """Communicate beside another thread of the program. That might communicate too, so that ranks which
    wait for one another are not proven to wait for ever (tests/faults/test_mutual_waits.py has those)."""
    ended = threading.Event()

    def load() -> None:  # a frame of the program: a thread that only runs a method of threading is not one
        ended.wait()

    loader = threading.Thread(target=load)
    loader.start()
    queue = comm.named_queue("gradients")
    try:
        for _ in range(1 + (comm.rank != LATE)):
            queue.allreduce(np.ones(3), name="weight")
        comm.allgather_object("done")
    finally:
        ended.set()
        loader.join()


def test_ranks_that_wait_for_each_other_are_told_what_to_do(nursery: Nursery) -> None:
    env = {"MULTIRING_STALL_WARNING": "0.2", "MULTIRING_TIMEOUT": "0.8"}
    outcomes = nursery.run(2, run_out_of_batches, env=env)
    for outcome in outcomes:
        outcome.check_raised((multiring.TimeoutError, multiring.PeerLostError), "waited 0.8 s")
    # The first one leaves then, which the other may be told before its own time is up, with the reason.
    assert any(isinstance(outcome.error, multiring.TimeoutError) for outcome in outcomes)
    text = nursery.output()
    assert "in allgather 'allgather_object' int64[1]" in text
    assert (
        "waits for this rank in the exchange of gradients or other named tensors (communicator 'world/"
        in text
    )
    assert "most often one rank has fewer batches (hooks.join(), or what 'Uneven data' says in " in text
    assert "stands behind `if comm.rank == 0:`; set MULTIRING_STALL_WARNING" in text


def send_when_missed(comm: Communicator) -> None:
    if comm.rank == LATE:
        wait_until(lambda: b" has waited " in os.pread(2, 1 << 20, 0), "the warning")
        comm.send(np.ones(3), 0)
    else:
        comm.recv(LATE)


def test_a_long_wait_for_a_message_is_warned_of(nursery: Nursery) -> None:
    nursery.values(2, send_when_missed, env={"MULTIRING_STALL_WARNING": "0.2"})
    text = nursery.output()
    for words in (
        "multiring: warning: rank 0 on ",
        "in recv from rank 1 of communicator",
        " s for rank 1 on ",
        ", in recv)",
    ):
        assert words in text


def test_a_long_wait_is_warned_of(nursery: Nursery) -> None:
    nursery.values(2, come_when_missed, env={"MULTIRING_STALL_WARNING": "0.2"})
    text = nursery.output()
    assert "in allreduce 'grad' sum float64[3] (24 bytes) of communicator 'world', has waited " in text
    assert "for rank 1; rank 1 (process " in text
    assert ") was last in barrier; set MULTIRING_STALL_WARNING to change or silence this warning" in text
    line = come_when_missed.__code__.co_firstlineno + 4
    assert "multiring: warning: rank 0 on " in text
    assert f" (this rank is at {__file__}:{line}, in allreduce)" in text
