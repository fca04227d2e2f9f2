"""Keras 3 and tf_keras models under `fit()`: wrapped optimizers, mixed precision, saving."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import multiring
import multiring.tensorflow as mt
from multiring import Communicator
from multiring.errors import UsageError
from multiring.tensorflow import callbacks
from tests.adapters.horovod.support import refused
from tests.adapters.tensorflow.support import (
    LIBRARIES,
    STEPS,
    assert_close,
    assert_same,
    data,
    loss_of,
    make_model,
    share,
    train,
)
from tests.support import run_job, run_python

FITS = [("keras", 1, {"steps_per_execution": 2}), ("keras", 2, {"run_eagerly": True}), ("tf_keras", 1, {})]


@pytest.mark.parametrize(("name", "passes", "compiled"), FITS)
def test_ranks_fit_like_one(comm: Communicator, name: str, passes: int, compiled: dict[str, Any]) -> None:
    """N ranks with their parts against this process alone with whole batches. With one optimizer, layers are
    frozen and set free again between fits."""
    library = LIBRARIES[name]
    # With Adam a wrong scale of the gradients would not show.
    plain, inner = (library.optimizers.SGD(0.1, momentum=0.9) for _ in range(2))
    wrapped = mt.DistributedOptimizer(inner, comm, backward_passes_per_step=passes)
    if passes > 1:
        plain = library.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=passes)
    alone, model = make_model(library), make_model(library)
    for trainable in (True, passes > 1, True):
        alone.layers[0].trainable = model.layers[0].trainable = trainable
        alone.compile(plain, loss_of(library), jit_compile=False)
        train(alone, data())
        model.compile(wrapped, loss_of(library), **compiled)
        assert not model.jit_compile
        train(model, share(comm))
    assert_close(model, alone)
    assert_same(comm, model)


@pytest.mark.parametrize("traced", [False, True])
def test_a_gradient_of_an_early_pass_alone(comm: Communicator, traced: bool) -> None:
    """What an early pass has brought counts, though the last pass has no gradient for that variable."""
    names = ("always", "early", "never")
    variables = [keras.Variable(np.ones(2, "float32"), name=name) for name in names]
    inner = keras.optimizers.SGD(1.0)
    optimizer = mt.DistributedOptimizer(inner, comm, backward_passes_per_step=2)
    optimizer.build(variables)

    def backward(value: Any, early: bool) -> None:
        gradient = tf.ones([2]) * value
        optimizer.apply([gradient, gradient if early else None, None], variables)

    run = tf.function(backward) if traced else backward
    mean = (comm.size + 1) / 2
    for step in range(1, 4):
        run(tf.constant(comm.rank + 1.0), True)
        run(tf.constant(3.0), False)
        for variable, change in zip(variables, ((mean + 3) / 2, mean / 2, 0.0), strict=True):
            np.testing.assert_allclose(variable.numpy(), 1.0 - step * change, rtol=1e-6)
    assert int(inner.iterations) == 3


def test_an_optimizer_goes_on_in_another_world(comm: Communicator) -> None:
    optimizer = mt.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = make_model()
    for _ in range(2):
        multiring.shutdown()
        comm = multiring.init()
        model.compile(optimizer, loss_of(keras))
        train(model, share(comm))
        assert_same(comm, model)
        assert len(optimizer._reduction._made) == 1


def test_xla_is_kept_off(comm: Communicator) -> None:
    """Asked for XLA, Keras says that it is not possible; other models of the program are compiled."""
    model, other = make_model(), make_model()
    wrapped = mt.DistributedOptimizer(keras.optimizers.SGD(0.1), comm)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.compile(wrapped, loss_of(keras), jit_compile=True)
    assert any("jit_compile" in str(warning.message) for warning in caught)
    train(model, share(comm))
    other.compile(keras.optimizers.SGD(0.1), loss_of(keras), jit_compile=True)
    assert other.jit_compile


def assert_skips_an_overflow(comm: Communicator, model: Any) -> None:
    """An infinite gradient on one rank makes all ranks skip the step."""
    images, labels = (value[:6] for value in share(comm))
    before = model.get_weights()
    train(model, (np.full_like(images, np.inf) if comm.rank == 1 else images, labels), steps=1)
    for found, wanted in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("inside", [True, False])
def test_loss_scaling(comm: Communicator, inside: bool) -> None:
    """Trains like one process; where a step is skipped, all ranks lower the scale."""
    policy = keras.config.dtype_policy().name
    plain, inner = (keras.optimizers.SGD(0.1) for _ in range(2))
    if inside:
        plain, inner = (
            keras.optimizers.LossScaleOptimizer(one, initial_scale=64.0) for one in (plain, inner)
        )
    else:
        keras.config.set_dtype_policy("mixed_float16")
    try:
        model, alone, start = make_model(), make_model(), make_model()
        wrapped = mt.DistributedOptimizer(inner, comm)
        model.compile(wrapped, loss_of(keras))
        assert model.optimizer is wrapped
        train(model, share(comm), epochs=2)
        alone.compile(plain, loss_of(keras), jit_compile=False)
        train(alone, data(), epochs=2)
        assert int(alone.optimizer.iterations) == 2 * STEPS, "a step was skipped"
        tolerance = 2e-5 if inside else 2e-3  # of float32, of float16
        assert_close(model, alone, rtol=0, atol=tolerance)
        for found, first in zip(alone.get_weights(), start.get_weights(), strict=True):
            assert abs(found - first).max() > 20 * tolerance, "nothing was learnt"
        before, scale = model.get_weights(), float(wrapped.dynamic_scale)
        assert_skips_an_overflow(comm, model)
        assert float(wrapped.dynamic_scale) == scale / 2
        train(model, share(comm))
        assert any((a != b).any() for a, b in zip(model.get_weights(), before, strict=True))
        assert_same(comm, model)
    finally:
        keras.config.set_dtype_policy(policy)


def test_loss_scaling_of_tf_keras(comm: Communicator) -> None:
    model = make_model(tf_keras)
    optimizer = mt.DistributedOptimizer(tf_keras.optimizers.SGD(0.1), comm)
    model.compile(tf_keras.mixed_precision.LossScaleOptimizer(optimizer), loss_of(tf_keras))
    train(model, share(comm))
    assert_skips_an_overflow(comm, model)


def test_refused(comm: Communicator) -> None:
    sgd = keras.optimizers.SGD(0.1)
    optimizer = mt.DistributedOptimizer(sgd, comm)
    inner = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(0.1))
    calls = {
        "LossScaleOptimizer has to be inside": lambda: keras.optimizers.LossScaleOptimizer(optimizer),
        "distributed already": lambda: mt.DistributedOptimizer(optimizer, comm),
        r"cannot wrap a builtins\.str": lambda: mt.DistributedOptimizer("sgd", comm),
        "0 backward passes": lambda: mt.DistributedOptimizer(sgd, comm, backward_passes_per_step=0),
        "has to be outside": lambda: mt.DistributedOptimizer(inner, comm),
    }
    refused(UsageError, calls)


def test_a_custom_loop_with_sparse_gradients(comm: Communicator) -> None:
    """And a learning rate that changes."""
    table = keras.Variable(np.ones((7, 2), "float32"))
    optimizer = mt.DistributedOptimizer(keras.optimizers.SGD(1.0), comm)

    @tf.function
    def step(rows: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table.value, rows))
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    counts = np.zeros((7, 1), np.float32)
    for rank in range(comm.size):
        np.add.at(counts, [0, 1 + rank, 1 + rank], 1.0 / comm.size)
    for rate in (1.0, 0.0):
        optimizer.learning_rate = rate
        assert float(optimizer.inner_optimizer.learning_rate) == rate
        step(tf.constant([0, 1 + comm.rank, 1 + comm.rank]))
        np.testing.assert_allclose(table.numpy(), np.ones((7, 2)) - counts, rtol=1e-6)
    assert int(optimizer.iterations) == 2


@pytest.mark.parametrize(("name", "scales"), [("keras", False), ("keras", True), ("tf_keras", False)])
def test_settings_of_the_wrapper_are_the_optimizers(comm: Communicator, name: str, scales: bool) -> None:
    """Given before the first step, between fits and by a callback. Reduced gradients are clipped, once."""
    library = LIBRARIES[name]
    plain, inner = (library.optimizers.SGD(0.1, momentum=0.9) for _ in range(2))
    outer = [one if not scales else keras.optimizers.LossScaleOptimizer(one) for one in (plain, inner)]
    wrapped = mt.DistributedOptimizer(outer[1], comm)
    if name == "keras":
        wrapped = copy.deepcopy(wrapped)
    alone, model = make_model(library), make_model(library)
    alone.compile(outer[0], loss_of(library), run_eagerly=True)
    model.compile(wrapped, loss_of(library), run_eagerly=True)
    # What LossScaleOptimizer has of these has no effect: with plain Keras they are given to the one inside.
    for optimizer, one, part in ((plain, alone, data()), (wrapped, model, share(comm))):

        def change(batch: int, logs: Any, optimizer: Any = optimizer) -> None:
            optimizer.momentum = 0.5 / (batch + 1)
            optimizer.learning_rate = 0.3 / (batch + 1)

        optimizer.clipnorm, optimizer.weight_decay = 0.05, 0.1
        optimizer.use_ema, optimizer.ema_momentum = True, 0.6
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        train(one, part, library.callbacks.LambdaCallback(on_train_batch_end=change))
        assert optimizer.momentum == 0.5 / STEPS
        optimizer.clipnorm, optimizer.global_clipnorm, optimizer.nesterov = None, 0.02, True
        del optimizer.ema_overwrite_frequency
        optimizer.ema_overwrite_frequency = 3
        train(one, part)
    assert_close(model, alone)
    assert_same(comm, model)


@pytest.mark.parametrize("traced", [False, True])
def test_gradients_of_other_dtypes(comm: Communicator, traced: bool) -> None:
    """They are converted, as by a plain optimizer; here only on some ranks."""
    variable = keras.Variable(np.ones(2), dtype="float64")
    optimizer = mt.DistributedOptimizer(keras.optimizers.SGD(1.0), comm)
    optimizer.build([variable])

    def step(value: Any) -> None:
        optimizer.apply([tf.cast(tf.ones([2]) * value, tf.float32 if comm.rank else tf.float64)], [variable])

    (tf.function(step) if traced else step)(tf.constant(comm.rank + 1.0))
    np.testing.assert_allclose(variable.numpy(), 1.0 - (comm.size + 1) / 2)


# Loads the models that it is told of.
LOAD_WITHOUT_MULTIRING = """
import sys
import keras, tf_keras

