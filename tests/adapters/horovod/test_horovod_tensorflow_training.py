"""Training with tapes of the TensorFlow face, and under `fit()` with Keras 3 and tf_keras, beside one process
that has the whole batch."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import multiring.horovod.keras as alone
import multiring.horovod.tensorflow as hvt
import multiring.horovod.tensorflow.keras as hvd
from multiring import Communicator
from tests.adapters.horovod.support import ROWS, refused, samples_of_a_line, with_hvd
from tests.on_ranks import same_everywhere

STEPS = 6


def weights() -> list[Any]:
    return [tf.Variable(np.full((3, 1), 0.2)), tf.Variable(np.zeros(1))]


def gradient(tape: Any, own: list[Any], x: Any, y: Any) -> Any:
    with tape:
        loss = tf.reduce_mean((x @ own[0] + own[1] - y) ** 2)
    return tape.gradient(loss, own)


def jacobian(is_vectorised: bool, rank: int) -> Any:
    own = tf.Variable(np.ones((3, 2)))
    with hvt.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        y = tf.tanh(np.full((4, 3), rank + 1.0) @ own)
    return tape.jacobian(y, own, experimental_use_pfor=is_vectorised)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "predivide": {"gradient_predivide_factor": 2.0},
    "groups": {"num_groups": 2},
    "sum": {"op": hvt.Sum},
}


@pytest.mark.parametrize("in_function", [False, True])
@with_hvd()
def test_tapes(comm: Communicator, in_function: bool) -> None:
    x, y = samples_of_a_line(comm.size)
    mine = slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
    for what, options in OPTIONS.items():
        own, reference = weights(), weights()

        def step() -> Any:
            tape = hvt.DistributedGradientTape(tf.GradientTape(), **options)  # noqa: B023
            assert isinstance(tape, tf.GradientTape)
            return gradient(tape, own, x[mine], y[mine])  # noqa: B023

        run = tf.function(step) if in_function else step
        factor = comm.size if what == "sum" else 1
        for _ in range(STEPS):
            whole = [factor * each for each in gradient(tf.GradientTape(), reference, x, y)]
            for variable, each in zip([*reference, *own], [*whole, *run()], strict=True):
                variable.assign_sub(0.01 * each)
        for one, other in zip(own, reference, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)
    by_pfor, by_loop = (jacobian(is_vectorised, comm.rank) for is_vectorised in (True, False))
    np.testing.assert_allclose(by_pfor, by_loop)
    wrong = {"op": hvt.Sum, "gradient_predivide_factor": 2.0}
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        hvt.DistributedGradientTape(tf.GradientTape(), **wrong)


@with_hvd()
def test_local_sources_sparse_gradients_and_adasum(comm: Communicator) -> None:
    table, kernel, unused = tf.Variable(tf.ones([4, 2])), tf.Variable(1.0), tf.Variable(1.0)

    def gradients(**options: Any) -> Any:
        with hvt.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            rows = tf.gather(table, [comm.rank, 3])
            loss = tf.reduce_sum(rows) * (comm.rank + 1.0) + kernel * (2.0 - comm.rank)
        tape.register_local_source(kernel)
        return tape.gradient(loss, [table, kernel, unused])

    sparse, local, missing = gradients()
    assert isinstance(sparse, tf.IndexedSlices)
    assert missing is None
    expected = [[0.5] * 2, [1.0] * 2, [0.0] * 2, [1.5] * 2]
    np.testing.assert_allclose(tf.convert_to_tensor(sparse), expected)
    assert float(local) == (2.0 - comm.rank) / 2
    dense, local, _ = gradients(sparse_as_dense=True, scale_local_gradients=False)
    np.testing.assert_allclose(dense, expected)
    assert float(local) == 2.0 - comm.rank
    orthogonal = hvt.allreduce(tf.one_hot(comm.rank, 2), op=hvt.Adasum)
    np.testing.assert_allclose(orthogonal, [1.0, 1.0])


@with_hvd()
def test_state_is_restored(comm: Communicator) -> None:
    variable = tf.Variable(float(comm.rank))
    state = hvt.elastic.TensorFlowState([variable], step=comm.rank)
    seen = []

    @hvt.elastic.run
    def train(state: Any) -> str:
        seen.append((float(variable), state.step))
        while state.step < 4:
            variable.assign_add(1.0)
            state.step += 1
            if state.step == 2:
                state.commit()
            if state.step == 3 and len(seen) == 1:
                tf.function(lambda: hvt.allreduce(tf.ones([2 + comm.rank]), name="differs"))()
        return "done"

    assert train(state) == "done"
    assert seen == [(0.0, 0), (2.0, 2)]
    state.on_hosts_updated(1.0, 1)
    with pytest.raises(hvt.elastic.HostsUpdatedInterrupt):
        state.check_host_updates()


OPTIMIZERS: dict[str, Any] = {
    "keras": (keras, keras.optimizers.SGD),
    "tf_keras": (tf_keras, tf_keras.optimizers.SGD),
    "legacy": (tf_keras, tf_keras.optimizers.legacy.SGD),
}
FIT_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "predivide": {"gradient_predivide_factor": 2.0, "groups": 2},
    "passes": {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
}


def make_model(library: Any = keras, value: float = 0.3) -> Any:
    constant = library.initializers.Constant(value)
    first = library.layers.Dense(4, activation="tanh", kernel_initializer=constant)
    model = library.Sequential([first, library.layers.Dense(1, kernel_initializer=constant)])
    model.build((None, 3))
    return model


def samples() -> tuple[Any, Any]:
    x = np.random.default_rng(2).normal(size=(48, 3)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


def fit(comm: Communicator, model: Any, **options: Any) -> Any:
    """Trains with this rank's half of the data."""
    x, y = samples()
    return model.fit(x[comm.rank :: 2], y[comm.rank :: 2], verbose=0, **options)


