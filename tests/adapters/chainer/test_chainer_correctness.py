"""What could let the ranks of a Chainer training drift apart: each case is right, or an error."""

from __future__ import annotations

import copy
import re
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
    SMALL,
    assert_gradients,
    assert_same_weights,
    bits_of,
    draw,
    expected,
    make_model,
    squares,
)
from tests.on_ranks import Pool, on_ranks, same_everywhere


def make_optimizer(comm: Communicator, actual: Any = None, **options: Any) -> Any:
    actual = chainer.optimizers.MomentumSGD(0.1) if actual is None else actual
    return multiring.chainer.create_multi_node_optimizer(actual, comm, **SMALL, **options)


@pytest.mark.parametrize("way", ["communicator", "synchronize", "double buffering"])
def test_gradients_that_are_not_finite_in_debug_mode(comm: Communicator, way: str) -> None:
    model = make_model()
    mn = multiring.chainer.create_communicator(comm)
    optimizer = make_optimizer(comm, double_buffering=way == "double buffering").setup(model)
    for parameter in model.params():
        parameter.grad = np.zeros_like(parameter.array)
    if comm.rank == 1:
        model.middle.W.grad[1, 2] = np.nan
    with (
        chainer.using_config("debug", True),
        pytest.raises(ValueError, match=r"Parameters diverged after allreduce\..*'middle/W'"),
    ):
        if way == "communicator":
            mn.multi_node_mean_grad(model)
        elif way == "synchronize":
            optimizer.synchronize()
        else:
            optimizer.update()
            optimizer.update()
    comm.barrier()  # the other rank has still to see its own
    mn.finalize()
    optimizer.close()


