"""Collectives of the PyTorch face, compared with NumPy, process sets, and joining the job."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import multiring
import multiring.horovod.torch as hvd
from multiring import Communicator
from tests.adapters.horovod.support import refused, with_hvd
from tests.on_ranks import on_ranks

DTYPES = ["int32", "float16"]
SHAPES = [(), (17,), (3, 5), (2, 3, 4), (0, 3)]


def given(rank: int, dtype: str, shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(rank).integers(-50, 50, shape).astype(dtype)


def tensor(rank: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(given(rank, dtype, shape)))


@with_hvd(1, 3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce(comm: Communicator, dtype: str) -> None:
    """Every operation, every rank of tensor, in all forms; factors in float64 for integers, whose results are
    truncated toward zero."""
    ops = {hvd.Sum: np.sum, hvd.Min: np.min, hvd.Max: np.max}
    for shape in SHAPES:
        parts = np.stack([given(rank, dtype, shape) for rank in range(comm.size)])
        x = tensor(comm.rank, dtype, shape)
        before = x.clone()
        for op, reduce in ops.items():
            wanted = reduce(parts.astype("float64"), axis=0).astype(dtype)
            found = [
                hvd.allreduce(x, op=op),
                hvd.allreduce_(x.clone(), op=op),
                hvd.synchronize(hvd.allreduce_async(x, op=op, name=f"{op} {shape}")),
                hvd.synchronize(hvd.allreduce_async_(x.clone(), op=op)),
                *hvd.grouped_allreduce([x, x], op=op),
                *hvd.grouped_allreduce_([x.clone()], op=op),
                *hvd.synchronize(hvd.grouped_allreduce_async_([x.clone()], op=op)),
                *hvd.synchronize(hvd.grouped_allreduce_async([x], op=op)),
            ]
            for each in found:
                assert each.dtype == x.dtype
                np.testing.assert_array_equal(each.numpy(), wanted)
        assert torch.equal(x, before)
        mean = np.sum(parts.astype("float64"), axis=0) / comm.size
        wanted = np.trunc(mean).astype(dtype) if dtype[0] == "i" else mean
        tolerance = {"rtol": 1e-3 if dtype == "float16" else 1e-6, "atol": 1e-8}
        np.testing.assert_allclose(hvd.allreduce(x).numpy(), wanted, **tolerance)
        np.testing.assert_allclose(hvd.allreduce(x, average=True).numpy(), wanted, **tolerance)
        assert torch.equal(hvd.allreduce(x, average=False), hvd.allreduce(x, op=hvd.Sum))
        assert torch.equal(hvd.allreduce(x, average=0), hvd.allreduce(x, op=hvd.Sum))  # type: ignore[arg-type]
    small = torch.full((4,), 2, dtype=x.dtype)
    assert hvd.allreduce(small, op=hvd.Product).tolist() == [2**comm.size] * 4
    rounded = hvd.allreduce(torch.tensor([1 + 2**-13, 3.0]), compression=hvd.Compression.fp16)
    assert rounded.tolist() == [1.0, 3.0]
    x, parts = tensor(comm.rank, dtype, (17,)), np.stack([given(r, dtype, (17,)) for r in range(comm.size)])
    for first, second in ((0.25, 1.0), (1.0, 0.3), (1.5, 2.0)):
        found = hvd.allreduce(x, op=hvd.Sum, prescale_factor=first, postscale_factor=second).numpy()
        scaled = parts.astype("float64") * first
        if dtype[0] == "i":
            np.testing.assert_array_equal(found, np.trunc(np.trunc(scaled).sum(0) * second))
        else:
            np.testing.assert_allclose(found, scaled.sum(0) * second, rtol=2e-3)


@with_hvd()
def test_what_is_refused(comm: Communicator) -> None:
    for bad in (
        torch.ones(3, 2).t(),
        torch.ones(2, dtype=torch.uint8),
        torch.ones(2, dtype=torch.complex64),
        torch.eye(2).to_sparse(),
    ):
        with pytest.raises(ValueError, match=r"contiguous|not supported"):
            hvd.allreduce(bad)
    calls = {
        "supersedes average": lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum),
        "op is 17": lambda: hvd.allreduce(torch.ones(2), op=17),
        r"on meta; .* CUDA devices .* tensor\.cpu\(\)": lambda: hvd.allreduce(torch.ones(2, device="meta")),
    }
    refused(ValueError, calls)
    assert len({hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product}) == 6
    if comm.rank == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Sum)
        assert not hvd.poll(handle)
        refused(ValueError, {"same name": lambda: hvd.allreduce_async(torch.ones(2), name="x")})
    comm.barrier()
    if comm.rank != 0:
        handle = hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [comm.size] * 2


@with_hvd()
def test_two_threads_without_names(comm: Communicator) -> None:
    """Nothing orders their calls, so ranks could give one another the wrong tensors."""
    first = None
    if comm.rank == 0:
        first = hvd.allreduce_async(torch.ones(2))
        with (
            ThreadPoolExecutor(1) as other,
            pytest.raises(ValueError, match="rank 0: two threads.*the same name"),
        ):
            other.submit(hvd.allreduce, torch.ones(2)).result()
    comm.barrier()
    found = hvd.allreduce(torch.ones(2)) if first is None else hvd.synchronize(first)
    assert found.tolist() == [1.0] * 2
    with ThreadPoolExecutor(1) as other:  # one after the other
        assert other.submit(hvd.allreduce, torch.full((2,), float(comm.rank))).result().tolist() == [0.5] * 2


@with_hvd(3)
def test_gradients_of_reductions(comm: Communicator) -> None:
    """Backward is the same reduction of the gradients."""
    weight = [float(rank + 1) for rank in range(comm.size)]
    for op, wanted in ((hvd.Sum, sum(weight)), (hvd.Average, sum(weight) / comm.size)):
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        hvd.allreduce(x, op=op).backward(torch.full((3,), weight[comm.rank], dtype=torch.float64))
        torch.testing.assert_close(x.grad, torch.full((3,), wanted, dtype=torch.float64))
        xs = [torch.ones(2, k, dtype=torch.float64, requires_grad=True) for k in (1, 2)]
        outputs = hvd.grouped_allreduce(xs, op=op, prescale_factor=0.5)
        torch.autograd.backward(sum((weight[comm.rank] * each).sum() for each in outputs))
        for each in xs:
            torch.testing.assert_close(each.grad, torch.full_like(each, wanted / 2).detach())


@with_hvd(3)
def test_reducescatter(comm: Communicator) -> None:
    """Uneven rows, averages, factors and gradients."""
    for rows in (comm.size, 2 * comm.size + 1, 1):
        parts = [given(rank, "float64", (rows, 2)) for rank in range(comm.size)]
        shares = np.array_split(np.sum(parts, axis=0), comm.size)
        counts = [rows // comm.size + (rank < rows % comm.size) for rank in range(comm.size)]
        assert [len(share) for share in shares] == counts
        x = torch.from_numpy(parts[comm.rank]).requires_grad_(True)
        found = hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
        np.testing.assert_array_equal(found.detach().numpy(), shares[comm.rank] / 2)
        found.backward(torch.full_like(found, comm.rank + 1))
        whose = np.repeat(np.arange(comm.size) + 1.0, counts)[:, None] * np.ones((1, 2))
        np.testing.assert_allclose(x.grad.numpy(), whose * comm.size / 2)
        mean = hvd.grouped_reducescatter([x.detach(), x.detach() * 2])
        np.testing.assert_allclose(mean[0].numpy(), shares[comm.rank] / comm.size)
        np.testing.assert_allclose(mean[1].numpy(), 2 * shares[comm.rank] / comm.size)
    for tensor_, op in ((torch.tensor(1.0), hvd.Sum), (torch.ones(3), hvd.Adasum)):
        with pytest.raises(hvd.HorovodInternalError, match="Reducescatter"):
            hvd.reducescatter(tensor_, op=op)


@with_hvd(1, 3)
@pytest.mark.parametrize("dtype", ["uint8", "float16", "bool"])
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


@with_hvd(3)
def test_gradients_of_moves(comm: Communicator) -> None:
    """Of an allgather, the averaged gradient of this rank's rows; of a broadcast, all on the root."""
    mean = sum(range(1, comm.size + 1)) / comm.size
    x = torch.ones(comm.rank + 1, 2, dtype=torch.float64, requires_grad=True)
    joined = hvd.allgather(x)
    weight = torch.arange(joined.shape[0], dtype=torch.float64)[:, None]
    ((comm.rank + 1) * weight * joined).sum().backward()
    first = sum(range(1, comm.rank + 1))
    torch.testing.assert_close(x.grad, mean * weight[first : first + comm.rank + 1].expand(-1, 2))
    y = torch.ones(3, dtype=torch.float64, requires_grad=True)
    ((comm.rank + 1) * hvd.broadcast(y, 1)).sum().backward()
    assert y.grad.tolist() == [mean if comm.rank == 1 else 0] * 3
    z = torch.ones(2 * comm.size, dtype=torch.float64, requires_grad=True)
    splits = torch.full((comm.size,), 2, dtype=torch.int32)
    received, counts = hvd.alltoall(z, splits)
    assert counts.tolist() == [2] * comm.size
    (received * (comm.rank + 1)).sum().backward()
    assert z.grad.tolist() == [float(rank + 1) for rank in range(comm.size) for _ in range(2)]


