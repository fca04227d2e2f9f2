"""Gradients that the program puts into `p.grad` itself, and what it does to those that were reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multiring.torch
from multiring import Communicator
from multiring.errors import UsageError
from tests.adapters.torch.support import (
    SMALL,
    assert_gradients,
    draw,
    expected,
    make_model,
    squares,
)
from tests.on_ranks import all_raise, on_ranks


def own_gradients(model: nn.Module, rank: int, loss: Callable[[Any, int], Tensor] = squares) -> list[Tensor]:
    return list(torch.autograd.grad(loss(model, rank), list(model.parameters())))


def by_autograd_grad(model: nn.Module, rank: int) -> None:
    for parameter, gradient in zip(model.parameters(), own_gradients(model, rank), strict=True):
        parameter.grad = gradient


def by_torch_func(model: nn.Module, rank: int) -> None:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        found: Tensor = (torch.func.functional_call(model, parameters, (draw(rank),)) ** 2).mean()
        return found

    found = torch.func.grad(loss)(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        parameter.grad = found[name]


def into_the_same_tensors(model: nn.Module, rank: int) -> None:
    """Manual accumulation into gradients that the program keeps."""
    for parameter, gradient in zip(model.parameters(), own_gradients(model, rank), strict=True):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.zero_()
        parameter.grad += gradient


def through_data(model: nn.Module, rank: int) -> None:
    """As old programs do it: the tensor stays, its memory is another."""
    for parameter, gradient in zip(model.parameters(), own_gradients(model, rank), strict=True):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.data = gradient


def some_by_backward(model: nn.Module, rank: int) -> None:
    """The first layers' gradients come from backward(), the last one's are given."""
    gradients = own_gradients(model, rank)
    torch.autograd.backward(squares(model, rank), inputs=list(model.parameters())[:4])
    for parameter, gradient in list(zip(model.parameters(), gradients, strict=True))[4:]:
        parameter.grad = gradient


def replaced_after_backward(model: nn.Module, rank: int) -> None:
    """What backward() has reduced gives way to gradients of this rank."""
    torch.autograd.backward(squares(model, rank + 10))
    by_autograd_grad(model, rank)


def on_one_rank(model: nn.Module, rank: int) -> None:
    by_autograd_grad(model, rank) if rank == 0 else torch.autograd.backward(squares(model, rank))


GIVE = [
    by_autograd_grad,
    by_torch_func,
    into_the_same_tensors,
    through_data,
    some_by_backward,
    replaced_after_backward,
    on_one_rank,
]


@pytest.mark.parametrize("give", GIVE)
def test_step_reduces_gradients_that_the_program_gives(
    comm: Communicator, give: Callable[[nn.Module, int], None]
) -> None:
    wanted = expected(comm, squares)
    for keep in (False, True):
        model = make_model()
        optimizer = multiring.torch.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.0), model, comm, **SMALL
        )
        for _ in range(3):
            optimizer.zero_grad(set_to_none=not keep)
            give(model, comm.rank)
            optimizer.step()
            assert_gradients(model, wanted, comm)
        optimizer.remove()


@on_ranks(3)
def test_synchronize_reduces_them_once(comm: Communicator) -> None:
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, average=False, **SMALL)
    wanted = [gradient * comm.size for gradient in expected(comm, squares)]
    for give in (by_autograd_grad, by_torch_func, into_the_same_tensors, through_data):
        give(model, comm.rank)
        hooks.synchronize()
        assert_gradients(model, wanted, comm)
        for parameter in model.parameters():
            parameter.grad = parameter.grad  # the same tensor: nothing new
        hooks.synchronize()
        assert_gradients(model, wanted, comm)
    hooks.remove()


@pytest.mark.parametrize("in_place", [True, False])
def test_edits_of_reduced_gradients_are_not_reduced(comm: Communicator, in_place: bool) -> None:
    """What every rank makes of a sum is not added up again, by step() or by the next backward()."""
    model = make_model()
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.0), model, comm, op="sum", **SMALL
    )
    wanted = [gradient * comm.size / 8 for gradient in expected(comm, squares)]
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.div_(8) if in_place else parameter.grad / 8
        optimizer.step()
        assert_gradients(model, wanted, comm)
    rounds = optimizer._hooks.rounds
    assert rounds == 2
    model[:1].zero_grad()
    torch.autograd.backward(model[:1](draw(comm.rank)).sum())
    assert_gradients(model[2:], wanted[2:], comm)
    optimizer.remove()


@pytest.mark.parametrize("how", ["flat", "list", "later"])
def test_gradients_stay_the_tensors_that_the_program_knows(comm: Communicator, how: str) -> None:
    """A program that keeps references to its gradients, or has them all in one tensor."""
    model = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    wanted = expected(comm, squares)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    saved = [torch.zeros_like(p) for p in parameters]
    if how == "flat":
        parts = torch.split(flat, [p.numel() for p in parameters])
        saved = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
    for parameter, gradient in zip(parameters, saved, strict=True):
        parameter.grad = gradient
    for step in range(4):
        if how == "later" and step in (0, 2):  # gradients that have moved into their slots by then
            saved = [p.grad for p in parameters if p.grad is not None]
        flat.zero_() if how == "flat" else torch._foreach_zero_(saved)
        torch.autograd.backward(squares(model, comm.rank))
        assert_gradients(model, wanted, comm)
        assert all(p.grad is gradient for p, gradient in zip(parameters, saved, strict=True))
        if how == "flat":
            whole = torch.cat([gradient.reshape(-1) for gradient in wanted])
            torch.testing.assert_close(flat, whole, rtol=1e-12, atol=1e-14)
        if how == "later" and step == 1:
            saved = []
            for _ in range(2):
                model.zero_grad(set_to_none=False)
                torch.autograd.backward(squares(model, comm.rank))
    model[4].requires_grad_(False)  # buckets are planned anew
    torch._foreach_zero_(saved)
    torch.autograd.backward(squares(model, comm.rank))
    assert_gradients(model[:4], wanted[:4], comm)
    model[4].requires_grad_(True)
    flat.zero_() if how == "flat" else torch._foreach_zero_(saved)
    torch.autograd.backward(squares(model, comm.rank))
    assert_gradients(model, wanted, comm)
    hooks.remove()


@pytest.mark.parametrize("how", ["channels_last", "share_memory", "data"])
def test_memory_of_gradients_may_change(comm: Communicator, how: str) -> None:
    """The memory of kept gradients changes between steps, but not the tensors."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2)).double()
    reference: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 2)).double()
    reference.load_state_dict(model.state_dict())

    def loss(model: Any, rank: int) -> Tensor:
        return (model(draw(rank, 36).view(2, 3, 6, 6)) ** 2).mean()

    wanted = expected(comm, loss, lambda: (reference.zero_grad(), reference)[1])
    hooks = multiring.torch.register_gradient_hooks(model, comm, **SMALL)
    for step in range(5):
        if step == 3 and how == "channels_last":
            model.to(memory_format=torch.channels_last)
        elif step == 3 and how == "share_memory":
            model.share_memory()
        elif step == 3:
            for parameter in model.parameters():
                parameter.grad.data = torch.ones_like(parameter)
        model.zero_grad(set_to_none=False)
        torch.autograd.backward(loss(model, comm.rank))
        assert_gradients(model, wanted, comm)
    hooks.remove()


