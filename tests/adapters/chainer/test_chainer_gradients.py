"""Which gradients of Chainer are reduced, when, and what counts as reduced already."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import multiring.chainer  # noqa: F401  # before Chainer

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
    make_pair,
    squares,
)
from tests.on_ranks import on_ranks, refuses, same_everywhere


def test_buckets_leave_while_the_backward_pass_runs(comm: Communicator) -> None:
    model, optimizer = make_pair(comm)
    found: list[int] = []

    def look(_: Any) -> None:
        current = optimizer._slots.reducer._round
        found.append(0 if current is None else len(current.works))

    for _ in range(2):
        optimizer.update(squares, model, comm.rank, spare=True, call=look)
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


def test_a_parameter_without_dimensions_whose_gradient_is_added_to(comm: Communicator) -> None:
    model = chainer.Chain()
    with model.init_scope():
        model.scale = chainer.Parameter(np.array(2.0))
    optimizer = make_optimizer(comm, model, chainer.optimizers.SGD(0.1))

    def loss() -> Any:
        return model.scale * (comm.rank + 1.0)

    model.cleargrads()
    loss().backward()
    optimizer.backward(loss())
    optimizer.update()
    np.testing.assert_allclose(model.scale.array, 2.0 - 0.1 * (comm.size + 1))


def test_a_gradient_inside_of_the_loss(comm: Communicator) -> None:
    """As in a gradient penalty: it is this rank's own."""

    def loss(model: Any, rank: int) -> Any:
        x = chainer.Variable(draw(rank))
        (inner,) = chainer.grad([model(x)], [x], enable_double_backprop=True)
        return functions.mean(model(x) ** 2) + functions.mean(inner**2)

    model, optimizer = make_pair(comm, chainer.optimizers.SGD(0.0))
    for _ in range(2):
        optimizer.update(loss, model, comm.rank)
        model.spare.cleargrads()
        assert_gradients(model, expected(comm, loss), comm)


def test_dtypes_in_one_model(comm: Communicator) -> None:
    """float16, float32 and float64 side by side; parameters of no elements and of no dimensions."""
    arrays = [np.zeros(3, np.float16), np.zeros((2, 2), np.float32), np.zeros((0, 4)), np.zeros(())]
    parameters = [chainer.Parameter(array.copy()) for array in arrays]
    link = chainer.Link()
    with link.init_scope():
        for number, parameter in enumerate(parameters):
            setattr(link, f"p{number}", parameter)
    optimizer = make_optimizer(comm, link, chainer.optimizers.SGD(1.0))
    for _ in range(2):
        for parameter, array in zip(parameters, arrays, strict=True):
            parameter.grad = np.full_like(array, comm.rank)
        optimizer.update()
    for parameter, array in zip(parameters, arrays, strict=True):
        assert (parameter.shape, parameter.dtype) == (array.shape, array.dtype)
        np.testing.assert_array_equal(parameter.array, -(comm.size - 1))


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
    wanted = expected(comm)
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


def test_a_scaled_gradient_that_some_ranks_lack(comm: Communicator) -> None:
    """The spare layer has a gradient on the last rank only, scaled with the loss."""
    results = []
    for scale in (None, 1024.0):
        for overlap in (True, False):
            model, optimizer = make_pair(comm, overlap=overlap)
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
    model, optimizer = make_pair(comm, op="sum")
    squares(model, comm.rank).backward()
    optimizer.synchronize()
    before = bits_of(model)
    average = model.first.W.grad.copy()
    model.first.W.grad[...] *= 0.5
    np.testing.assert_array_equal(model.first.W.grad, 0.5 * average)
    model.middle.W.grad = 0.5 * model.middle.W.grad
    refuses(UsageError, "'middle/W' was replaced after it had been averaged", optimizer.update)
    assert bits_of(model) == before


def with_zeros(comm: Communicator, layout: str = "apart", **options: Any) -> tuple[Any, Any]:
    """A model whose gradients are there, also in one flat array or with gaps, and its optimizer."""
    model = make_model()
    flat = np.zeros(sum(parameter.size for parameter in model.params()))
    start = 0
    for parameter in model.params():
        part = flat[start : start + parameter.size].reshape(parameter.shape)
        start += parameter.size
        gaps = np.zeros((*parameter.shape, 2))[..., 1]
        parameter.grad = {"flat": part, "gaps": gaps}.get(layout, np.zeros_like(part))
    return model, make_optimizer(comm, model, chainer.optimizers.SGD(0.5), **options)


