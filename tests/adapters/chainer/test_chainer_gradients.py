"""Which gradients of Chainer's are averaged, where, and what then holds for the update."""

from __future__ import annotations

import numpy as np
import pytest

import multiring.chainer  # isort: skip  # before chainer, which it makes importable

import chainer

from multiring import Communicator, TopK
from multiring.errors import UsageError
from tests.adapters.chainer.support import SMALL, Pool, bits_of, make_model, squares


def written_in_place(comm: Communicator) -> None:
    """As ChainerMN's own tests do: values written into the arrays that are there, again and again."""
    model = make_model()
    mn = multiring.chainer.create_communicator(comm)
    for parameter in model.params():
        parameter.grad = np.zeros_like(parameter.array)
    for turn in range(3):
        for number, parameter in enumerate(model.params()):
            parameter.grad[...] = comm.rank + number + turn
        mn.multi_node_mean_grad(model)
        for number, parameter in enumerate(model.params()):
            np.testing.assert_array_equal(parameter.grad, (comm.size - 1) / 2 + number + turn)
    optimizer = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD(0.5), comm)
    optimizer.setup(model)
    for turn in range(3):
        before = {name: parameter.array.copy() for name, parameter in model.namedparams()}
        for parameter in model.params():
            parameter.grad[...] = comm.rank + turn
        optimizer.update()
        for name, parameter in model.namedparams():
            expected = before[name] - 0.5 * ((comm.size - 1) / 2 + turn)
            np.testing.assert_allclose(parameter.array, expected, rtol=1e-12, err_msg=name)


def stay_where_they_are(comm: Communicator) -> None:
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


def test_gradients_of_a_backward_pass_stay_where_they_are(ranks: Pool) -> None:
    ranks(2).run(stay_where_they_are)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_values_written_into_the_same_arrays(ranks: Pool, size: int) -> None:
    ranks(size).run(written_in_place)


def send_everything(comm: Communicator) -> None:
    """A compression that sends everything has the bits of none."""
    for options in ({}, {"overlap": False}, {"double_buffering": True}):
        found = []
        for compression in (None, TopK(1.0)):
            model = make_model()
            optimizer = multiring.chainer.create_multi_node_optimizer(
                chainer.optimizers.SGD(0.1), comm, **SMALL, **options, compression=compression
            )
            optimizer.setup(model)
            for turn in range(4):
                optimizer.update(squares, model, comm.rank + turn)
            found.append({name: parameter.array.tobytes() for name, parameter in model.namedparams()})
        assert found[0] == found[1]


def test_a_compression_that_sends_everything(ranks: Pool) -> None:
    ranks(2).run(send_everything)


def shared_arrays(comm: Communicator) -> None:
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


def test_arrays_that_several_refer_to(ranks: Pool) -> None:
    ranks(3).run(shared_arrays)


def unused_and_scaled(comm: Communicator) -> None:
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
            assert comm.allgather_object(bits_of(model)) == [bits_of(model)] * comm.size
            results.append(model)
    for other in results[1:]:
        for (name, x), (_, y) in zip(results[0].namedparams(), other.namedparams(), strict=True):
            np.testing.assert_allclose(x.array, y.array, rtol=1e-12, err_msg=name)


def test_a_scaled_gradient_that_some_ranks_lack(ranks: Pool) -> None:
    ranks(2).run(unused_and_scaled)


def replaced(comm: Communicator) -> None:
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


def test_gradients_replaced_after_synchronize_are_refused(ranks: Pool) -> None:
    ranks(2).run(replaced)
