"""Gradients of Chainer of which only the largest entries travel: what is kept back outlives the buckets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import multiring.chainer  # before Chainer

# isort: split
import chainer
from chainer import links

from multiring import Communicator, TopK
from tests.adapters.chainer.support import SMALL, draw, expected, make_model, squares

STEPS = 8


def lazy_model() -> Any:
    """The spare layer has no shape yet, and no part in `squares`."""
    model = make_model()
    del model.spare
    with model.init_scope(), chainer.using_config("dtype", np.float64):
        model.spare = links.Linear(None, 3, initialW=0.5)
    return model


def change(step: int, model: Any, optimizer: Any) -> None:
    if step == 2:
        model.spare(draw(0, 2))  # a parameter gets its shape: the buckets are made anew
    if step == 4:
        optimizer.close()


def backward(optimizer: Any, model: Any, rank: int) -> bool:
    """A step of the same gradients; returns whether reduced ones are there."""
    model.cleargrads()
    optimizer.backward(squares(model, rank))
    return True


def update(optimizer: Any, model: Any, rank: int) -> bool:
    before = optimizer.t
    optimizer.update(squares, model, rank)
    return bool(optimizer.t > before)


def nothing_is_lost(comm: Communicator, act: Callable[..., bool], dropped: int, **options: Any) -> None:
    """What has been received in all, and what is kept on average over the ranks, is all gradients but those
    of the steps that were dropped on their way."""
    model = lazy_model()
    optimizer = multiring.chainer.create_multi_node_optimizer(
        chainer.optimizers.SGD(0.0), comm, compression=TopK(0.2), **SMALL, **options
    )
    optimizer.setup(model)
    wanted = {name: gradient for name, gradient in expected(comm, squares).items() if gradient is not None}
    received = {name: np.zeros_like(gradient) for name, gradient in wanted.items()}
    for step in range(STEPS):
        change(step, model, optimizer)
        is_reduced = act(optimizer, model, comm.rank)
        for name, parameter in model.namedparams():
            if is_reduced and name in received:
                received[name] += parameter.grad
    assert len(optimizer._slots.parameters) == len(wanted) + 2, "the spare layer takes part"
    sets = [slots for slots in (optimizer._slots, getattr(optimizer, "_other", None)) if slots is not None]
    for name, gradient in wanted.items():
        kept = sum(slots.reducer.residuals()[name.lstrip("/")] for slots in sets)
        assert np.abs(kept).sum() > 0, name
        total = received[name] + comm.allreduce(kept, "average").reshape(gradient.shape)
        np.testing.assert_allclose(total, (STEPS - dropped) * gradient, rtol=1e-12, atol=1e-14, err_msg=name)
    optimizer.close()


def test_what_is_kept_back_outlives_a_change_of_the_model(comm: Communicator) -> None:
    nothing_is_lost(comm, backward, 0)
    # On their way when the model changes, when the optimizer is closed, and at the end.
    nothing_is_lost(comm, update, 3, double_buffering=True)


def test_another_model_begins_with_none(comm: Communicator) -> None:
    optimizer = multiring.chainer.create_multi_node_optimizer(
        chainer.optimizers.SGD(0.0), comm, compression=TopK(0.2), **SMALL
    )
    for _ in range(2):
        model = make_model()
        optimizer.setup(model)
        assert optimizer._slots.reducer.residuals() == {}
        optimizer.backward(squares(model, comm.rank))
        assert optimizer._slots.reducer.residuals()
    optimizer.close()