@with_hvd(1, 3)
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
    wrong: Any
    for wrong in ([1.0] * comm.size, [float("inf")] * comm.size, torch.ones(comm.size)):
        with pytest.raises(ValueError, match="expected integers"):
            hvd.alltoall(torch.ones(comm.size), wrong)
    if comm.size > 1:
        refused(ValueError, {"without splits": lambda: hvd.alltoall(torch.ones(comm.size + 1))})


@with_hvd(1, 3)
def test_objects(comm: Communicator) -> None:
    root = comm.size - 1
    assert hvd.broadcast_object({"rank": comm.rank}, root) == {"rank": root}
    assert hvd.broadcast_object(lambda: 17, root, name="f")() == 17
    if comm.size > 1:  # what cannot be pickled is an error on all ranks, and the job goes on
        refused((TypeError, hvd.HorovodInternalError), {"pickle": lambda: hvd.broadcast_object(comm, root)})
        with pytest.raises((TypeError, hvd.HorovodInternalError), match="pickle"):
            hvd.allgather_object(comm if comm.rank == root else 1)
    assert hvd.allgather_object("x" * comm.rank, name="texts") == ["x" * rank for rank in range(comm.size)]
    hvd.barrier()


@with_hvd(3)
def test_process_sets(comm: Communicator) -> None:
    """Some ranks, with roots that are ranks of the job; operations of several sets at once."""
    ends, pair = hvd.add_process_set([2, 0]), hvd.add_process_set(hvd.ProcessSet([1, 2]))
    assert (ends.ranks, ends.process_set_id, pair.process_set_id) == ([0, 2], 1, 2)
    assert ends.included() == (comm.rank != 1)
    assert ends.size() == 2
    assert ends.rank() == {0: 0, 1: None, 2: 1}[comm.rank]
    refused(ValueError, {"have a process set already": lambda: hvd.add_process_set([0, 2])})
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
    one = torch.ones(1, dtype=torch.float32 if comm.rank else torch.float64)
    if comm.rank == 1:
        refused(ValueError, {"rank 1 is not part of": lambda: hvd.allreduce(one, process_set=ends)})
    else:
        refused(ValueError, {"root_rank is 1": lambda: hvd.broadcast(one, 1, process_set=ends)})
        with pytest.raises(hvd.HorovodInternalError, match="Mismatched data types"):
            hvd.allreduce(one, process_set=ends)
    assert hvd.remove_process_set(ends)
    assert ends.process_set_id is None
    assert not hvd.remove_process_set(ends)
    assert not hvd.remove_process_set(hvd.global_process_set)
    again = hvd.add_process_set([0, 2])
    if again.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=again).item() == 2
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3


