"""Gradient hooks that send only the largest entries, and gradients that cross hosts in half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import multiring.torch
from multiring import Communicator, TopK
from multiring.errors import UsageError
from tests.adapters.torch.support import SMALL, draw, expected, gradients_of, make_model, squares
from tests.on_ranks import same_everywhere

STEPS = 6


def test_what_is_kept_back_comes_later(comm: Communicator) -> None:
    """The same gradients step after step: what has been received in all, and what is kept on average over the
    ranks, is all of them. Parameters are frozen, and thawed again, meanwhile."""
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL, compression=TopK(0.2))
    wanted = expected(comm, squares)
    names = [name for name, _ in model.named_parameters()]
    received = [torch.zeros_like(parameter) for parameter in model.parameters()]
    steps = [0] * len(names)
    frozen = names.index("2.weight")
    for step in range(STEPS):
        list(model.parameters())[frozen].requires_grad_(step % 3 != 2)
        model.zero_grad()
        if step == 1:  # in two passes
            with hooks.no_sync():
                (0.25 * squares(model, comm.rank)).backward()
            (0.75 * squares(model, comm.rank)).backward()
        else:
            squares(model, comm.rank).backward()
        for index, gradient in enumerate(gradients_of(model)):
            if gradient is not None:
                received[index] += gradient
                steps[index] += 1
        if step == 2:  # as a checkpoint is taken up, while a parameter is frozen
            state = {name: kept.clone() for name, kept in hooks.residuals().items()}
            hooks.remove()
            hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL, compression=TopK(0.2))
            with pytest.raises(UsageError, match=r"'2.weight' with 3 elements .* has 64 elements"):
                hooks.load_residuals({names[frozen]: torch.zeros(3)})
            hooks.load_residuals(state)
    assert steps == [STEPS - 2 if index == frozen else STEPS for index in range(len(names))]
    for index, name in enumerate(names):
        kept = hooks.residuals()[name].clone()
        assert kept.abs().sum() > 0, name
        comm.allreduce(kept, "average", out=kept)
        total = received[index] + kept.reshape(received[index].shape)
        torch.testing.assert_close(total, steps[index] * wanted[index], rtol=1e-12, atol=1e-14)
    hooks.remove()


def train(comm: Communicator, **options: Any) -> tuple[float, float]:
    """Loss of a wrapped optimizer before and after; a parameter group is added meanwhile."""
    model = make_model()
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD(model[2:].parameters(), lr=0.2), model, comm, **SMALL, **options
    )
    inputs = draw(comm.rank, 32)
    losses = []
    for step in range(60):
        if step == 5:
            before = optimizer.residuals()
            optimizer.add_param_group({"params": list(model[:2].parameters())})
            assert set(before) == set(optimizer.residuals())
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :3].sin())
        loss.backward()
        optimizer.step()
        losses.append(float(comm.allreduce(loss.detach().reshape(1), "average")))
    bits = [p.detach().numpy().tobytes() for p in model.parameters()]
    assert same_everywhere(comm, bits)
    optimizer.remove()
    return losses[0], losses[-1]


def test_a_wrapped_optimizer_learns(comm: Communicator) -> None:
    start, dense = train(comm)
    _, sparse = train(comm, compression=TopK(0.1))
    assert dense < 0.7 * start
    assert sparse < dense + 0.1 * (start - dense), (start, dense, sparse)
