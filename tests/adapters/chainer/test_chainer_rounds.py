"""What counts as reduced where a program writes into arrays, looks at averages, or skips updates."""

from __future__ import annotations

import time
from typing import Any

import chainer
import numpy as np
import pytest
from chainer import functions

from multiring import Communicator
from multiring.errors import UsageError
from tests.adapters.chainer.support import bits_of, make_model, make_optimizer, squares
from tests.on_ranks import on_ranks, same_everywhere


def with_zeros(comm: Communicator, **options: Any) -> tuple[Any, Any]:
    """A model whose gradients are there, and its optimizer."""
    model = make_model()
    for parameter in model.params():
        parameter.grad = np.zeros_like(parameter.array)
    return model, make_optimizer(comm, model, chainer.optimizers.SGD(0.5), **options)


@pytest.mark.parametrize("way", ["synchronize", "skip", "backward", "double buffering"])
def test_gradients_written_in_place(comm: Communicator, way: str) -> None:
    """New gradients in the same arrays in every step; the weights go the way of their averages."""
    model, optimizer = with_zeros(comm, double_buffering=way == "double buffering")
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
        elif way != "double buffering":
            optimizer.synchronize()
        average = value * (comm.size + 1) / 2
        if way != "double buffering":
            np.testing.assert_array_equal(model.spare.W.grad, average)
        if way != "skip" or step % 2:
            optimizer.update()
    total = {"skip": sum(values[1::2]), "double buffering": sum(values[:-1])}.get(way, sum(values))
    if way != "backward":
        np.testing.assert_allclose(
            begin - model.middle.W.array, 0.5 * total * (comm.size + 1) / 2, rtol=1e-12
        )
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

    again = pytest.raises(UsageError, match=r"'middle/W' was reduced before, and would be once more with op=")
    model, optimizer = with_zeros(comm, **options)
    for step in range(6):
        clear = model.zerograds if step == 3 else model.cleargrads
        clear()
        if step % 2:
            optimizer.backward(loss())
            with again:
                optimizer.backward(loss())
            with pytest.raises(UsageError, match="may hold sums"):
                optimizer.synchronize()
        else:
            loss().backward()
        optimizer.update()
        np.testing.assert_array_equal(model.middle.W.grad, total)
        with again:
            optimizer.update()
        np.testing.assert_array_equal(model.middle.W.grad, total)
    for _ in range(2):  # written into what an update has left
        for parameter in model.params():
            parameter.grad[...] = comm.rank + 1
        optimizer.update()
        np.testing.assert_array_equal(model.middle.W.grad, total)


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