def group_of(comm: Communicator) -> Any:
    """Of a communicator of the ranks that are even, or odd, as mpi4py has it."""

    class Group:
        def Get_size(self) -> int:  # noqa: N802
            return len(range(comm.rank % 2, comm.size, 2))

        def Translate_ranks(self, ranks: list[int], world: object) -> list[int]:  # noqa: N802
            return [comm.rank % 2 + 2 * rank for rank in ranks]

    return Group()


class FakeComm:
    """A communicator of mpi4py as far as process sets need one."""

    def __init__(self, group: Any) -> None:
        self.Get_group = lambda: group


COMM_WORLD: Any = FakeComm(None)
COMM_WORLD.Get_size = lambda: 3


@on_ranks(3)
def test_process_sets_of_communicators(comm: Communicator) -> None:
    """Each rank gives its own; those of all ranks are registered."""
    own = hvd.ProcessSet(FakeComm(group_of(comm)))
    hvd.init(process_sets=[own])
    assert own.ranks == ([1] if comm.rank == 1 else [0, 2])
    assert own.process_set_id == (2 if comm.rank == 1 else 1)
    text = f"ProcessSet(process_set_id={own.process_set_id}, ranks={own.ranks}, mpi_comm={own.mpi_comm})"
    assert str(own) == text
    found = hvd.allreduce(torch.tensor(comm.rank), op=hvd.Sum, process_set=own).item()
    assert found == (1 if comm.rank == 1 else 2)
    hvd.shutdown()
    refused(ValueError, {"list of process ranks": lambda: hvd.ProcessSet("ab")})
    part = [0, 2] if comm.rank != 1 else [1]  # whose ranks are not MPI's
    with pytest.raises(ValueError, match=f"the job has {len(part)} ranks, and MPI 3 processes"):
        hvd.init(comm=part, process_sets=[hvd.ProcessSet(FakeComm(group_of(comm)))])


