"""Process groups of torch.distributed with tensors on a device: what they give on the CPU, whatever streams
make and read the tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from multiring import Communicator
from multiring.errors import UsageError
from tests.adapters.torch_distributed.support import TIMEOUT, shared_store, with_world
from tests.gpu.late_tensors import Place, assert_same, on_devices
from tests.on_ranks import on_ranks, refuses

R = dist.ReduceOp
# As torch 2.13 calls them, or as versions before do.
all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
Tensors = list[torch.Tensor]
Case = Callable[[Communicator, Place], Tensors]


def _reductions(comm: Communicator, on: Place) -> Tensors:
    asked = [
        (torch.float32, R.SUM),
        (torch.float32, R.AVG),
        (torch.float16, R.MAX),
        (torch.bfloat16, R.SUM),
        (torch.float64, R.PRODUCT),
        (torch.int32, R.AVG),
        (torch.int64, R.BXOR),
        (torch.uint8, R.MIN),
        (torch.bool, R.BOR),
        (torch.complex64, R.SUM),
        (torch.float32, dist._make_nccl_premul_sum(0.5)),
    ]
    tensors = [on.given((5, 3), comm.rank, dtype) for dtype, _ in asked]
    for tensor, (_, op) in zip(tensors, asked, strict=True):
        dist.all_reduce(tensor, op)
    tensors.append(on.given((300_000,), comm.rank))
    dist.all_reduce(tensors[-1])
    tensors.append(on.given((5, 3), comm.rank))
    dist.reduce(tensors[-1], comm.size - 1)
    return tensors


def _asynchronous(comm: Communicator, on: Place) -> Tensors:
    """Small ones may run together; waited for in another order."""
    tensors = [on.given((1 + 997 * index,), comm.rank) for index in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    polled = dist.all_reduce(tensors[0], async_op=True)
    while not polled.is_completed():
        pass
    assert polled.is_success()
    return tensors


def _views(comm: Communicator, on: Place) -> Tensors:
    """With gaps, and with other elements than their memory has."""
    turned = on.given((3, 4), comm.rank).t()
    dist.all_reduce(turned)
    strided = on.given((4, 6), comm.rank)
    dist.broadcast(strided[:, ::2], comm.size - 1)
    memory = torch.complex(on.room(4), on.given((4,), comm.rank))
    negated = memory.conj().imag
    dist.all_reduce(negated)
    conjugated = on.given((4,), comm.rank, torch.complex64).conj()
    dist.group.WORLD.allreduce([conjugated]).wait()  # type: ignore[union-attr]
    joined = on.room(3, 4 * comm.size).t()
    all_gather_single(joined, on.given((3, 4), comm.rank).t().contiguous())
    part = on.room(3, 4).t()[:2]
    reduce_scatter_single(part, on.given((2 * comm.size, 3), comm.rank))
    return [turned, strided, memory, negated, conjugated, joined, part]


def _moves(comm: Communicator, on: Place) -> Tensors:
    """Of dtypes that the core knows, of one that travels as bytes, and complex numbers."""
    size, last, found = comm.size, comm.size - 1, []
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.bool,
        torch.uint16,
        torch.complex64,
        torch.float8_e5m2,
    ):
        room, given = partial(on.room, dtype=dtype), partial(on.given, dtype=dtype)
        tensor = given((2, 3), comm.rank)
        dist.broadcast(tensor, last)
        apart = [room(2, 3) for _ in range(size)]
        dist.all_gather(apart, given((2, 3), comm.rank))
        rows = list(room(2 * size, 3).chunk(size))
        dist.all_gather(rows, given((2, 3), comm.rank))
        single = room(2 * size, 3)
        all_gather_single(single, given((2, 3), comm.rank))
        gathered = [room(2, 3) for _ in range(size)] if comm.rank == last else []
        dist.gather(given((2, 3), comm.rank), gathered or None, dst=last)
        received = room(2, 3)
        dist.scatter(
            received, [given((2, 3), r) for r in range(size)] if comm.rank == last else None, src=last
        )
        exchanged = room(size, 3)
        dist.all_to_all_single(exchanged, given((size, 3), comm.rank))
        found += [tensor, *apart, *rows, single, *gathered, received, exchanged]
    return found


def _unequal_parts(comm: Communicator, on: Place) -> Tensors:
    counts = [4, 1, 2][: comm.size]
    gathered = [on.room(count) for count in counts]
    dist.all_gather(gathered, on.given((counts[comm.rank],), comm.rank))
    inputs = list(on.given((sum(counts),), comm.rank).split(counts))
    block = on.room(counts[comm.rank])
    dist.reduce_scatter(block, inputs)
    outputs = [on.room(counts[comm.rank]) for _ in counts]
    dist.all_to_all(outputs, [each.clone() for each in inputs])
    sent = [comm.rank + to + 1 for to in range(comm.size)]
    received = on.room(sum(sent), 2)
    dist.all_to_all_single(received, on.given((sum(sent), 2), comm.rank), sent, sent)
    return [*gathered, block, *outputs, received]


def _reduced_parts(comm: Communicator, on: Place) -> Tensors:
    """Also where input and output share memory, as FSDP passes them."""
    size, rank = comm.size, comm.rank
    block, rows = on.room(2, 2), on.given((2 * size, 2), rank)
    dist.reduce_scatter(block, [each.clone() for each in rows.chunk(size)])
    single = on.room(2, 2)
    reduce_scatter_single(single, rows, R.AVG)
    reduce_scatter_single(rows.chunk(size)[rank], rows)
    whole = on.given((2 * size, 3), rank)
    all_gather_single(whole, whole.chunk(size)[rank])
    return [block, single, rows.chunk(size)[rank], whole]


def _coalesced(comm: Communicator, on: Place) -> Tensors:
    tensors = [on.given((3,), comm.rank), on.given((4, 2), comm.rank)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    wholes, blocks = [on.room(3 * comm.size), on.room(comm.size)], [on.room(3), on.room(1)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for whole in wholes:
            all_gather_single(whole, on.given((whole.numel() // comm.size,), comm.rank))
    manager.wait()
    with dist._coalescing_manager():
        for block in blocks:
            reduce_scatter_single(block, on.given((block.numel() * comm.size,), comm.rank))
    return [*tensors, *wholes, *blocks]


def _messages(comm: Communicator, on: Place) -> Tensors:
    """Short and long ones, with gaps, from any rank, to the rank itself."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    own = on.room(3)
    pending = [dist.irecv(own, comm.rank, tag=9), dist.isend(on.given((3,), comm.rank), comm.rank, tag=9)]
    received = [on.room(5), on.room(4, 6)[:, ::2], on.room(100_000), on.room(2, dtype=torch.bfloat16)]
    if comm.size > 1:
        sent = [on.given(tuple(each.shape), comm.rank, each.dtype) for each in received]
        operations = [dist.P2POp(dist.isend, tensor, after) for tensor in sent]
        operations += [dist.P2POp(dist.irecv, tensor, before) for tensor in received]
        pending += dist.batch_isend_irecv(operations)
        anything = on.room(4)
        pending.append(dist.isend(on.given((4,), comm.rank), after, tag=3))
        assert dist.recv(anything, tag=3) == before
        received.append(anything)
    for work in pending:
        work.wait()
    return [own, *received]


