"""Gradient hooks of Torch beyond the contract: when and how they run, and in which memory they average."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import multiring.torch
from multiring import Communicator
from multiring.errors import UsageError
from multiring.gradients.states import GradientState
from multiring.torch import counts
from tests.adapters.torch.support import (
    assert_gradients,
    backward,
    bits,
    check_steps,
    draw,
    expected,
    explode,
    make_hooked,
    make_model,
    register,
    squares,
)
from tests.on_ranks import all_raise, on_ranks, refuses, same_everywhere


def test_buckets_follow_the_order_of_arrival(comm: Communicator) -> None:
    """The model registers its layers in the order in which gradients arrive, the reverse of the usual."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleList(nn.Linear(6, 6) for _ in range(4)).double()

    def loss(model: Any, rank: int) -> Tensor:
        x = draw(rank)
        for layer in reversed(model):
            x = torch.tanh(layer(x))
        return x.sum()

    model = make()
    hooks = register(model, comm, bucket_bytes=300)
    wanted = expected(comm, loss, make)
    plans = []
    for _ in range(3):
        check_steps(model, loss, wanted, comm, steps=1)
        plans.append(
            [slot.index for bucket in hooks._gradients.reducer.plan.buckets for slot in bucket.slots]
        )
    # Layer 0 is applied last, so its gradients arrive first; within a layer, weight and bias in either order.
    assert [index // 2 for index in plans[0]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_parts(comm: Communicator, use_reentrant: bool) -> None:
    def loss(model: Any, rank: int) -> Tensor:
        x = draw(rank).requires_grad_(True)
        x = again(lambda z: torch.tanh(model[0](z)), x)
        x = again(lambda z: again(model[2], z), x)
        return (again(model[4], x) ** 2).mean()

    again = partial(checkpoint, use_reentrant=use_reentrant)
    model, hooks = make_hooked(comm)
    check_steps(model, loss, expected(comm, loss), comm)
    assert hooks.rounds == 2


def test_two_models_with_hooks_of_their_own(comm: Communicator) -> None:
    """Ranks begin with gradients of different models, and have gradients missing in both at the end.

    A rank that waited for one model before it sent all of the other would wait for ever.
    """
    models = [make_model(k, inputs) for k, inputs in enumerate((6, 3))]
    for model in models:
        register(model, comm)

    def loss(chain: nn.Sequential, rank: int) -> Tensor:
        first, second, x = chain[:5], chain[5:], draw(rank)
        if rank == 0:
            return second[:1](first[:3](x)[:, :3]).sum()  # gradients of `second` come first
        other = (second[:1](x[:, :3]) ** 2).sum()
        return other + (first[:3](x) ** 2).sum()  # what was computed last is differentiated first

    chain = nn.Sequential(*models[0], *models[1])
    wanted = expected(comm, loss, lambda: nn.Sequential(*make_model(0, 6), *make_model(1, 3)))
    check_steps(chain, loss, wanted, comm, steps=3)


@on_ranks(1, 3)
def test_sum_and_scales(comm: Communicator) -> None:
    size = comm.size
    for options, factor in (
        ({"average": False}, size),
        ({"prescale": 0.5, "postscale": 4.0}, 2.0),
        ({"average": False, "prescale": 2.0**-20}, size * 2.0**-20),
        ({"prescale": -1e6, "postscale": 1e-3}, -1e3),
    ):
        model, hooks = make_hooked(comm, **options)
        # One rank without a factor has nothing to do.
        assert bool(model[0].weight._post_accumulate_grad_hooks) == (size > 1 or factor != 1.0)
        for step in range(2):
            model.zero_grad()
            with hooks.no_sync() if step == 0 else nullcontext():
                torch.autograd.backward(model[0](draw(1)).sum() * 0.0)
            assert all(p.grad is None for p in model[1:].parameters())
            torch.autograd.backward(squares(model, comm.rank))
            assert_gradients(model, [g * factor for g in expected(comm, squares)], comm)


@pytest.mark.parametrize("between", ["nothing", "clipping", "a pass that stays local"])
@pytest.mark.parametrize("options", [{"average": False}, {"prescale": 0.5}])
@all_raise(UsageError, "was reduced before, and would be once more with op=.*; call zero_grad")
def test_what_was_reduced_is_not_reduced_again(comm: Communicator, options: Any, between: str) -> None:
    model, hooks = make_hooked(comm, **options)
    for kept in (False, True):
        for _ in range(2):
            backward(model, comm.rank, keep=kept)
    if between == "clipping":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with hooks.no_sync() if between.startswith("a pass") else nullcontext():
        torch.autograd.backward(squares(model, comm.rank))


def test_copies_of_a_model_and_the_end_of_a_communicator(comm: Communicator) -> None:
    """A local copy of a model has no hooks; gradients may be read after the end of the communicator."""
    model, hooks = make_hooked(comm)
    torch.autograd.backward(squares(model, comm.rank))
    duplicate = multiring.torch.local_copy(model)
    backward(duplicate, comm.rank)
    assert hooks.rounds == 1
    wanted = expected(comm, squares)
    for end in (multiring.shutdown, hooks.remove):
        end()
        found = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


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
    register(model, comm, bucket_bytes=1)
    check_steps(model, loss, wanted, comm, steps=3)


@on_ranks(3)
def test_gradients_of_a_failed_pass_are_not_kept(comm: Communicator) -> None:
    """After a failed backward pass gradients have to be new ones, or they would be what still arrives."""
    model, hooks = make_hooked(comm)
    wanted = expected(comm, squares)
    for keeps in (False, True):
        loss = (model[1:](explode(model[0](draw(comm.rank)))) ** 2).mean()
        refuses(ArithmeticError, "exploded", torch.autograd.backward, loss)
        reducer = hooks._gradients.reducer
        assert GradientState.SENT in {reducer.states[index] for index in range(len(reducer.specs))}
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