def assert_same(comm: Communicator, model: Any) -> None:
    assert same_everywhere(comm, [weight.tolist() for weight in model.get_weights()])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@with_hvd()
def test_fit(comm: Communicator, kind: str) -> None:
    """Beside a plain optimizer and the batches of all ranks."""
    library, make = OPTIMIZERS[kind]
    for what, options in FIT_OPTIONS.items():
        model, reference = make_model(library), make_model(library)
        optimizer = hvd.DistributedOptimizer(make(0.1, momentum=0.9), **options)
        assert isinstance(optimizer, make)
        assert type(optimizer).__name__ == "SGD"
        model.compile(optimizer, "mse")
        reference.compile(make(0.1, momentum=0.9), "mse")
        fit(comm, model, batch_size=6, epochs=2, shuffle=False)
        passes = options.get("backward_passes_per_step", 1)
        reference.fit(*samples(), batch_size=12 * passes, epochs=2, shuffle=False, verbose=0)
        for mine, other in zip(model.get_weights(), reference.get_weights(), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6, err_msg=what)
        assert_same(comm, model)
        assert int(model.optimizer.iterations) == 8


@pytest.mark.parametrize("kind", ["keras", "tf_keras"])
@with_hvd()
def test_callbacks(comm: Communicator, kind: str) -> None:
    library, make = OPTIMIZERS[kind]
    model = make_model(library, 0.1 + comm.rank)
    model.compile(hvd.DistributedOptimizer(make(0.4, momentum=0.9)), "mse", metrics=["mae"])
    rates: list[float] = []

    class Rates(hvd.callbacks.Callback):
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(np.asarray(self.model.optimizer.learning_rate)))

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2),
        hvd.callbacks.LearningRateScheduleCallback(0.4, 0.1, start_epoch=2),
        Rates(),
    ]
    history = fit(comm, model, batch_size=12, epochs=3, callbacks=callbacks)
    assert_same(comm, model)
    assert same_everywhere(comm, history.history["mae"])
    np.testing.assert_allclose(rates, [0.25, 0.3, 0.35, 0.4, 0.04, 0.04], rtol=1e-6)
    model.optimizer.learning_rate = 0.7  # by the program, which a warmup of no epochs leaves alone
    callbacks = [hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=0), Rates()]
    fit(comm, model, batch_size=12, epochs=1, callbacks=callbacks)
    np.testing.assert_allclose(rates[6:], [0.7, 0.7], rtol=1e-6)
    refused(ValueError, {"initial_lr": lambda: hvd.callbacks.LearningRateScheduleCallback(None, 1.0)})


@pytest.mark.parametrize("of_tensorflow", [False, True])
@with_hvd()
def test_local_variables_are_not_broadcast(comm: Communicator, of_tensorflow: bool) -> None:
    """Nor reduced; whether they are named by Keras's variable or by the one of TensorFlow that it holds."""
    model = make_model(keras, 0.1 + comm.rank)
    named = model.layers[0].trainable_variables
    local = [variable.value for variable in named] if of_tensorflow else named
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
    for variable in local:
        optimizer.register_local_var(variable)
    model.compile(optimizer, "mse")
    fit(comm, model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local)])
    own, shared = model.layers[0].get_weights()[0], model.layers[1].get_weights()[0]
    assert np.unique(own).tolist() == [np.float32(0.1 + comm.rank)]
    assert np.unique(shared).tolist() == [np.float32(0.1)]


@with_hvd()
def test_models_are_saved_and_loaded(comm: Communicator, tmp_path: Path) -> None:
    """As with the plain optimizer, so that they can be loaded without multiring; with its state."""
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    fit(comm, model, batch_size=8)
    path = tmp_path / f"{comm.rank}.keras"
    model.save(path)
    assert b"multiring" not in zipfile.ZipFile(path).read("config.json")
    plain, loaded = keras.models.load_model(path), hvd.load_model(path)
    assert type(plain.optimizer) is keras.optimizers.Adam
    for one, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)
    fit(comm, loaded, batch_size=8)
    assert_same(comm, loaded)