def _functional(comm: Communicator, on: Place) -> Tensors:
    """Through torch's own operators, which wait for each tensor by itself."""
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    gather: Any = getattr(functional, "all_gather_single", functional.all_gather_tensor)
    scatter: Any = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)
    total = functional.all_reduce(on.given((4,), comm.rank), "sum", group)
    whole = gather(on.given((2, 3), comm.rank), 0, group)
    block = scatter(on.given((2 * comm.size, 3), comm.rank), "sum", 0, group)
    return [functional.wait_tensor(each) for each in (total, whole, block)]


CASES: dict[str, Case] = {
    "reductions": _reductions,
    "asynchronous": _asynchronous,
    "views": _views,
    "moves": _moves,
    "unequal parts": _unequal_parts,
    "reduced parts": _reduced_parts,
    "coalesced": _coalesced,
    "messages": _messages,
    "functional": _functional,
}


@with_world()
@on_devices(1, 2, 3)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_tensors_on_the_host(comm: Communicator, name: str, device: str) -> None:
    """Complete when `wait` returns: they are read on a stream that waits for nothing."""
    host, on = Place("cpu"), Place(device)
    expected = CASES[name](comm, host)
    with on.own_stream():
        found = CASES[name](comm, on)
        with on.own_stream():
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert_same(one, other, on, f"{name} {number}")


@with_world()
@on_devices(2)
def test_inputs_that_are_let_go_of(comm: Communicator, device: str) -> None:
    """Their memory, and that of copies, is used again at once."""
    on, count = Place(device), 70_000
    with on.own_stream():
        for turn in range(10):
            wholes = [[on.room(count) for _ in range(comm.size)] for _ in range(3)]
            works = []
            for part, whole in enumerate(wholes):
                values = torch.full((2 * count,), 10.0 * turn + part + comm.rank, device=device)[::2]
                works.append(dist.all_gather(whole, values, async_op=True))
                del values
                for _ in range(4):
                    torch.full((2 * count,), -1.0, device=device)
            for part, (work, whole) in enumerate(zip(works, wholes, strict=True)):
                work.wait()
                with on.own_stream():
                    for rank, each in enumerate(whole):
                        assert (each.cpu() == 10.0 * turn + part + rank).all()


