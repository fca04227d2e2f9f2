"""Programs that are right and once were refused, hung, or lost something."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import multiring.tensorflow as mt
from multiring import Communicator
from multiring.errors import MismatchError, UsageError
from multiring.tensorflow import callbacks
from tests.on_ranks import same_everywhere


def make_model(
    comm: Communicator, optimizer: Any, kit: Any = keras, *, lazy: bool = False, **options: Any
) -> Any:
    kit.utils.set_random_seed(comm.rank)
    layers = [kit.layers.Dense(3), kit.layers.BatchNormalization(), kit.layers.Dense(1)]
    model = kit.Sequential(layers if lazy else [kit.layers.Input((4,)), *layers])
    model.compile(mt.DistributedOptimizer(optimizer, comm), "mse", **options)
    return model


def data(comm: Communicator) -> tuple[Any, Any]:
    return np.random.default_rng(comm.rank).standard_normal((8, 4)).astype("float32"), np.ones(
        (8, 1), "float32"
    )


def assert_same(comm: Communicator, model: Any) -> None:
    own = [np.asarray(value).tobytes() for value in model.get_weights()]
    assert same_everywhere(comm, own)


def fit(comm: Communicator, model: Any, *added: Any, **options: Any) -> None:
    given = [callbacks.BroadcastInitialState(comm=comm), *added]
    model.fit(*data(comm), 2, verbose=0, callbacks=given, **options)
    assert_same(comm, model)


def test_traced_functions_are_freed(comm: Communicator) -> None:
    graphs = []
    for _ in range(2):
        v = tf.Variable([1.0, 2.0])

        @tf.function
        def step(v: Any = v) -> None:
            with mt.DistributedGradientTape(tf.GradientTape(), comm) as tape:
                value = tf.reduce_sum(v * v)
            v.assign_sub(tape.gradient(value, v))
            mt.allreduce(v, name="once", comm=comm)
            mt.allreduce(v, name="once", comm=comm)

        step()
        graphs.append(weakref.ref(step.get_concrete_function().graph))
        del step, v
        gc.collect()
    assert [graph() for graph in graphs] == [None, None]


def test_py_functions_of_a_pipeline_do_not_meet_the_main_thread(comm: Communicator) -> None:
    def element(number: Any) -> Any:
        return mt.allreduce(tf.cast(number, tf.float32) + 100.0, comm=comm)

    elements = tf.data.Dataset.range(4).map(lambda k: tf.py_function(element, [k], tf.float32)).prefetch(4)
    for number, found in enumerate(elements):
        assert found.numpy() == comm.size * (100.0 + number)
        assert mt.allreduce(tf.constant(1.0), comm=comm).numpy() == comm.size


def test_a_name_of_the_main_thread_is_refused_in_a_py_function(comm: Communicator) -> None:
    own = comm.split(0)
    mt.allreduce(1.0, name="x", comm=own)
    inside = tf.data.Dataset.range(1).map(
        lambda k: tf.py_function(lambda _: mt.allreduce(100.0, name="x", comm=own), [k], tf.float32)
    )
    with pytest.raises(tf.errors.OpError, match="belongs to thread 'MainThread'"):
        next(iter(inside))


def test_a_callback_serves_several_models(comm: Communicator) -> None:
    same = callbacks.BroadcastInitialState(comm=comm)
    for _ in range(2):
        model = make_model(comm, keras.optimizers.SGD(0.1), lazy=True)
        model.fit(*data(comm), 2, epochs=1, verbose=0, callbacks=[same])
        assert_same(comm, model)


def plain_schedule(kit: Any) -> Any:
    class Warmup(kit.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc, name-defined]
        def __call__(self, step: Any) -> Any:
            return 0.01 * (tf.cast(step, tf.float32) + 1.0)

    return Warmup()


class WithFunction(keras.optimizers.SGD):  # type: ignore[misc]
    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "function": lambda g: g,
            "layers": {"kernel", "bias", "gamma", "beta"},
        }


def test_settings_need_not_be_readable(comm: Communicator) -> None:
    fit(comm, make_model(comm, keras.optimizers.Adam(plain_schedule(keras))))
    fit(comm, make_model(comm, WithFunction(0.1)))


def test_settings_of_tf_keras_need_not_be_readable(comm: Communicator) -> None:
    tf_keras = pytest.importorskip("tf_keras")
    model = make_model(comm, tf_keras.optimizers.Adam(plain_schedule(tf_keras)), tf_keras)
    mt.broadcast_variables(model.weights, comm=comm)
    model.fit(*data(comm), 2, verbose=0)


class TwoParts(keras.Model):  # type: ignore[misc]
    """Has a step of its own, in which the first part is trained three times; is never called."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.parts = [make_model(comm, keras.optimizers.SGD(0.1)) for _ in range(2)]

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        for part in [self.parts[0]] * 3 + [self.parts[1]]:
            with tf.GradientTape() as tape:
                value = tf.reduce_mean((part(x) - y) ** 2)
            weights = part.trainable_variables
            part.optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))
        return {"loss": value}


def test_a_model_that_is_built_in_parts_starts_alike(comm: Communicator) -> None:
    model = TwoParts(comm)
    model.compile()
    fit(comm, model)


def test_several_steps_at_once_need_a_built_model(comm: Communicator) -> None:
    model = make_model(comm, keras.optimizers.SGD(0.1), lazy=True, steps_per_execution=4)
    with pytest.raises(
        UsageError, match=f"rank {comm.rank}: the model has no variables.*build it before fit"
    ):
        fit(comm, model)
    model.build((None, 4))
    fit(comm, model)


def test_one_rank_may_validate_and_save(comm: Communicator, tmp_path: Path) -> None:
    model = make_model(comm, keras.optimizers.SGD(0.1))
    if comm.rank:
        fit(comm, model, epochs=2)
        return
    best = keras.callbacks.ModelCheckpoint(f"{tmp_path}/best.keras", save_best_only=True)
    fit(comm, model, best, epochs=2, validation_data=data(comm))
    assert Path(best.filepath).exists()


def test_weights_that_one_rank_restores_are_everyones(comm: Communicator) -> None:
    model = make_model(comm, keras.optimizers.SGD(2.0))  # diverges: the first epoch is the best
    stop = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
    fit(comm, model, *([stop] if comm.rank == 0 else []), epochs=6)
    assert comm.allgather_object(stop.stopped_epoch)[0] < 5


def test_numbers_of_layers_are_explained(comm: Communicator) -> None:
    if comm.rank == 0:
        keras.layers.Dense(1)
    model = make_model(comm, keras.optimizers.SGD(0.1))
    with pytest.raises(MismatchError, match=r"name the layers, or call keras\.utils\.clear_session"):
        fit(comm, model)
    keras.utils.clear_session()
    fit(comm, make_model(comm, keras.optimizers.SGD(0.1)))
