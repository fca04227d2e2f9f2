"""Programs that are right on one process are right on several, or an error says what is not."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import multiring.torch
from multiring import Communicator
from multiring.errors import UsageError
from tests.adapters.torch.support import (
    assert_gradients,
    assert_same_weights,
    backward,
    bits,
    draw,
    expected,
    make_hooked,
    make_model,
    make_wrapped,
    register,
    squares,
    step_with,
    update,
    wrap,
)
from tests.on_ranks import refuses, same_everywhere


class WithBuffer(nn.Module):
    """A linear layer and a buffer that its result is multiplied with."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3).double()
        self.register_buffer("table", buffer)
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.layer(x) * self.table.nan_to_num()
        return scaled


def table() -> Tensor:
    return torch.tensor([1.5, float("nan"), -0.0], dtype=torch.float64)


def test_two_backward_passes_over_one_graph_with_a_constant(comm: Communicator) -> None:
    def both(model: nn.Module, rank: int) -> Tensor:
        return model(draw(rank)).mean() + (model(draw(rank)) ** 2).mean()

    model = WithBuffer(table())
    register(model, comm, check_every=1)
    wanted = expected(comm, both, lambda: WithBuffer(table()))
    for _ in range(2):
        model.zero_grad()
        out = model(draw(comm.rank))
        torch.autograd.backward(out.mean(), retain_graph=True)
        torch.autograd.backward((out**2).mean())
        assert_gradients(model, wanted, comm)


def test_buffers_of_modules_that_come_later(comm: Communicator) -> None:
    """They are made the same as those that were there when hooks were registered."""
    model, _ = make_hooked(comm, check_every=1)
    for step in range(6):
        if step == 3:
            model.append(nn.BatchNorm1d(3, affine=False).double())
        backward(model, comm.rank)
        assert step < 3 or same_everywhere(comm, bits([model[-1].running_mean]))


def test_buffers_made_in_inference_mode(comm: Communicator) -> None:
    """As a cache that a validation before training makes; it takes over rank 0's values all the same."""
    model = WithBuffer(table())
    register(model, comm, check_every=1)
    with torch.inference_mode():
        model.table = torch.full((3,), comm.rank + 1.0, dtype=torch.float64)
        assert model.table.is_inference()
    for _ in range(2):
        torch.autograd.backward(model.layer(draw(comm.rank)).mean())
        assert model.table.tolist() == [1.0] * 3
    with torch.inference_mode():
        model.table += comm.rank
    multiring.torch.broadcast_parameters(model, comm=comm)
    assert model.table.tolist() == [1.0] * 3


