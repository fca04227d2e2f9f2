"""Adasum, and batch normalisation over ranks, by Horovod's names."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import multiring.horovod.torch as hvd
from multiring import Communicator
from tests.adapters.horovod.support import with_hvd
from tests.on_ranks import on_ranks, same_everywhere


def combined(parts: list[Any]) -> Any:
    """Adasum as the paper has it: pairs of halves, by recursion."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    a, b = combined(parts[:half]), combined(parts[half:])
    dot = float(np.vdot(a, b))
    return (1 - dot / (2 * np.vdot(a, a))) * a + (1 - dot / (2 * np.vdot(b, b))) * b


def part(rank: int, seed: int = 0) -> Any:
    return np.random.default_rng(10 * seed + rank).normal(size=(5, 3)) + 0.5


@on_ranks(1, 4)
@with_hvd
def test_adasum(comm: Communicator) -> None:
    """One by one and in a group, whose tensors are combined apart; equal parts stay what they are."""
    every = [[part(rank, seed) for rank in range(comm.size)] for seed in (1, 2)]
    mine = [torch.from_numpy(each[comm.rank]) for each in every]
    found = hvd.allreduce(mine[0], op=hvd.Adasum)
    np.testing.assert_allclose(found.numpy(), combined(every[0]), rtol=1e-12)
    for each, parts in zip(hvd.grouped_allreduce(mine, op=hvd.Adasum), every, strict=True):
        np.testing.assert_allclose(each.numpy(), combined(parts), rtol=1e-12)
    same = torch.from_numpy(part(0))
    np.testing.assert_allclose(hvd.allreduce_(same.clone(), op=hvd.Adasum).numpy(), part(0), rtol=1e-12)
    assert not hvd.allreduce(torch.zeros(3), op=hvd.Adasum).any()


@on_ranks(3)
@with_hvd
def test_where_adasum_is_refused(comm: Communicator) -> None:
    with pytest.raises(NotImplementedError, match="non-power of 2"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    pair = hvd.add_process_set([0, 1])
    if pair.included():
        with pytest.raises(NotImplementedError, match="non-global process sets"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum, process_set=pair)


@on_ranks(4)
@with_hvd
def test_adasum_optimizer(comm: Communicator) -> None:
    """The changes that the ranks' own steps make are combined."""
    torch.manual_seed(1)
    model = nn.Linear(5, 3, bias=False).double()
    copies = [copy.deepcopy(model) for _ in range(comm.size)]
    inner = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in copies]
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(own, model.named_parameters(), op=hvd.Adasum)
    assert type(optimizer).__name__ == "SGD"
    for step in range(3):
        inputs = [torch.from_numpy(part(rank, step).T.copy()) for rank in range(comm.size)]
        before = copies[0].weight.detach().clone()
        for each, other, x in zip(copies, inner, inputs, strict=True):
            other.zero_grad()
            each(x).square().mean().backward()
            other.step()
        change = combined([(each.weight.detach() - before).numpy() for each in copies])
        with torch.no_grad():
            for each in copies:
                each.weight.copy_(before + torch.from_numpy(change))
        optimizer.zero_grad()
        model(inputs[comm.rank]).square().mean().backward()
        optimizer.step()
        torch.testing.assert_close(model.weight, copies[0].weight, rtol=1e-11, atol=1e-13)
    assert same_everywhere(comm, model.weight.tolist())


@on_ranks(3)
@with_hvd
def test_batch_normalisation(comm: Communicator) -> None:
    """Like one layer with the batches of all ranks."""
    layer = hvd.SyncBatchNorm(3, eps=1e-3, momentum=0.2).double()
    whole = nn.BatchNorm1d(3, eps=1e-3, momentum=0.2).double()
    parts = [torch.from_numpy(part(rank)) for rank in range(comm.size)]
    output, wanted = layer(parts[comm.rank]), whole(torch.cat(parts))
    torch.testing.assert_close(output, wanted[5 * comm.rank : 5 * comm.rank + 5])
    torch.testing.assert_close(layer.running_var, whole.running_var)
