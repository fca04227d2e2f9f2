"""Programs that are right on one process are right on several, or an error says what is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import multiring.torch
from multiring import Communicator
from multiring.errors import UsageError
from tests.adapters.torch_support import SMALL, Pool, assert_gradients, draw, expected, make_model, squares


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


def one_graph_twice(comm: Communicator) -> None:
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


def test_two_backward_passes_over_one_graph_with_a_constant(ranks: Pool) -> None:
    ranks(2).run(one_graph_twice)


def inference_buffer(comm: Communicator) -> None:
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


def test_buffers_made_in_inference_mode(ranks: Pool) -> None:
    ranks(2).run(inference_buffer)


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


def own_notes(comm: Communicator) -> None:
    """What the groups of an optimizer hold beside numbers may be each rank's own."""
    model = make_model()
    group = {"params": model.parameters(), "log": f"/tmp/log.{comm.rank}", "tags": {f"tag{comm.rank}"}}
    optimizer = multiring.torch.DistributedOptimizer(
        torch.optim.SGD([group], 0.1), model, comm, check_every=1, **SMALL
    )
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(squares(model, comm.rank))
        optimizer.step()
    optimizer.remove()


def test_notes_in_parameter_groups_may_differ(ranks: Pool) -> None:
    ranks(2).run(own_notes)
