"""Train a small network on digits by `fit()`: a script written for Horovod, without a word of multiring.

multiring run --horovod -np 2 python examples/horovod/keras_digits.py
"""

from __future__ import annotations

import argparse
from typing import Any

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
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
    parser.add_argument("--warmup-epochs", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    args = parse()
    hvd.init()
    images, labels, test_images, test_labels = load()
    share = slice(hvd.rank(), None, hvd.size())
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
    rate = args.lr * hvd.size()
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(rate, args.warmup_epochs),
        hvd.callbacks.LearningRateScheduleCallback(rate, 0.1, start_epoch=max(args.epochs - 2, 1)),
    ]
    model.fit(
        images[share],
        labels[share],
        batch_size=args.batch_size,
        epochs=args.epochs,
        verbose=2 if hvd.rank() == 0 else 0,
        callbacks=callbacks,
    )
    _, accuracy = model.evaluate(test_images[share], test_labels[share], verbose=0)
    accuracy = hvd.allreduce(accuracy * len(test_labels[share]), name="right", average=False)
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, test accuracy {accuracy / len(test_labels):.4f}")


if __name__ == "__main__":
    main()
