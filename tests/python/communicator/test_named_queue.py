"""Operations matched by name, from Python: any order, errors, and how a queue ends."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiring import AbortedError, Communicator, MismatchError, NamedQueue, PeerLostError, UsageError
from tests.rank_pool import RankPool
from tests.support import run_job

Pools = Callable[[int], RankPool]


def check_basics(comm: Communicator) -> None:
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


@pytest.mark.parametrize("size", [1, 2, 3])
def test_basics(ranks: Pools, size: int) -> None:
    ranks(size).run(check_basics)


def check_torch(comm: Communicator) -> None:
    import torch

    queue = comm.named_queue()
    x = torch.full((3, 2), comm.rank + 1.0, dtype=torch.bfloat16)
    total = queue.allreduce(x, name="x", out=x)
    assert total is x
    assert x.eq(comm.size * (comm.size + 1) / 2).all()
    assert isinstance(queue.allreduce(x, name="y"), torch.Tensor)
    queue.close()


def test_torch_tensors(ranks: Pools) -> None:
    ranks(2).run(check_torch)


def check_orders(comm: Communicator, names: list[int], seeds: list[int]) -> None:
    queue = comm.named_queue()
    order = list(enumerate(names))
    random.Random(seeds[comm.rank]).shuffle(order)
    # Of equal names the k-th meets the k-th, so equal names have equal values.
    works = [(n, queue.allreduce_async(np.full(1 + 300 * n, float(n)), name=f"n{n}")) for _, n in order]
    random.Random(seeds[-1]).shuffle(works)
    for n, work in works:
        result = work.wait()
        assert result.shape == (1 + 300 * n,)
        assert (result == n * comm.size).all()
    queue.close()


@settings(max_examples=25, deadline=None, database=None)
@given(names=st.lists(st.integers(0, 9), max_size=30), seeds=st.lists(st.integers(), min_size=4, max_size=4))
def test_any_order(ranks: Pools, names: list[int], seeds: list[int]) -> None:
    ranks(3).run(check_orders, names, seeds)


def check_threads(comm: Communicator) -> None:
    queue = comm.named_queue()
    failures: list[BaseException] = []

    def body(thread: int) -> None:
        try:
            numbers = list(range(50))
            random.Random(10 * comm.rank + thread).shuffle(numbers)
            for number in numbers[:25]:  # one after the other would wait for what the others do later
                queue.allreduce_async(np.ones(1), name=f"{thread}/{number}")
            works = [queue.allreduce_async(np.ones(1), name=f"{thread}/{number}") for number in numbers[25:]]
            for work in works:
                assert work.wait()[0] == comm.size
            assert queue.allreduce(np.full(1, thread), name=f"end {thread}")[0] == thread * comm.size
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    queue.close()


def test_threads(ranks: Pools) -> None:
    ranks(3).run(check_threads)


def check_temporaries(comm: Communicator) -> None:
    queue = comm.named_queue()
    numbers = list(range(40))
    random.Random(comm.rank).shuffle(numbers)
    works = {}
    for number in numbers:
        works[number] = queue.allreduce_async(np.full(30_000, float(number)), name=str(number))
        np.full(30_000, -1.0)  # would take the place of an input that was let go
    gc.collect()
    for number, work in works.items():
        assert (work.wait() == number * comm.size).all()


def test_arrays_are_kept_alive(ranks: Pools) -> None:
    ranks(2).run(check_temporaries)


def check_idle(comm: Communicator) -> float:
    queue = comm.named_queue()
    queue.allreduce(np.ones(1), name="first")
    before = time.process_time()
    time.sleep(0.5)
    used = time.process_time() - before
    queue.close()
    return used


def test_an_idle_queue_sleeps(ranks: Pools) -> None:
    assert max(ranks(2).run(check_idle)) < 0.05


def check_usage(comm: Communicator) -> None:
    with pytest.raises(UsageError, match="needs a name"):
        comm.named_queue("")
    queue = comm.named_queue()
    for name, text in {"": "needs a name", "n" * 5000: "at most 4096"}.items():
        with pytest.raises(UsageError, match=text):
            queue.allreduce(np.ones(1), name=name)
    with pytest.raises(UsageError, match="op is 'mean'"):
        queue.allreduce(np.ones(1), name="x", op="mean")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="bool has no average"):
        queue.allreduce(np.ones(1, bool), name="x", op="average")
    assert queue.allreduce(np.ones(1), name="x")[0] == comm.size
    queue.close()


def test_usage_errors_break_nothing(ranks: Pools) -> None:
    ranks(2).run(check_usage)


def check_mismatch(comm: Communicator) -> None:
    queue = comm.named_queue()
    with pytest.raises(MismatchError, match=r"rank 1 asked for allreduce 'w' sum float64\[5\]"):
        queue.allreduce(np.ones(4 + (comm.rank == 1)), name="w")
    assert queue.is_broken
    with pytest.raises(
        AbortedError, match=r"world/queue' is broken on rank \d by its first error \(mismatch"
    ):
        queue.allreduce(np.ones(4), name="w")
    assert comm.allreduce(np.ones(1))[0] == comm.size
    queue.close()


def test_mismatch(ranks: Pools) -> None:
    ranks(3).run(check_mismatch)


def check_steps(comm: Communicator) -> None:
    queue = comm.named_queue()
    assert queue.allreduce(np.ones(4), name="w", step=1)[0] == comm.size
    with pytest.raises(MismatchError, match=r"'w': ranks 0, 2 submitted it in step 2; rank 1 .* in step 3"):
        queue.allreduce(np.ones(4), name="w", step=3 if comm.rank == 1 else 2)
    queue.close()


def test_steps_are_compared(ranks: Pools) -> None:
    ranks(3).run(check_steps)


def check_close(comm: Communicator) -> None:
    queue = comm.named_queue()
    address = queue.address
    pending = queue.allreduce_async(np.ones(4), name=f"only on {comm.rank}")
    comm.barrier()
    queue.close()
    queue.close()
    with pytest.raises((AbortedError, PeerLostError)):
        pending.wait()
    assert queue.is_broken
    assert queue.address == address
    with pytest.raises(AbortedError, match="'world/queue' is closed on rank"):
        queue.allreduce(np.ones(4), name="x")


@pytest.mark.parametrize("size", [1, 2])
def test_close(ranks: Pools, size: int) -> None:
    ranks(size).run(check_close) if size > 1 else ranks(size).run(check_close_alone)


def check_close_alone(comm: Communicator) -> None:
    queue = comm.named_queue()
    assert queue.allreduce_async(np.ones(4), name="x").wait()[0] == 1
    queue.close()
    with pytest.raises(AbortedError, match="is closed"):
        queue.allreduce(np.ones(4), name="x")


def check_abort(comm: Communicator) -> None:
    group = comm.split(0)
    assert group is not None
    queue = group.named_queue()
    pending = queue.allreduce_async(np.ones(4), name=f"only on {comm.rank}")
    if comm.rank == 1:
        group.abort("no more data")
    with pytest.raises(AbortedError, match="rank 1 on .* aborted: no more data"):
        pending.wait()
    group.close()


def test_abort_of_the_communicator(ranks: Pools) -> None:
    ranks(3).run(check_abort)


ANEW = """
import numpy as np
import multiring

