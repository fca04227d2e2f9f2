"""Float16 parameters with float32 copies, and dynamic loss scaling: what ranks hand over to each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import multiring.chainer  # before Chainer

# isort: split
import chainer
from chainer import functions, links

from multiring import Communicator
from multiring.errors import MismatchError
from tests.adapters.chainer.support import bits_of
from tests.on_ranks import all_raise, same_everywhere

X = np.ones((1, 3), np.float16)


def make(comm: Communicator, **options: Any) -> tuple[Any, Any]:
    with chainer.using_config("dtype", np.float16):
        model = links.Linear(3, 2, initialW=0.1 * np.arange(6).reshape(2, 3))
    optimizer = multiring.chainer.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.01), comm, **options
    ).setup(model)
    optimizer.use_fp32_update()
    return model, optimizer


def train(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.update(lambda: functions.sum(model(X) * np.float16(0.37)))


def same_copies(comm: Communicator, model: Any) -> bool:
    copies = [p.update_rule._fp32_param for _, p in sorted(model.namedparams())]
    values = [bits_of(model), [None if c is None else c.array.tobytes() for c in copies]]
    return same_everywhere(comm, values)


@pytest.mark.parametrize("way", ["join", "broadcast"])
def test_copies_and_scales_are_handed_over(comm: Communicator, way: str) -> None:
    model, optimizer = make(comm, check_every=1)
    if way == "join":
        optimizer.loss_scaling(interval=2)
    train(model, optimizer, 2)
    if way == "join":
        for _ in range(2):
            with optimizer.join():
                train(model, optimizer, 1 if comm.rank else 4)
            scale = optimizer._loss_scale
            assert same_everywhere(comm, scale)
    else:
        train(model, optimizer.actual_optimizer, 3 if comm.rank == 0 else 0)
    if way == "broadcast":
        multiring.chainer.broadcast_parameters(model, comm=comm)
        multiring.chainer.broadcast_optimizer_state(optimizer, comm=comm)
    train(model, optimizer, 3)
    assert same_copies(comm, model)
    optimizer.close()


def test_copies_follow_weights_that_were_broadcast(comm: Communicator) -> None:
    """Weights that rank 0 has set are those that training goes on with; Chainer's copies would win."""
    model, optimizer = make(comm)
    train(model, optimizer, 1)
    model.W.array[...] = 5 - comm.rank
    multiring.chainer.broadcast_parameters(model, comm=comm)
    train(model, optimizer, 1)
    np.testing.assert_allclose(model.W.array, 5, atol=0.1)


@all_raise(MismatchError, r"'float32 copy of W' float32 \(2, 3\)")
def test_copies_are_compared(comm: Communicator) -> None:
    model, optimizer = make(comm, check_every=4)
    train(model, optimizer, 3)
    if comm.rank == 1:
        model.W.update_rule._fp32_param.array[...] += 1e-6
    train(model, optimizer, 1)
