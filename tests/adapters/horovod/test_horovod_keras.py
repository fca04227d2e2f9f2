"""The Keras face, with Keras 3 and with tf_keras, beside one process that has the whole batch."""

from __future__ import annotations

import json
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
from tests.adapters.horovod.support import with_hvd
from tests.on_ranks import same_everywhere

OPTIMIZERS: dict[str, Any] = {
    "keras": (keras, keras.optimizers.SGD),
    "tf_keras": (tf_keras, tf_keras.optimizers.SGD),
    "legacy": (tf_keras, tf_keras.optimizers.legacy.SGD),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "predivide": {"gradient_predivide_factor": 2.0, "groups": 2},
    "passes": {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
}


def make_model(library: Any, value: float) -> Any:
    first = library.layers.Dense(4, activation="tanh", kernel_initializer=constant(library, value))
    second = library.layers.Dense(1, kernel_initializer=constant(library, value))
    model = library.Sequential([first, second])
    model.build((None, 3))
    return model


def constant(library: Any, value: float) -> Any:
    return library.initializers.Constant(value)


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(48, 3)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@with_hvd
def test_fit(comm: Communicator, kind: str) -> None:
    """Beside a plain optimizer and the batches of all ranks."""
    library, make = OPTIMIZERS[kind]
    x, y = data()
    for what, options in OPTIONS.items():
        model, reference = make_model(library, 0.3), make_model(library, 0.3)
        inner = make(0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(inner, **options)
        assert isinstance(optimizer, make)
        assert type(optimizer).__name__ == "SGD"
        model.compile(optimizer, "mse")
        reference.compile(make(0.1, momentum=0.9), "mse")
        model.fit(x[comm.rank :: 2], y[comm.rank :: 2], batch_size=6, epochs=2, shuffle=False, verbose=0)
        passes = options.get("backward_passes_per_step", 1)
        reference.fit(x, y, batch_size=12 * passes, epochs=2, shuffle=False, verbose=0)
        for mine, other in zip(model.get_weights(), reference.get_weights(), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6, err_msg=what)
        assert same_everywhere(comm, [weight.tolist() for weight in model.get_weights()])
        assert int(model.optimizer.iterations) == 8


@pytest.mark.parametrize("kind", ["keras", "tf_keras"])
@with_hvd
def test_callbacks(comm: Communicator, kind: str) -> None:
    library, make = OPTIMIZERS[kind]
    x, y = data()
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
    history = model.fit(
        *(x[comm.rank :: 2], y[comm.rank :: 2]), batch_size=12, epochs=3, verbose=0, callbacks=callbacks
    )
    assert same_everywhere(comm, [weight.tolist() for weight in model.get_weights()])
    assert same_everywhere(comm, history.history["mae"])
    np.testing.assert_allclose(rates, [0.25, 0.3, 0.35, 0.4, 0.04, 0.04], rtol=1e-6)
    with pytest.raises(ValueError, match="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, 1.0)


@with_hvd
def test_models_are_saved_and_loaded(comm: Communicator, tmp_path: Path) -> None:
    """As with the plain optimizer, so that they can be loaded without multiring; with its state."""
    x, y = data()
    model = make_model(keras, 0.3)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    model.fit(x, y, batch_size=16, verbose=0)
    path = tmp_path / f"{comm.rank}.keras"
    model.save(path)
    saved = json.loads(zipfile.ZipFile(path).read("config.json"))["compile_config"]["optimizer"]
    assert saved["class_name"] == "Adam"
    assert "multiring" not in saved["module"]
    plain, loaded = keras.models.load_model(path), hvd.load_model(path)
    assert type(plain.optimizer) is keras.optimizers.Adam
    for one, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)
    rows = slice(comm.rank * 8, comm.rank * 8 + 8)
    loaded.fit(x[rows], y[rows], verbose=0)
    assert same_everywhere(comm, [weight.tolist() for weight in loaded.get_weights()])


@with_hvd
def test_values_and_what_is_refused(comm: Communicator) -> None:
    assert hvd.allreduce(2.0 * comm.rank) == 1.0
    assert alone.allreduce(np.arange(3), op=hvd.Sum, compression=hvd.Compression.none).tolist() == [0, 2, 4]
    assert hvd.allgather(np.full((comm.rank + 1,), comm.rank)).tolist() == [0, 1, 1]
    assert hvd.broadcast(np.array([comm.rank]), 1).tolist() == [1]
    assert hvd.reducescatter(np.ones((2, 2)), op=hvd.Sum).tolist() == [[2.0, 2.0]]
    assert alone.DistributedOptimizer is hvd.DistributedOptimizer
    with pytest.raises(ValueError, match="Adasum"):
        hvt.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Adasum)
    with pytest.raises(ValueError, match="inherit"):
        hvd.DistributedOptimizer(object())
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(hvt.DistributedOptimizer(keras.optimizers.SGD()))


@with_hvd
def test_local_layers_and_loss_scales(comm: Communicator) -> None:
    x, y = data()
    model = make_model(keras, 0.3)
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), local_layers=model.layers[0]
    )
    model.compile(optimizer, "mse")
    model.fit(x[comm.rank :: 2], y[comm.rank :: 2], batch_size=6, epochs=1, shuffle=False, verbose=0)
    first, _, second, _ = model.get_weights()
    assert not same_everywhere(comm, first.tolist())
    assert same_everywhere(comm, second.tolist())
    # One rank's overflow: all skip the step.
    before = [weight.numpy().tolist() for weight in model.weights]
    gradients = [tf.fill(weight.shape, np.inf if comm.rank else 1.0) for weight in model.trainable_weights]
    hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))).apply(
        gradients, model.trainable_weights
    )
    assert [weight.numpy().tolist() for weight in model.weights] == before


@with_hvd
def test_state_in_fit(comm: Communicator) -> None:
    x, y = data()
    model = make_model(keras, 0.1 + comm.rank)
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
        rest = 3 - state.epoch
        model.fit(
            *(x[comm.rank :: 2], y[comm.rank :: 2]),
            batch_size=12,
            epochs=rest,
            verbose=0,
            callbacks=callbacks,
        )

    train(state)
    assert epochs == [0, 1, 1, 2]
    assert (state.epoch, state.batch) == (3, 0)
    assert same_everywhere(comm, [weight.tolist() for weight in model.get_weights()])
