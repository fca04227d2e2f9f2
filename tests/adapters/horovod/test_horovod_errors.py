"""What the ranks do not agree on fails on all of them, and nothing else does; ranks that have joined."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import multiring.horovod.torch as hvd
from multiring import Communicator
from multiring.horovod.operations import NOT_YET
from multiring.horovod.pending import call_meanwhile
from tests.adapters.horovod.support import refused, with_hvd

Call = Callable[[int], Any]


ones = torch.ones
MISMATCHES: dict[str, Call] = {
    "Mismatched data types: One rank had type float32, but another rank had type int32": lambda rank: (
        hvd.allreduce(ones(3, dtype=torch.int32 if rank else torch.float32), name="a")
    ),
    r"Mismatched allreduce tensor shapes: .*shape \[3, 2\].*shape \[2, 3\]": lambda rank: hvd.allreduce(
        ones((2, 3) if rank else (3, 2)), name="a"
    ),
    "Mismatched collective operations: One rank did an allreduce": lambda rank: (
        hvd.allgather if rank else hvd.allreduce
    )(ones(4), name="a"),
    "Mismatched allreduce operations: One rank had op max": lambda rank: hvd.allreduce(
        ones(3), op=hvd.Sum if rank else hvd.Max
    ),
    "Mismatched prescale and/or postscale factors": lambda rank: hvd.allreduce(
        ones(3), prescale_factor=1.0 + rank
    ),
    "Mismatched broadcast root ranks: One rank specified root rank 0": lambda rank: hvd.broadcast(
        ones(3), min(rank, 1)
    ),
    r"Mismatched broadcast tensor shapes: .*\[3\].*\[4\]": lambda rank: hvd.broadcast(ones(3 + rank), 0),
    "Mismatched allgather tensor shapes: .*dimension 1 equal to 3": lambda rank: hvd.allgather(
        ones(2, 3 + rank)
    ),
    "Mismatched allgather tensor shapes: .*rank 1, .*rank 2": lambda rank: hvd.allgather(
        ones((2, 3) if rank else (2,))
    ),
    "rank-zero tensor": lambda _: hvd.allgather(torch.tensor(1.0)),
    "Mismatched alltoall tensor shapes: .*dimension 1 equal to 3": lambda rank: hvd.alltoall(
        ones(6, 3 + rank)
    ),
    r"Mismatched reducescatter tensor shapes: .*\[6, 3\]": lambda rank: hvd.reducescatter(ones(6, 3 + rank)),
    "Mismatched": lambda rank: hvd.grouped_allreduce([ones(3), ones(3 + rank)]),
}


@with_hvd(3)
@pytest.mark.parametrize("text", MISMATCHES)
def test_a_mismatch_fails_on_all_ranks_and_the_job_goes_on(comm: Communicator, text: str) -> None:
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match=text):
            MISMATCHES[text](comm.rank)
        x = torch.full((5,), float(comm.rank))
        assert hvd.allreduce(x, op=hvd.Sum, name="a").tolist() == [sum(range(comm.size))] * 5


@with_hvd(3)
def test_what_is_in_flight_beside_a_mismatch_is_done(comm: Communicator) -> None:
    """Twenty operations in another order on every rank, a few of which do not match, and one that a rank
    submits only after the others have met. All others have their result, once."""
    for turn in range(3):
        handles: dict[str, int] = {}
        names = [f"t{k}" for k in range(20)]
        for k in torch.randperm(20, generator=torch.Generator().manual_seed(100 * turn + comm.rank)).tolist():
            shape = 7 + comm.rank if k % 3 == 1 else 7
            handles[names[k]] = hvd.allreduce_async_(
                torch.full((shape,), float(k)), name=names[k], op=hvd.Sum
            )
        if comm.rank != 0:
            handles["late"] = hvd.allreduce_async(torch.ones(2), name="late", op=hvd.Sum)
        for k, name in enumerate(names):
            if k % 3 == 1:
                with pytest.raises(hvd.HorovodInternalError, match=f"shapes: .*'{name}'"):
                    hvd.synchronize(handles[name])
            else:
                while not hvd.poll(handles[name]):
                    pass
                assert hvd.poll(handles[name])
                assert hvd.synchronize(handles[name]).tolist() == [k * comm.size] * 7
                assert hvd.synchronize(handles[name]) is None
        if comm.rank == 0:
            handles["late"] = hvd.allreduce_async(torch.ones(2), name="late", op=hvd.Sum)
        assert hvd.synchronize(handles["late"]).tolist() == [comm.size] * 2
    assert hvd.synchronize(10**9) is None


@with_hvd()
def test_a_mismatch_that_no_rank_waits_for(comm: Communicator) -> None:
    """It is found by the next submission or wait; its handle still raises."""
    bad = hvd.allreduce_async(torch.ones(2 + comm.rank), name="bad")
    for _ in range(10):
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [comm.size] * 2
    refused(hvd.HorovodInternalError, {"Mismatched": lambda: hvd.synchronize(bad)})


def test_a_rank_that_leaves(comm: Communicator) -> None:
    """Before what the others wait for."""
    hvd.init()
    if comm.rank == 1:
        hvd.shutdown()
        return
    refused(hvd.HorovodInternalError, {"rank 1": lambda: hvd.allreduce(torch.ones(2))})
    hvd.shutdown()


@with_hvd(1, 3)
def test_ranks_that_have_joined_give_zeros(comm: Communicator) -> None:
    """Rank r joins after 3 r + 1 steps; averages go on dividing by all ranks. Twice."""
    for _ in range(2):
        for step in range(3 * comm.rank + 1):
            active = [rank for rank in range(comm.size) if step < 3 * rank + 1]
            handles = [
                hvd.allreduce_async(torch.full((k + 1,), float(comm.rank + 1)), name=f"{k}", op=op)
                for k, op in enumerate((hvd.Sum, hvd.Average))
            ]
            total = sum(rank + 1.0 for rank in active)
            assert hvd.synchronize(handles[1]).tolist() == pytest.approx([total / comm.size] * 2)
            assert hvd.synchronize(handles[0]).tolist() == [total]
            unnamed = hvd.grouped_allreduce([torch.ones(3), torch.ones(2, dtype=torch.int64)], op=hvd.Sum)
            assert [each.tolist() for each in unnamed] == [[len(active)] * 3, [len(active)] * 2]
        assert hvd.join() == comm.size - 1
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == comm.size


@with_hvd(3)
def test_other_collectives_are_refused_while_a_rank_has_joined(comm: Communicator) -> None:
    if comm.rank != 0:
        pending = hvd.allreduce_async_(torch.ones(2), name="goes on", op=hvd.Sum)
        calls = {
            "Broadcast": lambda: hvd.broadcast(torch.ones(2), 1),
            "Allgather": lambda: hvd.allgather(torch.ones(2)),
            "Alltoall": lambda: hvd.alltoall(torch.ones(comm.size)),
            "Reducescatter": lambda: hvd.reducescatter(torch.ones(comm.size)),
            "Barrier": hvd.barrier,
        }
        text = "is not supported with Join at this time"
        refused(RuntimeError, {f"{kind} {text}": call for kind, call in calls.items()})
        while not hvd.poll(pending):
            pass
        assert hvd.synchronize(pending).tolist() == [comm.size - 1] * 2
        with pytest.raises(hvd.HorovodInternalError, match="Mismatched data types"):
            hvd.allreduce(torch.ones(2, dtype=torch.float64 if comm.rank == 1 else torch.float32))
    last = hvd.join()
    assert 0 <= last < comm.size
    assert hvd.broadcast(torch.full((2,), comm.rank), 1).tolist() == [1, 1]


@with_hvd()
@pytest.mark.parametrize("first", [0, 1])
def test_a_name_that_was_refused_in_one_join_is_refused_in_the_next(comm: Communicator, first: int) -> None:
    """By the rank that had joined then, and did not submit it."""
    for joined in (first, 1 - first, first):
        if comm.rank != joined:
            text = "Broadcast is not supported with Join at this time"
            refused(RuntimeError, {text: lambda: hvd.broadcast(torch.ones(2), 0, name="jb")})
        hvd.join()
    assert hvd.broadcast(torch.full((1,), float(comm.rank)), 1, name="jb").item() == 1.0


@with_hvd(3)
def test_a_process_set_goes_on_while_a_rank_has_joined(comm: Communicator) -> None:
    """Rank 1 waits for an operation of the set that rank 2 submits after one of all ranks."""
    pair = hvd.add_process_set([1, 2])
    x = torch.ones(2)
    if comm.rank == 1:
        whole = hvd.allreduce_async(x, name="whole", op=hvd.Sum)
        assert hvd.allreduce(x, op=hvd.Sum, process_set=pair).tolist() == [2, 2]
        assert hvd.synchronize(whole).tolist() == [2, 2]
    elif comm.rank == 2:
        assert hvd.allreduce(x, name="whole", op=hvd.Sum).tolist() == [2, 2]
        assert hvd.allreduce(x, op=hvd.Sum, process_set=pair).tolist() == [2, 2]
    hvd.join()


@with_hvd(3)
def test_mismatches_in_several_sets(comm: Communicator) -> None:
    check_several_sets(comm, [0, 1], [1, 2])


@pytest.mark.full
@with_hvd(4)
def test_mismatches_in_overlapping_sets(comm: Communicator) -> None:
    check_several_sets(comm, [0, 1, 2], [0, 1, 3])


def check_several_sets(comm: Communicator, *ranks: list[int]) -> None:
    """Rank 1 waits in a set for rank 0, which waits for all ranks after a mismatch; and mismatches in several
    sets, which each rank finds in another order."""
    sets = [hvd.global_process_set, *(hvd.add_process_set(each) for each in ranks)]
    everyone = [len(ranks[0])] * 2
    mine = [each for each in sets if each.included()]
    x, text = torch.ones(2), "Mismatched allreduce tensor shapes"
    for turn in range(4):
        bad = {each: hvd.allreduce_async(torch.ones(2 + comm.rank), process_set=each) for each in mine}
        if comm.rank == 1:
            for each in mine[1:]:
                assert hvd.allreduce(x, op=hvd.Sum, process_set=each).tolist() == everyone
        for each in mine if (comm.rank + turn) % 2 else mine[::-1]:
            refused(hvd.HorovodInternalError, {text: lambda handle=bad[each]: hvd.synchronize(handle)})
        if comm.rank != 1:
            for each in mine[1:]:
                assert hvd.allreduce(x, op=hvd.Sum, process_set=each).tolist() == everyone
    # A rank that makes a set takes part in what others wait for.
    late = hvd.allreduce_async(torch.ones(2 + comm.rank))
    if comm.rank == 0:
        refused(hvd.HorovodInternalError, {text: lambda: hvd.synchronize(late)})
    hvd.add_process_set([comm.size - 1])
    if comm.rank != 0:
        refused(hvd.HorovodInternalError, {text: lambda: hvd.synchronize(late)})


@with_hvd()
def test_a_group_of_which_one_is_refused(comm: Communicator) -> None:
    """Those that were submitted before it have a handle, and end."""
    x = torch.ones(2)
    operations: Any = hvd.global_process_set.operations()
    submit = operations.submit

    def submit_but_one(request: Any, start: Any) -> Any:
        if request.name.endswith("2of3"):
            raise ValueError("it is in flight")
        return submit(request, start)

    operations.submit = submit_but_one
    calls = (hvd.grouped_allreduce_async, hvd.grouped_allgather_async, hvd.grouped_reducescatter_async)
    for call in calls:
        handle = call([x, x, x], name="group")  # type: ignore[operator]
        refused(ValueError, {"in flight": lambda handle=handle: hvd.synchronize(handle)})  # type: ignore[misc]
        assert hvd.allreduce(x, name="group_1of3").tolist() == [1, 1]


@with_hvd(3)
def test_a_set_is_made_while_a_rank_recovers_in_another(comm: Communicator) -> None:
    """Rank 0 comes last, so it waits for no rank before the set is made; it takes part all the same."""
    pair = hvd.add_process_set([0, 1])
    text = "Mismatched allreduce tensor shapes"
    bad = hvd.allreduce_async(torch.ones(2 + comm.rank), process_set=pair) if pair.included() else -1
    if comm.rank == 0:
        comm.recv(1)
    elif comm.rank == 1:
        operations: Any = pair.operations()
        meet = operations._meet

        def meet_and_tell() -> None:
            comm.send(np.zeros(1), 0)
            meet()

        operations._meet = meet_and_tell
    hvd.add_process_set([1, 2])
    if pair.included():
        refused(hvd.HorovodInternalError, {text: lambda: hvd.synchronize(bad)})
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=pair).tolist() == [2, 2]
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [3, 3]


@with_hvd(3)
def test_a_rank_that_has_joined_recovers_in_a_set(comm: Communicator) -> None:
    pair = hvd.add_process_set([0, 1])
    text = "Mismatched allreduce tensor shapes"
    for _ in range(2):
        bad = hvd.allreduce_async(torch.ones(2 + comm.rank), process_set=pair) if pair.included() else -1
        if comm.rank == 1:
            refused(hvd.HorovodInternalError, {text: lambda handle=bad: hvd.synchronize(handle)})
            assert hvd.allreduce(torch.ones(2), name="on", op=hvd.Sum).tolist() == [2, 2]
        elif comm.rank == 2:
            assert hvd.allreduce(torch.ones(2), name="on", op=hvd.Sum).tolist() == [2, 2]
        assert hvd.join() in (1, 2)
        if comm.rank == 0:
            refused(hvd.HorovodInternalError, {text: lambda handle=bad: hvd.synchronize(handle)})
        if pair.included():
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=pair).tolist() == [2, 2]


def test_a_call_that_is_left() -> None:
    """The end of the process does not wait for it."""
    ends = threading.Event()
    threads: list[threading.Thread] = []

    def call() -> None:
        threads.append(threading.current_thread())
        ends.wait()

    def look() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_meanwhile(call, look)
    assert threads[0].daemon
    ends.set()
    threads[0].join()
    refused(ValueError, {"invalid literal": lambda: call_meanwhile(lambda: int("x"), look)})


@with_hvd()
def test_work_that_another_thread_has_submitted_anew(comm: Communicator) -> None:
    """It has not failed, but not ended yet."""
    operations: Any = hvd.global_process_set.operations()

    class Work:
        def done(self) -> bool:
            return False

    class Renewed:
        key, refusal, work = ("x", 0), "", Work()

    is_done, operations.is_done = operations.is_done, lambda pending: True
    assert operations.take(Renewed()) is NOT_YET
    operations.is_done = is_done


@with_hvd()
def test_an_operation_that_was_late_is_not_submitted_again(comm: Communicator) -> None:
    """Its caller has seen the error, and uses the memory for something else. The ranks meet all the same."""
    operations: Any = hvd.global_process_set.operations()
    operations._queue.close()
    operations._base.timeout = 0.3
    operations._queue = operations._base.named_queue("short")
    x = torch.full((2,), 5.0)
    if comm.rank == 1:
        refused(hvd.HorovodInternalError, {"'late'": lambda: hvd.allreduce_(x, name="late")})
    else:
        refused(hvd.HorovodInternalError, {"'other'": lambda: hvd.allreduce_(x, name="other")})
    operations._base.timeout = 60.0
    y = torch.ones(2)
    assert hvd.allreduce(y, name="next", op=hvd.Sum).tolist() == [2, 2]
    assert hvd.allreduce(y, name="late", op=hvd.Sum).tolist() == [2, 2]
    assert hvd.allreduce(y, name="other", op=hvd.Sum).tolist() == [2, 2]
    assert x.tolist() == [5, 5]


@with_hvd()
def test_an_error_comes_when_the_operation_has_ended(comm: Communicator) -> None:
    """The ranks cannot meet, and the queue goes on: until it has ended, it may write to the memory."""
    operations: Any = hvd.global_process_set.operations()
    x = torch.full((2,), comm.rank + 1.0)
    if comm.rank == 1:
        comm.recv(0)
    handle = hvd.allreduce_async_(x, name="x", op=hvd.Sum)
    attend = operations._attend

    def fails() -> None:
        raise hvd.HorovodInternalError("the ranks cannot meet")

    operations._attend = fails
    if comm.rank == 0:
        sender = threading.Timer(0.2, lambda: comm.send(np.zeros(1), 1))
        sender.start()
    assert hvd.synchronize(handle).tolist() == [3, 3]
    operations._attend = attend
    if comm.rank == 0:
        sender.join()


@with_hvd(3)
def test_a_rank_that_leaves_a_recovery(comm: Communicator) -> None:
    """By Ctrl-C, while it waits for rank 0: the set ends with an error on both ranks, and the job goes on."""
    pair = hvd.add_process_set([0, 1])
    if pair.included():
        operations: Any = pair.operations()
        bad = hvd.allreduce_async(torch.ones(2 + comm.rank), process_set=pair)
        if comm.rank == 0:
            comm.recv(1)
        else:
            look_after = operations._look_after

            def interrupted(sets: list[Any]) -> None:
                if operations not in sets:  # in a meeting
                    raise KeyboardInterrupt
                look_after(sets)

            operations._look_after = interrupted
            with pytest.raises(KeyboardInterrupt):
                hvd.synchronize(bad)
            comm.send(np.zeros(1), 0)

        def call() -> object:
            return hvd.allreduce(torch.ones(2), process_set=pair) if comm.rank else hvd.synchronize(bad)

        refused(hvd.HorovodInternalError, {"asked for different operations": call})
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [3, 3]
