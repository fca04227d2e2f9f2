"""Gradients of several passes that were not applied yet, where a reduction fails and the program goes on."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import torch

import multiring.horovod.tensorflow as hvt
import multiring.horovod.tensorflow.keras as hvk
import multiring.horovod.torch as hvd
from multiring import Communicator, MismatchError
from tests.adapters.horovod.support import with_hvd

STEPS = 8
WANTED = -sum(10.0**step for step in range(STEPS))
# After so many steps the state is committed: between two updates, or in the middle of a sum of two.
COMMITS = [2, 3]


@pytest.mark.parametrize("every", COMMITS)
@pytest.mark.parametrize("fails_at", [4, 5])
@with_hvd()
def test_a_torch_optimizer_goes_back_to_the_sums_of_the_commit(
    comm: Communicator, every: int, fails_at: int
) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), backward_passes_per_step=2)
    failures = [fails_at]

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS:
            (model.weight.sum() * 10.0**state.step).backward()
            if state.step in failures:
                failures.clear()
                hvd.allreduce(torch.ones(2 + comm.rank), name="differs")
            if state.step % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
            state.step += 1
            if state.step % every == 0:
                state.commit()

    train(hvd.elastic.TorchState(model, optimizer, step=0))
    assert not failures
    assert model.weight.item() == WANTED


LIBRARIES: dict[str, Any] = {
    "keras": (keras, keras.optimizers.SGD),
    "tf_keras": (tf_keras, tf_keras.optimizers.SGD),
    "legacy": (tf_keras, tf_keras.optimizers.legacy.SGD),
}


def _model(library: Any) -> Any:
    model = library.Sequential([library.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.build((None, 1))
    return model


@pytest.mark.parametrize("every", COMMITS)
@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("kind", LIBRARIES)
@with_hvd()
def test_a_keras_optimizer_goes_back_to_the_sums_of_the_commit(
    comm: Communicator, kind: str, in_function: bool, every: int
) -> None:
    library, sgd = LIBRARIES[kind]
    model = _model(library)
    optimizer = hvk.DistributedOptimizer(sgd(1.0), backward_passes_per_step=2)
    (variable,) = model.trainable_variables

    def apply(gradient: Any) -> None:
        optimizer.apply_gradients([(gradient, variable)])

    apply = tf.function(apply) if in_function else apply
    failures = [5]

    @hvt.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS:
            if state.step in failures:
                failures.clear()
                hvt.allreduce(tf.ones(2 + comm.rank), name="differs")
            apply(tf.fill([1, 1], 10.0**state.step))
            state.step += 1
            if state.step % every == 0:
                state.commit()

    train(hvt.elastic.TensorFlowKerasState(model, optimizer, step=0))
    assert not failures
    assert float(variable.numpy()[0, 0]) == WANTED


@pytest.mark.parametrize("kind", LIBRARIES)
@with_hvd()
def test_momentum_is_part_of_the_state(comm: Communicator, kind: str) -> None:
    library, sgd = LIBRARIES[kind]
    model, alone = _model(library), _model(library)
    optimizer, own = hvk.DistributedOptimizer(sgd(1.0, momentum=0.5)), sgd(1.0, momentum=0.5)
    failures = [3]

    @hvt.elastic.run
    def train(state: Any) -> None:
        while state.step < 4:
            if state.step in failures:
                failures.clear()
                hvt.allreduce(tf.ones(2 + comm.rank), name="differs")
            optimizer.apply_gradients([(tf.ones([1, 1]), model.trainable_variables[0])])
            state.step += 1

    train(hvt.elastic.TensorFlowKerasState(model, optimizer, step=0))
    for _ in range(4):
        own.apply_gradients([(tf.ones([1, 1]), alone.trainable_variables[0])])
    np.testing.assert_array_equal(model.get_weights()[0], alone.get_weights()[0])


@pytest.mark.parametrize("passes", [1, 2])
@with_hvd()
def test_a_step_that_failed_is_lost_and_no_other(comm: Communicator, passes: int) -> None:
    variable = keras.Variable(np.zeros(2, "float32"), name="v")
    optimizer = hvk.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=passes)
    for step in range(10):
        if comm.rank == 1 and step == 3:
            variable.assign([5.0, 5.0])
        try:
            optimizer.apply_gradients([(tf.ones(2), variable)])
        except MismatchError:
            assert step == 3
            hvt.broadcast_variables([variable], 0)
    np.testing.assert_array_equal(variable.numpy(), float(passes - 10))
