"""Reduced gradients that the program keeps are its own: no later round writes to them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multiring.torch
from multiring import Communicator, TopK
from multiring.errors import MismatchError, UsageError
from tests.adapters.torch.support import (
    Loss,
    assert_same_weights,
    backward,
    bits,
    check_steps,
    draw,
    expected,
    make_model,
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


@on_ranks(2)
@pytest.mark.parametrize("options", [{"op": "sum"}, {"prescale": 2.0}], ids=["sum", "scaled"])
def test_sums_over_several_passes_begin_anew_where_gradients_were_zeroed(
    comm: Communicator, options: dict[str, Any]
) -> None:
    model = nn.Linear(2, 1, bias=False)
    hooks = register(model, comm, check_every=0, **options)
    x = torch.full((1, 2), float(comm.rank + 1))
    one_pass = torch.full((1, 2), 3.0)
    for passes in (1, 2, 1, 3):
        model.zero_grad(set_to_none=False)
        with hooks.no_sync():
            for _ in range(passes - 1):
                torch.autograd.backward(model(x).sum())
        torch.autograd.backward(model(x).sum())
        assert torch.equal(model.weight.grad, passes * one_pass)
    with pytest.raises(UsageError, match="was reduced before"):
        torch.autograd.backward(model(x).sum())


def freeze_in_turns(model: nn.Sequential, step: int) -> None:
    model[0].requires_grad_(step % 3 != 1)
    model[4].requires_grad_(step % 3 != 2)


def test_parts_frozen_in_turns_keep_their_buckets(comm: Communicator) -> None:
    """Also those that are frozen when hooks are registered; and after hooks all may be thawed."""
    model = nn.Sequential(*(nn.Linear(6, 6) if k % 2 == 0 else nn.Tanh() for k in range(5))).double()
    multiring.torch.broadcast_parameters(model, comm=comm)
    reference = copy.deepcopy(model)
    freeze_in_turns(model, 1)
    hooks = register(model, comm, check_every=1)
    reducers = []
    for step in range(1, 10):
        freeze_in_turns(model, step)
        freeze_in_turns(reference, step)
        check_steps(model, squares, expected(comm, squares, lambda: copy.deepcopy(reference)), comm, steps=1)
        reducers.append(hooks._gradients.reducer)
    assert len(set(map(id, reducers))) == 3
    hooks.remove()
    backward(model.requires_grad_(True), comm.rank)


@all_raise(MismatchError, "do not agree about the parameters of the model")
def test_other_parts_frozen_on_another_rank(comm: Communicator) -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) if k % 2 == 0 else nn.Tanh() for k in range(5))).double()
    multiring.torch.broadcast_parameters(model, comm=comm)
    register(model, comm)
    for step in (0, 1, 2, 0, 1 + comm.rank):
        freeze_in_turns(model, step)
        backward(model, comm.rank)


def test_a_cotangent_stays_as_it_is(comm: Communicator) -> None:
    """Gradients that are views of a tensor which the program writes to and passes to backward()."""
    model = nn.Linear(6, 3).double()
    register(model, comm)
    numbers = sum(p.numel() for p in model.parameters())
    direction = torch.zeros(numbers, dtype=torch.float64)
    for step in range(3):
        model.zero_grad()
        direction.mul_(0.5).add_(comm.rank + step)
        before = direction.clone()
        torch.cat([p.view(-1) for p in model.parameters()]).backward(direction)  # type: ignore[no-untyped-call]
        assert torch.equal(direction, before)
        mean = comm.allreduce(before, op="average")
        found = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(found, mean, rtol=1e-12, atol=0)


def test_a_hook_before_ours_puts_gradients_into_one_memory(comm: Communicator) -> None:
    model = Joined("cat")
    sizes = [p.numel() for p in model.parameters()]
    flat = torch.zeros(sum(sizes), dtype=torch.float64)

    def gather(parameter: Tensor, view: Tensor) -> None:
        if parameter.grad is not None and parameter.grad is not view:
            parameter.grad = view.copy_(parameter.grad)

    for p, part in zip(model.parameters(), flat.split(sizes), strict=True):
        p.register_post_accumulate_grad_hook(partial(gather, view=part.view_as(p)))  # type: ignore[no-untyped-call]
    wanted = expected(comm, first_loss, lambda: Joined("cat"))
    register(model, comm)
    for _ in range(3):
        backward(model, comm.rank, first_loss)
        torch.testing.assert_close(flat, torch.cat([w.flatten() for w in wanted]), rtol=1e-12, atol=1e-14)


def clip_between(model: nn.Linear, loss: Callable[[], Tensor], step: Callable[[], object]) -> None:
    torch.autograd.backward(loss())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.autograd.backward(loss())


def twice_into_one_memory(model: nn.Linear, loss: Callable[[], Tensor], step: Callable[[], object]) -> None:
    flat = torch.zeros(20, dtype=torch.float64)
    model.weight.grad = flat[2:].view_as(model.weight)
    for _ in range(2):
        torch.autograd.backward(loss())


def add_own(model: nn.Linear, loss: Callable[[], Tensor], step: Callable[[], object]) -> None:
    torch.autograd.backward(loss())
    assert model.weight.grad is not None
    model.weight.grad = model.weight.grad + torch.autograd.grad(loss(), model.weight)[0]
    step()


@pytest.mark.parametrize("way", [clip_between, twice_into_one_memory, add_own])
@all_raise(UsageError, "'weight' was reduced before, and would be once more with op='sum'")
def test_sums_are_not_summed_again(comm: Communicator, way: Callable[..., None]) -> None:
    model = nn.Linear(6, 3, bias=False).double()
    multiring.torch.broadcast_parameters(model, comm=comm)
    optimizer = wrap(torch.optim.SGD(model.parameters(), 0.1), model, comm, op="sum")
    way(model, partial(squares, model, comm.rank), optimizer.step)


@pytest.mark.parametrize("when", ["frozen", "thawed", "after no_sync"])
def test_gradients_of_parameters_that_are_frozen(comm: Communicator, when: str) -> None:
    """Optimizers apply them, so they are reduced."""
    model = nn.Linear(6, 3).double()
    multiring.torch.broadcast_parameters(model, comm=comm)
    wanted = expected(comm, squares, lambda: copy.deepcopy(model))[0]
    optimizer = wrap(torch.optim.SGD(model.parameters(), 0.1), model, comm)
    for _ in range(2):
        optimizer.zero_grad()
        model.weight.requires_grad_(True)
        if when == "after no_sync":
            with optimizer.no_sync():
                torch.autograd.backward(squares(model, comm.rank))
            model.weight.requires_grad_(False)
        else:
            (own,) = torch.autograd.grad(squares(model, comm.rank), model.weight)
            model.weight.requires_grad_(False)
            torch.autograd.backward(squares(model, comm.rank))
            model.weight.requires_grad_(when == "thawed")
            model.weight.grad = own
        optimizer.synchronize()
        torch.testing.assert_close(model.weight.grad, wanted, rtol=1e-12, atol=1e-14)


@all_raise(UsageError, "'one.weight' has got a gradient, .* frozen between the forward and the backward pass")
def test_a_parameter_that_is_frozen_after_forward(comm: Communicator) -> None:
    model = nn.Sequential(OrderedDict(one=nn.Linear(6, 3), two=nn.Linear(3, 3))).double()
    register(model, comm)
    loss = squares(model, comm.rank)
    model.one.weight.requires_grad_(False)
    torch.autograd.backward(loss)


def test_gradients_that_are_replaced_inside_of_join(comm: Communicator) -> None:
    model, alone = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
    multiring.torch.broadcast_parameters(model, comm=comm)
    alone.load_state_dict(model.state_dict())
    optimizer = wrap(torch.optim.SGD(model.parameters(), 0.1), model, comm)

    def halve(part: nn.Module) -> None:
        for p in part.parameters():
            p.grad = None if p.grad is None else p.grad / 2

    with optimizer.join():
        for step in range(2 + comm.rank):
            optimizer.zero_grad()
            torch.autograd.backward(squares(model, comm.rank + step))
            halve(model)
            optimizer.step()
    reference = torch.optim.SGD(alone.parameters(), 0.1)
    for step in range(1 + comm.size):
        ranks = [rank for rank in range(comm.size) if step < 2 + rank]
        reference.zero_grad()
        for rank in ranks:
            torch.autograd.backward(squares(alone, rank + step) / len(ranks))
        halve(alone)
        reference.step()
    assert_same_weights(model, alone)


def test_gradients_made_in_inference_mode(comm: Communicator) -> None:
    """Torch does not count writes to them: what is there at a step is new."""
    model = nn.Linear(6, 3).double()
    optimizer = wrap(torch.optim.SGD(model.parameters(), 0.1), model, comm)
    with torch.inference_mode():
        given = torch.zeros(3, 6, dtype=torch.float64)
    model.weight.grad = given
    for step in range(3):
        with torch.inference_mode():
            given.fill_(comm.rank + step)
        optimizer.step()
        assert bool((given == (comm.size - 1) / 2 + step).all())


def test_gradients_that_one_rank_adds_to_are_compressed_as_the_others(comm: Communicator) -> None:
    """The second backward pass of a step uses other parameters on each rank; all keep the first gradients."""
    found = []
    for compression in (None, TopK(1.0)):
        model = make_model()
        hooks = register(model, comm, compression=compression)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model, comm.rank)
            torch.autograd.backward(model[4 * comm.rank].bias.square().sum())
            optimizer.step()
        found.append(bits(model.parameters()))
        hooks.remove()
    assert found[0] == found[1]
