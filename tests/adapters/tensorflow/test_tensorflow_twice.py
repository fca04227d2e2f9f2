"""Tape and optimizer wrapped at once: gradients would be reduced twice."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import multiring.tensorflow as mt
from multiring import Communicator
from tests.on_ranks import all_raise


@pytest.mark.parametrize(
    ("library", "where", "clip"),
    [
        ("keras", "eager", True),
        ("keras", "compute", False),
        ("tf_keras", "step", True),
        ("tf_keras", "inner", False),
    ],
)
@all_raise(Exception, "wrap the tape or the optimizer, not both")
def test_both_wrapped_are_refused(comm: Communicator, library: str, where: str, clip: bool) -> None:
    made: Any = {"keras": keras, "tf_keras": tf_keras}[library]
    w = tf.Variable([1.0, 2.0]) if library == "tf_keras" else keras.Variable(np.ones(2, "float32"))
    table = (
        tf.Variable(tf.ones([3, 2])) if library == "tf_keras" else keras.Variable(np.ones((3, 2), "float32"))
    )
    optimizer = mt.DistributedOptimizer(made.optimizers.SGD(0.1), comm, op="sum")
    optimizer.build([w, table])

    def gradients(factor: Any) -> Any:
        with mt.DistributedGradientTape(tf.GradientTape(), comm, op="sum") as tape:
            loss = tf.reduce_sum(tf.convert_to_tensor(w) * factor)
            loss += tf.reduce_sum(tf.gather(tf.convert_to_tensor(table), [1]))
        found = tape.gradient(loss, [w, table])
        if clip:
            found, _ = tf.clip_by_global_norm([tf.convert_to_tensor(g) for g in found], 1.0)
        return found

    def apply(found: Any) -> None:
        optimizer.apply_gradients(zip(found, [w, table], strict=True))

    compute = tf.function(gradients) if where in ("compute", "inner") else gradients

    def step(factor: Any) -> None:
        apply(compute(factor))

    run = tf.function(step) if where in ("step", "inner") else step
    run(tf.constant(comm.rank + 1.0))


@pytest.mark.parametrize("traced", [False, True])
def test_legal_uses_of_both(comm: Communicator, traced: bool) -> None:
    """A tape for one model and an optimizer for the other, and a penalty on a reduced gradient."""
    one, other = (keras.Variable(np.ones(2, "float32"), name=name) for name in ("one", "other"))
    plain, wrapped = keras.optimizers.SGD(1.0), mt.DistributedOptimizer(keras.optimizers.SGD(1.0), comm)
    plain.build([one])
    wrapped.build([other])

    def step(factor: Any) -> None:
        with mt.DistributedGradientTape(tf.GradientTape(), comm) as tape:
            loss = tf.reduce_sum(one.value * factor)
        reduced = tape.gradient(loss, one)
        plain.apply([reduced], [one])
        with tf.GradientTape() as local:
            loss = tf.reduce_sum(other.value * factor * tf.reduce_sum(reduced))
        wrapped.apply(local.gradient(loss, [other]), [other])

    def watched(factor: Any) -> Any:
        """Looks at the mean gradient of what the wrapped optimizer trains."""
        with mt.DistributedGradientTape(tf.GradientTape(persistent=True), comm) as tape:
            loss = tf.reduce_sum(other.value * factor)
        mean = tape.gradient(loss, other)
        with tf.GradientTape() as local:
            loss = tf.reduce_sum(other.value * factor)
        wrapped.apply(local.gradient(loss, [other]), [other])
        return mean

    mean = (comm.size + 1) / 2
    factor = tf.constant(comm.rank + 1.0)
    (tf.function(step) if traced else step)(factor)
    np.testing.assert_allclose(one.numpy(), 1.0 - mean)
    np.testing.assert_allclose(other.numpy(), 1.0 - mean * 2 * mean)
    found = (tf.function(watched) if traced else watched)(factor)
    np.testing.assert_allclose(found, [mean, mean])
    np.testing.assert_allclose(other.numpy(), 1.0 - mean * 2 * mean - mean)
