"""Gradient hooks that send only the largest entries, and gradients that cross hosts in half precision."""

from __future__ import annotations

import pytest
import torch

import multiring.torch
from multiring import Communicator, TopK
from multiring.errors import UsageError
from tests.adapters.torch.support import SMALL, expected, gradients_of, make_model, squares
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


def test_a_parameter_group_that_is_added_keeps_what_was_kept_back(comm: Communicator) -> None:
    model = make_model()
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD(model[2:].parameters(), lr=0.2), model, comm, compression=TopK(0.1), **SMALL
    )
    for step in range(4):
        if step == 2:
            before = {name: kept.clone() for name, kept in optimizer.residuals().items()}
            optimizer.add_param_group({"params": list(model[:2].parameters())})
            after = optimizer.residuals()
            assert set(before) <= set(after)
            assert all(torch.equal(after[name], kept) for name, kept in before.items())
        optimizer.zero_grad()
        squares(model, comm.rank).backward()
        optimizer.step()
    assert same_everywhere(comm, [p.detach().numpy().tobytes() for p in model.parameters()])
    optimizer.remove()
