"""Messages between ranks: tags, any source, batches, and a rank's own."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import multiring
from multiring import Communicator
from tests.adapters.torch_distributed.support import TIMEOUT, numbers, shared_store, with_world, world
from tests.on_ranks import on_ranks, refuses

LARGE = 300_000  # elements: more than a mailbox holds, so a send waits for its receiver


@with_world()
def test_tags_are_matched_whatever_the_order(comm: Communicator) -> None:
    """Messages with one tag keep their order."""
    sent = [(tag, numbers((size,), tag)) for tag, size in enumerate((3, LARGE, 5))]
    sent += [(3, torch.full((3,), float(index))) for index in range(20)]
    if comm.rank == 0:
        for work in [dist.isend(tensor, 1, tag=tag) for tag, tensor in sent]:
            work.wait()
        return
    for tag in (2, 0, 1):
        tensor = torch.empty_like(sent[tag][1])
        assert dist.recv(tensor, 0, tag=tag) == 0
        assert torch.equal(tensor, sent[tag][1])
    tensors = [torch.empty(3) for _ in range(20)]
    works = [dist.irecv(tensor, 0, tag=3) for tensor in tensors]
    for index, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        work.wait()
        assert torch.equal(tensor, torch.full((3,), float(index)))


@with_world()
def test_a_message_leaves_when_it_is_there(comm: Communicator) -> None:
    """As one on a device, which is copied to the host first."""
    messenger = dist.group.WORLD._messenger  # type: ignore[union-attr]
    for to in (1, 0):
        tensor, received = torch.zeros(3), torch.empty(3)
        works = [dist.irecv(received, 0, tag=4)] if comm.rank == to else []
        if comm.rank == 0:
            copy = mock.Mock(wait=lambda seconds, check, x=tensor, value=5.0 + to: x.fill_(value))
            works.append(messenger.send(tensor, copy, to, 4))
        for work in works:
            work.wait()
        assert comm.rank != to or torch.equal(received, torch.full((3,), 5.0 + to))


@with_world(3)
def test_any_source(comm: Communicator) -> None:
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


@with_world(3)
def test_any_source_of_several_that_send_at_once(comm: Communicator) -> None:
    """What was not received waits in its place, beside collectives and messages of other tags."""
    found = torch.empty(LARGE)
    if comm.rank == 0:
        sources = {dist.recv(found, tag=1)}
        total = torch.ones(3)
        dist.all_reduce(total)
        assert torch.equal(total, torch.full((3,), 3.0))
        short = torch.empty(2)
        assert dist.recv(short, 2, tag=2) == 2
        assert dist.recv(short, 1, tag=2) == 1
        sources.add(dist.recv(found, tag=1))
        assert sources == {1, 2}
    else:
        works = [dist.isend(numbers((LARGE,), comm.rank), 0, tag=1), dist.isend(torch.ones(2), 0, tag=2)]
        dist.all_reduce(torch.ones(3))
        for work in works:
            work.wait()
    dist.barrier()


@on_ranks(3)
def test_any_source_and_a_rank_that_leaves(comm: Communicator) -> None:
    with shared_store(comm) as store:
        dist.init_process_group("multiring", store=store, rank=comm.rank, world_size=3, timeout=TIMEOUT)
        if comm.rank == 0:
            tensors = [torch.empty(4) for _ in range(3)]
            works = [dist.irecv(tensor) for tensor in tensors[:2]]
            assert works[0]._source_rank() == 2
            comm.barrier()  # rank 2 has left
            refuses(multiring.TimeoutError, "any rank", works[1].wait, timedelta(seconds=0.2))
            comm.barrier()  # rank 1 sends
            assert works[1]._source_rank() == 1
            assert dist.recv(tensors[2], 1, tag=5) == 1
            assert torch.equal(torch.stack(tensors), torch.stack([numbers((4,), rank) for rank in (2, 1, 6)]))
            dist.send(tensors[0], 1)
            # All that could send have left.
            refuses(multiring.PeerLostError, r"process group '0'", dist.recv, tensors[0])
        elif comm.rank == 1:
            comm.barrier()
            comm.barrier()
            dist.send(numbers((4,), 1), 0)
            dist.send(numbers((4,), 6), 0, tag=5)
            dist.recv(torch.empty(4), 0)
        else:
            dist.send(numbers((4,), 2), 0)
            dist.destroy_process_group()
            comm.barrier()
            comm.barrier()
            return
        dist.destroy_process_group()


@with_world(2)
def test_receives_that_are_posted_one_after_the_other(comm: Communicator) -> None:
    """While the first one waits, others are added; a message to oneself ends one of any source."""
    if comm.rank == 0:
        tensors = [torch.empty(3) for _ in range(4)]
        works = [
            dist.irecv(tensors[0], 0, tag=1),
            dist.irecv(tensors[1], tag=2),
            dist.irecv(tensors[2], 1, tag=3),
        ]
        dist.isend(torch.full((3,), 1.0), 0, tag=1)
        dist.isend(torch.full((3,), 2.0), 0, tag=2)
        for work in works[:2]:
            work.wait()
        comm.barrier()
        works.append(dist.irecv(tensors[3], tag=4))
        for work in works:
            work.wait()
        assert torch.equal(torch.stack(tensors)[:, 0], torch.tensor([1.0, 2.0, 3.0, 4.0]))
    else:
        comm.barrier()
        dist.send(torch.full((3,), 4.0), 0, tag=4)
        dist.send(torch.full((3,), 3.0), 0, tag=3)


@with_world(3)
def test_large_messages_in_a_circle_and_in_batches(comm: Communicator) -> None:
    after, before = (comm.rank + 1) % 3, (comm.rank + 2) % 3
    received = torch.empty(LARGE)
    operations = [
        dist.P2POp(dist.isend, numbers((LARGE,), comm.rank), after),
        dist.P2POp(dist.irecv, received, before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(received, numbers((LARGE,), before))


@with_world(1, 2)
def test_messages_to_oneself(comm: Communicator) -> None:
    sent, received = numbers((3,), comm.rank), [torch.empty(3) for _ in range(3)]
    works = [dist.irecv(received[0], comm.rank, tag=1), dist.isend(sent, comm.rank, tag=1)]
    works.append(dist.isend(sent + 1, comm.rank, tag=2))
    works.append(dist.irecv(received[1], tag=2))  # from any source
    assert works[3]._source_rank() == comm.rank
    operations = [dist.P2POp(dist.irecv, received[2], comm.rank), dist.P2POp(dist.isend, sent + 2, comm.rank)]
    for work in works + dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(torch.stack(received), torch.stack([sent, sent + 1, sent + 2]))
    work = dist.irecv(torch.empty(2), comm.rank)
    dist.isend(sent, comm.rank)
    refuses(multiring.MismatchError, "sent 3 elements", work.wait)


@with_world()
def test_messages_pass_collectives(comm: Communicator) -> None:
    # A receive that waits does not keep the ranks from reducing meanwhile.
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


@pytest.mark.parametrize("size", [3, LARGE])
def test_a_message_that_cannot_be_taken(comm: Communicator, size: int) -> None:
    """No thread ends in silence: all receives of the group end, on all ranks."""
    with world(comm), mock.patch.object(torch, "from_numpy", side_effect=MemoryError("none left")):
        dist.barrier()
        if comm.rank == 0:
            waiting = dist.irecv(torch.empty(2), 1, tag=7)
            works = [dist.irecv(torch.empty(2), 1, tag=8)]
            for work in [waiting, *works]:
                refuses(multiring.InternalError, "rank 0 cannot receive the message.*MemoryError", work.wait)
            refuses(multiring.MultiringError, "MemoryError", dist.irecv(torch.empty(2), 1, tag=9).wait)
        else:
            refuses(multiring.MultiringError, "MemoryError", _sends_until_it_fails, size)
        comm.barrier()


def _sends_until_it_fails(size: int) -> None:
    dist.send(torch.ones(size), 0, tag=1)  # which nobody receives
    while True:
        dist.send(torch.ones(2), 0, tag=2)


@with_world()
def test_a_message_of_another_size(comm: Communicator) -> None:
    if comm.rank == 0:
        dist.send(torch.ones(2), 1)
        comm.barrier()
    else:
        refuses(RuntimeError, "rank 0 .*float32", dist.recv, torch.ones(3), 0)
        comm.barrier()
