"""Train a small network on digits by Keras 3, on whichever backend KERAS_BACKEND names.

    KERAS_BACKEND=torch multiring run -np 2 python examples/keras_digits.py

Without a launcher the same script trains in one process.
"""

from __future__ import annotations

import keras
import numpy as np
from sklearn.datasets import load_digits

import multiring
import multiring.tensorflow as mt  # for Keras on any backend; imports TensorFlow on that one only

BATCH = 50  # images per step over all ranks
EPOCHS = 15


def main() -> None:
    comm = multiring.init()
    keras.utils.set_random_seed(0)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = digits.images[order].reshape(-1, 64) / 16 - 0.5, digits.target[order]
    mine = slice(comm.rank, 1500, comm.size)  # this rank's share
    model = keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=mt.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        images[mine],
        labels[mine],
        batch_size=BATCH // comm.size,
        epochs=EPOCHS,
        callbacks=[mt.callbacks.BroadcastInitialState(), mt.callbacks.MetricAverage()],
        verbose=0,
    )
    _, accuracy = model.evaluate(images[1500:], labels[1500:], verbose=0)  # the same on every rank
    if comm.rank == 0:
        print(f"{comm.size} ranks, Keras on {keras.backend.backend()}, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
