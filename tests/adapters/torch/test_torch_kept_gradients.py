"""Reduced gradients that the program keeps are its own: no later round writes to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multiring.torch
from multiring import Communicator
from multiring.errors import MismatchError
from tests.adapters.torch.support import (
    Loss,
    assert_same_weights,
    bits,
    check_steps,
    draw,
    expected,
    register,
    squares,
    wrap,
)
from tests.on_ranks import all_raise, on_ranks, same_everywhere


class _Halves(torch.autograd.Function):
    """A sum whose gradients are views of one buffer, which was written to."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        buffer = torch.empty(2, *gradient.shape, dtype=gradient.dtype)
        buffer[0], buffer[1] = gradient, gradient
        return buffer[0], buffer[1]


class Joined(nn.Module):
    """Weights that are joined to one, so that their gradients are views of one memory."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.first = nn.Parameter(torch.randn(3, 6, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(3, 6, dtype=torch.float64))
        self.last = nn.Linear(6, 2).double()
        self.head = nn.Linear(2, 2).double()

    def forward(self, x: Tensor, *, with_head: bool = True) -> Tensor:
        if self.how == "cat":
            weight = torch.cat([self.first, self.second])
        elif self.how == "stack":
            weight = torch.stack([self.first, self.second]).view(6, 6)
        else:
            weight = _Halves.apply(self.first, self.second).repeat(2, 1)  # type: ignore[no-untyped-call]
        y: Tensor = self.last(torch.tanh(x @ weight))
        return self.head(y) if with_head else y


def first_loss(model: nn.Module, rank: int) -> Tensor:
    return (model(draw(rank)) ** 2).mean()


def second_loss(model: nn.Module, rank: int) -> Tensor:
    """Only the last rank's batch has something for the head."""
    return model(draw(rank + 10), with_head=rank == 1).sin().mean()


def surgery(model: nn.Module, backward: Callable[[Loss], None], combine: Callable[[Any, Any], Any]) -> None:
    """Two losses whose gradients are kept, and put together to the gradients of the step."""
    parameters = list(model.parameters())
    found = []
    for loss in (first_loss, second_loss):
        model.zero_grad()
        backward(loss)
        found.append([p.grad for p in parameters])
    for p, one, two in zip(parameters, *found, strict=True):
        p.grad = combine(one, two)


def linear(one: Tensor, two: Tensor) -> Tensor:
    return 0.5 * one + 2.0 * two


def project(one: Tensor, two: Tensor) -> Tensor:
    """PCGrad: each without what it has against the other."""
    product = (one * two).sum().clamp(max=0)
    return one - product / (two * two).sum() * two + two - product / (one * one).sum() * one


@pytest.mark.parametrize("combine", [linear, project])
@pytest.mark.parametrize("how", ["cat", "stack", "function"])
@pytest.mark.parametrize("wraps", [True, False])
def test_gradient_surgery(
    comm: Communicator, how: str, combine: Callable[[Any, Any], Any], wraps: bool
) -> None:
    model, alone = Joined(how), Joined(how)
    plain = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer: Any = plain
    if wraps:
        optimizer = wrap(plain, model, comm, check_every=1)
    else:
        register(model, comm, check_every=1)
    reference = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)

    def over_all(loss: Loss) -> None:
        total = sum(loss(alone, rank) for rank in range(comm.size)) / comm.size
        torch.autograd.backward(total)  # type: ignore[arg-type]

    for _ in range(4):
        surgery(model, lambda loss: torch.autograd.backward(loss(model, comm.rank)), combine)
        optimizer.step()
        surgery(alone, over_all, combine)
        reference.step()
        assert_same_weights(model, alone)
    assert same_everywhere(comm, bits(model.parameters()))


@on_ranks(3)
def test_what_is_kept_stays_as_it_is(comm: Communicator) -> None:
    """Whatever the next rounds are: each of them reduces other gradients, in other plans of the buckets."""
    model = Joined("cat")
    register(model, comm)
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(8):
        model.zero_grad()
        model.head.requires_grad_(step not in (3, 4))
        torch.autograd.backward((second_loss if step % 2 else first_loss)(model, comm.rank))
        kept += [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
        for gradient, value in kept:
            assert torch.equal(gradient, value)


@on_ranks(3)
def test_a_memory_that_the_program_has_given(comm: Communicator) -> None:
    """All gradients in one flat tensor: they stay there, and are averaged there."""
    model = Joined("cat")
    wanted = expected(comm, first_loss, lambda: Joined("cat"))
    register(model, comm)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    views = [
        v.view_as(p) for p, v in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True)
    ]
    for _ in range(3):
        flat.zero_()
        for p, view in zip(parameters, views, strict=True):
            p.grad = view
        torch.autograd.backward(first_loss(model, comm.rank))
        assert all(p.grad is view for p, view in zip(parameters, views, strict=True))
        torch.testing.assert_close(flat, torch.cat([w.flatten() for w in wanted]), rtol=1e-12, atol=1e-14)


def freeze_in_turns(model: nn.Sequential, step: int) -> None:
    model[0].requires_grad_(step % 3 != 1)
    model[4].requires_grad_(step % 3 != 2)


def test_parts_frozen_in_turns_keep_their_buckets(comm: Communicator) -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) if k % 2 == 0 else nn.Tanh() for k in range(5))).double()
    multiring.torch.broadcast_parameters(model, comm=comm)
    reference = copy.deepcopy(model)
    hooks = register(model, comm, check_every=1)
    reducers = []
    for step in range(9):
        freeze_in_turns(model, step)
        freeze_in_turns(reference, step)
        check_steps(model, squares, expected(comm, squares, lambda: copy.deepcopy(reference)), comm, steps=1)
        reducers.append(hooks._gradients.reducer)
    assert len(set(map(id, reducers))) == 3


@all_raise(MismatchError, "do not agree about the parameters of the model")
def test_other_parts_frozen_on_another_rank(comm: Communicator) -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) if k % 2 == 0 else nn.Tanh() for k in range(5))).double()
    multiring.torch.broadcast_parameters(model, comm=comm)
    register(model, comm)
    for step in (0, 1, 2, 0, 1 + comm.rank):
        freeze_in_turns(model, step)
        torch.autograd.backward(squares(model, comm.rank))
