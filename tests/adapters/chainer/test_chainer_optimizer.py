"""The multi-node optimizer of Chainer: how it stands for the one it wraps, and what goes wrong around it."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiring.chainer  # before Chainer

# isort: split
import chainer
import chainermn
from chainer import functions, links

from multiring import Communicator
from multiring.errors import MismatchError, UsageError
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
from tests.on_ranks import all_raise, on_ranks, refuses, same_everywhere


def whole(model: Any, step: int, size: int, **kwargs: Any) -> Any:
    """Mean loss over what all ranks see in a step."""
    return functions.mean(model(np.concatenate([draw(10 * step + r) for r in range(size)]), **kwargs) ** 2)


def train_like_one(comm: Communicator, overlap: bool) -> list[dict[str, bytes]]:
    """Compared with the same optimizer, alone with the samples of all ranks; hooks see reduced gradients."""
    model, single = make_model(), make_model()
    alone = chainer.optimizers.Adam(0.01).setup(single)
    wrapped = make_optimizer(comm, model, chainer.optimizers.Adam(0.01), overlap=overlap)
    for optimizer in (alone, wrapped):
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.5))
    wrapped.use_cleargrads(overlap)  # or zerograds()
    history = []
    for step in range(5):
        wrapped.update(squares, model, 10 * step + comm.rank)
        alone.update(whole, single, step, comm.size)
        history.append(bits_of(model))
    assert_same_weights(model, single, rtol=1e-10, atol=1e-13)
    assert all(one.creator is None and one.node.rank == 0 for one in model.params())
    return history


@on_ranks(1, 3)
def test_ranks_train_like_one(comm: Communicator) -> list[dict[str, bytes]]:
    history = train_like_one(comm, overlap=True)
    assert train_like_one(comm, overlap=False) == history
    return history


@pytest.mark.parametrize("double_buffering", [False, True])
def test_shapes_that_the_first_batch_gives(comm: Communicator, double_buffering: bool) -> None:
    """And other values on every rank. As in ChainerMN, the first update brings the ranks together, and does
    no more; with double buffering, the second has nothing to update with."""
    model = make_model(seed=comm.rank, inputs=None)
    optimizer = make_optimizer(comm, model, chainer.optimizers.Adam(), double_buffering=double_buffering)
    for step in range(4):
        optimizer.update(squares, model, 10 * step + comm.rank)
        assert same_everywhere(comm, bits_of(model))
        if step == 0:
            assert model.middle.W.array.tobytes() == make_model(0, None).middle.W.array.tobytes()
            assert optimizer.t == 0
    assert optimizer.t == (2 if double_buffering else 3)


def test_a_link_that_joins_later(comm: Communicator) -> None:
    model, optimizer = make_pair(comm, chainer.optimizers.MomentumSGD(0.1))
    optimizer.update(squares, model, comm.rank)
    with model.init_scope(), chainer.using_config("dtype", np.float64):
        model.extra = links.Linear(3, 2)
    for parameter in model.extra.params():
        parameter.update_rule = optimizer.actual_optimizer.create_update_rule()
    for step in range(2):
        optimizer.update(lambda: functions.mean(model.extra(model(draw(comm.rank))) ** 2))
        assert optimizer.t == 1 + step
    assert same_everywhere(comm, bits_of(model))


@all_raise(MismatchError, "'first/W' not initialised on rank 0")
def test_a_shape_on_one_rank_only_is_an_error_on_all(comm: Communicator) -> None:
    model = make_model(inputs=None)
    optimizer = make_optimizer(comm, model)
    if comm.rank == 1:
        optimizer.update(squares, model, 0)
    else:
        model.cleargrads()
        optimizer.update()


def test_it_stands_for_the_optimizer(comm: Communicator, tmp_path: Path) -> None:
    model = make_model()
    actual = chainer.optimizers.Adam(0.01)
    optimizer = multiring.chainer.create_multi_node_optimizer(actual, comm)
    refuses(UsageError, r"call setup\(link\)", optimizer.update)
    assert optimizer.setup(model) is optimizer
    optimizer.alpha = 0.02
    assert actual.alpha == 0.02
    assert "alpha" not in vars(optimizer)
    optimizer.use_auto_new_epoch = True
    optimizer.new_epoch(auto=True)
    assert (actual.epoch, optimizer.epoch, optimizer.target) == (1, 1, model)
    refuses(AttributeError, "nothing", lambda: optimizer.nothing)
    optimizer.update(squares, model, comm.rank)
    path = f"{tmp_path}/{comm.rank}.npz"
    chainer.serializers.save_npz(path, optimizer)
    other = make_optimizer(comm, make_model(), chainer.optimizers.Adam())
    chainer.serializers.load_npz(path, other)
    assert other.t == 1
    momenta = [one.target.first.W.update_rule.state["m"] for one in (optimizer, other)]
    np.testing.assert_array_equal(*momenta)
    refuses(UsageError, "serialize", copy.deepcopy, optimizer)
    assert "Adam" in repr(optimizer)
    # What is set up already is compared at once.
    late = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD().setup(make_model()), comm)
    late.update(squares, late.target, comm.rank)
    assert late.t == 1


def test_dynamic_loss_scaling(comm: Communicator) -> None:
    """An overflow on one rank is skipped by all."""
    model, optimizer = make_pair(comm)
    optimizer.loss_scaling()
    before = bits_of(model)
    factor = np.inf if comm.rank == 0 else 1.0
    with pytest.warns(UserWarning, match="Non finite number"), np.errstate(invalid="ignore"):
        optimizer.update(lambda: squares(model, comm.rank) * factor)
    assert bits_of(model) == before
    optimizer.update(squares, model, comm.rank)
    assert bits_of(model) != before
    assert same_everywhere(comm, bits_of(model))


@on_ranks(1, 3)
def test_double_buffering(comm: Communicator) -> list[dict[str, bytes]]:
    """Every update uses the average gradients that the model had one update earlier."""
    model, single = make_model(), make_model()
    optimizer = make_optimizer(comm, model, chainer.optimizers.MomentumSGD(0.1), double_buffering=True)
    assert not optimizer.needs_update
    alone = chainer.optimizers.MomentumSGD(0.1).setup(single)
    stale: dict[str, Any] = {}
    history = []
    for step in range(6):
        optimizer.update(squares, model, 10 * step + comm.rank, spare=step in (0, 3))
        assert optimizer.needs_update
        single.cleargrads()
        whole(single, step, comm.size, spare=step in (0, 3)).backward()
        fresh = {name: parameter.grad for name, parameter in single.namedparams()}
        if stale:
            for name, parameter in single.namedparams():
                parameter.grad = stale[name]
            alone.update()
        stale = fresh
        assert_same_weights(model, single, rtol=1e-10, atol=1e-13)
        history.append(bits_of(model))
    assert optimizer.t == 5
    refuses(UsageError, "double buffering", optimizer.synchronize)
    refuses(UsageError, "double buffering", optimizer.join().__enter__)
    optimizer.close()
    optimizer.close()
    return history


class LockedRule(chainer.optimizers.momentum_sgd.MomentumSGDRule):  # type: ignore[misc]
    """Its state cannot be pickled."""

    def init_state(self, parameter: Any) -> None:
        super().init_state(parameter)
        self.state["lock"] = threading.Lock()

    def update_core_cpu(self, parameter: Any) -> None:
        with self.state["lock"]:
            super().update_core_cpu(parameter)


class Locked(chainer.optimizers.MomentumSGD):  # type: ignore[misc]
    def create_update_rule(self) -> LockedRule:
        return LockedRule(self.hyperparam)


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_state_that_cannot_be_pickled(comm: Communicator, everywhere: bool) -> None:
    """All ranks, or rank 0 alone, have a state before the first update, which then is a broadcast."""
    model, actual = make_model(), Locked(0.1)
    actual.setup(model)
    if everywhere or comm.rank == 0:
        actual.update(squares, model, 0)
    optimizer = multiring.chainer.create_multi_node_optimizer(actual, comm)
    told = "state 'lock' of the update rule of 'first/W' cannot be pickled .*, and 7 more like it: each rank"
    warns = comm.rank == 0 and not everywhere
    with pytest.warns(UserWarning, match=told) if warns else nullcontext():
        optimizer.update(squares, model, comm.rank)
    assert optimizer.t == (2 if everywhere else 1)
    optimizer.update(squares, model, comm.rank)
    state = [one.update_rule.state["v"].tobytes() for one in model.params()]
    assert same_everywhere(comm, [bits_of(model), state])


def failing(model: Any, rank: int) -> Any:
    def explode(_: Any) -> None:
        raise ArithmeticError("the loss has exploded")

    return squares(model, rank, call=explode)


def test_a_backward_pass_that_fails_on_all_ranks(comm: Communicator) -> None:
    """The next one starts afresh."""
    model, optimizer = make_pair(comm, chainer.optimizers.SGD(0.0))
    for step in range(4):
        if step in (1, 2):
            refuses(ArithmeticError, "exploded", optimizer.update, failing, model, comm.rank)
            assert all(parameter.creator is None for parameter in model.params())
            continue
        model.cleargrads()
        optimizer.backward(squares(model, comm.rank))
        assert_gradients(model, expected(comm), comm)


@all_raise(MismatchError, r"gradients\[")
def test_a_backward_pass_that_fails_on_one_rank(comm: Communicator) -> None:
    """It is not mixed with what the others wait for."""
    model = make_model()
    optimizer = make_optimizer(comm.split(0), model)
    optimizer.update(squares, model, comm.rank)
    if comm.rank == 1:
        refuses(ArithmeticError, "exploded", optimizer.update, failing, model, comm.rank)
    optimizer.update(squares, model, comm.rank)


def test_refused(comm: Communicator) -> None:
    make, sgd = multiring.chainer.create_multi_node_optimizer, chainer.optimizers.SGD
    refuses(UsageError, "no parameters", make_optimizer, comm, chainer.Link())
    link = chainer.Link()
    with link.init_scope():
        link.count = chainer.Parameter(np.zeros(2, np.int32))
    refuses(UsageError, "dtype int32 cannot be reduced", make_optimizer, comm, link)
    for option, value in (("op", "mean"), ("postscale", 0.0), ("buffers", "some")):
        text = f"{option} is {value!r}".removesuffix(".0")
        refuses(UsageError, text, make_optimizer, comm, make_model(), **{option: value})
    refuses(UsageError, "is no communicator of multiring", make, sgd(), object())
    mn = multiring.chainer.create_communicator(comm)
    for wrapped in (chainermn.create_multi_node_optimizer(sgd(), mn), make(sgd(), mn)):
        refuses(UsageError, "would be reduced twice", make_optimizer, comm, make_model(), wrapped)
    model, optimizer = make_pair(comm)
    optimizer.update(squares, model, comm.rank)
    for parameter in model.first.params():
        parameter.array = parameter.array.astype(np.float32)
    model.cleargrads()
    model.first.W.grad = np.ones_like(model.first.W.array)
    refuses(UsageError, r"'first/W' has become float32 \(8, 6\), it was float64", optimizer.update)
    model = chainer.Sequential(links.Linear(6, 3), links.BatchNormalization(3))
    multiring.chainer.convert_sync_batch_normalization(model, comm)
    join = make_optimizer(comm, model).join()
    refuses(UsageError, "synchronised batch normalisation", join.__enter__)
    join = make_optimizer(comm, make_model(inputs=None)).join()
    refuses(UsageError, "'first/W' has no shape yet", join.__enter__)


def test_a_backward_pass_inside_of_another(comm: Communicator) -> None:
    """A layer's gradient comes twice: refused; after the pass there is one, which Chainer has chosen."""
    model = make_model()
    optimizer = make_optimizer(comm.split(0), model, chainer.optimizers.SGD(0.0))

    def loss(model: Any, rank: int) -> Any:
        def inner(x: Any) -> None:
            with chainer.force_backprop_mode():
                functions.sum(model.last(x)).backward()

        return squares(model, rank, call=inner)

    text = "'last/W' received a second gradient .*overlap=False"
    refuses(UsageError, text, optimizer.update, loss, model, comm.rank)
    optimizer.overlap = False
    model.cleargrads()
    optimizer.backward(loss(model, comm.rank))
    assert_gradients(model, expected(comm, loss), comm)


def test_a_dropped_optimizer_releases_its_buckets(comm: Communicator) -> None:
    model, optimizer = make_pair(comm)
    for _ in range(2):
        optimizer.update(squares, model, comm.rank)
    dropped = [weakref.ref(model), weakref.ref(optimizer._slots.reducer._memory)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in dropped] == [None, None]
