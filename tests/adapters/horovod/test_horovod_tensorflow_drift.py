"""Ranks whose variables or rates drift apart under Horovod's tapes and Keras optimizers; legal programs."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import multiring.horovod.tensorflow as hvt
import multiring.horovod.tensorflow.keras as hvd
from multiring import Communicator
from multiring.errors import MismatchError
from multiring.horovod.tensorflow import drift
from tests.adapters.horovod.support import with_hvd
from tests.on_ranks import all_raise, same_everywhere


class Rate(keras.callbacks.Callback):
    """Lowers the learning rate on rank 0, or on every rank."""

    def __init__(self, lowers: bool) -> None:
        super().__init__()
        self._lowers = lowers

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 3 and self._lowers:
            self.model.optimizer.learning_rate = 0.01


def fit(comm: Communicator, callbacks: list[Any], seed: int = 0, **options: Any) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
    model.compile(optimizer, "mse", **options)
    x = np.random.default_rng(comm.rank).standard_normal((48, 4))
    model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0, callbacks=callbacks)
    return model.get_weights()


@with_hvd()
def test_a_function_compares_what_the_program_has_assigned_by_then(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gradients in a step, with assignments before, between and after them; TensorFlow runs operations at
    the same time where it sees no order."""
    first, second = tf.Variable([1.0, 2.0]), tf.Variable([[3.0]])
    seen = []

    def look(self: Any, what: str, step: int, entries: Any, numbers: Any) -> None:
        time.sleep(0.2)  # what may run beside it does so in this time
        seen.append([np.array(value).tolist() for _, value in entries()])

    monkeypatch.setattr(drift.SetCheck, "run", look)

    @tf.function
    def step() -> None:
        first.assign_add([1.0, 1.0])
        with tf.GradientTape(persistent=True) as tape:
            one, other = tf.reduce_sum(first * 2), tf.reduce_sum(first) + tf.reduce_sum(second)
        tape = hvt.DistributedGradientTape(tape)
        tape.gradient(one, [first])
        first.assign_add([10.0, 10.0])
        tape.gradient(other, [first, second])
        for variable in (first, second):
            variable.assign(tf.zeros_like(variable))

    step()
    assert seen == [[[2.0, 3.0]], [[12.0, 13.0], [[3.0]]]]


ERRORS = (MismatchError, tf.errors.UnknownError)


@pytest.mark.parametrize("eagerly", [False, True])
@with_hvd()
def test_a_rate_that_is_lower_on_one_rank(comm: Communicator, eagerly: bool) -> None:
    with pytest.raises(ERRORS, match="'learning_rate' 0.0"):
        fit(comm, [Rate(comm.rank == 0)], run_eagerly=eagerly)


@with_hvd()
def test_a_forgotten_broadcast(comm: Communicator) -> None:
    with pytest.raises(ERRORS, match=r"hvd\.broadcast_variables was not called"):
        fit(comm, [], seed=comm.rank)


@with_hvd()
def test_rates_and_models_that_are_the_same(comm: Communicator) -> None:
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    weights = fit(comm, [broadcast, Rate(True)], seed=comm.rank)
    assert same_everywhere(comm, [weight.tolist() for weight in weights])
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(schedule)), "mse")
    model.fit(np.ones((24, 4)), np.ones((24, 1)), batch_size=4, verbose=0)


def steps(variables: list[Any], rank: int, count: int, in_function: bool) -> None:
    def gradients(x: Any) -> Any:
        with hvt.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variables[0] * x) + variables[1]
        return tape.gradient(loss, variables)

    compute = tf.function(gradients) if in_function else gradients
    for _ in range(count):
        for variable, gradient in zip(variables, compute(tf.fill([3], rank + 1.0)), strict=True):
            variable.assign_sub(0.1 * gradient)


