"""Train a small network on digits: an ordinary Keras script, with five lines for many processes.

    multiring run -np 2 python examples/tensorflow_digits.py

The lines that multiring needs are numbered; without a launcher the same script trains in one process.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

import multiring  # 1
import multiring.tensorflow

BATCH = 64  # images per step over all ranks, so that any number of ranks trains the same
EPOCHS = 20


def load() -> tuple[Any, Any, Any, Any]:
    """Images of shape (n, 8, 8, 1) and labels, for training and for the test; the same on every rank."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = digits.images[order].astype("float32")[..., None] / 16 - 0.5
    labels = digits.target[order]
    return images[:1472], labels[:1472], images[1472:], labels[1472:]


def main() -> None:
    comm = multiring.init()  # 2
    images, labels, test_images, test_labels = load()
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = multiring.tensorflow.DistributedOptimizer(optimizer)  # 3
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    callbacks = [multiring.tensorflow.callbacks.BroadcastInitialState()]  # 4
    share = slice(comm.rank, None, comm.size)  # 5: each rank its part
    model.fit(images[share], labels[share], BATCH // comm.size, epochs=EPOCHS, callbacks=callbacks, verbose=0)
    _, accuracy = model.evaluate(test_images[share], test_labels[share], verbose=0)
    # Each rank has looked at its share of the test images: weight by how many these were.
    metrics = multiring.tensorflow.average_metrics({"accuracy": accuracy}, len(test_labels[share]))
    if comm.rank == 0:
        print(f"{comm.size} ranks, test accuracy {metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
