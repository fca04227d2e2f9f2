"""The wrapped optimizer between its parts: GradScaler in the middle of a group, state set from outside."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

import multiring.torch
from multiring import Communicator
from multiring.errors import UsageError
from tests.adapters.torch.support import SMALL, draw, make_model


def loss_of(model: Any, rank: int, step: int) -> Tensor:
    return (model(draw(100 * step + rank)) ** 2).mean()


@pytest.mark.parametrize(("unscale", "fused"), [(False, True), (True, False)])
def test_an_overflow_in_a_partial_group_stops_all(comm: Communicator, unscale: bool, fused: bool) -> None:
    """The last group of an epoch has fewer passes, and one rank's gradients in it are infinite or not."""
    model = make_model()
    inner = torch.optim.Adam(model.parameters(), fused=fused)
    optimizer = multiring.torch.DistributedOptimizer(inner, model, comm, backward_passes_per_step=2, **SMALL)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        overflows = step == 1 and comm.rank == 1
        if step != 2 or comm.rank == 0:  # a rank without a loss, right after a step that was left out
            loss = loss_of(model, comm.rank, step) * (float("inf") if overflows else 1.0)
            torch.autograd.backward(scaler.scale(loss))
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (64.0 if step == 0 else 32.0)
        same = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert all(same) == (step == 1)
        bits = comm.allgather_object([p.detach().numpy().tobytes() for p in model.parameters()])
        assert bits[0] == bits[1]
    optimizer.remove()


def test_attributes_are_those_of_the_wrapped_optimizer(comm: Communicator) -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = multiring.torch.DistributedOptimizer(inner, model, comm)
    torch.autograd.backward(loss_of(model, comm.rank, 0))
    optimizer.step()
    assert inner.state
    optimizer.state = defaultdict(dict)  # momentum starts afresh
    assert not inner.state
    assert optimizer.state is inner.state
    optimizer.param_groups = [{**group, "lr": 0.5} for group in optimizer.param_groups]
    assert inner.param_groups[0]["lr"] == 0.5
    optimizer.note = "ours"
    assert inner.note == "ours"
    del optimizer.note
    assert not hasattr(inner, "note")
    optimizer.remove()


def test_what_goes_past_the_wrapper_is_refused(comm: Communicator) -> None:
    model = make_model()
    inner = torch.optim.SGD(model[2:].parameters(), lr=0.1)
    optimizer = multiring.torch.DistributedOptimizer(inner, model, comm, backward_passes_per_step=2)
    torch.autograd.backward(loss_of(model, comm.rank, 0))
    with pytest.raises(UsageError, match=r"step\(\) of the wrapped optimizer .* not reduced"):
        inner.step()
    torch.autograd.backward(loss_of(model, comm.rank, 1))
    inner.step()  # schedulers and the like may have the wrapped one
    inner.add_param_group({"params": list(model[:2].parameters())})
    with pytest.raises(UsageError, match=r"parameter 0 of group 1 .* by add_param_group\(\) of the"):
        optimizer.step()
    optimizer.remove()
    inner.step()
