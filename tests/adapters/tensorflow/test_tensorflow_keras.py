"""Keras 3 and tf_keras models under `fit()`: wrapped optimizers, mixed precision."""

from __future__ import annotations

import functools
import warnings
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
from tests.on_ranks import same_everywhere
from tests.support import run_job

STEPS, BATCH = 4, 12


def data() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    images = draw.standard_normal((STEPS * BATCH, 5)).astype("float32")
    return images, (images @ draw.standard_normal((5, 3))).argmax(1)


def share(comm: Communicator) -> tuple[Any, Any]:
    """This rank's part of each of the `STEPS` batches."""
    parts = [value.reshape(STEPS, BATCH, *value.shape[1:]) for value in data()]
    width = BATCH // comm.size
    mine = slice(width * comm.rank, width * (comm.rank + 1))
    images, labels = (part[:, mine].reshape(STEPS * width, *part.shape[2:]) for part in parts)
    return images, labels


def make_model(library: Any = keras, seed: int = 0) -> Any:
    library.utils.set_random_seed(seed)
    layers = library.layers
    return library.Sequential(
        [layers.Input((5,)), layers.Dense(8, activation="tanh"), layers.Dense(3, dtype="float32")]
    )


def loss_of(library: Any) -> Any:
    return library.losses.SparseCategoricalCrossentropy(from_logits=True)


def weights_of(model: Any) -> list[Any]:
    return [np.array(value) for value in model.get_weights()]


def same_bits(comm: Communicator, model: Any) -> None:
    assert same_everywhere(comm, [value.tobytes() for value in weights_of(model)])


