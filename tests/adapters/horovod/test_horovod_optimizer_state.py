"""State of optimizers that is broadcast through Horovod's API, and optimizers of sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multiring.horovod.torch as hvd
from multiring import Communicator
from tests.adapters.horovod.support import with_hvd

STEPS = 4


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.5),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=0.1, t0=0),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1),
}


@with_hvd()
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_a_fresh_optimizer(comm: Communicator, kind: str) -> None:
    """It steps as if nothing had been broadcast, gradients are left alone, and a rank that has state loses
    it: the root has none."""
    wrapped, plain = (nn.Embedding(4, 3, sparse=kind == "SparseAdam") for _ in range(2))
    plain.load_state_dict(hvd.broadcast_object(plain.state_dict()))
    wrapped.load_state_dict(plain.state_dict())
    optimizer, expected = KINDS[kind](wrapped.parameters()), KINDS[kind](plain.parameters())
    if comm.rank == 1:
        take_step(optimizer, wrapped(torch.tensor([0])).sum())
        optimizer.zero_grad()
        wrapped.load_state_dict(plain.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert wrapped.weight.grad is None
    for _ in range(2):
        for model, its in ((wrapped, optimizer), (plain, expected)):
            take_step(its, (model(torch.tensor([1, 3])) ** 2).sum())
    assert wrapped.weight.tolist() == plain.weight.tolist()


@with_hvd()
@pytest.mark.parametrize("options", [{"sparse_as_dense": True}, {"groups": 1}], ids=["as dense", "group"])
def test_sparse_gradients_come_back_sparse(comm: Communicator, options: Any) -> None:
    model, reference = (nn.Embedding(8, 3, sparse=True).double() for _ in range(2))
    reference.load_state_dict(hvd.broadcast_object(reference.state_dict()))
    model.load_state_dict(reference.state_dict())
    inner = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **options)
    alone = torch.optim.SparseAdam(list(reference.parameters()), lr=0.1)
    for step in range(STEPS):
        rows = [torch.tensor([step % 3, step % 3 + rank]) for rank in range(comm.size)]
        take_step(optimizer, (model(rows[comm.rank]) ** 2).sum())
        take_step(alone, torch.stack([(reference(each) ** 2).sum() for each in rows]).mean())
        assert model.weight.grad is not None
        assert model.weight.grad.is_sparse
        used = sorted({*rows[0].tolist(), *rows[1].tolist()})
        assert model.weight.grad.coalesce().indices().tolist() == [used]
    torch.testing.assert_close(model.weight, reference.weight, rtol=1e-12, atol=1e-14)