@with_hvd()
def test_reductions_without_a_gradient(comm: Communicator) -> None:
    for op, name in ((hvd.Min, "min"), (hvd.Max, "max"), (hvd.Product, "product")):
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(NotImplementedError, match=f"op={name}"):
            hvd.allreduce(x, op=op).sum().backward()


@with_hvd()
def test_nothing_is_kept_of_operations_that_have_no_name(comm: Communicator) -> None:
    table: Any = hvd.global_process_set.operations()._pending
    for _ in range(3):
        hvd.allreduce(torch.ones(1))
        hvd.grouped_allreduce([torch.ones(1)] * 2)
    assert (len(table._counts), table.values()) == (0, [])


def assert_place(comm: Communicator) -> None:
    assert (hvd.rank(), hvd.size()) == (comm.rank, comm.size)
    assert (hvd.local_rank(), hvd.local_size()) == (comm.local_rank, comm.local_size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (comm.cross_rank, comm.cross_size)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == comm.size


BUILT = ("mpi_enabled", "gloo_enabled", "mpi_built", "gloo_built", "cuda_built", "is_homogeneous")


@on_ranks(1, (4, 2))
def test_joining_and_leaving(comm: Communicator) -> None:
    """Many times; with static process sets; with handles that nobody waits for; with a list of ranks that
    train apart from the others."""
    calls = [hvd.rank, hvd.size, hvd.local_rank, hvd.is_homogeneous, hvd.mpi_threads_supported]
    for call in (*calls, lambda: hvd.allreduce(torch.ones(1))):
        refused(ValueError, {"has not been initialized": call})
    handle = -1
    for _ in range(3):
        hvd.init()
        hvd.init()
        assert hvd.is_initialized()
        assert_place(comm)
        for name in BUILT:
            assert isinstance(getattr(hvd, name)(), bool), name
        assert not any((hvd.nccl_built(), hvd.ddl_built(), hvd.ccl_built(), hvd.rocm_built()))
        refused(ValueError, {"MPI is not enabled": hvd.mpi_threads_supported})
        handle = hvd.allreduce_async(torch.ones(1), name="nobody waits")
        hvd.barrier()
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        assert hvd.synchronize(handle) is None
    ranks = list(range(comm.size))
    for bad in ([[0], [0]], [ranks], [[0], [comm.size]]):
        with pytest.raises(ValueError, match=r"process set|expected ranks"):
            hvd.init(process_sets=[hvd.ProcessSet(each) for each in bad])
    own = hvd.ProcessSet([0])
    hvd.init(process_sets=[own] if comm.size > 1 else None)
    assert comm.size == 1 or own.process_set_id == 1
    assert os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") is None
    refused(ValueError, {"HOROVOD_DYNAMIC_PROCESS_SETS=1": lambda: hvd.add_process_set([0])})
    assert_place(comm)
    hvd.shutdown()
    refused(ValueError, {"different ranks": lambda: hvd.ProcessSet([1, 1])})
    assert multiring.is_initialized()  # the program's own world
    apart = ranks[comm.rank % 2 :: 2]
    hvd.init(comm=apart)
    assert hvd.size() == len(apart)
    assert hvd.allgather(torch.tensor([comm.rank])).tolist() == apart
    hvd.shutdown()
    refused(ValueError, {f"with {comm.rank} among them": lambda: hvd.init(comm=[comm.rank + 1])})