class Normalised(chainer.Chain):
    """Has besides the running statistics a count, states of random number generators, and a scalar."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        with self.init_scope(), chainer.using_config("dtype", np.float64):
            self.network = make_model()
            self.norm = links.BatchNormalization(6)
        self.add_persistent("seen", np.full(2, rank, np.int64))
        self.add_persistent("random", np.random.RandomState(rank))
        self.add_persistent("bits", np.full(4, rank, np.uint32))
        self.add_persistent("scalar", np.float64(rank))
        self.add_persistent("nothing", None)

    def forward(self, x: Any) -> Any:
        return self.network(self.norm(x))

    def statistics(self) -> list[Any]:
        return [self.norm.avg_mean.copy(), self.norm.avg_var.copy()]


@pytest.mark.parametrize(
    ("options", "own_loop"),
    [({"overlap": False}, False), ({}, True), ({"double_buffering": True}, False)],
)
def test_running_statistics(comm: Communicator, options: dict[str, Any], own_loop: bool) -> None:
    """The statistics are those of rank 0, as if it alone had kept them; or averages of what all kept."""
    found: dict[str, list[Any]] = {}
    parameters = []
    for mode in ("local", "broadcast", "average"):
        model = Normalised(comm.rank)
        optimizer = make_optimizer(comm, buffers=mode, check_every=1, **options).setup(model)
        assert (model.seen == (comm.rank if mode == "local" else 0)).all()
        for step in range(4):
            x = draw(10 * step + comm.rank) + comm.rank
            if own_loop:
                model.cleargrads()
                optimizer.backward(functions.mean(model(x) ** 2))
                optimizer.update()
            else:
                optimizer.update(lambda x=x, model=model: functions.mean(model(x) ** 2))
        found[mode] = model.statistics()
        parameters.append(bits_of(model))
        wanted = {"local": comm.rank, "broadcast": 0, "average": 0}[mode]
        assert (model.seen == wanted).all()
        assert (model.bits == comm.rank).all()
        assert model.scalar == comm.rank
        assert model.random.randint(1 << 30) == np.random.RandomState(comm.rank).randint(1 << 30)
        optimizer.close()
    every = comm.allgather_object(found["local"])
    assert not same_everywhere(comm, [one.tobytes() for one in found["local"]])
    assert [one.tobytes() for one in found["broadcast"]] == [one.tobytes() for one in every[0]]
    for one, own in zip(found["average"], zip(*every, strict=True), strict=True):
        np.testing.assert_allclose(one, np.mean(own, axis=0), rtol=1e-12)
    assert same_everywhere(comm, [one.tobytes() for one in found["average"]])
    assert parameters[0] == parameters[1] == parameters[2]
    assert same_everywhere(comm, parameters)


@on_ranks(3)
def test_running_statistics_of_uneven_data(comm: Communicator) -> None:
    """A rank without data takes over the statistics of one that has some, and is not compared."""
    model = Normalised(comm.rank)
    optimizer = make_optimizer(comm, check_every=1).setup(model)
    with optimizer.join():
        for step in range(2 * comm.rank + 1):
            optimizer.update(lambda step=step: functions.mean(model(draw(10 * step + comm.rank)) ** 2))
    assert (model.seen == 0).all()
    optimizer.update(lambda: functions.mean(model(draw(comm.rank)) ** 2))
    assert same_everywhere(comm, [one.tobytes() for one in model.statistics()])
    with pytest.raises(UsageError, match="buffers is 'some'"):
        make_optimizer(comm, buffers="some")


def drift(comm: Communicator, what: str, double_buffering: bool) -> None:
    model = Normalised(comm.rank)
    is_odd = comm.rank == 1
    kind = chainer.optimizers.AdaGrad if what == "type" and is_odd else chainer.optimizers.SGD
    actual = kind(0.1)
    optimizer = make_optimizer(comm, actual, double_buffering=double_buffering, check_every=4).setup(model)
    if what == "hook":
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.2 if is_odd else 0.1))
    if what == "noise":
        np.random.seed(comm.rank)
        optimizer.add_hook(chainer.optimizer_hooks.GradientNoise(0.3))
    for step in range(9):
        if step == 5 and is_odd and what == "weights":
            model.network.middle.W.array[0, 0] += 1
        if step == 5 and is_odd and what == "replaced":
            model.network.middle.W.array = model.network.middle.W.array + 1
        if step == 5 and is_odd and what == "rate":
            optimizer.lr = 0.2
        if step == 5 and is_odd and what == "own rate":
            model.network.last.b.update_rule.hyperparam.lr = 0.2
        if step == 5 and is_odd and what == "frozen":
            model.network.first.disable_update()
        optimizer.update(lambda step=step: functions.mean(model(draw(10 * step + comm.rank)) ** 2))
        assert step < 7 or what == "none"
    optimizer.close()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("type", r"at step 2: .*'optimizer' 'SGD' on rank 0, but 'optimizer' 'AdaGrad' on rank 1"),
        ("hook", r"at step 2: .*'hook WeightDecay of the optimizer' .*0.1.*0.2"),
        ("noise", r"at step 2: .*'network/first/W' float64 .* on rank 0, but"),
        ("replaced", r"at step 8: .*'network/middle/W' float64"),
        ("rate", r"at step 8: .*'lr of the optimizer' 0.1 on rank 0, but 'lr of the optimizer' 0.2"),
        ("own rate", r"at step 8: .*'lr of the update rule of network/last/b' 0.2"),
        ("frozen", r"at step 8: .*'update rule of network/first/W' \('SGDRule', True\) on rank 0"),
    ],
)
def test_states_that_differ(ranks: Pool, what: str, text: str) -> None:
    for error in ranks(2).run_expecting_errors(drift, what, False):
        assert isinstance(error, MismatchError), error
        assert re.search(text, str(error)), error


def test_states_that_differ_with_double_buffering(ranks: Pool) -> None:
    ranks(2).run(drift, "none", True)
    for error in ranks(2).run_expecting_errors(drift, "weights", True):
        assert isinstance(error, MismatchError), error
        assert "'network/middle/W'" in str(error)


def test_a_snapshot_that_one_rank_has_loaded(comm: Communicator, tmp_path: Path) -> None:
    """A snapshot of a training is loaded on rank 0 alone: all take over its parameters, its momentum, and its
    statistics, and go on as the training would have."""
    whole, model = Normalised(0), Normalised(0)
    plain = chainer.optimizers.MomentumSGD(0.1).setup(whole)
    for step in range(3):
        plain.update(lambda step=step: functions.mean(whole(draw(step)) ** 2))
    path = f"{tmp_path}/snapshot.npz"
    optimizer = make_optimizer(comm, check_every=1).setup(model)
    if comm.rank == 0:
        del whole.random, whole.nothing
        for link in (whole, model):
            link._persistent -= {"random", "nothing"}
        chainer.serializers.save_npz(path, whole)
        chainer.serializers.save_npz(path + ".state", plain)
        chainer.serializers.load_npz(path, model)
        chainer.serializers.load_npz(path + ".state", optimizer)
    statistics = whole.statistics()
    for step in range(3):  # the first of them broadcasts
        optimizer.update(lambda: functions.mean(model(draw(7)) ** 2))
        if step == 0:
            assert optimizer.t == plain.t == 3
            assert [a.tobytes() for a in statistics] != [a.tobytes() for a in model.statistics()]
        else:
            plain.update(lambda: functions.mean(whole(draw(7)) ** 2))
        assert_same_weights(model, whole, atol=1e-14)
        assert same_everywhere(comm, [a.tobytes() for a in model.statistics()])
    assert same_everywhere(comm, bits_of(model))


def test_objects_that_change_between_steps(comm: Communicator) -> None:
    """What changes objects and arrays between steps, but no value, changes nothing."""
    found = []
    for swaps in (False, True):
        model = make_model()
        optimizer = make_optimizer(comm, check_every=1).setup(model)
        for step in range(5):
            if swaps and step == 1:
                model.to_device("@numpy")
                for parameter in model.params():
                    parameter.array = parameter.array.copy()
            if swaps and step == 2:
                copied = copy.deepcopy(model)
                model.cleargrads()
                copied.cleargrads()
            if swaps and step == 3:
                parameter = chainer.Parameter(model.middle.W.array)
                parameter.update_rule, parameter.grad = model.middle.W.update_rule, model.middle.W.grad
                del model.middle.W
                with model.middle.init_scope():
                    model.middle.W = parameter
            if swaps and step == 4:
                for parameter in model.params():
                    parameter.grad = None if parameter.grad is None else parameter.grad.copy()
            model.cleargrads()
            squares(model, 10 * step + comm.rank).backward()
            if swaps:
                for parameter in model.params():
                    parameter.grad = None if parameter.grad is None else parameter.grad.copy()
            optimizer.update()
        found.append(bits_of(model))
        assert same_everywhere(comm, found)
        optimizer.close()
    assert found[0] == found[1]


def test_a_gradient_inside_of_the_loss(comm: Communicator) -> None:
    """A gradient inside of the loss, as in a gradient penalty, is this rank's own."""

    def loss(model: Any, rank: int) -> Any:
        x = chainer.Variable(draw(rank))
        (inner,) = chainer.grad([model(x)], [x], enable_double_backprop=True)
        return functions.mean(model(x) ** 2) + functions.mean(inner**2)

    model = make_model()
    optimizer = make_optimizer(comm, chainer.optimizers.SGD(0.0)).setup(model)
    wanted = expected(comm, loss)
    for _ in range(2):
        optimizer.update(loss, model, comm.rank)
        model.spare.cleargrads()
        assert_gradients(model, wanted, comm)