@pytest.mark.parametrize(
    ("name", "options", "compiled"),
    [
        ("keras", {}, {"steps_per_execution": 2}),
        ("keras", {"backward_passes_per_step": 2}, {"run_eagerly": True}),
        ("tf_keras", {}, {}),
    ],
)
def test_ranks_fit_like_one(
    comm: Communicator, name: str, options: dict[str, Any], compiled: dict[str, Any]
) -> None:
    """N ranks with their parts against this process alone with whole batches."""
    library: Any = {"keras": keras, "tf_keras": tf_keras}[name]
    passes = options.get("backward_passes_per_step", 1)
    inner = {"gradient_accumulation_steps": passes} if passes > 1 else {}
    alone = make_model(library)
    # With Adam a wrong scale of the gradients would not show.
    sgd = functools.partial(library.optimizers.SGD, 0.1, momentum=0.9)
    alone.compile(sgd(**inner), loss_of(library), jit_compile=False)
    alone.fit(*data(), BATCH, epochs=2, shuffle=False, verbose=0)
    model = make_model(library)
    model.compile(mt.DistributedOptimizer(sgd(), comm, **options), loss_of(library), **compiled)
    assert not model.jit_compile
    model.fit(*share(comm), BATCH // comm.size, epochs=2, shuffle=False, verbose=0)
    for found, wanted in zip(weights_of(model), weights_of(alone), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)
    same_bits(comm, model)


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


@pytest.mark.parametrize("name", ["keras", "tf_keras"])
def test_layers_are_frozen_between_fits(comm: Communicator, name: str) -> None:
    """Layers are frozen and set free again between fits with one optimizer."""
    library: Any = {"keras": keras, "tf_keras": tf_keras}[name]
    alone, model = make_model(library), make_model(library)
    plain = library.optimizers.SGD(0.1, momentum=0.9)
    wrapped = mt.DistributedOptimizer(library.optimizers.SGD(0.1, momentum=0.9), comm)
    for trainable in (True, False, True):
        for one, optimizer, part in ((alone, plain, data()), (model, wrapped, share(comm))):
            one.layers[0].trainable = trainable
            one.compile(optimizer, loss_of(library), jit_compile=False)
            one.fit(*part, len(part[0]) // STEPS, shuffle=False, verbose=0)
    for found, wanted in zip(weights_of(model), weights_of(alone), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)
    same_bits(comm, model)


def test_an_optimizer_goes_on_in_another_world(comm: Communicator) -> None:
    optimizer = mt.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = make_model()
    for _ in range(2):
        multiring.shutdown()
        comm = multiring.init()
        model.compile(optimizer, loss_of(keras))
        model.fit(*share(comm), 6, shuffle=False, verbose=0)
        same_bits(comm, model)
        assert len(optimizer._reduction._made) == 1


def test_xla_is_kept_off(comm: Communicator) -> None:
    """Asked for XLA, Keras says that it is not possible; other models of the program are compiled."""
    model, other = make_model(), make_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.compile(
            mt.DistributedOptimizer(keras.optimizers.SGD(0.1), comm), loss_of(keras), jit_compile=True
        )
    assert any("jit_compile" in str(warning.message) for warning in caught)
    model.fit(*share(comm), 6, verbose=0)
    other.compile(keras.optimizers.SGD(0.1), loss_of(keras), jit_compile=True)
    assert other.jit_compile


@pytest.mark.parametrize("inside", [True, False])
def test_loss_scaling(comm: Communicator, inside: bool) -> None:
    """Trains like one process; an infinite gradient on one rank makes all ranks skip the step and lower the
    scale."""
    policy = keras.config.dtype_policy().name
    optimizer = keras.optimizers.SGD(0.1)
    if not inside:
        keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make_model()
        given = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0) if inside else optimizer
        wrapped = mt.DistributedOptimizer(given, comm)
        model.compile(wrapped, loss_of(keras))
        assert model.optimizer is wrapped
        images, labels = share(comm)
        start = weights_of(model)
        model.fit(images, labels, 6, epochs=2, shuffle=False, verbose=0)
        before, scale = weights_of(model), float(wrapped.dynamic_scale)
        alone, plain = make_model(), keras.optimizers.SGD(0.1)
        if inside:
            plain = keras.optimizers.LossScaleOptimizer(plain, initial_scale=64.0)
        alone.compile(plain, loss_of(keras), jit_compile=False)
        alone.fit(*data(), BATCH, epochs=2, shuffle=False, verbose=0)
        assert int(alone.optimizer.iterations) == 2 * STEPS, "a step was skipped"
        tolerance = 2e-5 if inside else 2e-3  # of float32, of float16
        for found, wanted, first in zip(before, weights_of(alone), start, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)
            assert abs(wanted - first).max() > 20 * tolerance, "nothing was learnt"
        broken = np.full_like(images[:6], np.inf) if comm.rank == 1 else images[:6]
        model.fit(broken, labels[:6], 6, epochs=1, verbose=0)
        for found, wanted in zip(weights_of(model), before, strict=True):
            np.testing.assert_array_equal(found, wanted)
        assert float(wrapped.dynamic_scale) == scale / 2
        model.fit(images, labels, 6, epochs=1, verbose=0)
        assert any((a != b).any() for a, b in zip(weights_of(model), before, strict=True))
        same_bits(comm, model)
    finally:
        keras.config.set_dtype_policy(policy)


def test_loss_scaling_of_tf_keras(comm: Communicator) -> None:
    model = make_model(tf_keras)
    optimizer = mt.DistributedOptimizer(tf_keras.optimizers.SGD(0.1), comm)
    model.compile(tf_keras.mixed_precision.LossScaleOptimizer(optimizer), loss_of(tf_keras))
    images, labels = share(comm)
    model.fit(images, labels, 6, verbose=0)
    before = weights_of(model)
    broken = np.full_like(images[:6], np.inf) if comm.rank == 1 else images[:6]
    model.fit(broken, labels[:6], 6, verbose=0)
    for found, wanted in zip(weights_of(model), before, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_refused(comm: Communicator) -> None:
    optimizer = mt.DistributedOptimizer(keras.optimizers.SGD(0.1), comm)
    with pytest.raises(UsageError, match="LossScaleOptimizer has to be inside"):
        keras.optimizers.LossScaleOptimizer(optimizer)
    with pytest.raises(UsageError, match="distributed already"):
        mt.DistributedOptimizer(optimizer, comm)
    with pytest.raises(UsageError, match=r"cannot wrap a builtins\.str"):
        mt.DistributedOptimizer("sgd", comm)
    with pytest.raises(UsageError, match="0 backward passes"):
        mt.DistributedOptimizer(keras.optimizers.SGD(0.1), comm, backward_passes_per_step=0)
    inner = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(0.1))
    with pytest.raises(UsageError, match="has to be outside"):
        mt.DistributedOptimizer(inner, comm)


def test_a_custom_loop_with_sparse_gradients(comm: Communicator) -> None:
    """With an embedding, whose gradient is sparse, and a learning rate that changes."""
    keras.utils.set_random_seed(comm.rank)
    model = keras.Sequential([keras.layers.Input((3,), dtype="int32"), keras.layers.Embedding(7, 4)])
    optimizer = mt.DistributedOptimizer(keras.optimizers.SGD(1.0), comm)
    mt.broadcast_variables(model, comm=comm)
    table = model.weights[0].numpy()

    @tf.function
    def step(tokens: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tokens))
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))

    step(tf.constant([[0, 1 + comm.rank, 1 + comm.rank]]))
    counts = np.zeros((7, 1), np.float32)
    for rank in range(comm.size):
        np.add.at(counts, [0, 1 + rank, 1 + rank], 1.0 / comm.size)
    np.testing.assert_allclose(model.weights[0].numpy(), table - counts, rtol=1e-6)
    optimizer.learning_rate = 0.0
    assert float(optimizer.inner_optimizer.learning_rate) == 0.0
    step(tf.constant([[5, 5, 5]]))
    np.testing.assert_allclose(model.weights[0].numpy(), table - counts, rtol=1e-6)
    assert int(optimizer.iterations) == 2


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
wrap = functools.partial(mt.DistributedOptimizer, first_bucket_bytes=1000)  # several buckets
for compiled in ({}, {"run_eagerly": True}):
    found = train(wrap, mine, 12 // comm.size, freeze, **compiled)
    for one, other in zip(found, alone):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
    bits = comm.allgather_object([weight.tobytes() for weight in found])
    assert bits[0] == bits[1]
"""


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_other_backends_of_keras(backend: str) -> None:
    result = run_job(2, OTHER_BACKEND, timeout=120.0, env={"KERAS_BACKEND": backend})
    assert result.returncode == 0, result.stderr