old = []
for generation in range(3):
    comm = multiring.init()
    queue = comm.split(0).named_queue()
    assert queue.allreduce(np.ones(3), name="x")[0] == comm.size
    pending = queue.allreduce_async(np.ones(3), name=f"only on {comm.rank}")
    comm.barrier()
    multiring.shutdown()
    try:
        pending.wait()
    except (multiring.AbortedError, multiring.PeerLostError):
        pass
    old.append(queue)
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
    result = run_job(2, ANEW)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("reached the end") == 2
    assert "Error" not in result.stderr


TIMEOUT = """
import numpy as np
import multiring

comm = multiring.init()
queue = comm.named_queue()
try:
    queue.allreduce(np.ones(3), name="grad/a" if comm.rank == 0 else "grad/b")
except multiring.TimeoutError as error:
    assert "rank 0 submitted 'grad/a' and waits for rank 1, which has not submitted it" in str(error), error
    assert "rank 1 submitted 'grad/b' and waits for rank 0, which has not submitted it" in str(error), error
    assert error.rank is not None
    print("timed out")
"""


def test_what_is_never_matched_is_named() -> None:
    result = run_job(2, TIMEOUT, env={"MULTIRING_TIMEOUT": "0.5"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("timed out") == 2


FORK = """
import os
import numpy as np
import multiring

comm = multiring.init()
queue = comm.named_queue()
queue.allreduce(np.ones(3), name="x")
pending = queue.allreduce_async(np.ones(3), name="late") if comm.rank == 0 else None
comm.barrier()
child = os.fork()
if child == 0:
    try:
        queue.allreduce(np.ones(3), name="child")
    except multiring.UsageError as error:
        assert "belongs to the parent" in str(error), error
        queue.close()
        print("child done", flush=True)
    # Leaves through the whole of the interpreter's exit.
else:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    comm.barrier()
    if pending is None:
        pending = queue.allreduce_async(np.ones(3), name="late")
    assert pending.wait()[0] == comm.size
    print("parent done", flush=True)
"""


def test_forked_children() -> None:
    result = run_job(2, FORK)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("parent done") == 2
    assert result.stdout.count("child done") == 2
