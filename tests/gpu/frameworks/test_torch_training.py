"""Torch models on a device: gradients, state from a root, training that is what one process would do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import multiring.torch
from multiring import Communicator, UsageError
from tests.on_ranks import on_ranks


def _model(**where: Any) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 40), nn.Tanh(), nn.Linear(40, 3)).to(
        **where
    )


def _data(rank: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 20, generator=generator)
    return x, torch.randint(3, (16,), generator=generator)


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_averaged(comm: Communicator, dtype: torch.dtype) -> None:
    """The same bits as an allreduce of what this rank's backward pass makes without hooks."""
    plain, model = _model(device="cuda", dtype=dtype), _model(device="cuda", dtype=dtype)
    hooks = multiring.torch.register_gradient_hooks(model, comm=comm)
    with torch.cuda.stream(torch.cuda.Stream()):
        for step in range(
            4
        ):  # the second is compared over ranks, the order of buckets changes after the first
            x, y = (part.cuda() for part in _data(comm.rank, step))
            x = x.to(dtype)
            plain.zero_grad()
            model.zero_grad()
            _loss(plain, x, y).backward()
            torch.cuda._sleep(20_000_000)  # gradients come late
            _loss(model, x, y).backward()
            hooks.synchronize()
            for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
                assert expected.grad is not None
                assert parameter.grad is not None
                assert parameter.grad.is_cuda
                average = comm.allreduce(expected.grad.clone(), "average")
                assert torch.equal(parameter.grad, average)
    hooks.remove()


@on_ranks(2)
def test_gradients_that_are_edited_on_another_stream(comm: Communicator) -> None:
    """Between a backward pass in no_sync() and synchronize(): that sees what either stream has made."""
    model = _model(device="cuda")
    hooks = multiring.torch.register_gradient_hooks(model, comm=comm)
    x, y = (part.cuda() for part in _data(comm.rank))
    plain = _model(device="cuda")
    _loss(plain, x, y).backward()
    torch.cuda.synchronize()
    for factor in (1, 3):  # 1: there is no edit, and nothing but the hooks orders the streams
        model.zero_grad()
        making, editing = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(making), hooks.no_sync():
            loss = _loss(model, x, y)
            torch.cuda._sleep(50_000_000)  # gradients come late
            loss.backward()
        if factor != 1:
            editing.wait_stream(making)
        with torch.cuda.stream(editing):
            if factor != 1:
                torch.cuda._sleep(50_000_000)  # and so do their edits
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(factor)
            hooks.synchronize()
        for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert expected.grad is not None
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, comm.allreduce(expected.grad * factor, "average"))
    hooks.remove()


@on_ranks(2)
def test_refused_on_two_devices(comm: Communicator) -> None:
    model = _model(device="cuda")
    model[4].cpu()
    with pytest.raises(UsageError, match=r"'4\.weight' is on cpu, and parameter '0\.weight' on cuda:0"):
        multiring.torch.register_gradient_hooks(model, comm=comm)
    for parameter in model[4].parameters():
        parameter.requires_grad_(False)  # it may stay there
    multiring.torch.register_gradient_hooks(model, comm=comm).remove()


@on_ranks(2)
def test_training_is_that_of_one_process(comm: Communicator) -> None:
    model, alone = _model(device="cuda"), _model()
    if comm.rank == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    multiring.torch.broadcast_parameters(model, comm=comm)
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, comm
    )
    multiring.torch.broadcast_optimizer_state(optimizer, comm=comm)
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        optimizer.zero_grad()
        _loss(model, *(part.cuda() for part in _data(comm.rank, step))).backward()
        optimizer.step()
        reference.zero_grad()
        both = [_data(rank, step) for rank in range(comm.size)]
        _loss(alone, *(torch.cat(parts) for parts in zip(*both, strict=True))).backward()
        reference.step()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        np.testing.assert_allclose(mine.detach().cpu(), expected.detach(), rtol=1e-3, atol=1e-4)
        gathered = comm.allgather(mine.detach().reshape(1, -1))
        assert torch.equal(gathered[0], gathered[1])


class _Branches(nn.Module):
    """Takes a branch, so that ranks use different parameters; and has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(20)
        self.left, self.right, self.unused = nn.Linear(20, 3), nn.Linear(20, 3), nn.Linear(20, 3)

    def forward(self, x: torch.Tensor, go_left: bool) -> torch.Tensor:
        return self.left(self.norm(x)) if go_left else self.right(self.norm(x))


@on_ranks(2)
def test_parameters_that_one_rank_uses(comm: Communicator) -> None:
    torch.manual_seed(3)
    model = _Branches().cuda()
    hooks = multiring.torch.register_gradient_hooks(model, comm=comm)
    for step in range(3):
        x, y = (part.cuda() for part in _data(comm.rank, step))
        nn.functional.cross_entropy(model(x, comm.rank == 0), y).backward()
        hooks.synchronize()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == name.startswith("unused"), name
            if parameter.grad is not None:
                gathered = comm.allgather(parameter.grad.reshape(1, -1))
                assert torch.equal(gathered[0], gathered[1])
        if step == 1:  # what is kept is left as it is
            continue
        model.zero_grad()
    model.eval()
    x, _ = _data(0)
    model(x.cuda(), True)  # buffers are taken over
    gathered = comm.allgather(model.norm.running_mean.reshape(1, -1))
    assert torch.equal(gathered[0], gathered[1])
    hooks.remove()


@on_ranks(2)
def test_top_k_compression(comm: Communicator) -> None:
    """Works on the host: gradients are read from the device and written there."""
    model = _model(device="cuda")
    compression = multiring.TopK(0.5)
    hooks = multiring.torch.register_gradient_hooks(model, comm=comm, compression=compression)
    for step in range(2):
        model.zero_grad()
        _loss(model, *(part.cuda() for part in _data(comm.rank, step))).backward()
        hooks.synchronize()
        for parameter in model.parameters():
            assert parameter.grad is not None
            gathered = comm.allgather(parameter.grad.reshape(1, -1))
            assert torch.equal(gathered[0], gathered[1])
    hooks.remove()


@on_ranks(2)
def test_sync_batchnorm(comm: Communicator) -> None:
    """As over the whole batch in one process."""
    torch.manual_seed(3)
    layer = nn.BatchNorm1d(20).cuda()
    whole = nn.BatchNorm1d(20)
    synchronised = multiring.torch.convert_sync_batchnorm(layer, comm)
    x, _ = _data(comm.rank)
    x = x.cuda().requires_grad_()
    every = torch.cat([_data(rank)[0] for rank in range(comm.size)]).requires_grad_()
    (synchronised(x) ** 3).sum().backward()
    (whole(every) ** 3).sum().backward()
    assert x.grad is not None
    assert every.grad is not None
    mine = slice(16 * comm.rank, 16 * (comm.rank + 1))
    np.testing.assert_allclose(x.grad.cpu(), every.grad[mine], rtol=1e-3, atol=1e-4)
    assert isinstance(synchronised, nn.BatchNorm1d | multiring.torch.SyncBatchNorm)
    assert synchronised.running_var is not None
    assert whole.running_var is not None
    np.testing.assert_allclose(synchronised.running_var.cpu(), whole.running_var, rtol=1e-4)
