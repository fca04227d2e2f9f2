"""What operations that were not waited for give: works, futures, coalescing; what goes wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import multiring
from multiring import Communicator
from multiring.torch_distributed import ProcessGroup, old_torch
from multiring.torch_distributed.meeting import connect_group
from multiring.torch_distributed.work import GroupWork, Part
from tests.adapters.torch_distributed.support import TIMEOUT, numbers, with_world, world
from tests.nursery import Nursery
from tests.on_ranks import refuses


def _sum(*shape: int) -> torch.Tensor:
    return numbers(shape, 0) + numbers(shape, 1)


@with_world()
def test_works_tell_what_has_become_of_them(comm: Communicator) -> None:
    tensors = [numbers((1 + 997 * index,), comm.rank) for index in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for tensor, work in reversed(list(zip(tensors, works, strict=True))):
        assert isinstance(work, dist.Work)
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0] is tensor
        assert torch.equal(tensor, _sum(*tensor.shape))
    barrier = dist.barrier(async_op=True)
    while not barrier.is_completed():
        pass
    assert barrier.is_success()


@with_world()
def test_a_future_that_waits_for_another(comm: Communicator) -> None:
    # As the hooks of DistributedDataParallel for PowerSGD do, in the thread that completes the first one.
    first, second = numbers((5,), comm.rank), numbers((6,), comm.rank)
    outer = dist.all_reduce(first, async_op=True).get_future()
    other = dist.all_reduce(second, async_op=True).get_future()

    def then(future: Any) -> torch.Tensor:
        third = future.value()[0].clone()
        inner = dist.all_reduce(third, async_op=True).get_future()
        return other.wait()[0].sum() + inner.wait()[0].sum()

    total = outer.then(then).wait()
    assert total == _sum(6).sum() + 2 * _sum(5).sum()


@with_world()
def test_coalesced_operations(comm: Communicator) -> None:
    group = dist.group.WORLD
    tensors = [numbers((3,), comm.rank), numbers((4, 2), comm.rank)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert torch.equal(tensors[0], _sum(3))
    assert torch.equal(tensors[1], _sum(4, 2))
    outputs, blocks = [torch.empty(6), torch.empty(2)], [torch.empty(3), torch.empty(1)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.all_gather_single(output, numbers((output.numel() // 2,), comm.rank))
    with dist._coalescing_manager():
        for block in blocks:
            dist.reduce_scatter_single(block, numbers((2 * block.numel(),), comm.rank))
    for output, block in zip(outputs, blocks, strict=True):
        parts = [numbers((output.numel() // 2,), rank) for rank in range(2)]
        assert torch.equal(output, torch.cat(parts))
        assert torch.equal(block, _sum(2 * block.numel()).chunk(2)[comm.rank])
    # With a device, operations of all kinds are waited for together.
    tensor, row = numbers((3,), comm.rank), [torch.empty(2), torch.empty(2)]
    group._start_coalescing(torch.device("cpu"))
    group.allreduce([tensor])
    group.allgather([row], [numbers((2,), comm.rank)])
    group._end_coalescing(torch.device("cpu")).wait()
    assert torch.equal(tensor, _sum(3))
    assert torch.equal(row[1], numbers((2,), 1))


@with_world()
def test_works_that_torch_2_6_would_collect(comm: Communicator) -> None:
    group: Any = dist.group.WORLD
    with mock.patch.object(old_torch, "WORK_IS_COLLECTED", True):
        work = dist.all_reduce(numbers((3,), comm.rank), async_op=True)
        held = weakref.ref(work)
        del work
        assert held() is not None
        held().wait()  # type: ignore[union-attr]
        total = numbers((3,), comm.rank)
        dist._broadcast_coalesced(group, [total], 1000, 1)  # waits in C++
        assert torch.equal(total, numbers((3,), 1))
        dist.all_reduce(total, async_op=True).get_future().wait()
        works = group.allreduce_coalesced([total, total + 1])
        assert type(works) is dist.Work  # held by C++ alone
        works.wait()
        dist.barrier()
    assert held() is None
    assert not group.kept


def test_torch_2_6_shuts_groups_down() -> None:
    theirs, ours, other = mock.Mock(), mock.Mock(spec=ProcessGroup), mock.Mock()
    with mock.patch.object(distributed_c10d, "_shutdown_backend", theirs, create=True):
        old_torch.shut_down_when_destroyed(ProcessGroup)
        for group in (ours, other):
            distributed_c10d._shutdown_backend(group)
    ours.shutdown.assert_called_once_with()
    theirs.assert_called_once_with(other)


@with_world()
def test_the_future_of_an_operation_that_has_ended_is_done(comm: Communicator) -> None:
    """Libraries chain functions on it after `wait`, and expect them to run at once."""
    total = numbers((3,), comm.rank)
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    seen: list[Any] = []
    assert work.get_future().then(lambda done: seen.extend(done.value())).done()
    assert seen[0] is total


@with_world()
def test_a_coalescing_block_that_raises(comm: Communicator) -> None:
    group, tensor = dist.group.WORLD, numbers((3,), comm.rank)
    with pytest.raises(KeyError), dist._coalescing_manager(device=torch.device("cpu")):
        group.allreduce([tensor]).wait()
        raise KeyError
    assert torch.equal(tensor, _sum(3))
    # Torch itself notes from here on what it should run, and has to be told otherwise.
    dist.distributed_c10d._world.pg_coalesce_state.clear()
    held = weakref.ref(tensor)
    del tensor
    group.barrier().wait()
    assert held() is None  # nothing waits for the block's end
    tensor = numbers((3,), comm.rank)
    with dist._coalescing_manager(device=torch.device("cpu")):
        group.allreduce([tensor])
    assert torch.equal(tensor, _sum(3))


@with_world()
def test_functions_that_torch_calls_by_other_names(comm: Communicator) -> None:
    group = dist.group.WORLD
    lists = [[torch.empty(2), torch.empty(3, 2)] for _ in range(2)]
    group.allgather_coalesced(lists, [numbers((2,), comm.rank), numbers((3, 2), comm.rank)]).wait()
    for rank, (one, other) in enumerate(lists):
        assert torch.equal(one, numbers((2,), rank))
        assert torch.equal(other, numbers((3, 2), rank))
    whole, block = torch.empty(4), torch.empty(2)
    group._allgather_base(whole, numbers((2,), comm.rank)).wait()
    assert torch.equal(whole, torch.cat([numbers((2,), rank) for rank in range(2)]))
    group._reduce_scatter_base(block, numbers((4,), comm.rank)).wait()
    assert torch.equal(block, _sum(4).chunk(2)[comm.rank])
    group.alltoall_base(whole, numbers((4,), comm.rank), [], []).wait()
    assert torch.equal(whole, torch.cat([numbers((4,), rank).chunk(2)[comm.rank] for rank in range(2)]))
    group.monitored_barrier(timedelta(seconds=20))
    dist.barrier(timeout=timedelta(seconds=20))


@with_world()
def test_the_overloads_of_process_groups(comm: Communicator) -> None:
    group, mine, total = dist.group.WORLD, partial(numbers, (4,), comm.rank), _sum(4)
    every, limit = [numbers((4,), rank) for rank in range(2)], timedelta(seconds=20)
    reduced = [mine() for _ in range(4)]
    group.allreduce(reduced[0]).wait()
    group.allreduce(tensor=reduced[1]).wait()
    group.allreduce([reduced[2]], dist.ReduceOp.SUM, limit).wait()
    group.allreduce(tensor=reduced[3], op=dist.ReduceOp.AVG, timeout=limit).wait()
    for tensor, wanted in zip(reduced, [total] * 3 + [total / 2], strict=True):
        assert torch.equal(tensor, wanted)
    ones = [mine() for _ in range(3)]
    group.broadcast(ones[0], 1).wait()
    group.broadcast(ones[1], root=1).wait()
    group.broadcast(tensor=ones[2], root=1, timeout=limit).wait()
    assert all(torch.equal(tensor, every[1]) for tensor in ones)
    reduced = [mine() for _ in range(2)]
    group.reduce(reduced[0], 1, dist.ReduceOp.MAX).wait()
    group.reduce(tensor=reduced[1], root=1, op=dist.ReduceOp.MAX).wait()
    wanted = torch.maximum(*every) if comm.rank == 1 else mine()
    assert all(torch.equal(tensor, wanted) for tensor in reduced)
    outputs = [[torch.empty(4), torch.empty(4)] for _ in range(4)]
    group.allgather(outputs[0], mine()).wait()
    group.allgather(output_tensors=outputs[1], input_tensor=mine(), timeout=limit).wait()
    group.gather([outputs[2]] if comm.rank == 0 else [], [mine()]).wait()  # to rank 0
    group.gather(outputs[3] if comm.rank == 0 else [], mine(), root=0).wait()
    for output in outputs if comm.rank == 0 else outputs[:2]:
        assert torch.equal(torch.stack(output), torch.stack(every))
    blocks = [torch.empty(2) for _ in range(2)]
    group.scatter(blocks[0], list(mine().chunk(2)) if comm.rank == 0 else [], 0).wait()
    assert torch.equal(blocks[0], every[0].chunk(2)[comm.rank])
    group.reduce_scatter(blocks[1], list(mine().chunk(2)), dist.ReduceOp.SUM).wait()
    assert torch.equal(blocks[1], total.chunk(2)[comm.rank])
    group.barrier(limit).wait()
    assert group._device_types == [torch.device("cpu"), torch.device("cuda")]
    assert not group._get_backend(torch.device("cpu")).supports_tensor_alloc(torch.device("cpu"))


@with_world()
def test_who_waits_a_while_may_wait_again(comm: Communicator) -> None:
    tensor = numbers((3,), comm.rank)
    if comm.rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        text = r"allreduce.*for rank 1; rank 1.*was last in.*process group"
        refuses(multiring.TimeoutError, text, work.wait, timedelta(milliseconds=20))
        assert not work.is_completed()
        comm.barrier()
        work.wait()
    else:
        comm.barrier()
        dist.all_reduce(tensor)
    assert torch.equal(tensor, _sum(3))


@with_world()
def test_shapes_that_differ(comm: Communicator) -> None:
    with pytest.raises(multiring.MismatchError, match=r"rank 1 asked for.*float32\[3\]") as caught:
        dist.all_reduce(torch.ones(2 + comm.rank))
    assert f"[process group '0', rank {comm.rank}]" in str(caught.value)
    assert isinstance(caught.value, dist.DistBackendError)
    refuses(multiring.AbortedError, "first error", dist.barrier)


def test_operations_and_lists_that_differ(comm: Communicator) -> None:
    with (
        world(comm),
        pytest.raises(multiring.MismatchError, match="broadcast.*allreduce|allreduce.*broadcast"),
    ):
        dist.barrier()
        if comm.rank == 0:
            dist.broadcast(torch.ones(2), 0)
        else:
            dist.all_reduce(torch.ones(2))
    with world(comm), pytest.raises(multiring.MismatchError, match="elements of the ranks"):
        counts = [1, 2] if comm.rank == 0 else [3, 2]
        dist.all_gather([torch.empty(count) for count in counts], torch.ones(counts[comm.rank]))


def test_an_error_reaches_futures_and_backward(comm: Communicator) -> None:
    with world(comm):
        work = dist.all_reduce(torch.ones(2 + comm.rank), async_op=True)
        refuses(RuntimeError, "asked for", work.get_future().wait)
        assert isinstance(work.exception(), multiring.MismatchError)
        assert not work.is_success()
    with world(comm) as group:
        model = DistributedDataParallel(torch.nn.Linear(3, 2))
        loss = model(torch.ones(2, 3)).sum()
        group.comm.abort("a test ends the group")  # type: ignore[attr-defined]
        refuses(RuntimeError, "a test ends the group", loss.backward)


def _reduce_within(timeout: timedelta) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it cannot set it
        # From torch 2.14 it has a public name.
    getattr(dist, "set_timeout", distributed_c10d._set_pg_timeout)(timeout)
    dist.all_reduce(torch.ones(2))


def test_a_work_of_several_parts_tells_which_failed(comm: Communicator) -> None:
    class Pending:
        def __init__(self, error: multiring.MultiringError | None = None) -> None:
            self.done = lambda: error is not None
            self.error = error

        def wait(self, timeout: float | None = None) -> None:
            if self.error is not None:
                raise self.error
            time.sleep(timeout or 0.0)
            raise multiring.TimeoutError("not complete")

    with world(comm) as group:
        for limit, error in ((None, multiring.PeerLostError("lost")), (60.0, multiring.TimeoutError("own"))):
            work = GroupWork(group, [Part(Pending(error)), Part(Pending())], [], limit)
            refuses(type(error), str(error), work.wait)
            dist.all_reduce(torch.ones(2))  # the group goes on
        comm.barrier()
        work = GroupWork(group, [Part(Pending())], [], 1.0)
        refuses(multiring.TimeoutError, "not complete", work.wait, timedelta(milliseconds=1))
        comm.barrier()  # or another rank's error would come first
        refuses(multiring.TimeoutError, "broken on all ranks", work.wait)


def test_a_rank_that_does_not_come(comm: Communicator) -> None:
    short = timedelta(seconds=2)  # in which the ranks meet, too
    cases: list[tuple[timedelta, str, Callable[[], object]]] = [
        (short, "rank 1.*process group '0'", lambda: dist.all_reduce(torch.ones(2))),
        (short, "recv with tag 3 on rank 0.*rank 1", lambda: dist.recv(torch.ones(2), 1, tag=3)),
        (TIMEOUT, r"barrier.*for rank 1.*rank 0\]", lambda: dist.barrier(timeout=short / 10)),
        (TIMEOUT, r"allreduce.*for rank 1.*rank 0\]", lambda: _reduce_within(short / 10)),
    ]
    for timeout, text, call in cases:
        with world(comm, timeout):
            if comm.rank == 0:
                refuses(multiring.TimeoutError, text, call)
            comm.barrier()


@pytest.mark.parametrize("together", [False, True])
def test_a_timeout_counts_while_the_operation_waits_for_others(comm: Communicator, together: bool) -> None:
    """Behind one that is stuck, and with one that it runs together with."""
    with world(comm) as group:
        dist.barrier()
        if comm.rank == 0:
            first = torch.ones(2, dtype=torch.float32 if together else torch.int64)
            stuck = dist.all_reduce(first, async_op=True)
            work = group.allreduce(tensor=torch.ones(2), op=dist.ReduceOp.SUM, timeout=timedelta(seconds=0.3))
            begun = time.monotonic()
            refuses(multiring.TimeoutError, "allreduce.*for rank 1", work.wait)
            assert time.monotonic() - begun < TIMEOUT.total_seconds() / 2
            refuses(multiring.MultiringError, "for rank 1", stuck.wait)
        comm.barrier()


def test_an_error_of_init_process_group_is_shown_short(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = mock.Mock(**{"set.side_effect": RuntimeError("connection reset")})
    given = mock.Mock(
        store=gone, group_rank=0, group_size=1, timeout=TIMEOUT, group_id="0", global_ranks_in_group=[]
    )
    monkeypatch.setenv("MULTIRING_TRACEBACK", "short")
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(multiring.PeerLostError) as raised:
        connect_group(given)
    sys.excepthook(raised.type, raised.value, raised.tb)
    shown = capsys.readouterr().err
    assert "of multiring not shown" in shown
    assert "meeting.py" not in shown.partition("direct cause")[2]


def _killed(comm: Communicator) -> str:
    message = "no error"
    with contextlib.suppress(multiring.MultiringError), world(comm):
        dist.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if comm.rank == 0:
                dist.all_reduce(torch.ones(2))
            else:
                dist.recv(torch.ones(2), 1)
        except multiring.PeerLostError as error:
            message = str(error)
    return message


def test_a_killed_rank(nursery: Nursery) -> None:
    outcomes = nursery.run(3, _killed)
    for rank, operation in ((0, "allreduce"), (2, "recv")):
        told = str(outcomes[rank].value)
        assert "lost rank 1" in told
        assert operation in told
        assert f"[process group '0', rank {rank}]" in told
