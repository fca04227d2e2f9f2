"""A killed rank and a mismatch inside a training loop; a rank that throws."""

from __future__ import annotations

from tests.support import start_job

TRAINING = """
import os, signal, time
import keras, numpy as np
import multiring, multiring.tensorflow as mt

comm = multiring.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((64,)), *[keras.layers.Dense(64) for _ in range(4)]])
sizes = {"bucket_bytes": 1 << 14, "first_bucket_bytes": 1 << 12}
optimizer = mt.DistributedOptimizer(keras.optimizers.SGD(0.0), **sizes)
model.compile(optimizer, "mse")
start = None

class Die(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        global start
        if batch == 5 and comm.rank == 0:
            start = comm.recv(1)[0]
        if batch == 5 and comm.rank == 1:
            comm.send(np.array([time.time()]), 0)  # rank 0 measures from here
            os.kill(os.getpid(), signal.SIGKILL)

x = np.ones((80, 64), "float32")
try:
    with mt.translate_errors():
        model.fit(x, x, 4, epochs=100, verbose=0, callbacks=[Die()])
except multiring.MultiringError as error:
    path = os.path.join(os.environ["TEST_DIRECTORY"], "seen")
    with open(path + ".new", "w") as file:
        file.write(f"{type(error).__name__} {time.time() - start:.3f} {error}")
    os.rename(path + ".new", path)
    raise
"""


def test_a_killed_rank_is_reported_within_two_seconds() -> None:
    with start_job(2, TRAINING) as job:
        name, seconds, text = job.wait_for_file("seen", timeout=90.0).split(" ", 2)
        assert name == "PeerLostError", text
        assert float(seconds) < 2.0
        assert "rank 1" in text
        job.finish()
        job.assert_nothing_left()


MISMATCH = """
import os
import tensorflow as tf
import multiring, multiring.tensorflow as mt

comm = multiring.init()
variable = tf.Variable(tf.ones([4]), shape=tf.TensorShape(None))

@tf.function
def step(x):
    y = mt.allreduce(x, name="hidden layer")
    variable.assign_sub(y * 0.0)
    return y

try:
    for number in range(5):
        step(tf.ones([4 + (number == 3 and comm.rank == 1)]))
except tf.errors.FailedPreconditionError as error:
    path = os.path.join(os.environ["TEST_DIRECTORY"], f"seen{comm.rank}")
    with open(path + ".new", "w") as file:
        file.write(error.message)
    os.rename(path + ".new", path)
"""


def test_a_mismatch_reaches_every_rank() -> None:
    with start_job(2, MISMATCH) as job:
        for rank in range(2):
            text = job.wait_for_file(f"seen{rank}", timeout=90.0)
            assert "multiring: MismatchError" in text
            assert "hidden layer" in text
            assert "float32[4]" in text
            assert "float32[5]" in text
        assert job.finish().returncode == 0
