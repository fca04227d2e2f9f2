"""A rank is killed or leaves while others wait for what it was to submit: they learn of it, soon."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

import multiring
from multiring import AbortedError, Communicator, PeerLostError, Work
from tests.nursery import Nursery, note

SECONDS = 2.0
VICTIM = 1


def leave(how: str) -> None:
    note("left")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    multiring.shutdown()


def wait_for_victim(comm: Communicator, how: str, submits: bool) -> None:
    queue = comm.named_queue()
    queue.allreduce(np.ones(3), name="first")
    if comm.rank == VICTIM:
        pending = queue.allreduce_async(np.ones(3), name="other") if submits else None
        time.sleep(0.1)  # the others come meanwhile, or later
        leave(how)
        assert pending is None or pending.done()
        return
    queue.allreduce(np.ones(3), name="grad/a")


@pytest.mark.parametrize("submits", [False, True])
@pytest.mark.parametrize("how", ["killed", "shutdown"])
def test_before_it_submits(nursery: Nursery, how: str, submits: bool) -> None:
    outcomes = nursery.run(3, wait_for_victim, how, submits)
    for rank in (0, 2):
        outcome = outcomes[rank]
        assert isinstance(outcome.error, PeerLostError), outcome.trace or outcome
        assert "lost rank 1" in str(outcome.error)
        assert "'grad/a'" in str(outcome.error)
        assert outcome.error.tensor == "grad/a"
        assert outcome.ended is not None
        assert outcome.ended - outcomes[VICTIM].notes["left"] < SECONDS
        assert outcome.status == 0
    assert how == "killed" or outcomes[VICTIM].error is None, outcomes[VICTIM].trace


def repeat_until_lost(comm: Communicator, delay: float) -> None:
    queue = comm.named_queue()
    arrays = [np.ones(count) for count in (3, 2000, 300_000)]
    comm.barrier()
    if comm.rank == VICTIM:
        threading.Timer(delay, leave, ["killed"]).start()
    while True:
        order = np.random.default_rng().permutation(len(arrays))
        works: list[Work] = []
        try:
            for i in order:
                works.append(queue.allreduce_async(arrays[i], name=str(i)))
        except AbortedError:
            if not works:
                raise
        # What is submitted behind the first error is told of it as such; those before it get it itself.
        for work in works:
            work.wait()


@pytest.mark.parametrize("delay", [0.01, 0.02, 0.05])
def test_in_the_middle(nursery: Nursery, delay: float) -> None:
    outcomes = nursery.run(3, repeat_until_lost, delay)
    for rank in (0, 2):
        outcome = outcomes[rank]
        # Or it came back only when the queue had broken.
        behind = isinstance(outcome.error, AbortedError) and "first error (peer lost)" in str(outcome.error)
        assert behind or isinstance(outcome.error, PeerLostError), outcome.trace or outcome
        assert "lost rank 1" in str(outcome.error)
        assert outcome.ended is not None
        assert outcome.ended - outcomes[VICTIM].notes["left"] < SECONDS