def test_buffers_that_are_parts_of_one_tensor(comm: Communicator) -> None:
    """Torch counts a write to each of them as one to all; what a program writes itself stays."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3))
            for name, part in zip(("mean", "count", "own"), torch.zeros(3, 3), strict=True):
                self.register_buffer(name, part)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.5)
                self.own.fill_(comm.rank)
            return (x * self.weight).sum()

    model = Model()
    hooks = multiring.torch.register_gradient_hooks(model, comm)
    for step in range(3):
        model(torch.full((2, 3), float(comm.rank + step))).backward()
        hooks.synchronize()
        model.count.add_(1)
        model.own.fill_(7)
    model.state_dict()
    assert model.count.tolist() == [3.0] * 3
    assert model.own.tolist() == [7.0] * 3
    assert model.mean.tolist() == [1.25] * 3  # of rank 0's batches alone
    hooks.remove()


def test_an_averaged_buffer_whose_bits_are_another(comm: Communicator) -> None:
    """It is broadcast, as the other one is."""
    model = WithBuffer(torch.full((3,), comm.rank + 1.0))
    model.register_buffer("bits", model.table.view(torch.int32)[:2])
    register(model, comm, buffers="average", check_every=1)
    backward(model, comm.rank)
    assert model.state_dict()["table"].tolist() == [1.0] * 3
    assert same_everywhere(comm, bits(model.buffers()))


def test_expanded_buffers(comm: Communicator) -> None:
    """They have to be the same on all ranks, since they cannot be written to."""
    for same in (True, False):
        value = torch.full((1, 1), 2.0 if same else 1.0 + comm.rank).double()
        model = WithBuffer(value.expand(4, 3))
        if same:
            multiring.torch.broadcast_parameters(model, comm=comm)
        register(model, comm, check_every=1)
        if same or comm.rank == 0:
            backward(model, comm.rank)
            continue
        refuses(UsageError, r"buffer 'table'.*clone\(\)", backward, model, comm.rank)


def test_weights_perturbed_on_each_rank_during_backward(comm: Communicator) -> None:
    """SAM, perturbed by each rank's own gradients; one process computes all ranks' in turn."""
    model, reference = make_model(), make_model()
    optimizer = wrap(torch.optim.SGD(model.parameters(), 0.1), model, comm, check_every=1)
    steps = torch.optim.SGD(reference.parameters(), 0.1)

    def perturbed(model: Any, rank: int) -> Tensor:
        """Moves the weights along their gradients on this rank; the loss there."""
        torch.autograd.backward(squares(model, rank))
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * p.grad
                p.grad = None
        return squares(model, rank)

    for _ in range(4):
        before = copy.deepcopy(model.state_dict())
        with optimizer.no_sync():
            loss = perturbed(model, comm.rank)
        torch.autograd.backward(loss)
        model.load_state_dict(before)
        optimizer.step()
        optimizer.zero_grad()
        step_with(steps, expected(comm, perturbed, lambda: copy.deepcopy(reference)))
        steps.zero_grad()
    assert_same_weights(model, reference, rtol=1e-12)


def test_parameters_that_were_taken_over_are_compared(comm: Communicator) -> None:
    """What ranks had before they took over the parameters of one is not compared."""
    model, optimizer = make_wrapped(comm, check_every=1)
    for _ in range(2):
        with optimizer.join():
            for _ in range(2 + comm.rank):
                update(optimizer, squares(model, comm.rank))
    # Steps of each rank's own, and averages afterwards: equal again when they are compared.
    for _ in range(2):
        with optimizer.no_sync(), optimizer.skip_synchronize():
            update(optimizer, squares(model, comm.rank))
        multiring.torch.broadcast_parameters(model, comm=comm)
        update(optimizer, squares(model, comm.rank))


def test_parameters_that_leave_the_groups(comm: Communicator) -> None:
    model: Any = make_model()
    groups = [{"params": list(part.parameters())} for part in (model[0], model[2], model[4])]
    optimizer = wrap(torch.optim.SGD(groups, 0.1), model, comm)
    for step in range(2):
        if step == 1:
            del optimizer.param_groups[0]
            model[0].requires_grad_(False)
        update(optimizer, squares(model, comm.rank))
    assert same_everywhere(comm, bits(model.parameters()))


def test_a_block_with_hooks_of_its_own(comm: Communicator) -> None:
    """A block that comes later has hooks of its own."""
    model, _ = make_hooked(comm, check_every=1)
    for step in range(3):
        if step == 1:
            block = make_model(1)[2]
            register(block, comm, check_every=1)
            model.insert(2, block)
        backward(model, comm.rank)

    def grown() -> nn.Module:
        return make_model().insert(2, make_model(1)[2])

    assert_gradients(model, expected(comm, squares, grown), comm)


def test_all_parameters_are_frozen_for_a_while(comm: Communicator) -> None:
    model, reference = make_model(), make_model()
    inner, alone = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, reference))
    optimizer = wrap(inner, model, comm, check_every=1)
    for step in range(6):
        is_frozen = step in (2, 3)
        model.requires_grad_(not is_frozen)
        optimizer.zero_grad()
        if not is_frozen:
            torch.autograd.backward(squares(model, comm.rank))
            step_with(alone, expected(comm, squares, lambda: copy.deepcopy(reference)))
            alone.zero_grad()
        optimizer.step()
    assert_same_weights(model, reference, rtol=1e-12)
