"""Horovod's API where `tf.keras` is tf_keras (TF_USE_LEGACY_KERAS=1), and its first operations in threads.

A process has one `tf.keras`, and loads the native operations once, so these are jobs of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import run_job

BEGIN = """
import threading
import numpy as np
import tensorflow as tf
import horovod.tensorflow.keras as hvk
import horovod.tensorflow as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
mine = slice(4 * rank, 4 * rank + 4)
layers = tf.keras.layers
"""

NORMALISATION = """
assert layers.BatchNormalization.__module__.startswith("tf_keras")
for shape in (4, 3), (4, 5, 3), (4, 2, 2, 3):
    x = np.concatenate([np.random.default_rng(r).normal(r, 1 + r, shape) for r in range(size)]).astype("f")
    options = {"fused": False} if len(shape) == 4 else {}
    whole, synchronised = layers.BatchNormalization(**options), hvd.SyncBatchNormalization()
    wanted, found = whole(x, training=True)[mine], synchronised(x[mine], training=True)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    for one, other in zip(synchronised.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    if len(shape) == 3:
        mask = np.arange(5)[None] < np.arange(1, 1 + 4 * size)[:, None]
        whole, synchronised = layers.BatchNormalization(), hvd.SyncBatchNormalization()
        whole(x, training=True, mask=mask)
        synchronised(x[mine], training=True, mask=mask[mine])
        for one, other in zip(synchronised.get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
"""

LOADED = """
x, y = np.ones((8, 3), "f"), np.ones((8, 2), "f")
# A .keras file has no state of a legacy optimizer, which plain tf_keras does not find either.
for make, suffix in (tf.keras.optimizers.Adam, "keras"), (tf.keras.optimizers.legacy.Adam, "h5"):
    model = tf.keras.Sequential([layers.Dense(2, input_shape=(3,), kernel_initializer="ones")])
    model.compile(hvk.DistributedOptimizer(make(0.1)), "mse")
    best = hvk.callbacks.BestModelCheckpoint(monitor="loss", filepath=f"best-{rank}.keras")
    model.fit(x, y, verbose=0, callbacks=[best])
    np.testing.assert_array_equal(
        tf.keras.models.load_model(best.filepath).get_weights()[0], model.get_weights()[0]
    )
    path = f"model-{rank}.{suffix}"
    model.save(path)
    loaded = hvk.load_model(path)
    assert type(loaded).__module__.startswith("tf_keras")
    for each in model, loaded:
        each.fit(x * (1 + rank), y, epochs=2, verbose=0)
    for one, other in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.ptp(hvd.allgather(tf.reshape(loaded.get_weights()[0], [1, -1])), axis=0).max() == 0
"""

THREADS = """
functions = [tf.function(lambda x, k=k: hvd.allreduce(x, op=hvd.Sum, name=f"x{k}")) for k in range(4)]
found = [None] * 4
at_once = threading.Barrier(4)

def reduce(k):
    at_once.wait()
    found[k] = [float(functions[k](tf.constant(rank + k + 1.0))) for _ in range(3)]

threads = [threading.Thread(target=reduce, args=(k,)) for k in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert found == [[3.0 + 2 * k] * 3 for k in range(4)], found
"""


@pytest.mark.parametrize(
    ("what", "legacy"), [(NORMALISATION, "1"), (LOADED, "1"), (THREADS, "0")], ids=["norm", "load", "threads"]
)
def test_a_job_of_its_own(what: str, legacy: str, tmp_path: Path) -> None:
    done = run_job(
        2,
        BEGIN + what + "\nprint('done')",
        launcher_args=["--horovod"],
        env={"TF_USE_LEGACY_KERAS": legacy},
        cwd=tmp_path,
        timeout=120,
    )
    assert done.stdout.count("done") == 2, done.stdout + done.stderr
