"""Programs that are right on one process are right on several, or an error says what is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn

import multiring.torch
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from tests.adapters.torch.support import (
    SMALL,
    assert_gradients,
    assert_same_weights,
    draw,
    expected,
    make_model,
    squares,
)
from tests.on_ranks import Pool, all_raise


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
    def passes(model: nn.Module, rank: int) -> None:
        out = model(draw(rank))
        torch.autograd.backward(out.mean(), retain_graph=True)
        torch.autograd.backward((out**2).mean())

    def both(model: nn.Module, rank: int) -> Tensor:
        return model(draw(rank)).mean() + (model(draw(rank)) ** 2).mean()

    model = WithBuffer(table())
    hooks = multiring.torch.register_gradient_hooks(model, comm, check_every=1, **SMALL)
    for _ in range(2):
        model.zero_grad()
        passes(model, comm.rank)
        assert_gradients(model, expected(comm, both, lambda: WithBuffer(table())), comm)
    # A buffer that does change is seen by autograd.
    model.table.copy_(torch.full((3,), comm.rank + 2.0))
    model.table.requires_grad_(False)
    out = model.layer(draw(0)) * model.table
    torch.autograd.backward(out.mean(), retain_graph=True)
    if comm.rank:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(out.mean())
    hooks.remove()


def test_buffers_made_in_inference_mode(comm: Communicator) -> None:
    """As a cache that a validation before training makes; it takes over rank 0's values all the same."""
    model = WithBuffer(table())
    hooks = multiring.torch.register_gradient_hooks(model, comm, check_every=1, **SMALL)
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
    hooks.remove()


def expanded_buffer(comm: Communicator, same: bool) -> None:
    value = torch.full((1, 1), 2.0 if same else 1.0 + comm.rank).double()
    model = WithBuffer(value.expand(4, 3))
    if same:
        multiring.torch.broadcast_parameters(model, comm=comm)
    hooks = multiring.torch.register_gradient_hooks(model, comm, check_every=1, **SMALL)
    for _ in range(2):
        model.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))
    hooks.remove()


def test_expanded_buffers(ranks: Pool) -> None:
    ranks(2).run(expanded_buffer, True)
    errors = ranks(2).run_expecting_errors(expanded_buffer, False)
    assert isinstance(errors[1], UsageError), errors
    assert "buffer 'table'" in str(errors[1])
    assert "clone()" in str(errors[1])


def test_notes_in_parameter_groups_may_differ(comm: Communicator) -> None:
    """What the groups of an optimizer hold beside numbers may be each rank's own."""
    model = make_model()
    group = {
        "params": model.parameters(),
        "log": f"/tmp/log.{comm.rank}",
        "tags": {f"tag{comm.rank}"},
        "number": comm.rank,
    }
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD([group], 0.1), model, comm, check_every=1, **SMALL
    )
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))
        optimizer.step()
    optimizer.remove()


def test_weights_perturbed_on_each_rank_during_backward(comm: Communicator) -> None:
    """SAM, perturbed by each rank's own gradients; one process computes all ranks' in turn."""
    model, reference = make_model(), make_model()
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, comm, check_every=1, **SMALL
    )
    steps = torch.optim.SGD(reference.parameters(), 0.1)

    def perturb(part: nn.Module) -> list[Tensor]:
        before = [p.detach().clone() for p in part.parameters()]
        with torch.no_grad():
            for p in part.parameters():
                assert p.grad is not None
                p += 0.1 * p.grad
                p.grad = None
        return before

    def restore(part: nn.Module, before: list[Tensor]) -> None:
        with torch.no_grad():
            for p, old in zip(part.parameters(), before, strict=True):
                p.copy_(old)

    for _ in range(4):
        with optimizer.no_sync():
            torch.autograd.backward(squares(model, comm.rank))
        before = perturb(model)
        torch.autograd.backward(squares(model, comm.rank))
        restore(model, before)
        optimizer.step()
        optimizer.zero_grad()
        total = [torch.zeros_like(p) for p in reference.parameters()]
        for rank in range(comm.size):
            reference.zero_grad()
            torch.autograd.backward(squares(reference, rank))
            before = perturb(reference)
            torch.autograd.backward(squares(reference, rank))
            restore(reference, before)
            for one, p in zip(total, reference.parameters(), strict=True):
                assert p.grad is not None
                one += p.grad / comm.size
        for one, p in zip(total, reference.parameters(), strict=True):
            p.grad = one
        steps.step()
    assert_same_weights(model, reference, rtol=1e-12)
    optimizer.remove()


