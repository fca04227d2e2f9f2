"""Ranks that wait for one another in operations that cannot meet, and ranks of which that is not proven."""

from __future__ import annotations

import re

import pytest

from tests.support import run_job

BEGIN = """
import threading, time
import numpy as np
import torch
import multiring
import multiring.torch

comm = multiring.init()
comm.timeout = 60.0
one, other = comm.split(0), comm.split(0)
queue = comm.named_queue("queue")
"""

# What rank 0 waits in, what the others do, and how each is told.
MUTUAL = {
    "two communicators": (
        "one.barrier()",
        "other.allreduce(np.ones(3))",
        "barrier of communicator",
        "allreduce",
    ),
    "asynchronous": (
        "one.allreduce_async(np.ones(3)).wait()",
        "other.barrier()",
        r"allreduce .* of communicator",
        "barrier",
    ),
    "named": (
        "comm.barrier()",
        "queue.allreduce(np.ones(3), name='x').wait()",
        "barrier of communicator 'world'",
        "the exchange of gradients or other named tensors",
    ),
}

TOLD = """
began = time.monotonic()
try:
    if comm.rank == 0:
        {first}  # line of rank 0
    else:
        {second}  # line of the others
except (multiring.MismatchError, multiring.PeerLostError) as error:  # the other one may have ended first
    print("told:", round(time.monotonic() - began, 1), error)
"""


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("what", MUTUAL)
def test_both_are_told(what: str, ranks: int) -> None:
    first, second, here, there = MUTUAL[what]
    script = BEGIN + TOLD.format(first=first, second=second)
    lines = {
        comment: n for n, line in enumerate(script.splitlines(), 1) if (comment := line.partition("  # ")[2])
    }
    done = run_job(ranks, script, env={"MULTIRING_STALL_WARNING": "1"})
    told = re.findall(r"\[\d\] told: ([\d.]+) (.*)", done.stdout)
    assert len(told) == ranks, done.stdout + done.stderr
    for seconds, text in told:
        assert float(seconds) < 20
        assert "wait for one another, and cannot meet" in text
        assert re.search(f"rank 0 in {here}", text), text
        assert re.search(f"rank [12] in {there}", text), text
    both = [text for _, text in told if f"script.py:{lines['line of rank 0']}" in text]
    assert [text for text in both if f"script.py:{lines['line of the others']}" in text]


HOOKS = (
    BEGIN
    + """
model = torch.nn.Linear(3, 2)
hooks = multiring.torch.register_gradient_hooks(model)
multiring.torch.broadcast_parameters(model)
try:
    for step in range(3 + comm.rank):
        model(torch.ones(1, 3)).sum().backward()
        hooks.synchronize()
        model.zero_grad()
    comm.barrier()
except (multiring.MismatchError, multiring.PeerLostError) as error:
    print("told:", error)
"""
)


def test_a_rank_that_has_left_the_loop_early() -> None:
    done = run_job(2, HOOKS, env={"MULTIRING_STALL_WARNING": "1"})
    told = re.findall(r"\[(\d)\] told: (.*)", done.stdout)
    assert sorted(rank for rank, _ in told) == ["0", "1"], done.stdout + done.stderr
    # The rank that has noticed may see the other one leave before it is told itself.
    assert all("barrier" in text and "cannot meet" in text for _, text in told), told
    assert any("hooks.join()" in text for _, text in told), told


NOT_PROVEN = {
    "another thread comes": """
thread = threading.Thread(target=lambda: (time.sleep(4), one.barrier() if comm.rank else other.barrier()))
thread.start()
(other if comm.rank else one).barrier()
thread.join()
""",
    "a timer comes": """
timer = threading.Timer(4, lambda: one.barrier() if comm.rank else other.barrier())
timer.start()
(other if comm.rank else one).barrier()
timer.join()
""",
    "a rank is late": """
if comm.rank == 0:
    one.barrier()
    other.barrier()
else:
    time.sleep(4)
    one.barrier()
    other.barrier()
""",
    "the operation of another call": """
work = one.allreduce_async(np.ones(3))
if comm.rank == 0:
    time.sleep(3)
    other.barrier()
else:
    other.barrier()
work.wait()
""",
}


@pytest.mark.parametrize("what", NOT_PROVEN)
def test_what_is_not_proven_goes_on(what: str) -> None:
    done = run_job(2, BEGIN + NOT_PROVEN[what] + "\nprint('done')", env={"MULTIRING_STALL_WARNING": "1"})
    assert done.stdout.count("done") == 2
