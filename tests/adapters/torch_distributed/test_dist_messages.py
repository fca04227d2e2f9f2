"""Sends and receives with tags, in any order and of any source."""

from __future__ import annotations

import torch
import torch.distributed as dist

from multiring import Communicator
from tests.adapters.torch_distributed.support import numbers, world
from tests.on_ranks import on_ranks

LARGE = 300_000  # elements: more than a mailbox holds, so a send waits for its receiver


def test_tags_are_matched_whatever_the_order(comm: Communicator) -> None:
    with world(comm):
        if comm.rank == 0:
            works = [dist.isend(numbers((size,), tag), 1, tag=tag) for tag, size in enumerate((3, LARGE, 5))]
            for work in works:
                work.wait()
        else:
            for tag, size in ((2, 5), (0, 3), (1, LARGE)):
                tensor = torch.empty(size)
                assert dist.recv(tensor, 0, tag=tag) == 0
                assert torch.equal(tensor, numbers((size,), tag))


def test_messages_with_one_tag_keep_their_order(comm: Communicator) -> None:
    with world(comm):
        works = []
        tensors = [
            torch.full((3,), float(index)) if comm.rank == 0 else torch.empty(3) for index in range(20)
        ]
        for tensor in tensors:
            works.append(dist.isend(tensor, 1) if comm.rank == 0 else dist.irecv(tensor, 0))
        for index, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
            work.wait()
            assert torch.equal(tensor, torch.full((3,), float(index)))


@on_ranks(3)
def test_any_source(comm: Communicator) -> None:
    with world(comm):
        if comm.rank > 0:
            dist.send(numbers((4,), comm.rank), 0, tag=comm.rank % 2)
            dist.send(numbers((4,), 10 + comm.rank), 0, tag=7)
        else:
            found = torch.empty(4)
            for tag, source in ((1, 1), (0, 2)):  # only one rank sends each
                assert dist.recv(found, tag=tag) == source
                assert torch.equal(found, numbers((4,), source))
            sources = set()
            for _ in range(2):
                source = dist.recv(found, tag=7)
                assert torch.equal(found, numbers((4,), 10 + source))
                sources.add(source)
            assert sources == {1, 2}
        dist.barrier()


@on_ranks(3)
def test_large_messages_in_a_circle_and_in_batches(comm: Communicator) -> None:
    after, before = (comm.rank + 1) % 3, (comm.rank + 2) % 3
    with world(comm):
        received = torch.empty(LARGE)
        operations = [
            dist.P2POp(dist.isend, numbers((LARGE,), comm.rank), after),
            dist.P2POp(dist.irecv, received, before),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(received, numbers((LARGE,), before))


def test_messages_pass_collectives(comm: Communicator) -> None:
    # A receive that waits does not keep the ranks from reducing meanwhile.
    with world(comm):
        tensor = torch.empty(4, 2)[:, 0]
        work = dist.irecv(tensor, 0) if comm.rank == 1 else None
        total = torch.ones(3)
        dist.all_reduce(total)
        assert torch.equal(total, torch.full((3,), 2.0))
        if work is None:
            dist.send(numbers((4,), 0), 1)
        else:
            work.wait()
            assert work.is_completed()
            assert torch.equal(tensor, numbers((4,), 0))


def test_every_kind_of_tensor_is_sent(comm: Communicator) -> None:
    kinds = [torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e5m2]
    with world(comm):
        for dtype in kinds:
            for tags in ((1, 2), (2, 1)):  # the second time what came first is put aside
                for tag in (1, 2) if comm.rank == 0 else tags:
                    base = torch.float32 if dtype == torch.float8_e5m2 else dtype
                    wanted = numbers((5,), tag, base).to(dtype)
                    if comm.rank == 0:
                        dist.send(wanted, 1, tag=tag)
                        continue
                    tensor = torch.empty(5, dtype=dtype)
                    dist.recv(tensor, 0, tag=tag)
                    assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8)), (dtype, tags)
