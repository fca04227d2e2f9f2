"""Programs over Horovod's TensorFlow face whose result was wrong without an error."""

from __future__ import annotations

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import multiring.horovod.tensorflow as hvt
import multiring.horovod.tensorflow.keras as hvd
from multiring import Communicator
from tests.adapters.horovod.support import with_hvd


@pytest.mark.parametrize("in_function", [False, True])
@with_hvd()
def test_a_penalty_of_a_reduced_gradient(comm: Communicator, in_function: bool) -> None:
    """The gradient of an average is the average of the gradients."""
    w = tf.Variable(3.0)

    def penalty() -> tf.Tensor:
        with tf.GradientTape() as outer:
            with hvt.DistributedGradientTape(tf.GradientTape()) as inner:
                loss = (comm.rank + 1.0) * w**3
            slope = inner.gradient(loss, w)  # 1.5 * 3 w^2
            total = slope * slope
        return outer.gradient(total, w)

    compute = tf.function(penalty) if in_function else penalty
    for _ in range(2):
        # The slope is s = 4.5 w^2; of s^2 each rank has 2 s times its own 6 (rank + 1) w.
        slopes = hvt.allreduce(compute(), op=hvt.Average)
        assert abs(float(slopes) - 4 * 20.25 * 27.0) < 1e-3


@with_hvd()
def test_passes_add_up_the_same_variables(comm: Communicator) -> None:
    first, second = keras.Variable(0.0), keras.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    optimizer.build([first, second])
    optimizer.apply_gradients([(tf.constant(1.0), first)])
    with pytest.raises(ValueError, match="adds up the gradients of the same variables"):
        optimizer.apply_gradients([(tf.constant(10.0), second)])
    other = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    for _ in range(2):
        other.apply_gradients([(tf.constant(1.0), first), (tf.constant(10.0), second)])
    assert (float(first), float(second)) == (-2.0, -20.0)


@with_hvd()
def test_a_copy_of_a_distributed_optimizer_is_refused(comm: Communicator) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(ValueError, match="copy the optimizer before it is wrapped"):
        copy.deepcopy(optimizer)


@with_hvd()
def test_batch_normalisation_with_an_empty_batch_on_one_rank(comm: Communicator) -> None:
    layer = hvt.SyncBatchNormalization()
    whole = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    mine = whole if comm.rank == 0 else whole[:0]
    alone = tf.keras.layers.BatchNormalization()
    expected = alone(whole, training=True)
    result = layer(mine, training=True)
    assert np.allclose(result, expected[: len(mine)], atol=1e-5)
    assert np.allclose(layer.moving_mean, alone.moving_mean, atol=1e-6)
