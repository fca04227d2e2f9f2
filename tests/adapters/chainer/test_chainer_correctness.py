"""What could let the ranks of a Chainer training drift apart: each case is right, or an error."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multiring.chainer  # before Chainer

# isort: split
import chainer
from chainer import functions, links

from multiring import Communicator
from multiring.errors import MismatchError
from tests.adapters.chainer.support import (
    assert_same_weights,
    bits_of,
    draw,
    make_model,
    make_optimizer,
    make_pair,
    squares,
)
from tests.on_ranks import all_raise, on_ranks, same_everywhere


@pytest.mark.parametrize("way", ["communicator", "synchronize", "double buffering"])
def test_gradients_that_are_not_finite_in_debug_mode(comm: Communicator, way: str) -> None:
    model, optimizer = make_pair(comm, double_buffering=way == "double buffering")
    for parameter in model.params():
        parameter.grad = np.zeros_like(parameter.array)
    if comm.rank == 1:
        model.middle.W.grad[1, 2] = np.nan
    with (
        chainer.using_config("debug", True),
        pytest.raises(ValueError, match=r"Parameters diverged after allreduce\..*'middle/W'"),
    ):
        if way == "communicator":
            multiring.chainer.create_communicator(comm).multi_node_mean_grad(model)
        elif way == "synchronize":
            optimizer.synchronize()
        else:
            optimizer.update()
            optimizer.update()
    comm.barrier()  # the other rank has still to see its own


class Normalised(chainer.Chain):
    """Has besides the running statistics a count, states of random number generators, and a scalar."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        with self.init_scope(), chainer.using_config("dtype", np.float64):
            self.network = make_model()
            self.norm = links.BatchNormalization(6)
        self.add_persistent("seen", np.full(2, rank, np.int64))
        self.add_persistent("phase", np.full(2, rank * 1j, np.complex64))
        self.add_persistent("random", np.random.RandomState(rank))
        self.add_persistent("bits", np.full(4, rank, np.uint32))
        self.add_persistent("scalar", np.float64(rank))
        self.add_persistent("nothing", None)

    def forward(self, x: Any) -> Any:
        return self.network(self.norm(x))

    def statistics(self) -> Any:
        return np.stack([self.norm.avg_mean, self.norm.avg_var])


@pytest.mark.parametrize(
    ("options", "own_loop"),
    [({"overlap": False}, False), ({}, True), ({"double_buffering": True}, False)],
)
def test_running_statistics(comm: Communicator, options: dict[str, Any], own_loop: bool) -> None:
    """The statistics are those of rank 0, as if it alone had kept them; or averages of what all kept."""
    found = {}
    parameters = []
    for mode in ("local", "broadcast", "average"):
        model = Normalised(comm.rank)
        momentum = chainer.optimizers.MomentumSGD(0.1)
        optimizer = make_optimizer(comm, model, momentum, buffers=mode, check_every=1, **options)
        seen = comm.rank if mode == "local" else 0
        assert (model.seen == seen).all()
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
        assert (model.seen == seen).all()
        assert (model.phase == seen * 1j).all()
        assert (model.bits == comm.rank).all()
        assert model.scalar == comm.rank
        assert model.random.randint(1 << 30) == np.random.RandomState(comm.rank).randint(1 << 30)
        optimizer.close()
    every = comm.allgather_object(found["local"])
    assert not np.array_equal(every[0], every[1])
    np.testing.assert_array_equal(found["broadcast"], every[0])
    np.testing.assert_allclose(found["average"], np.mean(every, axis=0), rtol=1e-12)
    assert same_everywhere(comm, found["average"].tobytes())
    assert parameters[0] == parameters[1] == parameters[2]
    assert same_everywhere(comm, parameters)


@on_ranks(3)
def test_state_after_uneven_data(comm: Communicator) -> None:
    """Ranks take over statistics and momentum of the one that had data to the last. A rank without data is
    not compared, and has the statistics of one that has some."""
    model = Normalised(comm.rank)
    optimizer = make_optimizer(comm, model, chainer.optimizers.MomentumSGD(0.1), check_every=1)
    with optimizer.join():
        for step in range(2 * comm.rank + 1):
            optimizer.update(squares, model, 10 * step + comm.rank)
    assert (model.seen == 0).all()
    assert optimizer.t == 2 * comm.size - 1
    assert same_everywhere(comm, [one.update_rule.state["v"].tobytes() for one in model.params()])
    optimizer.update(squares, model, comm.rank)
    assert same_everywhere(comm, model.statistics().tobytes())


