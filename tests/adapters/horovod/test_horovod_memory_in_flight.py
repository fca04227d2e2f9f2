"""Operations of Horovod's face for Torch that share memory run in the order of the calls."""

from __future__ import annotations

from typing import Any

import torch

import multiring.horovod.torch as hvd
from multiring import Communicator
from tests.adapters.horovod.support import with_hvd


@with_hvd()
def test_one_tensor_in_place_twice(comm: Communicator) -> None:
    for number in range(30):
        x = torch.ones(50)
        handles = [hvd.allreduce_async_(x, op=hvd.Sum, name=f"{number}.{which}") for which in "ab"]
        handles.append(hvd.grouped_allreduce_async_([x, x[10:]], op=hvd.Sum, name=f"{number}.c"))
        for handle in reversed(handles):
            hvd.synchronize(handle)
        assert x.tolist() == [8.0] * 10 + [16.0] * 40


@with_hvd()
def test_adasum_of_a_tensor_in_flight(comm: Communicator) -> None:
    def adasum(x: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(x.clone(), op=hvd.Adasum)

    for number in range(5):
        start = torch.tensor([1.0, 2.0 + comm.rank, -1.0])
        expected = 2 * adasum(adasum(start))  # both ranks have the same then
        x = start.clone()
        first = hvd.allreduce_async_(x, op=hvd.Adasum, name=f"{number}.first")
        second = hvd.allreduce_async_(x, op=hvd.Adasum, name=f"{number}.second")
        third = hvd.allreduce_async_(x, op=hvd.Sum, name=f"{number}.third")
        gathered = hvd.allgather_async(x, name=f"{number}.fourth")
        for handle in (third, second, first):
            hvd.synchronize(handle)
        assert torch.equal(x, expected)
        assert torch.equal(hvd.synchronize(gathered), expected.repeat(2))


@with_hvd()
def test_what_the_library_copies_at_the_call(comm: Communicator) -> None:
    values = torch.ones(3)
    handle = hvd.allreduce_async_(values, op=hvd.Sum)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), values, (3,), check_invariants=False)
    result: Any = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)()
    hvd.synchronize(handle)
    assert result.to_dense().tolist() == [8.0, 0.0, 4.0]
    x = torch.ones(4)
    handle = hvd.allreduce_async_(x, op=hvd.Sum)
    reduced = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)
    hvd.synchronize(handle)
    assert reduced.tolist() == [4.0] * 4


@with_hvd()
def test_adasum_waits_for_those_that_read(comm: Communicator) -> None:
    """The ranks submit in other orders: the earlier operation of one is the later one of the other."""
    for number in range(5):
        start = torch.tensor([1.0, 2.0 + comm.rank, -1.0])
        combined = hvd.allreduce(start.clone(), op=hvd.Adasum)
        x, other = start.clone(), start.clone()

        def read(x: torch.Tensor = x, number: int = number) -> int:
            return hvd.allreduce_async(x, name=f"{number}.read")

        def write(x: torch.Tensor, number: int = number) -> int:
            return hvd.allreduce_async_(x, name=f"{number}.write", op=hvd.Adasum)

        handles = [read(), write(x)] if comm.rank == 0 else [write(other), read()]
        for handle in reversed(handles):
            found = hvd.synchronize(handle)
            if handle == handles[comm.rank]:
                assert found.tolist() == [1.0, 2.5, -1.0]
            else:
                assert torch.equal(found, combined)
