"""Which gradients of Chainer are reduced, and when: overlap, several users, compression, uneven data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import multiring.chainer  # before Chainer

# isort: split
import chainer
from chainer import functions, links

from multiring import Communicator, TopK
from multiring.errors import UsageError
from tests.adapters.chainer.support import (
    assert_gradients,
    assert_same_weights,
    bits_of,
    draw,
    expected,
    make_model,
    make_optimizer,
    squares,
)
from tests.on_ranks import on_ranks, same_everywhere


class _Probe(chainer.Function):  # type: ignore[misc]
    """Nothing forward; backward says how many buckets have left by then."""

    def __init__(self, look: Callable[[], int], found: list[int]) -> None:
        self._look, self._found = look, found

    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, inputs: Any, gradients: Any) -> Any:
        self._found.append(self._look())
        return gradients


def test_buckets_leave_while_the_backward_pass_runs(comm: Communicator) -> None:
    model = make_model()
    optimizer = make_optimizer(comm, model)
    found: list[int] = []

    def look() -> int:
        current = optimizer._slots.reducer._round
        return 0 if current is None else len(current.works)

    def loss() -> Any:
        first = functions.tanh(model.first(draw(comm.rank)))
        hidden = functions.tanh(model.middle(_Probe(look, found)(first)))
        return functions.mean((model.last(hidden) + model.spare(hidden)) ** 2)

    for _ in range(2):
        optimizer.update(loss)
    assert found[1] >= 2  # of those of the last, the spare and the middle layer


@pytest.mark.parametrize("shape", ["shared", "forget", "weights alone"])
def test_parameters_with_several_users(comm: Communicator, shape: str) -> None:
    """A parameter of several users is final after the last of them only; inside of forget(), at the end."""

    def loss(model: Any, rank: int) -> Any:
        hidden = functions.tanh(model.first(draw(rank)))
        for _ in range(3):
            hidden = functions.forget(model.middle, hidden) if shape == "forget" else model.middle(hidden)
        if shape == "weights alone":
            return functions.sum(model.middle.W * model.middle.W) * (rank + 1) + functions.sum(hidden)
        return functions.mean(model.last(hidden) ** 2)

    model, single = make_model(), make_model()
    optimizer = make_optimizer(comm, model, chainer.optimizers.SGD(0.1))
    alone = chainer.optimizers.SGD(0.1).setup(single)
    for step in range(3):
        optimizer.update(loss, model, 10 * step + comm.rank)
        ranks = range(10 * step, 10 * step + comm.size)
        alone.update(lambda m, ranks=ranks: sum(loss(m, r) for r in ranks) / comm.size, single)
    assert_same_weights(model, single, rtol=1e-10)


def test_a_gradient_inside_of_the_loss(comm: Communicator) -> None:
    """As in a gradient penalty: it is this rank's own."""

    def loss(model: Any, rank: int) -> Any:
        x = chainer.Variable(draw(rank))
        (inner,) = chainer.grad([model(x)], [x], enable_double_backprop=True)
        return functions.mean(model(x) ** 2) + functions.mean(inner**2)

    model = make_model()
    optimizer = make_optimizer(comm, model, chainer.optimizers.SGD(0.0))
    for _ in range(2):
        optimizer.update(loss, model, comm.rank)
        model.spare.cleargrads()
        assert_gradients(model, expected(comm, loss), comm)


def test_dtypes_in_one_model(comm: Communicator) -> None:
    """float16, float32 and float64 side by side; parameters of no elements and of no dimensions."""
    link = chainer.Link()
    shapes = {"half": ((3,), "float16"), "single": ((2, 2), "float32"), "none": ((0, 4), "float64")}
    shapes["scalar"] = ((), "float64")
    with link.init_scope():
        for name, (shape, dtype) in shapes.items():
            setattr(link, name, chainer.Parameter(np.zeros(shape, dtype)))
    optimizer = make_optimizer(comm, link, chainer.optimizers.SGD(1.0))
    for _ in range(2):
        for name, (shape, dtype) in shapes.items():
            getattr(link, name).grad = np.full(shape, comm.rank, dtype)
        optimizer.update()
    for name, (shape, dtype) in shapes.items():
        found = getattr(link, name).array
        assert (found.shape, found.dtype) == (shape, dtype)
        np.testing.assert_array_equal(found, -(comm.size - 1))


