"""The multi-node optimizer of Chainer: ranks train like one, and how it stands for the optimizer it wraps."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiring.chainer  # before Chainer

# isort: split
import chainer
from chainer import functions, links

from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from tests.adapters.chainer.support import SMALL, assert_same_weights, bits_of, draw, make_model, squares
from tests.on_ranks import all_raise, on_ranks, same_everywhere


def whole(model: Any, step: int, size: int, **kwargs: Any) -> Any:
    """Mean loss over what all ranks see in a step."""
    return functions.mean(model(np.concatenate([draw(10 * step + r) for r in range(size)]), **kwargs) ** 2)


def train_like_one(comm: Communicator, overlap: bool) -> list[dict[str, bytes]]:
    """Compared with the same optimizer, alone with the samples of all ranks; hooks see reduced gradients."""
    model, single = make_model(), make_model()
    alone = chainer.optimizers.Adam(0.01).setup(single)
    actual = chainer.optimizers.Adam(0.01)
    wrapped = multiring.chainer.create_multi_node_optimizer(actual, comm, overlap=overlap, **SMALL)
    assert wrapped.setup(model) is wrapped
    for optimizer in (alone, wrapped):
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.1))
        optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.5))
    history = []
    for step in range(5):
        wrapped.update(squares, model, 10 * step + comm.rank)
        alone.update(whole, single, step, comm.size)
        history.append(bits_of(model))
    assert_same_weights(model, single, rtol=1e-10, atol=1e-13)
    assert all(one.creator is None and one.node.rank == 0 for one in model.params())
    assert wrapped.t == 5
    wrapped.close()
    return history


@on_ranks(1, 3)
def test_ranks_train_like_one(comm: Communicator) -> list[dict[str, bytes]]:
    history = train_like_one(comm, overlap=True)
    assert train_like_one(comm, overlap=False) == history
    return history


def test_ranks_that_start_apart_are_brought_together(comm: Communicator) -> None:
    """As in ChainerMN, ranks that start apart are brought together by the first update, and by it alone."""
    model = make_model(seed=comm.rank)
    optimizer = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm)
    optimizer.setup(model)
    optimizer.update(squares, model, comm.rank)
    assert bits_of(model) == bits_of(make_model(seed=0))
    assert optimizer.t == 0
    optimizer.update(squares, model, comm.rank)
    assert optimizer.t == 1
    assert bits_of(model) != bits_of(make_model(seed=0))
    assert same_everywhere(comm, bits_of(model))


def test_shapes_that_the_first_batch_gives(comm: Communicator) -> None:
    """Parameters that the first batch gives a shape, of other values on every rank."""
    model = make_model(seed=comm.rank, inputs=None)
    optimizer = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
    optimizer.setup(model)
    for step in range(3):
        optimizer.update(squares, model, 10 * step + comm.rank)
        found = bits_of(model)
        assert same_everywhere(comm, found)
    assert optimizer.t == 2


def test_a_link_that_joins_later(comm: Communicator) -> None:
    """A link that joins later: set up again, it takes part, and the old ones keep their state."""
    model = make_model()
    optimizer = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.MomentumSGD(0.1), comm)
    optimizer.setup(model)
    optimizer.update(squares, model, comm.rank)
    with model.init_scope(), chainer.using_config("dtype", np.float64):
        model.extra = links.Linear(3, 2)
    model.extra.W.update_rule = optimizer.actual_optimizer.create_update_rule()
    model.extra.b.update_rule = optimizer.actual_optimizer.create_update_rule()
    for step in range(2):
        optimizer.update(lambda: functions.mean(model.extra(model(draw(comm.rank))) ** 2))
        assert optimizer.t == 1 + step
    found = bits_of(model)
    assert same_everywhere(comm, found)


@all_raise(MismatchError, "'first/W' not initialised on rank 0")
def test_a_shape_on_one_rank_only_is_an_error_on_all(comm: Communicator) -> None:
    model = make_model(inputs=None)
    optimizer = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    optimizer.setup(model)
    if comm.rank == 1:
        optimizer.update(squares, model, 0)
    else:
        model.cleargrads()
        optimizer.update()


def test_loops_of_ones_own(comm: Communicator) -> None:
    """cleargrads, backward, update as in a loop without an updater; accumulation; zerograds."""
    results = []
    for way in ("plain", "backward", "accumulated", "zerograds"):
        model = make_model()
        actual = chainer.optimizers.MomentumSGD(0.1)
        optimizer = multiring.chainer.create_multi_node_optimizer(actual, comm, **SMALL)
        optimizer.setup(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Chainer finds zerograds too slow
            optimizer.use_cleargrads(way != "zerograds")
            for step in range(3):
                if way == "zerograds":
                    optimizer.update(squares, model, 10 * step + comm.rank)
                    continue
                model.cleargrads()
                loss = squares(model, 10 * step + comm.rank)
                if way == "backward":
                    optimizer.backward(loss)
                    assert not optimizer._slots or not optimizer._slots.new
                elif way == "accumulated":
                    (0.25 * loss).backward()
                    (0.75 * squares(model, 10 * step + comm.rank)).backward()
                else:
                    loss.backward()
                optimizer.update()
        results.append({name: parameter.array.copy() for name, parameter in model.namedparams()})
        optimizer.close()
        optimizer.close()
    for other in results[1:]:
        for name, value in results[0].items():
            np.testing.assert_allclose(other[name], value, rtol=1e-12, err_msg=name)


def test_it_stands_for_the_optimizer(comm: Communicator, tmp_path: Path) -> None:
    model = make_model()
    actual = chainer.optimizers.Adam(0.01)
    optimizer = multiring.chainer.create_multi_node_optimizer(actual, comm)
    with pytest.raises(UsageError, match=r"call setup\(link\)"):
        optimizer.update()
    optimizer.setup(model)
    optimizer.alpha = 0.02
    assert actual.alpha == 0.02
    assert "alpha" not in vars(optimizer)
    optimizer.use_auto_new_epoch = True
    optimizer.new_epoch(auto=True)
    assert (actual.epoch, optimizer.epoch, optimizer.target) == (1, 1, model)
    with pytest.raises(AttributeError, match="nothing"):
        optimizer.nothing  # noqa: B018
    optimizer.update(squares, model, comm.rank)
    path = f"{tmp_path}/{comm.rank}.npz"
    chainer.serializers.save_npz(path, optimizer)
    other = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.Adam(), comm)
    other.setup(make_model())
    chainer.serializers.load_npz(path, other)
    assert other.t == 1
    np.testing.assert_array_equal(
        other.target.first.W.update_rule.state["m"], model.first.W.update_rule.state["m"]
    )
    with pytest.raises(UsageError, match="serialize"):
        copy.deepcopy(optimizer)
    assert "Adam" in repr(optimizer)
    with pytest.raises(UsageError, match="is no communicator of multiring"):
        multiring.chainer.create_multi_node_optimizer(actual, object())
    # What is set up already is compared at once.
    late = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD().setup(make_model()), comm)
    late.update(squares, late.target, comm.rank)
    assert late.t == 1


def test_loss_scaling(comm: Communicator) -> None:
    """Static scaling changes nothing; with dynamic scaling an overflow on one rank is skipped by all."""
    plain, scaled = make_model(), make_model()
    for model, scale in ((plain, None), (scaled, 1024.0)):
        optimizer = multiring.chainer.create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm, **SMALL)
        optimizer.setup(model)
        if scale is not None:
            optimizer.loss_scaling(scale=scale)
        for step in range(2):
            optimizer.update(squares, model, 10 * step + comm.rank)
        optimizer.close()
    assert_same_weights(plain, scaled)
    optimizer.loss_scaling()
    before = bits_of(scaled)
    factor = np.inf if comm.rank == 0 else 1.0
    with pytest.warns(UserWarning, match="Non finite number"), np.errstate(invalid="ignore"):
        optimizer.update(lambda: squares(scaled, comm.rank) * factor)
    assert bits_of(scaled) == before
    optimizer.update(squares, scaled, comm.rank)
    assert bits_of(scaled) != before
    assert same_everywhere(comm, bits_of(scaled))


@on_ranks(1, 3)
def test_double_buffering(comm: Communicator) -> list[dict[str, bytes]]:
    """Every update uses the average gradients that the model had one update earlier."""
    model, single = make_model(), make_model()
    optimizer = multiring.chainer.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm, double_buffering=True, **SMALL
    )
    optimizer.setup(model)
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
    with pytest.raises(UsageError, match="double buffering"):
        optimizer.synchronize()
    with pytest.raises(UsageError, match="double buffering"), optimizer.join():
        pass
    optimizer.close()
    optimizer.close()
    return history


def test_double_buffering_after_a_broadcast(comm: Communicator) -> None:
    model = make_model(seed=comm.rank, inputs=None)
    optimizer = multiring.chainer.create_multi_node_optimizer(
        chainer.optimizers.SGD(0.1), comm, double_buffering=True
    )
    optimizer.setup(model)
    for step in range(4):
        optimizer.update(squares, model, 10 * step + comm.rank)
        assert same_everywhere(comm, bits_of(model))
    # The first was the broadcast, the second had nothing to update with.
    assert optimizer.t == 2
