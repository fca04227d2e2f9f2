"""What trains over process groups, against Gloo in the same job: the same values; and how groups are made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from multiring import Communicator
from multiring.torch_distributed import ProcessGroup
from tests.adapters.torch_distributed.support import (
    TIMEOUT,
    numbers,
    shared_store,
    with_world,
)

Build = Callable[[torch.nn.Module, Any], torch.nn.Module]


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, turn: int) -> None:
    generator = torch.Generator().manual_seed(100 * turn + rank)
    optimizer.zero_grad()
    model(torch.randn(5, 6, generator=generator)).square().mean().backward()
    optimizer.step()


def _trained(build: Build, group: Any, steps: int = 3) -> list[torch.Tensor]:
    model = build(_model(), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for turn in range(steps):
        _step(model, optimizer, dist.get_rank(), turn)
    return [_whole(parameter).detach() for parameter in model.parameters()]


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _same_as_gloo(run: Callable[[Any], list[Any]]) -> None:
    """Two addends have one sum, so two ranks give the same bits whatever adds them."""
    for one, other in zip(run(dist.group.WORLD), run(dist.new_group(backend="gloo")), strict=True):
        assert torch.equal(one, other), f"{one} is not {other}"


def _compare(build: Build) -> None:
    _same_as_gloo(lambda group: _trained(build, group))


def _same_as_ddp(build: Build) -> None:
    """It averages, and does not add up only."""
    theirs = _trained(_parallel, dist.group.WORLD)
    for one, other in zip(_trained(build, dist.group.WORLD), theirs, strict=True):
        torch.testing.assert_close(one, other)


def _parallel(model: torch.nn.Module, group: Any, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=group, **options)


@with_world(2)
def test_distributed_data_parallel(comm: Communicator) -> None:
    options = {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True, "static_graph": True}
    for each in ({}, options, {"find_unused_parameters": True}):
        _compare(partial(_parallel, **each))


@with_world()
def test_hooks_of_distributed_data_parallel(comm: Communicator) -> None:
    def hooked(hook: Any, state: Callable[[Any], Any]) -> Build:
        def build(model: torch.nn.Module, group: Any) -> torch.nn.Module:
            parallel = _parallel(model, group)
            parallel.register_comm_hook(state(group), hook)
            return parallel

        return build

    _compare(hooked(default_hooks.allreduce_hook, lambda group: group))
    _compare(hooked(default_hooks.fp16_compress_hook, lambda group: group))
    few = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 0.5}
    state = partial(powerSGD_hook.PowerSGDState, **few)
    _compare(hooked(powerSGD_hook.powerSGD_hook, state))


@with_world()
def test_gradients_that_accumulate_and_uneven_inputs(comm: Communicator) -> None:
    def run(group: Any) -> list[Any]:
        model = _parallel(_model(), group)
        with model.no_sync():
            model(numbers((2, 6), comm.rank)).sum().backward()
        model(numbers((3, 6), 5 + comm.rank)).sum().backward()
        with Join([model]):
            for turn in range(2 + comm.rank):
                model(numbers((2, 6), 10 * turn + comm.rank)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    _same_as_gloo(run)


@with_world(2)
def test_fully_sharded(comm: Communicator) -> None:
    def sharded(model: torch.nn.Module, group: Any) -> torch.nn.Module:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in (model[0], model[2]):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    _compare(sharded)
    _same_as_ddp(sharded)


@with_world(4, (4, 2))
def test_sharded_and_replicated(comm: Communicator) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _same_as_ddp(lambda model, _: fully_shard(model, mesh=mesh))


@with_world()
def test_sparse_gradients_of_an_embedding(comm: Communicator) -> None:
    def run(group: Any) -> list[Any]:
        torch.manual_seed(5)
        layers = torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2)
        model = _parallel(torch.nn.Sequential(*layers), group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            words = [[0, 1, 1], [1, 2, 8], [8, 8, 3]] if comm.rank else [[step, 4]]
            model(torch.tensor(words)).square().sum().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    _same_as_gloo(run)


@with_world(3)
def test_distributed_tensors(comm: Communicator) -> None:
    mesh = init_device_mesh("cpu", (3,))
    whole = numbers((7, 5), 0)
    rows = distribute_tensor(whole, mesh, [Shard(0)])  # 3, 3 and 1 rows
    assert rows.to_local().shape[0] == (3, 3, 1)[comm.rank]
    assert torch.equal(rows.full_tensor(), whole)
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.to_local(), whole.tensor_split((2, 4), 1)[comm.rank])
    assert torch.equal(columns.redistribute(mesh, [Replicate()]).to_local(), whole)
    assert (rows.sum().full_tensor() - whole.sum()).abs() == 0
    product = distribute_tensor(whole.t().contiguous(), mesh, [Shard(1)]) @ rows
    assert torch.equal(product.full_tensor(), whole.t() @ whole)


@with_world()
def test_an_optimizer_without_redundancy(comm: Communicator) -> None:
    def run(group: Any) -> list[Any]:
        model = _parallel(_model(), group)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.1)
        for turn in range(3):
            _step(model, optimizer, comm.rank, turn)
        optimizer.consolidate_state_dict(0)
        return [parameter.detach() for parameter in model.parameters()]

    _same_as_gloo(run)


@with_world()
def test_functional_collectives(comm: Communicator) -> None:
    group = dist.group.WORLD
    tensor = numbers((4, 2), comm.rank)
    total = numbers((4, 2), 0) + numbers((4, 2), 1)
    assert torch.equal(functional.all_reduce(tensor, "avg", group), total / 2)
    rows = functional.all_to_all_single(tensor, None, None, group)
    assert torch.equal(rows, torch.cat([numbers((4, 2), rank).chunk(2)[comm.rank] for rank in range(2)]))
    assert torch.equal(functional.broadcast(tensor, 1, group), numbers((4, 2), 1))
    one, other = functional.all_reduce_coalesced([tensor, tensor + 1], "sum", group)
    assert torch.equal(one, total)
    assert torch.equal(other, total + 2)


@with_world()
def test_functional_collectives_into_a_tensor(comm: Communicator) -> None:
    """As Inductor emits them for FSDP, over our group and over Gloo's."""
    ops: Any = torch.ops._c10d_functional
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        tensor, name = numbers((4, 2), comm.rank), group.group_name
        whole = torch.empty(8, 2)
        found = ops.wait_tensor(ops.all_gather_into_tensor_out(tensor, 2, name, out=whole))
        assert found.data_ptr() == whole.data_ptr()
        assert torch.equal(whole, torch.cat([numbers((4, 2), rank) for rank in range(2)]))
        if group is dist.group.WORLD:  # Gloo's is not there in every release
            part = torch.empty(2, 2)
            ops.wait_tensor(ops.reduce_scatter_tensor_out(tensor, "sum", 2, name, out=part))
            total = numbers((4, 2), 0) + numbers((4, 2), 1)
            assert torch.equal(part, total.chunk(2)[comm.rank])


