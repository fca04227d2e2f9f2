"""Torch's own ways to train on several ranks, over process groups with tensors on a device: as one process
would, and with the bits of single allreduces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from multiring import Communicator
from tests.adapters.torch_distributed.support import with_world
from tests.gpu.late_tensors import (
    Place,
    expect_normalised_together,
    loss_of,
    make_batch,
    make_net,
    on_devices,
)
from tests.on_ranks import same_everywhere


def _trains_like_one_process(comm: Communicator, on: Place, parallel: nn.Module) -> None:
    """In steps on a stream of the program's own, whose gradients come late."""
    alone = make_net("cpu")
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    on.settle()
    with on.own_stream():
        for step in range(5):
            optimizer.zero_grad()
            loss = loss_of(parallel, make_batch(comm.rank, step, on.device))
            on.busy()
            loss.backward()
            optimizer.step()
            reference.zero_grad()
            loss_of(alone, torch.cat([make_batch(rank, step, "cpu") for rank in range(comm.size)])).backward()
            reference.step()
        found = [_whole(parameter).detach().cpu() for parameter in parallel.parameters()]
    for mine, expected in zip(found, alone.parameters(), strict=True):
        torch.testing.assert_close(mine, expected.detach(), rtol=1e-9, atol=1e-12)
    assert same_everywhere(comm, [each.tolist() for each in found])


def _whole(parameter: Any) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


PARALLEL: dict[str, dict[str, Any]] = {
    "as it is": {},
    "in many buckets": {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True, "static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
}


@with_world()
@on_devices(1, 2, 3)
@pytest.mark.parametrize("options", PARALLEL)
def test_distributed_data_parallel(comm: Communicator, options: str, device: str) -> None:
    model = make_net(device)
    if comm.rank == 1:
        nn.init.zeros_(model[0].weight)
    _trains_like_one_process(comm, Place(device), DistributedDataParallel(model, **PARALLEL[options]))


def _late_average(group: Any, bucket: Any) -> Any:
    """A hook whose future has late work in it."""

    def divide(future: Any) -> torch.Tensor:
        buffer: torch.Tensor = future.value()[0]
        Place(buffer.device.type).busy()
        return buffer.div_(dist.get_world_size(group))

    return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(divide)


@with_world()
@on_devices(2)
def test_hooks_of_distributed_data_parallel(comm: Communicator, device: str) -> None:
    """The bits of allreduces of what a backward pass makes without them."""
    on = Place(device)
    hooks: list[tuple[Any, torch.dtype]] = [
        (lambda group, bucket: _late_average(group, bucket), torch.float32),  # torch reads annotations
        (default_hooks.fp16_compress_hook, torch.float16),
    ]
    for hook, kind in hooks:
        plain = make_net(device, torch.float32)
        parallel = DistributedDataParallel(make_net(device, torch.float32), bucket_cap_mb=0.01)
        parallel.register_comm_hook(dist.group.WORLD, hook)
        on.settle()
        with on.own_stream():
            for step in range(3):
                plain.zero_grad()
                parallel.zero_grad()
                x = make_batch(comm.rank, step, device, torch.float32)
                loss_of(plain, x).backward()
                loss_of(parallel, x).backward()
                for mine, own in zip(parallel.parameters(), plain.parameters(), strict=True):
                    assert mine.grad is not None
                    assert own.grad is not None
                    expected = own.grad.to(kind)
                    if kind == torch.float16:  # it divides before
                        dist.all_reduce(expected.div_(comm.size))
                    else:
                        dist.all_reduce(expected)
                        expected.div_(comm.size)
                    assert torch.equal(mine.grad, expected.to(mine.grad.dtype)), f"{hook} step {step}"


@with_world()
@on_devices(1, 2, 3)
def test_fully_sharded(comm: Communicator, device: str) -> None:
    model = make_net(device)
    mesh = DeviceMesh.from_group(dist.group.WORLD, device)
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    _trains_like_one_process(comm, Place(device), fully_shard(model, mesh=mesh))


@with_world(2)
def test_batch_normalisation_of_torch(comm: Communicator) -> None:
    """That of torch.nn, which takes tensors on devices alone."""
    with torch.cuda.stream(torch.cuda.Stream()):
        expect_normalised_together(comm, nn.SyncBatchNorm(6).double().cuda(), "cuda")
