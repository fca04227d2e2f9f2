"""Train a small network on digits in a loop of one's own: a script written for Horovod, without a word of
multiring.

multiring run --horovod -np 2 python examples/horovod/tensorflow2_digits.py
"""

from __future__ import annotations

import argparse
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits


def load() -> tuple[Any, Any, Any, Any]:
    """Images of shape (n, 8, 8, 1) and labels, for training and for the test; the same on every rank."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = digits.images[order].astype("float32")[..., None] / 16 - 0.5
    labels = digits.target[order]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.05, help="for one rank")
    parser.add_argument("--fp16-allreduce", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse()
    hvd.init()
    images, labels, test_images, test_labels = load()
    share = slice(hvd.rank(), None, hvd.size())
    batches = tf.data.Dataset.from_tensor_slices((images[share], labels[share]))
    batches = batches.shuffle(1500, seed=1).batch(args.batch_size, drop_remainder=True)
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, padding="same", strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for epoch in range(args.epochs):
        for number, (x, y) in enumerate(batches):
            loss = step(x, y)
            if epoch == number == 0:  # the optimizer's variables are there now
                hvd.broadcast_variables(model.variables, root_rank=0)
                hvd.broadcast_variables(optimizer.variables, root_rank=0)
        if hvd.rank() == 0 and epoch % 4 == 3:
            print(f"epoch {epoch + 1}: loss {float(loss):.4f}", flush=True)
    logits = model(test_images[share], training=False)
    right = tf.reduce_sum(tf.cast(tf.argmax(logits, 1) == test_labels[share], tf.float32))
    total = hvd.allreduce(right, op=hvd.Sum, name="right")
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, test accuracy {float(total) / len(test_labels):.4f}")


if __name__ == "__main__":
    main()
