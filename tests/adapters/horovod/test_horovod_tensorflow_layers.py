"""Batch normalisation over ranks, of the TensorFlow face."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import multiring.horovod.tensorflow as hvt
from multiring import Communicator
from tests.adapters.horovod.support import with_hvd


@with_hvd()
def test_batch_normalisation_in_float64(comm: Communicator) -> None:
    whole = np.random.default_rng(1).standard_normal((8, 3)) * 3 + 50
    layer, alone = (
        make(dtype="float64") for make in (hvt.SyncBatchNormalization, tf.keras.layers.BatchNormalization)
    )
    found = layer(whole[4 * comm.rank : 4 * comm.rank + 4], training=True)
    expected = alone(whole, training=True)[4 * comm.rank : 4 * comm.rank + 4]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@with_hvd()
def test_batch_normalisation_over_all_ranks(comm: Communicator) -> None:
    whole = tf.random.stateless_normal([8, 3], [1, 2]) * 3 + 100
    factors = tf.random.stateless_normal([8, 3], [3, 4])
    mine = slice(0, 2) if comm.rank == 0 else slice(2, 8)
    layer, reference = hvt.SyncBatchNormalization(), tf.keras.layers.BatchNormalization()
    own, all_of_it = tf.Variable(whole[mine]), tf.Variable(whole)
    with tf.GradientTape(persistent=True) as tape:
        out = layer(own, training=True)
        expected = reference(all_of_it, training=True)
        loss, other = tf.reduce_sum(out * factors[mine]), tf.reduce_sum(expected * factors)
    np.testing.assert_allclose(out, expected[mine], atol=1e-4)
    np.testing.assert_allclose(tape.gradient(loss, own), tape.gradient(other, all_of_it)[mine], atol=1e-4)
    np.testing.assert_allclose(layer.moving_variance, reference.moving_variance, rtol=1e-4)


@with_hvd()
def test_copies_normalise_over_the_ranks_of_the_same_process_set(comm: Communicator, tmp_path: Path) -> None:
    sets = [hvt.add_process_set([rank]) for rank in range(comm.size)]
    layer = hvt.SyncBatchNormalization(process_set=sets[comm.rank], momentum=0.0)
    model = keras.Sequential([keras.Input((1,)), layer])
    copies = [model, keras.models.clone_model(model)]
    file = tmp_path / f"{comm.rank}.keras"
    model.save(file)
    kinds = {"SyncBatchNormalization": hvt.SyncBatchNormalization}
    copies.append(keras.models.load_model(file, custom_objects=kinds))
    for copy in copies:
        copy(tf.constant([[0.0], [2.0]]) + 10.0 * comm.rank, training=True)
        assert float(copy.layers[-1].moving_mean[0]) == 1.0 + 10 * comm.rank
    plain = keras.models.clone_model(keras.Sequential([keras.Input((1,)), hvt.SyncBatchNormalization()]))
    plain(tf.constant([[float(comm.rank)]]), training=True)
    assert float(plain.layers[-1].moving_mean[0]) == pytest.approx(0.005)
    unknown = hvt.SyncBatchNormalization(process_set=[0, 1, 2])
    with pytest.raises(ValueError, match=r"no process set of ranks \[0, 1, 2\] is registered"):
        unknown(tf.zeros([2, 1]), training=True)