def test_an_optimizer_is_wrapped_once(comm: Communicator) -> None:
    mn = multiring.chainer.create_communicator(comm)
    for make in (chainermn.create_multi_node_optimizer, multiring.chainer.create_multi_node_optimizer):
        with pytest.raises(UsageError, match="would be reduced twice"):
            make_optimizer(comm, make(chainer.optimizers.SGD(), mn))


@pytest.mark.parametrize("layout", ["flat", "strided", "list"])
def test_gradients_in_arrays_that_the_program_keeps(comm: Communicator, layout: str) -> None:
    """Gradients in arrays that the program keeps and writes into, set once."""
    model = make_model()
    optimizer = make_optimizer(comm, chainer.optimizers.SGD(0.5)).setup(model)
    parameters = [p for _, p in sorted(model.namedparams())]
    flat = np.zeros(sum(p.size for p in parameters))
    kept, start = [], 0
    for parameter in parameters:
        if layout == "flat":
            parameter.grad = flat[start : start + parameter.size].reshape(parameter.shape)
        elif layout == "strided":
            parameter.grad = np.zeros((*parameter.shape, 2))[..., 1]
        else:
            parameter.grad = np.zeros(parameter.shape)
        start += parameter.size
        kept.append(parameter.grad)
    for step in range(4):
        before = [p.array.copy() for p in parameters]
        for array in kept:
            array[...] = comm.rank + step
        optimizer.update()
        average = (comm.size - 1) / 2 + step
        for array, parameter, old in zip(kept, parameters, before, strict=True):
            assert parameter.grad is array
            np.testing.assert_array_equal(array, average)
            np.testing.assert_allclose(parameter.array, old - 0.5 * average, rtol=1e-12)
        assert layout != "flat" or (flat == average).all()