def test_a_dtype_that_changes_is_refused(comm: Communicator) -> None:
    """half() or float() between steps is refused, kept gradients or not, sparse or not."""
    for keep in (False, True):
        for model, x in ((make_model(), draw(0)), (nn.Embedding(5, 2, sparse=True), torch.tensor([1, 2]))):
            hooks = multiring.torch.register_gradient_hooks(model, comm)
            for _ in range(2):
                model.zero_grad(set_to_none=not keep or isinstance(model, nn.Embedding))
                torch.autograd.backward(model(x).sum())
            model.bfloat16()
            if not keep or isinstance(model, nn.Embedding):  # Torch does not add sparse ones of this dtype
                model.zero_grad()
            with pytest.raises(UsageError, match=r"has become torch.bfloat16 .*register them again"):
                torch.autograd.backward(model(x.bfloat16() if x.is_floating_point() else x).sum())
            hooks.remove()


@all_raise(UsageError, r"the gradient of '4\.weight' was replaced or taken away, or written to")
def test_a_hook_that_writes_to_a_gradient_on_its_way_is_refused(comm: Communicator) -> None:
    model = make_model()
    multiring.torch.register_gradient_hooks(model, comm, bucket_bytes=1, first_bucket_bytes=1)

    def double(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad *= 2

    model[4].weight.register_post_accumulate_grad_hook(double)
    torch.autograd.backward(squares(model, comm.rank))