for name, path in PATHS:
    optimizer = {"keras": keras, "tf_keras": tf_keras}[name].models.load_model(path).optimizer
    kind = type(optimizer)
    print(kind.__name__, kind.__module__.split(".")[0], int(optimizer.iterations.numpy()))
assert not [name for name in sys.modules if name.partition(".")[0] == "multiring"]
"""
SAVED: list[tuple[str, str, bool, dict[str, Any]]] = [
    ("keras", ".keras", False, {"backward_passes_per_step": 2}),
    ("keras", ".keras", True, {}),
    ("keras", ".h5", False, {}),
    ("tf_keras", ".h5", False, {}),
]


@pytest.mark.parametrize("saved", SAVED, ids=lambda saved: f"{saved[0]}{saved[1]}{'-scaled' * saved[2]}")
def test_a_saved_model_loads_without_multiring(
    comm: Communicator, tmp_path: Path, saved: tuple[str, str, bool, dict[str, Any]]
) -> None:
    """What is saved is the plain optimizer; wrapped again, it goes on where the other one was."""
    name, suffix, scales, options = saved
    library = LIBRARIES[name]
    model, plain = make_model(library), library.optimizers.Adam(0.01)
    if scales:
        plain = library.optimizers.LossScaleOptimizer(plain, initial_scale=4.0)
    model.compile(mt.DistributedOptimizer(plain, comm, **options), loss_of(library))
    assert isinstance(model.optimizer, type(plain))
    train(model, share(comm))
    path = tmp_path / f"{comm.rank}{suffix}"
    model.save(path)
    steps = int(model.optimizer.iterations.numpy())
    assert steps > 0
    loaded = library.models.load_model(path)
    assert type(loaded.optimizer) is type(plain)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    if (name, suffix) != ("keras", ".h5"):  # Keras 3 builds the optimizers of such files for no variables
        loaded.optimizer = mt.DistributedOptimizer(loaded.optimizer, comm, **options)
        for one, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
        for one in (model, loaded):
            train(one, share(comm))
        assert_close(loaded, model, rtol=0, atol=0)
    if comm.rank == 0:
        ended = run_python(LOAD_WITHOUT_MULTIRING.replace("PATHS", repr([(name, str(path))])))
        assert ended.stdout.splitlines() == [f"{type(plain).__name__} {name} {steps}"], ended.stderr


class StepsItself(keras.Model):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        return x

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": keras.ops.mean(batch[0])}


def test_a_plain_optimizer_under_fit_is_told(comm: Communicator) -> None:
    """It is no error: a program may average weights itself."""
    start = callbacks.BroadcastInitialState(comm=comm)

    def warnings_of(model: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            train(model, share(comm), start)
        return [str(one.message) for one in found if "gradients are not reduced" in str(one.message)]

    model, other = make_model(), StepsItself()
    for one in (model, other):
        one.compile(keras.optimizers.Adam(), loss_of(keras))
    assert warnings_of(other) == []
    told = warnings_of(model)
    assert ["the optimizer is a plain Adam" in text for text in told] == [True] * (comm.rank == 0)
    model.compile(mt.DistributedOptimizer(model.optimizer, comm), loss_of(keras))  # or it is not traced again
    assert warnings_of(model) == []


OTHER_BACKEND = """
import functools, sys
import keras, numpy as np
import multiring, multiring.tensorflow as mt

