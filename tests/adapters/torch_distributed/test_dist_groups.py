"""Process groups: how they are made, of which ranks, and how they end."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from multiring import Communicator
from multiring.torch_distributed import ProcessGroup
from tests.adapters.torch_distributed.support import TIMEOUT, numbers, shared_store, world
from tests.on_ranks import on_ranks


@on_ranks(3)
def test_groups_of_some_ranks(comm: Communicator) -> None:
    with world(comm):
        evens, pair, alone = dist.new_group([0, 2]), dist.new_group([1, 2]), dist.new_group([1])
        tensor = numbers((4,), comm.rank)
        for ranks, group in (([0, 2], evens), ([1, 2], pair), ([1], alone)):
            if comm.rank not in ranks:
                assert group == dist.GroupMember.NON_GROUP_MEMBER
                continue
            assert isinstance(group, ProcessGroup)
            assert dist.get_rank(group) == ranks.index(comm.rank)
            total = tensor.clone()
            dist.all_reduce(total, group=group)
            assert torch.equal(total, torch.stack([numbers((4,), rank) for rank in ranks]).sum(0))
            source = torch.full((2,), float(comm.rank))
            dist.broadcast(source, ranks[-1], group=group)  # by the job's number
            assert source.tolist() == [ranks[-1]] * 2
        if comm.rank in (1, 2):
            dist.destroy_process_group(pair)
        dist.all_reduce(tensor)  # the others go on


@on_ranks(4, (4, 2))
def test_enumerated_groups_a_mesh_and_local_synchronisation(comm: Communicator) -> None:
    with world(comm):
        mine, _ = dist.new_subgroups(2)
        tensor = torch.tensor([float(comm.rank)])
        dist.all_reduce(tensor, group=mine)
        assert tensor.item() == {0: 1, 1: 1, 2: 5, 3: 5}[comm.rank]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        tensor = torch.tensor([float(comm.rank)])
        dist.all_reduce(tensor, group=mesh["outer"].get_group())
        assert tensor.item() == {0: 2, 1: 4, 2: 2, 3: 4}[comm.rank]
        if comm.rank in (1, 3):  # the other ranks know nothing of this one
            local = dist.new_group([1, 3], use_local_synchronization=True)
            tensor = torch.tensor([float(comm.rank)])
            dist.all_reduce(tensor, group=local)
            assert tensor.item() == 4


def test_groups_of_two_backends_in_one_job(comm: Communicator) -> None:
    with world(comm):
        gloo, ours = dist.new_group(backend="gloo"), dist.new_group(backend="multiring")
        one, other = numbers((7,), comm.rank), numbers((7,), comm.rank)
        dist.all_reduce(one, group=gloo)
        dist.all_reduce(other, group=ours)
        assert torch.equal(one, other)
        assert dist.get_backend(ours) == "multiring"


def test_a_store_of_earlier_groups_serves_later_ones(comm: Communicator) -> None:
    # The names of the groups are the same again, and what the earlier ones have left is still there.
    with shared_store(comm) as store:
        for turn in range(3):
            dist.init_process_group("multiring", store=store, rank=comm.rank, world_size=2, timeout=TIMEOUT)
            group = dist.new_group([0, 1])
            tensor = torch.full((2,), float(turn + comm.rank))
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [2 * turn + 1] * 2
            dist.destroy_process_group()
