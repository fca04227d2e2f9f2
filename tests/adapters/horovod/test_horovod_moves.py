"""What moves tensors and objects by Horovod's names, process sets, and joining the job."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import multiring
import multiring.horovod.torch as hvd
from multiring import Communicator
from tests.adapters.horovod.support import with_hvd
from tests.on_ranks import on_ranks


@on_ranks(1, 3)
@pytest.mark.parametrize("dtype", ["uint8", "float16", "bool"])
@with_hvd
def test_allgather_and_broadcast(comm: Communicator, dtype: str) -> None:
    """Dimension 0 differs over ranks, and is 0 on one."""
    kind = getattr(torch, dtype)
    parts = [np.arange(rank * 6).reshape(rank, 3, 2) % 2 + rank % 2 for rank in range(comm.size)]
    tensors = [torch.from_numpy(part).to(kind) for part in parts]
    mine = tensors[comm.rank]
    joined = torch.cat(tensors)
    assert torch.equal(hvd.allgather(mine), joined)
    assert all(torch.equal(each, joined) for each in hvd.grouped_allgather([mine, mine], name="group"))
    for root in range(comm.size):
        x = torch.full((2, 3), comm.rank + 1, dtype=torch.int32).to(kind)
        wanted = torch.full((2, 3), root + 1, dtype=torch.int32).to(kind)
        assert torch.equal(hvd.broadcast(x, root), wanted)
        version = x._version
        assert hvd.broadcast_(x, root_rank=root, name="in place") is x
        assert torch.equal(x, wanted)
        assert x._version > version


@on_ranks(3)
@with_hvd
def test_gradients(comm: Communicator) -> None:
    """Of an allgather, the averaged gradient of this rank's rows; of a broadcast, all on the root."""
    mean = sum(range(1, comm.size + 1)) / comm.size
    x = torch.ones(comm.rank + 1, 2, dtype=torch.float64, requires_grad=True)
    joined = hvd.allgather(x)
    weight = torch.arange(joined.shape[0], dtype=torch.float64)[:, None]
    ((comm.rank + 1) * weight * joined).sum().backward()
    first = sum(range(1, comm.rank + 1))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, mean * weight[first : first + comm.rank + 1].expand(-1, 2))
    y = torch.ones(3, dtype=torch.float64, requires_grad=True)
    ((comm.rank + 1) * hvd.broadcast(y, 1)).sum().backward()
    assert y.grad is not None
    assert y.grad.tolist() == [mean if comm.rank == 1 else 0] * 3
    z = torch.ones(2 * comm.size, dtype=torch.float64, requires_grad=True)
    splits = torch.full((comm.size,), 2, dtype=torch.int32)
    received, counts = hvd.alltoall(z, splits)
    assert counts.tolist() == [2] * comm.size
    (received * (comm.rank + 1)).sum().backward()
    assert z.grad is not None
    assert z.grad.tolist() == [float(rank + 1) for rank in range(comm.size) for _ in range(2)]


@on_ranks(1, 3)
@with_hvd
def test_alltoall(comm: Communicator) -> None:
    """Rank i sends i + j + 1 rows of the value 10 i + j to rank j."""
    mine = range(comm.size)
    splits = [comm.rank + j + 1 for j in mine]
    x = torch.cat([torch.full((splits[j], 2), 10 * comm.rank + j) for j in mine])
    wanted = torch.cat([torch.full((i + comm.rank + 1, 2), 10 * i + comm.rank) for i in mine])
    received, counts = hvd.alltoall(x, splits=torch.tensor(splits, dtype=torch.int32))
    assert torch.equal(received, wanted)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [i + comm.rank + 1 for i in mine]
    even = hvd.alltoall(torch.full((2 * comm.size,), comm.rank))
    assert even.tolist() == [i for i in mine for _ in range(2)]
    received, counts = hvd.synchronize(hvd.alltoall_async(torch.full((comm.size,), comm.rank)))
    assert received.tolist() == list(mine)
    assert counts.tolist() == [1] * comm.size
    for bad in ([1] * (comm.size + 1), [5] * comm.size, [-1] * comm.size):
        with pytest.raises(ValueError, match="splits"):
            hvd.alltoall(torch.ones(comm.size), bad)
    if comm.size > 1:
        with pytest.raises(ValueError, match="without splits"):
            hvd.alltoall(torch.ones(comm.size + 1))


@on_ranks(1, 3)
@with_hvd
def test_objects(comm: Communicator) -> None:
    root = comm.size - 1
    assert hvd.broadcast_object({"rank": comm.rank, "x": torch.ones(2).tolist()}, root) == {
        "rank": root,
        "x": [1.0, 1.0],
    }
    assert hvd.broadcast_object(lambda: 17, root, name="f")() == 17
    if comm.size > 1:  # what cannot be pickled is an error on all ranks, and the job goes on
        with pytest.raises((TypeError, hvd.HorovodInternalError), match="pickle"):
            hvd.broadcast_object(comm, root)
        with pytest.raises((TypeError, hvd.HorovodInternalError), match="pickle"):
            hvd.allgather_object(comm if comm.rank == root else 1)
    assert hvd.allgather_object("x" * comm.rank, name="texts") == ["x" * rank for rank in range(comm.size)]
    hvd.barrier()


