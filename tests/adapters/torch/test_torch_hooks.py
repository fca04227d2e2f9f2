"""Gradient hooks of Torch beyond the contract: when and how they run, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import multiring.torch
from multiring import Communicator
from multiring.errors import UsageError
from multiring.gradients.reducer import GradientReducer
from tests.adapters.torch.support import (
    SMALL,
    assert_gradients,
    check_steps,
    draw,
    expected,
    gradients_of,
    make_model,
    squares,
)
from tests.on_ranks import all_raise, on_ranks


class _Observe(torch.autograd.Function):
    """Tells in the backward pass how many buckets have left."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[], None]) -> Tensor:
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.look()
        return gradient, None


class _Spy:
    """An exchange that notes the parameters of the buckets that leave."""

    def __init__(self, reducer: GradientReducer, sent: list[list[int]]) -> None:
        assert reducer._exchange is not None
        self._reducer, self._exchange, self._sent = reducer, reducer._exchange, sent

    def send(self, number: int, *rest: Any) -> Any:
        self._sent.append([slot.index for slot in self._reducer.plan.buckets[number].slots])
        return self._exchange.send(number, *rest)

    def receive(self, *arguments: Any) -> Any:
        return self._exchange.receive(*arguments)


def test_buckets_leave_during_backward_and_in_the_same_order_everywhere(
    comm: Communicator,
) -> list[list[list[int]]]:
    """With a parameter that rank 1 does not use: its bucket, and those behind it, wait for the end there."""
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    sent: list[list[int]] = []
    reducer = hooks._slots.reducer
    reducer._exchange = _Spy(reducer, sent)
    seen: list[int] = []
    history = []
    for step in range(2):
        model.zero_grad()
        sent.clear()
        seen.clear()
        x = _Observe.apply(model[0](draw(comm.rank)), lambda: seen.append(len(sent)))  # type: ignore[no-untyped-call]
        x = model[2](torch.tanh(x))
        if step == 0 or comm.rank == 0:
            x = model[4](torch.tanh(x))
        torch.autograd.backward((x**2).mean())
        early = seen[0]
        assert (early > 0) == (step == 0 or comm.rank == 0)
        assert early < len(sent)
        history.append(list(sent))
    hooks.remove()
    assert len(history[1]) > 3
    return history