@pytest.mark.parametrize("way", ["synchronize", "skip", "backward", "double buffering", "flat", "gaps"])
def test_gradients_written_in_place(comm: Communicator, way: str) -> None:
    """New gradients in the same arrays in every step; the weights go the way of their averages."""
    is_double = way == "double buffering"
    model, optimizer = with_zeros(comm, way, double_buffering=is_double)
    kept = {name: parameter.grad for name, parameter in model.namedparams()}
    values = [np.float64(10**step) for step in range(6)]
    begin = model.middle.W.array.copy()
    for step, value in enumerate(values):
        for name, parameter in model.namedparams():
            if way != "backward" or name.startswith("/spare"):  # the others have theirs of the loss
                parameter.grad[...] = (comm.rank + 1) * value
        if way == "backward":
            for link in (model.first, model.middle, model.last):
                link.cleargrads()
            optimizer.backward(squares(model, 10 * step + comm.rank))
        elif way in ("synchronize", "skip"):
            optimizer.synchronize()
        if way != "skip" or step % 2:
            optimizer.update()
        average = value * (comm.size + 1) / 2
        if not is_double:
            np.testing.assert_array_equal(model.spare.W.grad, average)
        for name, parameter in model.namedparams() if way in ("flat", "gaps") else ():
            assert parameter.grad is kept[name]
            np.testing.assert_array_equal(parameter.grad, average)
    total = {"skip": sum(values[1::2]), "double buffering": sum(values[:-1])}.get(way, sum(values))
    if way != "backward":
        way_gone = 0.5 * total * (comm.size + 1) / 2
        np.testing.assert_allclose(begin - model.middle.W.array, way_gone, rtol=1e-12)
    assert same_everywhere(comm, bits_of(model))


@on_ranks(3)
@pytest.mark.parametrize("way", ["new arrays", "written", "clipped", "stale"])
def test_updates_that_all_ranks_skip(comm: Communicator, way: str) -> None:
    """All ranks look at averages and skip an update: the next one is of new gradients, not of those."""
    model, optimizer = with_zeros(comm)
    if way == "stale":  # the first update broadcasts and is no update: what was looked at before it is over
        model.middle.W.array[0, 0] += comm.rank
    begin, total = model.middle.W.array.copy(), 0.0
    for step in range(4):
        if way == "new arrays":
            model.cleargrads()
            functions.sum(model.middle.W * (comm.rank + 1.0) * 10**step).backward()
        else:
            for parameter in model.params():
                parameter.grad[...] = (comm.rank + 1) * 10**step
        if step in (0, 2):
            optimizer.synchronize()
        if step == 2 and way != "clipped":
            continue
        if step == 2:
            for parameter in model.params():
                parameter.grad = np.minimum(parameter.grad, 1.0)  # the same on all ranks
        optimizer.update()
        average = 1.0 if step == 2 else 10**step * (comm.size + 1) / 2
        np.testing.assert_array_equal(model.middle.W.grad, average)
        if step == 0 and way == "stale":
            begin = model.middle.W.array.copy()
        else:
            total += average
    np.testing.assert_allclose(begin - model.middle.W.array, 0.5 * total, rtol=1e-12)
    assert same_everywhere(comm, bits_of(model))


@pytest.mark.parametrize("options", [{"op": "sum"}, {"prescale": 0.25, "postscale": 2.0}])
def test_sums_are_reduced_once(comm: Communicator, options: dict[str, Any]) -> None:
    """Sums are not summed up again: what is not known to be new is refused, on all ranks."""
    total = comm.size * (comm.size + 1) / 2 if "op" in options else (comm.size + 1) / 4

    def loss() -> Any:
        return functions.sum(model.middle.W) * (comm.rank + 1.0)

    again = UsageError, "'middle/W' was reduced before, and would be once more with op="
    model, optimizer = with_zeros(comm, **options)
    for step in range(6):
        clear = model.zerograds if step == 3 else model.cleargrads
        clear()
        if step % 2:
            optimizer.backward(loss())
            refuses(*again, optimizer.backward, loss())
            refuses(UsageError, "may hold sums", optimizer.synchronize)
        else:
            loss().backward()
        optimizer.update()
        np.testing.assert_array_equal(model.middle.W.grad, total)
        refuses(*again, optimizer.update)
        np.testing.assert_array_equal(model.middle.W.grad, total)
    for _ in range(2):  # written into what an update has left
        for parameter in model.params():
            parameter.grad[...] = comm.rank + 1
        optimizer.update()
        np.testing.assert_array_equal(model.middle.W.grad, total)


class _Clock:
    """A hook that keeps what differs over ranks."""

    name, timing, call_for_each_param = "clock", "pre", False

    def __call__(self, optimizer: Any) -> None:
        self.seconds = time.perf_counter()


class _Slots:
    __slots__ = ()
    name, timing, call_for_each_param = "slots", "post", False

    def __call__(self, optimizer: Any) -> None: ...


def test_what_may_differ_over_ranks(comm: Communicator) -> None:
    """Hooks and read-only arrays of a program's own are left alone."""
    model, optimizer = with_zeros(comm, check_every=1)
    model.add_persistent("grid", np.broadcast_to(np.arange(3.0) + comm.rank, (2, 3)))
    optimizer.add_hook(_Clock())
    optimizer.add_hook(_Slots())
    with optimizer.join():
        for step in range(3 + comm.rank):
            optimizer.update(squares, model, 10 * step + comm.rank)
        assert model.grid[0, 0] == comm.rank
    optimizer.update(squares, model, comm.rank)
    assert not model.grid.flags.writeable
    assert same_everywhere(comm, [bits_of(model), model.grid.tobytes()])  # join() takes over from one rank
