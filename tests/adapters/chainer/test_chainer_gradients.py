"""Which gradients of Chainer's are averaged, where, and what then holds for the update."""

from __future__ import annotations

import numpy as np
import pytest

import multiring.chainer  # isort: skip  # before chainer, which it makes importable

import chainer

from multiring import Communicator
from multiring.errors import UsageError
from tests.adapters.chainer.support import SMALL, assert_same_weights, bits_of, make_model, squares
from tests.on_ranks import on_ranks, same_everywhere


def test_gradients_of_a_backward_pass_stay_where_they_are(comm: Communicator) -> None:
    """What a backward pass has computed is averaged in its own memory."""
    model = make_model()
    mn = multiring.chainer.create_communicator(comm)
    for turn in range(3):
        model.cleargrads()
        squares(model, comm.rank + turn).backward()
        used = {name: p for name, p in model.namedparams() if p.grad is not None}
        before = {name: parameter.grad.ctypes.data for name, parameter in used.items()}
        mn.multi_node_mean_grad(model)
        assert {name: parameter.grad.ctypes.data for name, parameter in used.items()} == before
        assert used


@on_ranks(3)
def test_arrays_that_several_refer_to(comm: Communicator) -> None:
    """One array as the gradient of two parameters, of a parameter and something else, and a read-only one."""
    model = make_model()
    mn = multiring.chainer.create_communicator(comm)
    first, second = model.first, model.middle
    one = np.full_like(first.b.array, comm.rank)
    first.b.grad = second.b.grad = one
    held = np.full_like(first.W.array, comm.rank)
    views = [held, held[:], held[:]]
    first.W.grad = views[1]
    second.W.grad = np.broadcast_to(np.float64(comm.rank), second.W.shape)
    mn.multi_node_mean_grad(model)
    for parameter in (first.b, second.b, first.W, second.W):
        np.testing.assert_array_equal(parameter.grad, (comm.size - 1) / 2)
    np.testing.assert_array_equal(one, comm.rank)  # of two parameters, whose averages may differ
    np.testing.assert_array_equal(held, (comm.size - 1) / 2)
    mn.finalize()


def test_a_scaled_gradient_that_some_ranks_lack(comm: Communicator) -> None:
    """The spare layer has a gradient on the last rank only, scaled with the loss."""
    results = []
    for scale in (None, 1024.0):
        for overlap in (True, False):
            model = make_model()
            optimizer = multiring.chainer.create_multi_node_optimizer(
                chainer.optimizers.SGD(0.1), comm, overlap=overlap, **SMALL
            )
            optimizer.setup(model)
            if scale is not None:
                optimizer.loss_scaling(scale=scale)
            for step in range(2):
                optimizer.update(squares, model, 10 * step + comm.rank, spare=comm.rank == comm.size - 1)
            optimizer.close()
            assert same_everywhere(comm, bits_of(model))
            results.append(model)
    for other in results[1:]:
        assert_same_weights(results[0], other)


def test_gradients_replaced_after_synchronize_are_refused(comm: Communicator) -> None:
    """After synchronize() arrays may be written to, but others in their place are not averages."""
    model = make_model()
    optimizer = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm, op="sum")
    optimizer.setup(model)
    squares(model, comm.rank).backward()
    optimizer.synchronize()
    before = bits_of(model)
    average = model.first.W.grad.copy()
    model.first.W.grad[...] *= 0.5
    np.testing.assert_array_equal(model.first.W.grad, 0.5 * average)
    model.middle.W.grad = 0.5 * model.middle.W.grad
    with pytest.raises(UsageError, match=r"'middle/W' was replaced after it had been averaged"):
        optimizer.update()
    assert bits_of(model) == before
