"""Operations matched by name, from Python: any order, errors, and how a queue ends."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from multiring import AbortedError, Communicator, MismatchError, NamedQueue, PeerLostError
from multiring.work import keep_times
from tests.on_ranks import on_ranks
from tests.support import run_job


@on_ranks(1, 3)
def test_basics(comm: Communicator) -> None:
    queue = comm.named_queue()
    assert isinstance(queue, NamedQueue)
    assert (queue.rank, queue.size, queue.comm) == (comm.rank, comm.size, comm)
    assert queue.name == "world/queue"
    assert repr(queue) == f"<multiring.NamedQueue 'world/queue' rank {comm.rank} of {comm.size}>"
    assert isinstance(queue.address, int)
    assert queue.address != 0
    x = np.arange(6.0).reshape(2, 3)
    total = queue.allreduce(x, name="x")
    np.testing.assert_array_equal(total, x * comm.size)
    out = np.empty_like(x)
    assert queue.allreduce(x, name="x", op="average", out=out, prescale=2.0, postscale=3.0) is out
    np.testing.assert_array_equal(out, x * 6)
    columns = np.zeros((4, 4), np.float32)[:, ::2]  # not contiguous
    assert queue.allreduce(columns + comm.rank, name="max", op="max", out=columns) is columns
    assert (columns == comm.size - 1).all()
    assert queue.allreduce(np.zeros(0), name="nothing").shape == (0,)
    work = queue.allreduce_async(np.ones(3, np.int64), name="later", priority=3)
    assert work.wait(timeout=20.0).tolist() == [comm.size] * 3
    assert work.done()
    other = comm.named_queue("other")
    assert other.name == "world/other"
    assert other.address != queue.address
    other.close()


def test_times(comm: Communicator) -> None:
    queue = comm.named_queue()
    works = [queue.barrier_async(name="without")]
    keep_times(True)
    began = time.monotonic_ns()
    works += [queue.allreduce_async(np.ones(3), name=name) for name in ("a", "b")]
    for work in works:
        work.wait()
    ended = time.monotonic_ns()
    keep_times(False)
    assert works[0].times() == (0, 0, 0, 0)
    for work in works[1:]:
        made, queued, begun, complete = work.times()
        assert began <= made <= queued <= begun <= complete <= ended


@on_ranks(3)
def test_every_collective_in_any_order(comm: Communicator) -> None:
    """Submitted in another order on every rank, beside each other."""
    queue = comm.named_queue()
    x = np.arange(4.0)[:, None] + comm.rank
    ranks = range(comm.size)
    into = np.empty((4 // comm.size + (comm.rank < 4 % comm.size), 1))
    submits = {
        "sum": lambda: queue.allreduce_async(x, name="sum"),
        "scatter": lambda: queue.reduce_scatter_async(x, name="scatter", op="max"),
        "into": lambda: queue.reduce_scatter_async(x, name="into", op="max", out=into),
        "gather": lambda: queue.allgather_async(x[: comm.rank + 1], name="gather"),
        "send": lambda: queue.broadcast_async(x, comm.size - 1, name="send"),
        "swap": lambda: queue.alltoall_async(np.full(2 * comm.size, comm.rank), [2] * comm.size, name="swap"),
        "meet": lambda: queue.barrier_async(name="meet"),
    }
    order = [*submits]
    random.Random(comm.rank).shuffle(order)
    works = {name: submits[name]() for name in order}
    every = [np.arange(4.0)[:, None] + rank for rank in ranks]
    np.testing.assert_array_equal(works["sum"].wait(), np.sum(every, axis=0))
    share = np.array_split(np.max(every, axis=0), comm.size)[comm.rank]
    np.testing.assert_array_equal(works["scatter"].wait(), share)
    assert works["into"].wait() is into
    np.testing.assert_array_equal(into, share)
    parts = np.concatenate([each[: rank + 1] for rank, each in enumerate(every)])
    np.testing.assert_array_equal(works["gather"].wait(), parts)
    np.testing.assert_array_equal(works["send"].wait(), every[-1])
    received, counts = works["swap"].wait()
    assert received.tolist() == [rank for rank in ranks for _ in range(2)]
    assert counts.tolist() == [2] * comm.size
    assert works["meet"].wait() is None


@on_ranks(3)
def test_what_is_asked_for_is_compared(comm: Communicator) -> None:
    queue, steps = comm.named_queue(), comm.named_queue("steps")
    assert steps.allreduce(np.ones(4), name="w", step=1)[0] == comm.size
    with pytest.raises(MismatchError, match=r"rank 1 asked for allreduce 'x \(2, 3\)'"):
        queue.allreduce(np.ones(6), name="x", asked="x (2, 3)" if comm.rank == 1 else "x (3, 2)")
    with pytest.raises(MismatchError, match=r"'w': ranks 0, 2 submitted it in step 2; rank 1 .* in step 3"):
        steps.allreduce(np.ones(4), name="w", step=3 if comm.rank == 1 else 2)


@on_ranks(1, 2)
def test_close(comm: Communicator) -> None:
    queue = comm.named_queue()
    address = queue.address
    pending = queue.allreduce_async(np.ones(4), name=f"only on {comm.rank}")
    comm.barrier()
    queue.close()
    queue.close()
    if comm.size > 1:
        with pytest.raises((AbortedError, PeerLostError)):
            pending.wait()
        assert queue.is_broken
    assert queue.address == address
    with pytest.raises(AbortedError, match="'world/queue' is closed on rank"):
        queue.allreduce(np.ones(4), name="x")


ANEW = """
import numpy as np
import multiring

old = []
for generation in range(3):
    comm = multiring.init()
    old.append(comm.split(0).named_queue())
    assert old[-1].allreduce(np.ones(3), name="x")[0] == comm.size
    old[-1].allreduce_async(np.ones(3), name=f"only on {comm.rank}")
    comm.barrier()
    multiring.shutdown()
    for one in old:
        try:
            one.allreduce(np.ones(3), name="x")
        except multiring.AbortedError as error:
            assert "multiring.shutdown()" in str(error), error
        else:
            raise AssertionError("a closed queue took an operation")
comm = multiring.init()
last = comm.named_queue()
last.allreduce_async(np.ones(3), name=f"only on {comm.rank}")
print("reached the end")
# Leaves with the queue open and an operation pending.
"""


def test_starting_anew_and_leaving_with_an_open_queue() -> None:
    result = run_job(2, ANEW, code=0)
    assert result.stdout.count("reached the end") == 2
    assert "Error" not in result.stderr