@with_hvd()
def test_values_and_what_is_refused(comm: Communicator) -> None:
    assert hvd.allreduce(2.0 * comm.rank) == 1.0
    assert hvd.allreduce(2.0).dtype == np.float32
    assert hvd.allreduce(np.float64(1 + 2**-40)) == 1 + 2**-40
    assert alone.allreduce(np.arange(3), op=hvd.Sum, compression=hvd.Compression.none).tolist() == [0, 2, 4]
    assert hvd.allgather(np.full((comm.rank + 1,), comm.rank)).tolist() == [0, 1, 1]
    assert hvd.broadcast(np.array([comm.rank]), 1).tolist() == [1]
    assert hvd.reducescatter(np.ones((2, 2)), op=hvd.Sum).tolist() == [[2.0, 2.0]]
    assert alone.DistributedOptimizer is hvd.DistributedOptimizer
    sgd = keras.optimizers.SGD()
    calls = {
        "Adasum": lambda: hvt.DistributedOptimizer(sgd, op=hvd.Adasum),
        "inherit": lambda: hvd.DistributedOptimizer(object()),
        "do the same": lambda: hvd.DistributedOptimizer(
            keras.optimizers.SGD(gradient_accumulation_steps=2), backward_passes_per_step=2
        ),
        "already": lambda: hvd.DistributedOptimizer(hvt.DistributedOptimizer(sgd)),
    }
    refused(ValueError, calls)


@with_hvd()
def test_local_layers_and_loss_scales(comm: Communicator) -> None:
    model = make_model()
    scaled, other = (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)) for _ in range(2))
    model.compile(hvd.PartialDistributedOptimizer(scaled, local_layers=model.layers[0]), "mse")
    fit(comm, model, batch_size=6)
    first, _, second, _ = model.get_weights()
    assert not same_everywhere(comm, first.tolist())
    assert same_everywhere(comm, second.tolist())
    # One rank's overflow: all skip the step.
    before = model.get_weights()
    gradients = [tf.fill(weight.shape, np.inf if comm.rank else 1.0) for weight in model.trainable_weights]
    hvd.DistributedOptimizer(other).apply(gradients, model.trainable_weights)
    np.testing.assert_equal(model.get_weights(), before)


@with_hvd()
def test_loss_scales_around(comm: Communicator) -> None:
    """Where one rank overflows, all skip the step: compile() of tf_keras puts a LossScaleOptimizer around."""
    for make in (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD):
        scale = tf_keras.mixed_precision.LossScaleOptimizer
        for passes, is_inside in ((1, False), (2, False), (1, True)):
            options = {"backward_passes_per_step": passes}
            if is_inside:
                outside = hvd.DistributedOptimizer(scale(make(0.1)), **options)
            else:
                outside = scale(hvd.DistributedOptimizer(make(0.1), **options))
            model = make_model(tf_keras)
            weights = model.trainable_weights
            before = model.get_weights()

            def step(value: Any) -> None:
                gradients = [tf.fill(weight.shape, value) for weight in weights]  # noqa: B023
                outside.apply_gradients(list(zip(gradients, weights, strict=True)))  # noqa: B023

            run = tf.function(step)
            run(tf.constant(np.inf if comm.rank else 1.0))
            np.testing.assert_equal(model.get_weights(), before)
            for _ in range(passes):
                run(tf.constant(comm.rank + 0.5))
            for found, old in zip(model.get_weights(), before, strict=True):
                np.testing.assert_allclose(found, old - 0.1 * passes, rtol=1e-5)
    text = "LossScaleOptimizer has to be inside"
    own = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    refused(ValueError, {text: lambda: keras.optimizers.LossScaleOptimizer(own)})


@pytest.mark.parametrize("kind", OPTIMIZERS)
@with_hvd()
def test_what_is_made_from_a_config_reduces(comm: Communicator, kind: str) -> None:
    library, make = OPTIMIZERS[kind]
    optimizer = hvd.DistributedOptimizer(make(0.1), op=hvd.Sum)
    again = type(optimizer).from_config(optimizer.get_config())
    model = make_model(library)
    gradients = [tf.fill(weight.shape, float(comm.rank)) for weight in model.trainable_weights]
    before = model.get_weights()
    again.apply_gradients(list(zip(gradients, model.trainable_weights, strict=True)))
    for found, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_allclose(found, old - 0.1, rtol=1e-5)


@with_hvd()
def test_state_in_fit(comm: Communicator) -> None:
    model = make_model(value=0.1 + comm.rank)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    epochs: list[int] = []

    class Fails(hvd.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            epochs.append(state.epoch)
            if epochs == [0, 1]:
                hvd.allreduce(np.ones(2 + comm.rank))

    @hvd.elastic.run
    def train(state: Any) -> None:
        callbacks = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, 2),
            Fails(),
        ]
        fit(comm, model, batch_size=12, epochs=3 - state.epoch, callbacks=callbacks)

    train(state)
    assert epochs == [0, 1, 1, 2]
    assert (state.epoch, state.batch) == (3, 0)
    assert_same(comm, model)