def test_parameters_that_were_taken_over_are_compared(comm: Communicator) -> None:
    """What ranks had before they took over the parameters of one is not compared."""
    model = make_model()
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, comm, check_every=1, **SMALL
    )
    for _ in range(2):
        with optimizer.join():
            for _ in range(2 + comm.rank):
                optimizer.zero_grad()
                torch.autograd.backward(squares(model, comm.rank))
                optimizer.step()
    # Steps of each rank's own, and averages afterwards: equal again when they are compared.
    for _ in range(2):
        optimizer.zero_grad()
        with optimizer.no_sync(), optimizer.skip_synchronize():
            torch.autograd.backward(squares(model, comm.rank))
            optimizer.step()
        multiring.torch.broadcast_parameters(model, comm=comm)
        optimizer.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))
        optimizer.step()
    optimizer.remove()


def test_parameters_that_leave_and_join_the_groups(comm: Communicator) -> None:
    model: Any = make_model()
    groups = [{"params": list(part.parameters())} for part in (model[0], model[2], model[4])]
    optimizer = multiring.torch.DistributedOptimizer(torch.optim.SGD(groups, 0.1), model, comm, **SMALL)
    for step in range(2):
        if step == 1:
            del optimizer.param_groups[0]
            model[0].requires_grad_(False)
        optimizer.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))
        optimizer.step()
    # One in the place of another is not one that is known.
    model[4].weight = nn.Parameter(model[4].weight.detach().clone())
    optimizer.param_groups[-1]["params"][0] = model[4].weight
    optimizer.zero_grad()
    torch.autograd.backward(squares(model, comm.rank))
    with pytest.raises(UsageError, match=r"parameter 0 of group 1 of the optimizer, of shape \(3, 8\)"):
        optimizer.step()
    optimizer.remove()


def test_moved_parameters_can_be_loaded(comm: Communicator) -> None:
    """Pruning renames parameters, tying shares them: they have hooks as before."""
    model: Any = make_model()
    hooks = multiring.torch.register_gradient_hooks(model, comm, check_every=1, **SMALL)
    nn.utils.prune.l1_unstructured(model[0], "weight", amount=0.5)
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    model[2].weight = model[0].weight_orig
    model.load_state_dict(model.state_dict())
    with pytest.raises(UsageError, match="assign=True"):
        model.load_state_dict(
            {name: value.clone() for name, value in model.state_dict().items()}, assign=True
        )
    hooks.remove()


def test_a_block_with_hooks_of_its_own(comm: Communicator) -> None:
    """A block that comes later has hooks of its own."""
    model = make_model()
    handles = [multiring.torch.register_gradient_hooks(model, comm, check_every=1, **SMALL)]
    for step in range(3):
        if step == 1:
            block = make_model(1)[2]
            handles.append(multiring.torch.register_gradient_hooks(block, comm, check_every=1, **SMALL))
            model.insert(2, block)
        model.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))

    def grown() -> nn.Module:
        return make_model().insert(2, make_model(1)[2])

    assert_gradients(model, expected(comm, squares, grown), comm)
    for handle in handles:
        handle.remove()


def test_all_parameters_are_frozen_for_a_while(comm: Communicator) -> None:
    model, reference = make_model(), make_model()
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model, comm, check_every=1, **SMALL
    )
    steps = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    for step in range(6):
        is_frozen = step in (2, 3)
        model.requires_grad_(not is_frozen)
        optimizer.zero_grad()
        if not is_frozen:
            torch.autograd.backward(squares(model, comm.rank))
            for p, g in zip(
                reference.parameters(), expected(comm, squares, lambda: copy.deepcopy(reference)), strict=True
            ):
                p.grad = g
        optimizer.step()
        steps.step()
        steps.zero_grad()
    assert_same_weights(model, reference, rtol=1e-12)
    optimizer.remove()


def test_edits_of_reduced_gradients_send_nothing(comm: Communicator) -> None:
    """Rank 1 makes its step when rank 0 has made its own."""
    model, reference = make_model(), make_model()
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, comm, check_every=0, **SMALL
    )
    steps = torch.optim.SGD(reference.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        if comm.rank == 1:
            comm.recv(0)
        optimizer.step()
        if comm.rank == 0:
            comm.send(torch.zeros(1), 1)
        gradients = expected(comm, squares, lambda: copy.deepcopy(reference))
        for p, gradient in zip(reference.parameters(), gradients, strict=True):
            p.grad = gradient
        nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
        steps.step()
    assert_same_weights(model, reference, rtol=1e-12)
    optimizer.remove()


@all_raise(MismatchError, r"step 2: .*'parameter 0\.weight'")
def test_edits_that_differ_are_found(comm: Communicator) -> None:
    model = make_model()
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model, comm, **SMALL
    )
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))
        assert model[0].weight.grad is not None
        model[0].weight.grad += comm.rank
        optimizer.step()
