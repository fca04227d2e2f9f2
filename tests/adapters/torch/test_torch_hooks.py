"""Gradient hooks of Torch beyond the contract: when and how they run, and what goes wrong."""

from __future__ import annotations

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
from tests.adapters.torch.support import (
    assert_gradients,
    backward,
    check_steps,
    draw,
    expected,
    make_model,
    register,
    squares,
)
from tests.on_ranks import all_raise, on_ranks


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
    hooks = register(model, comm, bucket_bytes=300, first_bucket_bytes=300)
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
    model = make_model()
    hooks = register(model, comm)
    check_steps(model, loss, expected(comm, loss), comm)
    assert hooks.rounds == 2


def test_parameters_are_frozen_and_thawed(comm: Communicator) -> None:
    """First the head alone is trained, then the body alone, then everything, then a part without zeroing."""

    def train(model: nn.Sequential, head: bool, body: bool) -> nn.Sequential:
        model[4].requires_grad_(head)
        model[:4].requires_grad_(body)
        return model

    model = train(make_model(), True, False)
    hooks = register(model, comm)
    for which in ((True, False), (False, True), (True, True), (False, True)):
        train(model, *which)
        wanted = expected(comm, squares, lambda which=which: train(make_model(), *which))  # type: ignore[misc]
        check_steps(model, squares, wanted, comm)
    hooks.remove()
    model.requires_grad_(True)
    torch.autograd.backward(squares(model, comm.rank))


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
        model = make_model()
        hooks = register(model, comm, **options)
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
    model = make_model()
    hooks = register(model, comm, **options)
    for kept in (False, True):
        for _ in range(2):
            backward(model, comm.rank, keep=kept)
    if between == "clipping":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with hooks.no_sync() if between.startswith("a pass") else nullcontext():
        torch.autograd.backward(squares(model, comm.rank))


def test_copies_of_a_model_and_the_end_of_a_communicator(comm: Communicator) -> None:
    """A local copy of a model has no hooks; gradients may be read after the end of the communicator."""
    model = make_model()
    hooks = register(model, comm)
    torch.autograd.backward(squares(model, comm.rank))
    duplicate = multiring.torch.local_copy(model)
    backward(duplicate, comm.rank)
    assert hooks.rounds == 1
    wanted = expected(comm, squares)
    for end in (multiring.shutdown, hooks.remove):
        end()
        found = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