@all_raise(
    MismatchError,
    what={
        "none": None,
        "type": r"at step 2: .*'optimizer' 'SGD' on rank 0, but 'optimizer' 'AdaGrad' on rank 1",
        "hook": r"at step 2: .*'hook WeightDecay of the optimizer' .*0.1.*0.2",
        "noise": r"at step 2: .*'network/first/W' float64 .* on rank 0, but",
        "replaced": r"at step 8: .*'network/middle/W' float64",
        "rate": r"at step 8: .*'lr of the optimizer' 0.1 on rank 0, but 'lr of the optimizer' 0.2",
        "own rate": r"at step 8: .*'lr of the update rule of network/last/b' 0.2",
        "frozen": r"at step 8: .*'update rule of network/first/W' \('SGDRule', True\) on rank 0",
        "double buffering": "'network/middle/W'",
        "end": "at this call of check_state.*'lr",
    },
)
def test_states_that_differ(comm: Communicator, what: str) -> None:
    model = Normalised(comm.rank)
    is_odd = comm.rank == 1
    kind = chainer.optimizers.AdaGrad if what == "type" and is_odd else chainer.optimizers.SGD
    is_double = what in ("none", "double buffering")
    optimizer = make_optimizer(comm, model, kind(0.1), double_buffering=is_double, check_every=4)
    if what == "hook":
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.2 if is_odd else 0.1))
    if what == "noise":
        np.random.seed(comm.rank)
        optimizer.add_hook(chainer.optimizer_hooks.GradientNoise(0.3))
    for step in range(9):
        what_now = what if step == 5 and is_odd else None
        if what_now == "double buffering":
            model.network.middle.W.array[0, 0] += 1
        elif what_now == "replaced":
            model.network.middle.W.array = model.network.middle.W.array + 1
        elif what_now == "rate":
            optimizer.lr = 0.2
        elif what_now == "own rate":
            model.network.last.b.update_rule.hyperparam.lr = 0.2
        elif what == "end":
            optimizer.check_state()
            if step == 5:
                optimizer.lr = 0.1 + comm.rank
                optimizer.check_state()
        elif what_now == "frozen":
            model.network.first.disable_update()
        optimizer.update(squares, model, 10 * step + comm.rank)
        assert step < 7 or what == "none"


def test_a_snapshot_that_one_rank_has_loaded(comm: Communicator, tmp_path: Path) -> None:
    """A snapshot of a training is loaded on rank 0 alone: all take over its parameters, its momentum, and its
    statistics, and go on as the training would have."""
    whole, model = Normalised(0), Normalised(0)
    plain = chainer.optimizers.MomentumSGD(0.1).setup(whole)
    for step in range(3):
        plain.update(squares, whole, step)
    path = f"{tmp_path}/snapshot.npz"
    optimizer = make_optimizer(comm, model, chainer.optimizers.MomentumSGD(0.1), check_every=1)
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
        optimizer.update(squares, model, 7)
        if step == 0:
            assert optimizer.t == plain.t == 3
            assert not np.array_equal(statistics, model.statistics())
        else:
            plain.update(squares, whole, 7)
        assert_same_weights(model, whole, atol=1e-14)
        assert same_everywhere(comm, model.statistics().tobytes())
    assert same_everywhere(comm, bits_of(model))


def copy_gradients(model: Any) -> None:
    for parameter in model.params():
        parameter.grad = None if parameter.grad is None else parameter.grad.copy()


def test_objects_that_change_between_steps(comm: Communicator) -> None:
    """What changes objects and arrays between steps, but no value, changes nothing."""
    found = []
    for swaps in (False, True):
        model, optimizer = make_pair(comm, chainer.optimizers.MomentumSGD(0.1), check_every=1)
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
                copy_gradients(model)
            model.cleargrads()
            squares(model, 10 * step + comm.rank).backward()
            if swaps:
                copy_gradients(model)
            optimizer.update()
        found.append(bits_of(model))
        assert same_everywhere(comm, found)
    assert found[0] == found[1]


def make_half(comm: Communicator, **options: Any) -> tuple[Any, Any]:
    """Float16 parameters with float32 copies."""
    with chainer.using_config("dtype", np.float16):
        model = links.Linear(3, 2, initialW=0.1 * np.arange(6).reshape(2, 3))
    optimizer = make_optimizer(comm, model, chainer.optimizers.MomentumSGD(0.01), **options)
    optimizer.use_fp32_update()
    return model, optimizer


def train_half(model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.update(lambda: functions.sum(model(np.ones((1, 3), np.float16)) * np.float16(0.37)))


@pytest.mark.parametrize("way", ["join", "broadcast"])
def test_copies_and_scales_are_handed_over(comm: Communicator, way: str) -> None:
    model, optimizer = make_half(comm, check_every=1)
    if way == "join":
        optimizer.loss_scaling(interval=2)
    train_half(model, optimizer, 2)
    if way == "join":
        for _ in range(2):
            with optimizer.join():
                train_half(model, optimizer, 1 if comm.rank else 4)
            assert same_everywhere(comm, optimizer._loss_scale)
    else:
        train_half(model, optimizer.actual_optimizer, 3 if comm.rank == 0 else 0)
        multiring.chainer.broadcast_parameters(model, comm=comm)
        multiring.chainer.broadcast_optimizer_state(optimizer, comm=comm)
    train_half(model, optimizer, 3)
    copies = [p.update_rule._fp32_param for _, p in sorted(model.namedparams())]
    assert same_everywhere(comm, [bits_of(model), [None if c is None else c.array.tobytes() for c in copies]])


def test_copies_follow_weights_that_were_broadcast(comm: Communicator) -> None:
    """Weights that rank 0 has set are those that training goes on with; Chainer's copies would win."""
    model, optimizer = make_half(comm)
    train_half(model, optimizer, 1)
    model.W.array[...] = 5 - comm.rank
    multiring.chainer.broadcast_parameters(model, comm=comm)
    train_half(model, optimizer, 1)
    np.testing.assert_allclose(model.W.array, 5, atol=0.1)


@all_raise(MismatchError, r"'float32 copy of W' float32 \(2, 3\)")
def test_copies_are_compared(comm: Communicator) -> None:
    model, optimizer = make_half(comm, check_every=4)
    train_half(model, optimizer, 3)
    if comm.rank == 1:
        model.W.update_rule._fp32_param.array[...] += 1e-6
    train_half(model, optimizer, 1)
