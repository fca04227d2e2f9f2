"""Operations of a process group that share memory run in the order of submission; tensors without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from multiring import Communicator
from tests.adapters.torch_distributed.support import with_world
from tests.on_ranks import refuses

_COUNT = 6


def _gaps(size: int) -> torch.Tensor:
    return torch.ones(size, 2).t()[0]


def _first(size: int) -> dict[str, Callable[[], tuple[Any, torch.Tensor, float]]]:
    """Operations that make a tensor: the work, the tensor, the value of its elements afterwards."""

    def scatter(tensor: torch.Tensor) -> Any:
        parts = [torch.ones(_COUNT)] * size if dist.get_rank() == 0 else None
        return dist.scatter(tensor, parts, 0, async_op=True)

    def all_to_all() -> Any:
        outputs = [torch.zeros(_COUNT) for _ in range(size)]
        return dist.all_to_all(outputs, [torch.ones(_COUNT)] * size, async_op=True), outputs[0], 1.0

    def all_gather() -> Any:
        outputs = [torch.zeros(_COUNT) for _ in range(size)]
        return dist.all_gather(outputs, torch.ones(_COUNT), async_op=True), outputs[-1], 1.0

    def single() -> Any:
        whole = torch.zeros(size, _COUNT)
        return dist.all_to_all_single(whole, torch.ones(size, _COUNT), async_op=True), whole[0], 1.0

    def reduce_scatter(tensor: torch.Tensor) -> Any:
        return dist.reduce_scatter_single(tensor, torch.ones(size * _COUNT), async_op=True)

    def made(start: Callable[[torch.Tensor], Any], tensor: torch.Tensor, value: float) -> Any:
        return lambda: (start(tensor), tensor, value)

    def all_reduce(tensor: torch.Tensor) -> Any:
        return dist.all_reduce(tensor, async_op=True)

    numbers = torch.view_as_complex(torch.ones(_COUNT, 2)).conj()
    return {
        "all_reduce": made(all_reduce, torch.ones(_COUNT), float(size)),
        "all_reduce with gaps": made(all_reduce, _gaps(_COUNT), float(size)),
        "all_reduce of negatives": made(all_reduce, numbers.imag, -float(size)),
        "scatter": made(scatter, torch.zeros(_COUNT), 1.0),
        "scatter with gaps": made(scatter, torch.zeros(_COUNT, 2)[:, 0], 1.0),
        "reduce_scatter with gaps": made(reduce_scatter, torch.zeros(_COUNT, 2)[:, 0], float(size)),
        "all_to_all": all_to_all,
        "all_gather": all_gather,
        "all_to_all_single": single,
    }


_Then = Callable[[], tuple[Any, Callable[[], torch.Tensor], float]]


def _then(size: int, x: torch.Tensor) -> dict[str, _Then]:
    """Operations that read a tensor: the work, where the result is, and the factor on the elements."""
    rank = dist.get_rank()

    def outputs(
        start: Callable[[list[torch.Tensor]], Any], factor: float = 1.0, root: int | None = None
    ) -> Any:
        rooms = [torch.zeros(_COUNT) for _ in range(size)]
        is_given = root is None or rank == root
        return lambda: (start(rooms if is_given else []), lambda: rooms[0] if is_given else x, factor)

    def single() -> Any:
        room = torch.zeros(size * _COUNT)
        return (
            dist.all_gather_single(room, x.contiguous() if x.is_neg() else x, async_op=True),
            lambda: room,
            1.0,
        )

    def reduce(root: int) -> Any:
        work = dist.reduce(x, root, async_op=True)
        return work, lambda: x, float(size) if rank == root else 1.0

    def reduce_scatter() -> Any:
        room = torch.zeros(_COUNT)
        return dist.reduce_scatter(room, [x] * size, async_op=True), lambda: room, float(size)

    return {
        "all_reduce": lambda: (dist.all_reduce(x, async_op=True), lambda: x, float(size)),
        "reduce to the first": lambda: reduce(0),
        "reduce to the last": lambda: reduce(size - 1),
        "all_gather": outputs(lambda rooms: dist.all_gather(rooms, x, async_op=True)),
        "gather": outputs(lambda rooms: dist.gather(x, rooms or None, 0, async_op=True), root=0),
        "all_to_all": outputs(lambda rooms: dist.all_to_all(rooms, [x] * size, async_op=True)),
        "reduce_scatter": reduce_scatter,
        "broadcast": lambda: (dist.broadcast(x, 0, async_op=True), lambda: x, 1.0),
        "all_gather_single": single,
    }


@with_world(2, 3)
def test_an_operation_on_the_output_of_a_pending_one(comm: Communicator) -> None:
    for first_name, first in _first(comm.size).items():
        for then_name in _then(comm.size, torch.ones(1)):
            for in_order in (True, False):
                # A new tensor in each round: those of the table are used up.
                work, tensor, value = _first(comm.size)[first_name]()
                if tensor.is_neg() and then_name == "all_gather_single":
                    work.wait()  # its input is copied by the test
                following, result, factor = _then(comm.size, tensor)[then_name]()
                for each in (work, following) if in_order else (following, work):
                    each.wait()
                expected = torch.full_like(result(), value * factor)
                assert torch.equal(result(), expected), (first_name, then_name, in_order)
        assert first is not None


@with_world()
def test_operations_that_share_memory_in_part(comm: Communicator) -> None:
    for _ in range(100):
        whole = torch.ones(200)
        twice = torch.ones(50)
        works = [
            dist.all_reduce(whole[:120], async_op=True),
            dist.all_reduce(whole[80:], async_op=True),
            dist.all_reduce_coalesced([twice, twice], async_op=True),
        ]
        for work in works:
            work.wait()
        assert whole.tolist() == [2.0] * 80 + [4.0] * 40 + [2.0] * 80
        assert twice.tolist() == [4.0] * 50


@with_world()
def test_one_tensor_twice_under_the_coalescing_manager(comm: Communicator) -> None:
    for _ in range(50):
        tensor = torch.ones(5)
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(tensor)
            dist.all_reduce(tensor)
        manager.wait()
        assert tensor.tolist() == [4.0] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@with_world()
def test_a_sparse_tensor_without_entries_twice_in_flight(comm: Communicator, dtype: torch.dtype) -> None:
    """It has no memory by which the second operation could be told from others."""
    dense = torch.tensor([0, 3 * comm.rank, 0], dtype=dtype)
    sparse = dense.to_sparse()
    assert sparse._nnz() == comm.rank
    works = [dist.all_reduce(sparse, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    assert sparse.to_dense().tolist() == [0, 12, 0]


@with_world()
def test_derived_tensors_of_dtypes_that_the_core_does_not_know(comm: Communicator) -> None:
    class Derived(torch.Tensor):
        pass

    for dtype in (torch.float8_e4m3fn, torch.complex64, torch.complex32):
        tensor = torch.full((3,), comm.rank + 1.0).to(dtype).as_subclass(Derived)
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor.as_subclass(torch.Tensor).to(torch.complex64), torch.full((3,), 2 + 0j))


@with_world()
def test_tensors_of_one_call_that_are_copied_keep_the_order(comm: Communicator) -> None:
    group: Any = dist.group.WORLD
    sparse = torch.eye(3).to_sparse()
    group.allreduce_coalesced([sparse, sparse]).wait()
    assert torch.equal(sparse.to_dense(), 4 * torch.eye(3))
    x = torch.full((2,), 1 + 1j)
    work = group.allreduce_coalesced([x, x.conj()])
    work.wait()
    assert x.tolist() == [4 + 4j] * 2
    assert work.result()[0] is x
    x, y, z = (torch.zeros(count, dtype=torch.complex64) for count in (4, 2, 1))
    x += torch.tensor([1j, 2j, 3j, 4j])
    group.reduce_scatter_tensor_coalesced([y, z], [x, y.conj()]).wait()
    assert y.tolist() == ([2j, 4j] if comm.rank == 0 else [6j, 8j])
    assert z.tolist() == ([-8j] if comm.rank == 0 else [-12j])
    rows = [[torch.zeros(2, dtype=torch.complex64) for _ in range(2)] for _ in range(2)]
    group.allgather_coalesced(rows, [y, rows[0][0].conj()]).wait()
    assert [row[0].tolist() for row in rows] == [[2j, 4j], [6j, 8j]]
    assert [row[1].tolist() for row in rows] == [[-2j, -4j]] * 2


@with_world()
def test_results_that_are_copied_later_keep_the_order(comm: Communicator) -> None:
    group: Any = dist.group.WORLD  # torch's own functions refuse conjugated numbers
    sparse = torch.eye(3).to_sparse()
    numbers = torch.view_as_complex(torch.full((4, 2), comm.rank + 1.0)).conj()
    works = [
        dist.all_reduce(sparse, async_op=True),
        dist.all_reduce(sparse, async_op=True),
        group.broadcast([numbers], 1),
        group.broadcast([numbers], 0),
    ]
    for work in reversed(works):
        work.wait()
    assert torch.equal(sparse.to_dense(), 4 * torch.eye(3))
    assert torch.equal(numbers, torch.full((4,), 2 - 2j))


@pytest.mark.parametrize("asynchronous", [False, True])
@with_world()
def test_a_barrier_ends_what_comes_before_it(comm: Communicator, asynchronous: bool) -> None:
    group: Any = dist.group.WORLD
    sparse, numbers = torch.eye(3).to_sparse(), torch.full((2,), 1 + 2j)
    dist.all_reduce(sparse, async_op=True)
    group.allreduce([numbers.conj()])
    rows = [torch.zeros(2, 3)[:, ::2] for _ in range(2)]
    dist.all_gather(rows, torch.ones(2, 2), async_op=True)
    work = dist.barrier(async_op=asynchronous)
    if asynchronous:
        work.wait()
    assert torch.equal(sparse.to_dense(), 2 * torch.eye(3))
    assert numbers.tolist() == [2 + 4j] * 2
    assert [row.tolist() for row in rows] == [[[1.0] * 2] * 2] * 2


@with_world()
def test_futures_of_tensors_that_were_made_in_inference_mode(comm: Communicator) -> None:
    group: Any = dist.group.WORLD
    for number in range(5):
        with torch.inference_mode():
            sparse, numbers = torch.eye(3).to_sparse(), torch.full((2,), 1 + 2j)
            is_late = comm.rank == number % 2
            if is_late:
                comm.barrier()  # the other rank has asked for its futures, which a thread completes
            works = [dist.all_reduce(sparse, async_op=True), group.allreduce([numbers.conj()])]
            futures = [work.get_future() for work in works]
            if not is_late:
                comm.barrier()
            for future in futures:
                future.wait()
            assert torch.equal(sparse.to_dense(), 2 * torch.eye(3))
            assert numbers.tolist() == [2 + 4j] * 2


@with_world()
def test_a_sparse_tensor_over_the_values_of_a_pending_operation(comm: Communicator) -> None:
    values = torch.ones(3)
    work = dist.all_reduce(values, async_op=True)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), values, (3,), check_invariants=False)
    dist.all_reduce(sparse)
    work.wait()
    assert sparse.to_dense().tolist() == [8.0, 0.0, 4.0]


@with_world()
def test_tensors_over_one_memory_of_numpy(comm: Communicator) -> None:
    group: Any = dist.group.WORLD
    memory = np.ones(24, np.float32)
    numbers = torch.view_as_complex(torch.from_numpy(memory).view(12, 2)).conj()
    works = [
        group.allreduce([numbers]),
        dist.all_reduce(torch.from_numpy(memory[8:]), async_op=True),
    ]
    for work in works:
        work.wait()
    assert memory.tolist() == [2.0] * 8 + [4.0] * 16


@with_world()
def test_a_message_sends_what_the_operation_before_it_has_made(comm: Communicator) -> None:
    for tensor in (torch.ones(40_000), torch.ones(5, 2)[:, 1]):
        work = dist.all_reduce(tensor, async_op=True)
        if comm.rank == 0:
            message = dist.isend(tensor, 1)
        else:
            got = torch.zeros(tensor.shape)
            message = dist.irecv(got, 0)
        message.wait()
        work.wait()
        if comm.rank == 1:
            assert (got == 2).all()


@contextlib.contextmanager
def _pending() -> Iterator[torch.Tensor]:
    """Yield the result of a functional collective that has not been waited for: threes, on two ranks."""
    yield functional.all_reduce(torch.full((4,), dist.get_rank() + 1.0), "sum", dist.group.WORLD)


@with_world()
def test_results_of_functional_collectives(comm: Communicator) -> None:
    for _ in range(5):
        with _pending() as x:
            dist.all_reduce(x)
            assert x.tolist() == [6.0] * 4
        with _pending() as x:
            outputs = [torch.zeros(4) for _ in range(2)]
            dist.all_gather(outputs, x)
            assert torch.cat(outputs).tolist() == [3.0] * 8
        with _pending() as x:
            dist.broadcast(x, 0)
            assert x.tolist() == [3.0] * 4
        with _pending() as x:
            got = torch.zeros(4)
            if comm.rank == 0:
                dist.send(x, 1)
                x.tolist()
            else:
                dist.recv(got, 0)
                assert got.tolist() == [3.0] * 4
                assert x.tolist() == [3.0] * 4


@with_world()
def test_tensors_without_memory_of_their_own(comm: Communicator) -> None:
    mesh = init_device_mesh("cpu", (2,))
    without = r"DTensor has no memory of its own: pass the array that it stands for, such as x\.to_local\(\)"
    for placement in (Shard(0), Replicate()):
        x = distribute_tensor(torch.ones(4), mesh, [placement])
        refuses(RuntimeError, without, lambda x=x: dist.all_reduce(x))
        refuses(RuntimeError, without, lambda x=x: dist.broadcast(x, 0))
        refuses(RuntimeError, without, lambda x=x: dist.all_gather([torch.zeros(4)] * 2, x))
        dist.all_reduce(x.to_local())
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    refuses(RuntimeError, "jagged tensor is not supported", lambda: dist.all_reduce(jagged))
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    refuses(RuntimeError, "its storage of 0 bytes", lambda: dist.all_reduce(freed))
    refuses(RuntimeError, "storage of size 0", lambda: dist.all_gather([torch.zeros(8)] * 2, freed))
    parameter = torch.nn.Parameter(torch.ones(3))
    dist.all_reduce(parameter)
    assert parameter.tolist() == [2.0] * 3

    class Plain(torch.Tensor):
        pass

    plain = torch.ones(3).as_subclass(Plain)
    dist.all_reduce(plain)
    assert plain.tolist() == [2.0] * 3


@with_world()
def test_elements_that_share_memory_cannot_hold_a_result(comm: Communicator) -> None:
    with pytest.raises(RuntimeError, match="elements of the output share memory"):
        dist.all_reduce(torch.ones(1).expand(4))