@on_ranks(3)
@with_hvd
def test_sparse_tensors(comm: Communicator) -> None:
    """By rows that overlap, as dense ones."""
    dense = [torch.zeros(6, 2, dtype=torch.float64) for _ in range(comm.size)]
    for rank, each in enumerate(dense):
        each[rank : rank + 2] = rank + 1
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, comm.size)):
        found = hvd.sparse_allreduce_async(dense[comm.rank].to_sparse(1), "rows", op)()
        assert found.is_sparse
        torch.testing.assert_close(found.to_dense(), torch.stack(dense).sum(0) / divisor)
    nothing = hvd.sparse_allreduce_async(torch.zeros(6, 2).to_sparse(1), None, hvd.Sum)()
    assert not nothing.to_dense().any()


@on_ranks(3)
@with_hvd
def test_process_sets(comm: Communicator) -> None:
    """Some ranks, with roots that are ranks of the job; operations of several sets at once."""
    ends, pair = hvd.add_process_set([2, 0]), hvd.add_process_set(hvd.ProcessSet([1, 2]))
    assert (ends.ranks, ends.process_set_id, pair.process_set_id) == ([0, 2], 1, 2)
    assert ends.included() == (comm.rank != 1)
    assert ends.size() == 2
    assert ends.rank() == {0: 0, 1: None, 2: 1}[comm.rank]
    with pytest.raises(ValueError, match="have a process set already"):
        hvd.add_process_set([0, 2])
    handles = {}
    for process_set in (ends, pair) if comm.rank != 2 else (pair, ends):
        if process_set.included():
            x = torch.tensor([float(comm.rank)])
            handles[process_set] = hvd.allreduce_async(x, name="x", op=hvd.Sum, process_set=process_set)
            assert hvd.broadcast(x, 2, process_set=process_set).item() == 2
            assert hvd.allgather(x, process_set=process_set).tolist() == process_set.ranks
            hvd.barrier(process_set=process_set)
    for process_set, handle in handles.items():
        assert hvd.synchronize(handle).item() == sum(process_set.ranks or ())
    if comm.rank == 1:
        with pytest.raises(ValueError, match="rank 1 is not part of"):
            hvd.allreduce(torch.ones(1), process_set=ends)
    else:
        with pytest.raises(ValueError, match="root_rank is 1"):
            hvd.broadcast(torch.ones(1), 1, process_set=ends)
        text = "Mismatched data types"
        kind = torch.float32 if comm.rank else torch.float64
        with pytest.raises(hvd.HorovodInternalError, match=text):
            hvd.allreduce(torch.ones(1, dtype=kind), process_set=ends)
    assert hvd.remove_process_set(ends)
    assert ends.process_set_id is None
    assert not hvd.remove_process_set(ends)
    assert not hvd.remove_process_set(hvd.global_process_set)
    again = hvd.add_process_set([0, 2])
    if again.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=again).item() == 2
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3


def facts(comm: Communicator) -> None:
    assert (hvd.rank(), hvd.size()) == (comm.rank, comm.size)
    assert (hvd.local_rank(), hvd.local_size()) == (comm.local_rank, comm.local_size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (comm.cross_rank, comm.cross_size)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == comm.size


@on_ranks(1, (4, 2))
def test_joining_and_leaving(comm: Communicator) -> None:
    """Many times; with static process sets; with handles that nobody waits for."""
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.is_homogeneous, hvd.mpi_threads_supported):
        with pytest.raises(ValueError, match="has not been initialized"):
            call()
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.allreduce(torch.ones(1))
    for _ in range(3):
        hvd.init()
        hvd.init()
        assert hvd.is_initialized()
        facts(comm)
        hvd.allreduce_async(torch.ones(1), name="nobody waits")
        hvd.barrier()
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
    ranks = list(range(comm.size))
    for bad in ([[0], [0]], [ranks], [[0], [comm.size]]):
        with pytest.raises(ValueError, match=r"process set|expected ranks"):
            hvd.init(process_sets=[hvd.ProcessSet(each) for each in bad])
    own = hvd.ProcessSet([0])
    hvd.init(process_sets=[own] if comm.size > 1 else None)
    if comm.size > 1:
        assert own.process_set_id == 1
    assert os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") is None
    with pytest.raises(ValueError, match="HOROVOD_DYNAMIC_PROCESS_SETS=1"):
        hvd.add_process_set([0])
    facts(comm)
    hvd.shutdown()
    with pytest.raises(ValueError, match="different ranks"):
        hvd.ProcessSet([1, 1])
    assert multiring.is_initialized()  # the program's own world


@on_ranks(3)
def test_ranks_that_train_apart(comm: Communicator) -> None:
    """init(comm=...) with a list of ranks."""
    mine = [0, 2] if comm.rank != 1 else [1]
    hvd.init(comm=mine)
    assert hvd.size() == len(mine)
    assert hvd.allgather(torch.tensor([comm.rank])).tolist() == mine
    hvd.shutdown()
    with pytest.raises(ValueError, match=f"with {comm.rank} among them"):
        hvd.init(comm=[(comm.rank + 1) % comm.size])


@with_hvd
def test_what_is_built(comm: Communicator) -> None:
    names = (
        "mpi_enabled",
        "gloo_enabled",
        *(f"{of}_built" for of in ["mpi", "gloo", "ddl", "ccl", "cuda", "rocm"]),
    )
    for name in (*names, "is_homogeneous"):
        assert isinstance(getattr(hvd, name)(), bool), name
    assert hvd.nccl_built() == 0
    with pytest.raises(ValueError, match="MPI is not enabled"):
        hvd.mpi_threads_supported()