@pytest.mark.parametrize("in_function", [False, True])
@with_hvd()
def test_a_variable_that_one_rank_changes(comm: Communicator, in_function: bool) -> None:
    variables = [tf.Variable(tf.ones(3), name="kernel"), tf.Variable(0.0, name="bias")]
    steps(variables, comm.rank, 5, in_function)
    if comm.rank == 1:
        variables[0].assign_add([0.0, 1.0, 0.0])
    with pytest.raises(ERRORS, match="parameter kernel"):
        steps(variables, comm.rank, 4, in_function)


@with_hvd()
def test_layers_that_keras_numbers_otherwise_are_the_same(comm: Communicator) -> None:
    if comm.rank == 0:
        keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    hvt.broadcast_variables(model.variables, 0)
    model.fit(np.ones((16, 2)), np.ones((16, 1)), batch_size=2, verbose=0)
    model.layers[1].kernel.assign_add(np.full((3, 1), float(comm.rank)))
    with pytest.raises(ERRORS, match=r"parameter sequential/dense/kernel \(3\)"):
        model.fit(np.ones((16, 2)), np.ones((16, 1)), batch_size=2, verbose=0)


@pytest.mark.parametrize("in_function", [False, True])
@with_hvd()
def test_uneven_data_and_variables_of_one_rank(comm: Communicator, in_function: bool) -> None:
    variables = [tf.Variable(tf.ones(3)), tf.Variable(0.0)]
    for _ in range(2):
        steps(variables, comm.rank, 7 + 2 * comm.rank, in_function)
        hvt.join()
        hvt.broadcast_variables(variables, 0)
    own = tf.Variable(float(comm.rank))
    for _ in range(3):
        tape = hvt.DistributedGradientTape(tf.GradientTape())
        tape.register_local_source(own)
        with tape:
            loss = tf.reduce_sum(variables[0]) * own
        tape.gradient(loss, [own, variables[0]])


@with_hvd()
@all_raise(MismatchError, "parameter")
def test_the_check_is_on_where_nothing_is_said(comm: Communicator) -> None:
    variables = [tf.Variable(tf.fill([3], float(comm.rank))), tf.Variable(0.0)]
    steps(variables, comm.rank, 2, False)


@with_hvd()
def test_a_second_optimizer_is_compared_from_its_first_steps(comm: Communicator) -> None:
    variable = keras.Variable(np.ones(3), name="kernel")
    for differs in (False, True):
        rate = 0.1 * (1 + comm.rank) if differs else 0.1
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate))

        def train(optimizer: Any = optimizer) -> None:
            for _ in range(20):
                optimizer.apply_gradients([(tf.ones(3), variable)])

        if not differs:
            train()
            continue
        with pytest.raises(MismatchError, match="learning_rate"):
            train()


@with_hvd(3)
def test_one_variable_in_two_process_sets(comm: Communicator) -> None:
    """Each set counts its own reductions, and compares over its own ranks."""
    pair = hvt.add_process_set([0, 1])
    variable = tf.Variable(tf.ones(2))
    for _ in range(9):
        for process_set in (pair, hvt.global_process_set):
            with hvt.DistributedGradientTape(tf.GradientTape(), process_set=process_set) as tape:
                loss = tf.reduce_sum(variable * variable)
            found = tape.gradient(loss, variable)
            np.testing.assert_allclose(found, 2 * variable.numpy())


@with_hvd()
def test_several_steps_before_the_broadcast(comm: Communicator) -> None:
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    weights = fit(comm, [broadcast], seed=comm.rank, steps_per_execution=4)
    assert same_everywhere(comm, [weight.tolist() for weight in weights])


@with_hvd()
def test_variables_in_another_order(comm: Communicator) -> None:
    first, second = tf.Variable(1.0 + comm.rank, name="a"), tf.Variable(5.0, name="b")
    given = [first, second] if comm.rank == 0 else [second, first]
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"value of variable '[ab]:0' \(1 of 2\)"):
        hvt.broadcast_variables(given, 0)
    hvt.broadcast_variables([first, second], 0)
    assert float(first) == 1.0