@on_ranks(3)
def test_uneven(comm: Communicator) -> None:
    """Rank r has r + 1 batches; averages divide by those that have one, and momentum is handed over."""
    model, single = make_model(), make_model()
    optimizer = make_optimizer(comm, model, chainer.optimizers.MomentumSGD(0.1))
    alone = chainer.optimizers.MomentumSGD(0.1).setup(single)
    for epoch in range(2):
        with optimizer.join():
            for step in range(comm.rank + 1):
                optimizer.update(squares, model, 100 * epoch + 10 * step + comm.rank)
        for step in range(comm.size):
            active = [rank for rank in range(comm.size) if step <= rank]
            seeds = [100 * epoch + 10 * step + rank for rank in active]
            alone.update(lambda s=seeds: sum(squares(single, one) for one in s) / len(s))
        assert_same_weights(model, single, rtol=1e-10)
        for one, other in zip(model.params(), single.params(), strict=True):
            velocity = one.update_rule.state["v"]
            np.testing.assert_allclose(velocity, other.update_rule.state["v"], rtol=1e-9, atol=1e-15)
        assert optimizer.t == alone.t


@pytest.mark.parametrize("double_buffering", [False, True])
def test_compression_loses_nothing_when_the_model_changes(comm: Communicator, double_buffering: bool) -> None:
    """What has been received in all, and what is kept on average over the ranks, is all gradients but those
    of the steps that were dropped on their way."""
    model = make_model()
    del model.spare
    with model.init_scope(), chainer.using_config("dtype", np.float64):
        model.spare = links.Linear(None, 3, initialW=0.5)
    options = {"compression": TopK(0.2), "double_buffering": double_buffering}
    optimizer = make_optimizer(comm, model, chainer.optimizers.SGD(0.0), **options)
    wanted = {name: gradient for name, gradient in expected(comm).items() if gradient is not None}
    received = {name: np.zeros_like(gradient) for name, gradient in wanted.items()}
    steps = 8
    for step in range(steps):
        if step == 2:
            model.spare(draw(0, 2))  # a parameter gets its shape: the buckets are made anew
        if step == 4:
            optimizer.close()
        before = optimizer.t
        if double_buffering:
            optimizer.update(squares, model, comm.rank)
        else:
            model.cleargrads()
            optimizer.backward(squares(model, comm.rank))
        for name, parameter in model.namedparams():
            if name in received and (optimizer.t > before or not double_buffering):
                received[name] += parameter.grad
    assert len(optimizer._slots.parameters) == len(wanted) + 2, "the spare layer takes part"
    sets = [slots for slots in (optimizer._slots, getattr(optimizer, "_other", None)) if slots is not None]
    # On their way when the model changes, when the optimizer is closed, and at the end.
    arrived = steps - 3 if double_buffering else steps
    for name, gradient in wanted.items():
        kept = sum(slots.reducer.residuals()[name.lstrip("/")] for slots in sets)
        assert np.abs(kept).sum() > 0, name
        total = received[name] + comm.allreduce(kept, "average").reshape(gradient.shape)
        np.testing.assert_allclose(total, arrived * gradient, rtol=1e-12, atol=1e-14, err_msg=name)
    optimizer.setup(make_model())  # another model begins with none
    assert optimizer._slots.reducer.residuals() == {}


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
            optimizer = make_optimizer(comm, model, overlap=overlap)
            if scale is not None:
                optimizer.loss_scaling(scale=scale)
            for step in range(2):
                optimizer.update(squares, model, 10 * step + comm.rank, spare=comm.rank == comm.size - 1)
            assert same_everywhere(comm, bits_of(model))
            results.append(model)
    for other in results[1:]:
        assert_same_weights(results[0], other)


def test_gradients_replaced_after_synchronize_are_refused(comm: Communicator) -> None:
    """After synchronize() arrays may be written to, but others in their place are not averages."""
    model = make_model()
    optimizer = make_optimizer(comm, model, op="sum")
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
