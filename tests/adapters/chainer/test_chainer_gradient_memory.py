"""Gradients of Chainer that share memory with one another, with the program, or with the slots."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import multiring.chainer  # before Chainer

# isort: split
import chainer
from chainer import functions

from multiring import Communicator
from tests.adapters.chainer.support import make_model, make_optimizer
from tests.on_ranks import on_ranks


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


def test_gradients_that_are_columns_of_one_matrix(comm: Communicator) -> None:
    """No element is in two of them: the program's matrix gets the averages."""
    model = make_model()
    mn = multiring.chainer.create_communicator(comm)
    parameters = [model.first.b, model.middle.b]
    matrix = np.full((parameters[0].size, 2), float(comm.rank))
    for column, parameter in enumerate(parameters):
        parameter.grad = matrix[:, column]
    mn.multi_node_mean_grad(model)
    np.testing.assert_array_equal(matrix, (comm.size - 1) / 2)
    mn.finalize()


def test_gradients_that_were_broadcast(comm: Communicator) -> None:
    """NumPy lets a program write into what has one element in many places."""
    model = make_model()
    mn = multiring.chainer.create_communicator(comm)
    weight = model.first.W
    rows = np.arange(weight.shape[0], dtype=np.float64)[:, np.newaxis]
    full = np.arange(weight.size, dtype=np.float64).reshape(weight.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        weight.grad = np.broadcast_arrays(rows, full)[0] if comm.rank == 0 else full.copy()
        mn.multi_node_mean_grad(model)
    np.testing.assert_allclose(weight.grad, (rows + full * (comm.size - 1)) / comm.size)
    mn.finalize()


@pytest.mark.parametrize("transposed", [False, True])
def test_parameters_that_exchange_their_gradients(comm: Communicator, transposed: bool) -> None:
    """The gradient of each then lies in the memory where that of the other one is reduced."""

    class Pair(chainer.Link):
        def __init__(self) -> None:
            super().__init__()
            with self.init_scope():
                self.a, self.b = (chainer.Parameter(np.zeros((3, 3), np.float32)) for _ in "ab")

    pair = Pair()
    optimizer = make_optimizer(comm, pair, chainer.optimizers.SGD(1.0))
    first = np.arange(9, dtype=np.float32).reshape(3, 3)
    for _ in range(2):
        optimizer.update(lambda: functions.sum(pair.a * first) + functions.sum(pair.b * (first + 9)))
    a, b = pair.a.grad, pair.b.grad
    np.testing.assert_array_equal(a, first)
    pair.a.grad, pair.b.grad = b.T if transposed else b, a
    optimizer.synchronize()  # averages of what is the same everywhere
    np.testing.assert_array_equal(pair.a.grad, (first + 9).T if transposed else first + 9)
    np.testing.assert_array_equal(pair.b.grad, first)


def test_an_array_that_two_optimizers_reduce(comm: Communicator) -> None:
    """Chainer's backward of an addition gives both terms one array; here they belong to two optimizers."""
    pair = [chainer.Link(), chainer.Link()]
    optimizers = []
    for link in pair:
        with link.init_scope():
            link.w = chainer.Parameter(np.zeros(4))
        optimizers.append(make_optimizer(comm, link, chainer.optimizers.SGD(1.0), op="sum"))
    x = chainer.Variable(np.zeros(4))
    functions.sum((pair[0].w + pair[1].w + x) * (comm.rank + 1.0)).backward()
    for link, optimizer in zip(pair, optimizers, strict=True):
        optimizer.update()
        np.testing.assert_array_equal(link.w.array, -comm.size * (comm.size + 1) / 2)
    np.testing.assert_array_equal(x.grad, comm.rank + 1)