@with_world()
def test_tensor_parallel(comm: Communicator) -> None:
    mesh = init_device_mesh("cpu", (2,))
    alone, shared = _model(), _model()
    parallelize_module(shared, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    inputs = numbers((5, 6), 0)
    outputs = [alone(inputs), shared(inputs)]
    torch.testing.assert_close(outputs[1], outputs[0])
    for output in outputs:
        output.square().sum().backward()
    for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(_whole(other.grad), one.grad)


@with_world()
def test_compiled_collectives(comm: Communicator) -> None:
    def step(tensor: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(tensor * 2, "sum", dist.group.WORLD)
        rows = functional.all_gather_tensor(total + 1, 0, dist.group.WORLD)
        return functional.reduce_scatter_tensor(rows, "sum", 0, dist.group.WORLD)

    tensor = numbers((4, 3), comm.rank)
    # "aot_eager" traces as every backend does, and needs no compiler.
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(tensor), step(tensor))
    total = sum(numbers((4, 3), rank) * 2 for rank in range(2))
    assert torch.equal(compiled(tensor), (total + 1) * 2)
    torch._dynamo.reset()


@with_world(3)
def test_groups_of_some_ranks(comm: Communicator) -> None:
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


@with_world(4, (4, 2))
def test_enumerated_groups_a_mesh_and_local_synchronisation(comm: Communicator) -> None:
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
