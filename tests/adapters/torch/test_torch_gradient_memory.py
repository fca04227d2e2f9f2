"""Where gradients of Torch are averaged: in autograd's memory, or in their slots."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multiring import Communicator
from multiring.errors import UsageError
from multiring.gradients.states import GradientState
from multiring.torch import GradientHooks, counts
from tests.adapters.torch.support import (
    assert_gradients,
    backward,
    bits,
    check_steps,
    draw,
    expected,
    explode,
    gradients_of,
    make_model,
    register,
    squares,
)
from tests.on_ranks import on_ranks, same_everywhere


def slots_of(hooks: GradientHooks) -> list[int]:
    reducer = hooks._gradients.reducer
    return [reducer.slot(index).ctypes.data for index in range(len(reducer.specs))]


def addresses_of(model: nn.Module) -> list[int]:
    return [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]


@on_ranks(3)
def test_gradients_never_lie_in_slots(comm: Communicator) -> None:
    """Whether the program keeps them or not: they are its own, and remain when hooks are removed."""
    model = make_model()
    hooks = register(model, comm)
    wanted = expected(comm, squares)
    before: list[int] = []
    for step in range(5):
        backward(model, comm.rank, keep=step >= 2)
        assert_gradients(model, wanted, comm)
        addresses = addresses_of(model)
        assert not set(addresses) & set(slots_of(hooks))
        assert step < 3 or addresses == before
        before = addresses
    kept = bits(gradients_of(model))
    hooks.remove()
    hooks.remove()
    assert bits(gradients_of(model)) == kept
    backward(model, comm.rank)
    own = expected(comm, lambda model, _: squares(model, comm.rank))
    torch.testing.assert_close(gradients_of(model), own, rtol=1e-12, atol=1e-14)


class _Shared(torch.autograd.Function):
    """Its gradients are views of one memory, which the rest of the backward pass reads as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient.view_as(gradient), gradient.view_as(gradient)


@on_ranks(3)
def test_gradients_that_share_memory(comm: Communicator) -> None:
    """What autograd still needs for other gradients is not averaged under its hands."""
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(40, dtype=torch.float64)) for _ in range(4)])

    def loss(model: Any, rank: int) -> Tensor:
        x = draw(rank, 7)[0].repeat(7)[:40]
        for weight in model:
            x = _Shared.apply(x, weight)  # type: ignore[no-untyped-call]
        return (x**2).sum()

    wanted = expected(comm, loss, lambda: copy.deepcopy(model))
    register(model, comm, bucket_bytes=1, first_bucket_bytes=1)
    check_steps(model, loss, wanted, comm, steps=3)


@on_ranks(3)
def test_gradients_of_a_failed_pass_are_not_kept(comm: Communicator) -> None:
    """After a failed backward pass gradients have to be new ones, or they would be what still arrives."""
    model = make_model()
    hooks = register(model, comm)
    wanted = expected(comm, squares)
    for keeps in (False, True):
        loss = (model[1:](explode(model[0](draw(comm.rank)))) ** 2).mean()
        with pytest.raises(ArithmeticError, match="exploded"):
            torch.autograd.backward(loss)
        reducer = hooks._gradients.reducer
        assert GradientState.SENT in {reducer.state(index) for index in range(len(reducer.specs))}
        model.zero_grad(set_to_none=not keeps)
        if keeps:
            with pytest.raises(
                UsageError, match=r"call zero_grad\(set_to_none=True\) after such an exception"
            ):
                torch.autograd.backward(squares(model, comm.rank))
        backward(model, comm.rank)
        assert_gradients(model, wanted, comm)
        model.zero_grad()


def test_a_torch_that_counts_no_references(comm: Communicator) -> None:
    """Gradients are copied, and all buffers are taken over late."""

    def normalised() -> nn.Sequential:
        return make_model().append(nn.BatchNorm1d(3).double())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "_count_storage", None)
        patch.setattr(counts, "_count_tensor", None)
        patch.setattr(counts, "_ALONE", -1)
        model = normalised()
        register(model, comm)
        check_steps(model, squares, expected(comm, squares, normalised), comm)
        assert not same_everywhere(comm, bits(model.buffers()))
        model.state_dict()
        assert same_everywhere(comm, bits(model.buffers()))
