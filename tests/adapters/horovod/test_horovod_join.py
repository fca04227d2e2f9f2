"""Ranks that have no more data."""

from __future__ import annotations

import pytest
import torch

import multiring.horovod.torch as hvd
from multiring import Communicator
from tests.adapters.horovod.support import with_hvd
from tests.on_ranks import on_ranks


@on_ranks(1, 3)
@with_hvd
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


@on_ranks(3)
@with_hvd
def test_other_collectives_are_refused_while_a_rank_has_joined(comm: Communicator) -> None:
    if comm.rank != 0:
        pending = hvd.allreduce_async(torch.ones(2), name="goes on", op=hvd.Sum)
        calls = {
            "Broadcast": lambda: hvd.broadcast(torch.ones(2), 1),
            "Allgather": lambda: hvd.allgather(torch.ones(2)),
            "Alltoall": lambda: hvd.alltoall(torch.ones(comm.size)),
            "Reducescatter": lambda: hvd.reducescatter(torch.ones(comm.size)),
            "Barrier": hvd.barrier,
        }
        for kind, call in calls.items():
            with pytest.raises(RuntimeError, match=f"{kind} is not supported with Join at this time"):
                call()
        assert hvd.synchronize(pending).tolist() == [comm.size - 1] * 2
        if comm.size > 2:
            with pytest.raises(hvd.HorovodInternalError, match="Mismatched data types"):
                hvd.allreduce(torch.ones(2, dtype=torch.float64 if comm.rank == 1 else torch.float32))
    last = hvd.join()
    assert 0 <= last < comm.size
    assert hvd.broadcast(torch.full((2,), comm.rank), 1).tolist() == [1, 1]


@on_ranks(3)
@with_hvd
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


@with_hvd
def test_polling_while_a_rank_has_joined(comm: Communicator) -> None:
    if comm.rank == 1:
        handle = hvd.allreduce_async_(torch.ones(2), name="x", op=hvd.Sum)
        while not hvd.poll(handle):
            pass
        assert hvd.synchronize(handle).tolist() == [1, 1]
    assert hvd.join() == 1
