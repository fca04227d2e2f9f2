"""Which gradients the multi-node optimizer of Chainer reduces, when they leave, and how they are averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import multiring.chainer  # before Chainer

# isort: split
import chainer
from chainer import functions, links

from multiring import Communicator
from multiring.errors import UsageError
from tests.adapters.chainer.support import SMALL, assert_same_weights, draw, make_model, squares
from tests.on_ranks import on_ranks


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
    optimizer: Any = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD(), comm, **SMALL)
    optimizer.setup(model)
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
    optimizer.close()
    assert found[1] >= 2  # of those of the last, the spare and the middle layer


def test_parameters_with_several_users(comm: Communicator) -> None:
    """A parameter of several users is final after the last of them only; inside of forget(), at the end."""
    for shape in ("shared", "forget", "weights alone"):

        def loss(model: Any, rank: int, shape: str = shape) -> Any:
            hidden = functions.tanh(model.first(draw(rank)))
            for _ in range(3):
                hidden = functions.forget(model.middle, hidden) if shape == "forget" else model.middle(hidden)
            if shape == "weights alone":
                return functions.sum(model.middle.W * model.middle.W) * (rank + 1) + functions.sum(hidden)
            return functions.mean(model.last(hidden) ** 2)

        model, single = make_model(), make_model()
        optimizer = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm, **SMALL)
        optimizer.setup(model)
        alone = chainer.optimizers.SGD(0.1).setup(single)
        for step in range(3):
            optimizer.update(loss, model, 10 * step + comm.rank)
            losses = [lambda m, r=r, s=step: loss(m, 10 * s + r) for r in range(comm.size)]
            alone.update(lambda m: sum(one(m) for one in losses) / comm.size, single)  # noqa: B023
        for (name, one), (_, other) in zip(model.namedparams(), single.namedparams(), strict=True):
            np.testing.assert_allclose(one.array, other.array, rtol=1e-10, err_msg=f"{shape} {name}")
        optimizer.close()


def test_unused_parameters(comm: Communicator) -> None:
    """No rank has a gradient for the spare layer, which Chainer's gradient methods update with zeros."""
    model = make_model()
    make = multiring.chainer.create_multi_node_optimizer
    optimizer = make(chainer.optimizers.SGD(0.0), comm, zero_fill=False).setup(model)
    for _ in range(2):
        model.cleargrads()
        squares(model, comm.rank).backward()
        optimizer.synchronize()
        assert model.spare.W.grad is None
        assert model.first.W.grad is not None
        optimizer.update()
        assert not model.spare.W.grad.any()


def test_dtypes_in_one_model(comm: Communicator) -> None:
    """float16, float32 and float64 side by side; parameters of no elements and of no dimensions."""
    link = chainer.Link()
    shapes = {"half": ((3,), "float16"), "single": ((2, 2), "float32"), "none": ((0, 4), "float64")}
    shapes["scalar"] = ((), "float64")
    with link.init_scope():
        for name, (shape, dtype) in shapes.items():
            setattr(link, name, chainer.Parameter(np.zeros(shape, dtype)))
    optimizer = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD(1.0), comm)
    optimizer.setup(link)
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
    model = make_model()
    optimizer = multiring.chainer.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm, **SMALL
    )
    optimizer.setup(model)
    single = make_model()
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


def test_join_is_refused(comm: Communicator) -> None:
    model = chainer.Sequential(links.Linear(6, 3), links.BatchNormalization(3))
    multiring.chainer.convert_sync_batch_normalization(model, comm)
    optimizer = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    optimizer.setup(model)
    with pytest.raises(UsageError, match="synchronised batch normalisation"), optimizer.join():
        pass
    optimizer.setup(make_model(inputs=None))
    with pytest.raises(UsageError, match=r"'first/W' has no shape yet"), optimizer.join():
        pass
