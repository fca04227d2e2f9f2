"""What goes wrong inside a training loop of Chainer, what is refused, and what is left afterwards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import multiring.chainer  # before Chainer

# isort: split
import chainer
from chainer import functions

from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from tests.adapters.chainer.support import SMALL, assert_gradients, draw, expected, make_model, squares
from tests.on_ranks import all_raise


class _Fail(chainer.Function):  # type: ignore[misc]
    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, inputs: Any, gradients: Any) -> Any:
        raise ArithmeticError("the loss has exploded")


def failing(model: Any, rank: int) -> Any:
    hidden = functions.tanh(model.middle(_Fail()(functions.tanh(model.first(draw(rank))))))
    return functions.mean(model.last(hidden) ** 2)


def test_a_backward_pass_that_fails_on_all_ranks(comm: Communicator) -> None:
    """The next one starts afresh."""
    model = make_model()
    optimizer = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD(0.0), comm, **SMALL)
    optimizer.setup(model)
    for step in range(4):
        if step in (1, 2):
            with pytest.raises(ArithmeticError, match="exploded"):
                optimizer.update(failing, model, comm.rank)
            assert all(parameter.creator is None for parameter in model.params())
            continue
        model.cleargrads()
        optimizer.backward(squares(model, comm.rank))
        assert_gradients(model, expected(comm), comm)


@all_raise(MismatchError, r"gradients\[")
def test_a_backward_pass_that_fails_on_one_rank(comm: Communicator) -> None:
    """It is not mixed with what the others wait for."""
    model = make_model()
    group = comm.split(0)
    assert group is not None
    optimizer = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD(0.1), group, **SMALL)
    optimizer.setup(model)
    optimizer.update(squares, model, comm.rank)
    if comm.rank == 1:
        with pytest.raises(ArithmeticError, match="exploded"):
            optimizer.update(failing, model, comm.rank)
    optimizer.update(squares, model, comm.rank)


def test_refused(comm: Communicator) -> None:
    make = multiring.chainer.create_multi_node_optimizer
    with pytest.raises(UsageError, match="no parameters"):
        make(chainer.optimizers.SGD(), comm).setup(chainer.Link())
    link = chainer.Link()
    with link.init_scope():
        link.count = chainer.Parameter(np.zeros(2, np.int32))
    with pytest.raises(UsageError, match="dtype int32 cannot be reduced"):
        make(chainer.optimizers.SGD(), comm).setup(link)
    with pytest.raises(UsageError, match="op is 'mean'"):
        make(chainer.optimizers.SGD(), comm, op="mean").setup(make_model())
    with pytest.raises(UsageError, match="postscale is 0"):
        make(chainer.optimizers.SGD(), comm, postscale=0.0).setup(make_model())
    model = make_model()
    optimizer = make(chainer.optimizers.SGD(), comm).setup(model)
    optimizer.update(squares, model, comm.rank)
    model.first.W.array = model.first.W.array.astype(np.float32)
    model.first.b.array = model.first.b.array.astype(np.float32)
    model.cleargrads()
    model.first.W.grad = np.ones_like(model.first.W.array)
    with pytest.raises(UsageError, match=r"'first/W' has become float32 \(8, 6\), it was float64"):
        optimizer.update()


class _Inner(chainer.Function):  # type: ignore[misc]
    """Runs a backward pass of its own inside of the outer one, over a layer that both use."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, inputs: Any, gradients: Any) -> Any:
        with chainer.force_backprop_mode():
            functions.sum(self._layer(inputs[0])).backward()
        return gradients


def test_a_backward_pass_inside_of_another(comm: Communicator) -> None:
    """The layer's gradient comes twice: refused; after the pass there is one, which Chainer has chosen."""
    model = make_model()
    group = comm.split(0)
    make = multiring.chainer.create_multi_node_optimizer
    optimizer = make(chainer.optimizers.SGD(0.0), group, **SMALL).setup(model)

    def loss(model: Any, rank: int) -> Any:
        x = functions.tanh(model.first(draw(rank)))
        return functions.mean(model.last(model.middle(_Inner(model.last)(x))) ** 2)

    with pytest.raises(UsageError, match=r"'last/W' received a second gradient .*overlap=False"):
        optimizer.update(loss, model, comm.rank)
    optimizer.overlap = False
    model.cleargrads()
    optimizer.backward(loss(model, comm.rank))
    assert_gradients(model, expected(comm, loss), comm)


def test_a_dropped_optimizer_releases_its_buckets(comm: Communicator) -> None:
    model = make_model()
    optimizer: Any = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD(), comm, **SMALL)
    optimizer.setup(model)
    for _ in range(2):
        optimizer.update(squares, model, comm.rank)
    dropped = [weakref.ref(model), weakref.ref(optimizer._slots.reducer._memory)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in dropped] == [None, None]