def test_buckets_follow_the_order_of_arrival(comm: Communicator) -> None:
    """The model registers its layers in the order in which gradients arrive, the reverse of the usual."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({str(k): nn.Linear(6, 6) for k in range(4)}).double()

    def loss(model: Any, rank: int) -> Tensor:
        x = draw(rank)
        for k in reversed(range(4)):
            x = torch.tanh(model[str(k)](x))
        return x.sum()

    model = make()
    hooks = multiring.torch.register_gradient_hooks(model, comm, bucket_bytes=300, first_bucket_bytes=300)
    wanted = expected(comm, loss, make)
    plans = []
    for _ in range(3):
        model.zero_grad()
        torch.autograd.backward(loss(model, comm.rank))
        assert_gradients(model, wanted, comm)
        plans.append([slot.index for bucket in hooks._slots.reducer.plan.buckets for slot in bucket.slots])
    # Layer 0 is applied last, so its gradients arrive first; within a layer, weight and bias in either order.
    assert [index // 2 for index in plans[0]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert plans[0] == plans[1] == plans[2]
    hooks.remove()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_parts(comm: Communicator, use_reentrant: bool) -> None:
    def loss(model: Any, rank: int) -> Tensor:
        x = draw(rank).requires_grad_(True)
        x = checkpoint(lambda z: torch.tanh(model[0](z)), x, use_reentrant=use_reentrant)
        x = checkpoint(
            lambda z: checkpoint(model[2], z, use_reentrant=use_reentrant), x, use_reentrant=use_reentrant
        )
        return (checkpoint(model[4], x, use_reentrant=use_reentrant) ** 2).mean()

    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    wanted = expected(comm, loss)
    check_steps(model, loss, wanted, comm)
    assert hooks.rounds == 2
    hooks.remove()


def test_parameters_are_frozen_and_thawed(comm: Communicator) -> None:
    """First the head alone is trained, then the body alone, then everything, then a part without zeroing."""

    def make(head: bool, body: bool) -> nn.Sequential:
        model = make_model()
        model[4].requires_grad_(head)
        model[:4].requires_grad_(body)
        return model

    model = make(True, False)
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    for head, body in ((True, False), (False, True), (True, True), (False, True)):
        model[4].requires_grad_(head)
        model[:4].requires_grad_(body)
        for _ in range(2):
            model.zero_grad()
            torch.autograd.backward(squares(model, comm.rank))
            assert_gradients(model, expected(comm, squares, lambda h=head, b=body: make(h, b)), comm)
    hooks.remove()
    model.requires_grad_(True)
    torch.autograd.backward(squares(model, comm.rank))


def test_synchronize_reduces_without_a_backward_pass(comm: Communicator) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    if comm.rank == 0:
        torch.autograd.backward(squares(model, 0))
    else:
        hooks.synchronize()
    assert_gradients(model, expected(comm, lambda m, r: squares(m, 0) * (r == 0)), comm)
    with hooks.no_sync():
        model.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))
    hooks.synchronize()
    assert_gradients(model, expected(comm, squares), comm)
    hooks.remove()


def test_two_models_with_hooks_of_their_own(comm: Communicator) -> None:
    """Ranks begin with gradients of different models, and have gradients missing in both at the end.

    A rank that waited for one model before it sent all of the other would wait for ever.
    """
    models = [make_model(k, inputs) for k, inputs in enumerate((6, 3))]
    hooks = [multiring.torch.register_gradient_hooks(model, comm, **SMALL) for model in models]

    def loss(chain: nn.Sequential, rank: int) -> Tensor:
        first, second, x = chain[:5], chain[5:], draw(rank)
        if rank == 0:
            return second[:1](first[:3](x)[:, :3]).sum()  # gradients of `second` come first
        other = (second[:1](x[:, :3]) ** 2).sum()
        return other + (first[:3](x) ** 2).sum()  # what was computed last is differentiated first

    for _ in range(3):
        for model in models:
            model.zero_grad()
        chain = nn.Sequential(*models[0], *models[1])
        torch.autograd.backward(loss(chain, comm.rank))
        wanted = expected(comm, loss, lambda: nn.Sequential(*make_model(0, 6), *make_model(1, 3)))
        assert_gradients(chain, wanted, comm)
    for hook in hooks:
        hook.remove()


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
        hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL, **options)  # type: ignore[arg-type]
        for step in range(2):
            model.zero_grad()
            with hooks.no_sync() if step == 0 else nullcontext():
                torch.autograd.backward(model[0](draw(1)).sum() * 0.0)
            assert all(p.grad is None for p in model[1:].parameters())
            torch.autograd.backward(squares(model, comm.rank))
            assert_gradients(model, [g * factor for g in expected(comm, squares)], comm)
        hooks.remove()


def test_a_sum_leaves_gradients_without_news_alone(comm: Communicator) -> None:
    """A gradient that the program keeps is not added up again where no rank has a new one."""
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, average=False, **SMALL)
    torch.autograd.backward(squares(model, comm.rank))
    before = gradients_of(model)
    model[:1].zero_grad(set_to_none=False)
    torch.autograd.backward(model[:1](draw(comm.rank)).sum())
    for place, (one, other) in enumerate(zip(gradients_of(model), before, strict=True)):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other) == (place > 1)
    hooks.remove()


@pytest.mark.parametrize("between", ["nothing", "clipping", "a pass that stays local"])
@pytest.mark.parametrize("options", [{"average": False}, {"prescale": 0.5}])
@all_raise(UsageError, "was reduced before, and would be once more with op=.*; call zero_grad")
def test_what_was_reduced_is_not_reduced_again(comm: Communicator, options: Any, between: str) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL, **options)
    for kept in (False, True):
        for _ in range(2):
            model.zero_grad(set_to_none=not kept)
            torch.autograd.backward(squares(model, comm.rank))
    if between == "clipping":
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with hooks.no_sync() if between.startswith("a pass") else nullcontext():
        torch.autograd.backward(squares(model, comm.rank))


@on_ranks(1)
def test_one_rank_has_no_hooks(comm: Communicator) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    torch.autograd.backward(squares(model, 0))
    with hooks.join():
        pass
    hooks.synchronize()
    hooks.remove()


def test_copies_of_a_model_and_the_end_of_a_communicator(comm: Communicator) -> None:
    """A local copy of a model has no hooks; gradients may be read after the end of the communicator."""
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    torch.autograd.backward(squares(model, comm.rank))
    duplicate = multiring.torch.local_copy(model)
    duplicate.zero_grad()
    torch.autograd.backward(squares(duplicate, comm.rank))
    assert hooks.rounds == 1
    wanted = expected(comm, squares)
    multiring.shutdown()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)
    hooks.remove()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)
