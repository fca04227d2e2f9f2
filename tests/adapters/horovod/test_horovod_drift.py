"""Ranks whose parameters or hyperparameters drift apart under Horovod's optimizers, and legal programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import multiring.horovod.torch as hvd
from multiring import Communicator
from multiring.errors import MismatchError
from tests.adapters.horovod.support import with_hvd
from tests.on_ranks import all_raise, same_everywhere


def make_model(rank: int = 0) -> nn.Linear:
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3) + rank)
        model.bias.zero_()
    return model


def distributed(model: nn.Module, **options: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    return hvd.DistributedOptimizer(inner, model.named_parameters(), **options)


def take_step(optimizer: Any, model: nn.Module, rank: int = 0) -> None:
    optimizer.zero_grad()
    (model(torch.full((2, 3), rank + 1.0, dtype=torch.float64)) ** 2).mean().mul(0.01).backward()
    optimizer.step()


OPTIMIZERS: dict[str, dict[str, Any]] = {"average": {}, "groups": {"groups": 1}, "adasum": {"op": hvd.Adasum}}


@pytest.mark.parametrize("what", OPTIMIZERS)
@with_hvd()
@all_raise(MismatchError, "lr of parameter group 0")
def test_a_scheduler_that_lowers_the_rate_on_one_rank(comm: Communicator, what: str) -> None:
    model = make_model()
    optimizer = distributed(model, **OPTIMIZERS[what])
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(5):
        take_step(optimizer, model, comm.rank)
        scheduler.step(float(step) if comm.rank == 0 else -float(step))


@with_hvd()
@all_raise(MismatchError, "step 2", "parameter weight", "hvd.broadcast_parameters was not called")
def test_a_forgotten_broadcast(comm: Communicator) -> None:
    model = make_model(comm.rank)
    optimizer = distributed(model)
    for _ in range(2):
        take_step(optimizer, model)


@with_hvd()
def test_a_broadcast_after_the_first_step(comm: Communicator) -> None:
    """By name, and as an object, which no call of ours sees loaded."""
    for as_object in (False, True):
        model = make_model(comm.rank)
        named = [(f"{as_object}.{name}", parameter) for name, parameter in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), named)
        take_step(optimizer, model)
        if as_object:
            model.load_state_dict(hvd.broadcast_object(model.state_dict(), 0))
        else:
            hvd.broadcast_parameters(model.state_dict(), 0)
        for _ in range(4):
            take_step(optimizer, model)
        assert same_everywhere(comm, model.weight.tolist())


@with_hvd()
def test_parameters_that_are_perturbed_while_gradients_are_computed(comm: Communicator) -> None:
    model = make_model()
    optimizer = distributed(model)
    for _ in range(5):
        optimizer.zero_grad()
        before = model.weight.detach().clone()
        with torch.no_grad():
            model.weight += comm.rank
        model(torch.ones(2, 3, dtype=torch.float64)).mean().backward()
        optimizer.synchronize()
        with torch.no_grad():
            model.weight.copy_(before)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert same_everywhere(comm, model.weight.tolist())


@with_hvd(3)
def test_ranks_that_step_differently_often(comm: Communicator) -> None:
    """In two epochs, in the first of which one rank has no data; a drift is seen afterwards as well."""
    model = make_model()
    optimizer = distributed(model)
    for epoch in range(2):
        for _ in range(5 * comm.rank + epoch):
            take_step(optimizer, model)
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), 2)
    assert same_everywhere(comm, model.weight.tolist())
    if comm.rank == 1:
        optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(MismatchError, match="lr of parameter group 0"):
        for _ in range(20):
            take_step(optimizer, model)


@with_hvd(3)
@all_raise(MismatchError, "lr of parameter group 0")
def test_a_drift_while_a_rank_has_joined(comm: Communicator) -> None:
    model = make_model()
    optimizer = distributed(model)
    if comm.rank == 1:
        optimizer.param_groups[0]["lr"] = 1.0
    if comm.rank == 0:
        with pytest.raises(hvd.HorovodInternalError):
            hvd.join()  # until the others leave
        raise MismatchError("lr of parameter group 0, on the other ranks")
    try:
        for _ in range(2):
            take_step(optimizer, model)
    finally:
        hvd.global_process_set.operations().abort("ends")


@with_hvd(3)
def test_a_process_set_and_the_rank_outside_of_it(comm: Communicator) -> None:
    pair = hvd.add_process_set([0, 2])
    model = make_model(0 if pair.included() else 5)
    optimizer = distributed(model, process_set=pair)
    for _ in range(4 if pair.included() else 2):
        take_step(optimizer, model)


@with_hvd()
def test_steps_after_a_mismatch(comm: Communicator) -> None:
    """One rank has failed in the reduction of a gradient, and has not come as far as the other."""
    model = make_model()
    optimizer = distributed(model)
    take_step(optimizer, model)
    for _ in range(2):
        handle = hvd.allreduce_async(torch.ones(2 + comm.rank), name="unlike")
        take_step(optimizer, model)
        with pytest.raises(hvd.HorovodInternalError):
            hvd.synchronize(handle)
        take_step(optimizer, model)
    assert same_everywhere(comm, model.weight.tolist())


def test_it_can_be_turned_off(ranks: Any) -> None:
    ranks(2).run(train_apart)


def train_apart(comm: Communicator) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MULTIRING_CHECK_EVERY", "0")
        hvd.init()
        try:
            model = make_model(comm.rank)
            optimizer = distributed(model)
            for _ in range(4):
                take_step(optimizer, model)
        finally:
            hvd.shutdown()


@with_hvd()
def test_unlike_intervals(comm: Communicator) -> None:
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MULTIRING_CHECK_EVERY", str(10 + comm.rank))
        with pytest.raises(MismatchError, match="MULTIRING_CHECK_EVERY"):
            hvd.init()