assert "tensorflow" not in sys.modules
comm = multiring.init()
draw = np.random.default_rng(0)
images = draw.standard_normal((48, 5)).astype("float32")
labels = (images @ draw.standard_normal((5, 3))).argmax(1)

def train(wrap, part, batch, freeze, **compiled):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(8, activation="tanh"),
                              keras.layers.Dense(400, activation="tanh"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = wrap(keras.optimizers.SGD(0.1, momentum=0.9))
    callbacks = [mt.callbacks.BroadcastInitialState(), mt.callbacks.MetricAverage()]
    for _ in range(1 + freeze):
        model.compile(optimizer, loss, **compiled)
        model.fit(images[part], labels[part], batch, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        model.layers[0].trainable = False
    return [keras.ops.convert_to_numpy(weight) for weight in model.weights]

freeze = keras.backend.backend() != "jax"  # where Keras refuses it with any optimizer
alone = train(lambda optimizer: optimizer, slice(None), 12, freeze)
mine = slice(comm.rank, None, comm.size)
wrap = functools.partial(mt.DistributedOptimizer, bucket_bytes=1000)  # several buckets
for compiled in ({}, {"run_eagerly": True}):
    found = train(wrap, mine, 12 // comm.size, freeze, **compiled)
    for one, other in zip(found, alone):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
    bits = comm.allgather_object([weight.tobytes() for weight in found])
    assert bits[0] == bits[1]
"""


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_other_backends_of_keras(backend: str) -> None:
    run_job(2, OTHER_BACKEND, timeout=120.0, env={"KERAS_BACKEND": backend}, code=0)
