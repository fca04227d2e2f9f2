"""What an operation that was not waited for gives: works, futures, coalescing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import multiring
from multiring import Communicator
from tests.adapters.torch_distributed.support import numbers, world


def _sum(shape: tuple[int, ...], size: int) -> torch.Tensor:
    return torch.stack([numbers(shape, rank) for rank in range(size)]).sum(0)


def test_a_work_tells_what_has_become_of_it(comm: Communicator) -> None:
    with world(comm):
        tensor = numbers((1000,), comm.rank)
        work = dist.all_reduce(tensor, async_op=True)
        assert isinstance(work, dist.Work)
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0] is tensor
        assert torch.equal(tensor, _sum((1000,), 2))
        barrier = dist.barrier(async_op=True)
        while not barrier.is_completed():
            pass
        assert barrier.is_success()


def test_one_rank_may_wait_at_once_and_the_other_later(comm: Communicator) -> None:
    with world(comm):
        tensor = numbers((10,), comm.rank)
        work = dist.all_reduce(tensor, async_op=comm.rank == 0)
        if work is not None:
            work.wait()
        assert torch.equal(tensor, _sum((10,), 2))


def test_a_future_that_waits_for_another(comm: Communicator) -> None:
    # As the hooks of DistributedDataParallel for PowerSGD do, in the thread that completes the first one.
    with world(comm):
        first, second = numbers((5,), comm.rank), numbers((6,), comm.rank)
        outer = dist.all_reduce(first, async_op=True).get_future()
        other = dist.all_reduce(second, async_op=True).get_future()

        def then(future: Any) -> torch.Tensor:
            third = future.value()[0].clone()
            inner = dist.all_reduce(third, async_op=True).get_future()
            return other.wait()[0].sum() + inner.wait()[0].sum()

        total = outer.then(then).wait()
        assert total == _sum((6,), 2).sum() + 2 * _sum((5,), 2).sum()


def test_many_operations_under_way(comm: Communicator) -> None:
    with world(comm):
        tensors = [numbers((1 + 997 * index,), comm.rank) for index in range(20)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        for tensor in tensors:
            assert torch.equal(tensor, _sum(tuple(tensor.shape), 2))


def test_coalesced_operations(comm: Communicator) -> None:
    with world(comm) as group:
        tensors = [numbers((3,), comm.rank), numbers((4, 2), comm.rank)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        assert torch.equal(tensors[0], _sum((3,), 2))
        assert torch.equal(tensors[1], _sum((4, 2), 2))
        outputs = [torch.empty(6), torch.empty(2)]
        with dist._coalescing_manager():
            for output in outputs:
                dist.all_gather_single(output, numbers((output.numel() // 2,), comm.rank))
        for output in outputs:
            assert torch.equal(
                output, torch.cat([numbers((output.numel() // 2,), rank) for rank in range(2)])
            )
        blocks = [torch.empty(3), torch.empty(1)]
        with dist._coalescing_manager():
            for block in blocks:
                dist.reduce_scatter_single(block, numbers((2 * block.numel(),), comm.rank))
        for block in blocks:
            assert torch.equal(block, _sum((2 * block.numel(),), 2).chunk(2)[comm.rank])
        # With a device, operations of all kinds are waited for together.
        tensor, row = numbers((3,), comm.rank), [torch.empty(2), torch.empty(2)]
        group._start_coalescing(torch.device("cpu"))
        group.allreduce([tensor])
        group.allgather([row], [numbers((2,), comm.rank)])
        group._end_coalescing(torch.device("cpu")).wait()
        assert torch.equal(tensor, _sum((3,), 2))
        assert torch.equal(row[1], numbers((2,), 1))


def test_lists_that_are_gathered_together(comm: Communicator) -> None:
    with world(comm) as group:
        lists = [[torch.empty(2), torch.empty(3, 2)] for _ in range(2)]
        group.allgather_coalesced(lists, [numbers((2,), comm.rank), numbers((3, 2), comm.rank)]).wait()
        for rank, (one, other) in enumerate(lists):
            assert torch.equal(one, numbers((2,), rank))
            assert torch.equal(other, numbers((3, 2), rank))


def test_older_names_are_the_newer_ones(comm: Communicator) -> None:
    with world(comm) as group:
        whole, block = torch.empty(4), torch.empty(2)
        group._allgather_base(whole, numbers((2,), comm.rank)).wait()
        assert torch.equal(whole, torch.cat([numbers((2,), rank) for rank in range(2)]))
        group._reduce_scatter_base(block, numbers((4,), comm.rank)).wait()
        assert torch.equal(block, _sum((4,), 2).chunk(2)[comm.rank])
        group.alltoall_base(whole, numbers((4,), comm.rank), [], []).wait()
        assert torch.equal(whole, torch.cat([numbers((4,), rank).chunk(2)[comm.rank] for rank in range(2)]))


def test_who_waits_a_while_may_wait_again(comm: Communicator) -> None:
    with world(comm):
        tensor = numbers((3,), comm.rank)
        if comm.rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            with pytest.raises(multiring.TimeoutError, match="process group"):
                work.wait(timedelta(milliseconds=20))
            assert not work.is_completed()
            comm.barrier()
            work.wait()
        else:
            comm.barrier()
            dist.all_reduce(tensor)
        assert torch.equal(tensor, _sum((3,), 2))


def test_barriers(comm: Communicator) -> None:
    with world(comm) as group:
        dist.barrier()
        group.monitored_barrier(timedelta(seconds=20))
        dist.barrier(timeout=timedelta(seconds=20))