@with_world()
@on_devices(2)
def test_tensors_are_written_to_at_once_afterwards(comm: Communicator, device: str) -> None:
    """On another stream: nothing of the operation, or of its copies, comes later."""
    on = Place(device)
    with on.own_stream():
        for _ in range(10):
            tensor, turned = on.given((50_000,), comm.rank), on.given((200, 100), comm.rank).t()
            whole = [on.room(50_000) for _ in range(comm.size)]
            works = [dist.all_reduce(turned, async_op=True), dist.all_gather(whole, tensor, async_op=True)]
            for work in works:
                work.wait()
            with on.own_stream():
                for each in (tensor, turned, *whole):
                    each.fill_(7.0)
                on.busy()
                assert all((each.cpu() == 7.0).all() for each in (tensor, turned, *whole))


@with_world()
@on_devices(1, 2)
def test_what_follows_on_a_future_is_ordered(comm: Communicator, device: str) -> None:
    """A function that gives its stream late work; a future that waits for another one in it."""
    on = Place(device)
    for has_ended in (False, True):
        with on.own_stream():
            tensor, other = on.given((1000,), comm.rank), on.given((1000,), 5 + comm.rank)
            work = dist.all_reduce(tensor, async_op=True)
            beside = dist.all_reduce(other, async_op=True).get_future()
            if has_ended:
                work.wait()

            def doubled(future: Any, beside: Any = beside) -> torch.Tensor:
                on.busy()
                return future.value()[0] * 2 + beside.wait()[0]

            total = work.get_future().then(doubled).wait()
            expected = [Place("cpu").given((1000,), first + comm.rank) for first in (0, 5)]
            for each in expected:
                dist.all_reduce(each)
            assert_same(total, 2 * expected[0] + expected[1], on)


@with_world()
@on_devices(2)
def test_a_device_here_and_the_host_there(comm: Communicator, device: str) -> None:
    on = Place(device if comm.rank == 0 else "cpu")
    for name in ("reductions", "moves", "reduced parts"):
        expected = CASES[name](comm, Place("cpu"))
        for one, other in zip(CASES[name](comm, on), expected, strict=True):
            assert_same(one, other, on, name)


@with_world()
@on_devices(2)
def test_objects_and_barriers(comm: Communicator, device: str) -> None:
    group: Any = dist.group.WORLD
    assert distributed_c10d._get_object_coll_device(group) == "cpu"
    assert torch.device(device).type in distributed_c10d._device_capability(group)
    assert not group._get_backend(torch.device(device)).supports_splitting
    found: list[Any] = [None] * comm.size
    dist.all_gather_object(found, {"rank": comm.rank})
    assert found == [{"rank": rank} for rank in range(comm.size)]
    listed = [torch.ones(2, device=device), "text"] if comm.rank == 0 else [None, None]
    dist.broadcast_object_list(listed, src=0)
    assert_same(listed[0], torch.ones(2), Place(device))
    dist.barrier(device_ids=[0])
    group.monitored_barrier()


@on_ranks(2)
def test_a_group_that_is_bound_to_a_device(comm: Communicator) -> None:
    with shared_store(comm) as store:
        where = {"store": store, "rank": comm.rank, "world_size": comm.size}
        dist.init_process_group("multiring", timeout=TIMEOUT, device_id=torch.device("cuda", 0), **where)
        try:
            tensor = torch.full((3,), 1.0, device="cuda")
            dist.all_reduce(tensor, group=dist.new_group([0, 1]))
            assert tensor.tolist() == [2.0] * 3
            dist.barrier()
        finally:
            dist.destroy_process_group()


@with_world(2)
def test_refused_on_a_device(comm: Communicator) -> None:
    sparse = torch.eye(3, device="cuda").to_sparse()
    refuses(UsageError, r"sparse tensor on cuda:0 .*tensor\.cpu", dist.all_reduce, sparse)
    refuses(UsageError, "sparse", dist.broadcast, sparse, 0)
    refuses(UsageError, "share memory", dist.all_reduce, torch.ones(1, device="cuda").expand(3))
    tensor = torch.ones(2, device="cuda")
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]


@with_world(2)
def test_while_a_stream_is_captured(comm: Communicator) -> None:
    """The capture goes on, and so does the group."""
    x = torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        for call in (dist.all_reduce, dist.broadcast, dist.isend, dist.irecv):
            refuses(
                UsageError,
                "is being captured into a graph",
                call,
                x,
                *([] if call is dist.all_reduce else [0]),
            )
    graph.replay()
    assert y.tolist() == [2.0, 2.0]
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]
