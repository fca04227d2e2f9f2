"""Train a small convolutional network on digits: an ordinary Flax script, with five lines for many processes.

    multiring run -np 2 python examples/flax_digits.py

The lines that multiring needs are numbered; without a launcher the same script trains in one process.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import multiring  # 1
import multiring.jax

BATCH = 64  # images per step over all ranks, so that any number of ranks trains the same
EPOCHS = 12


class Network(nn.Module):
    @nn.compact
    def __call__(self, images: Any) -> Any:
        x = nn.relu(nn.Conv(16, (3, 3))(images))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
        x = nn.LayerNorm()(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


def load() -> tuple[Any, Any, Any, Any]:
    """Images of shape (n, 8, 8, 1) and labels, for training and for the test; the same on every rank."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = digits.images[order][..., None].astype(np.float32) / 16 - 0.5
    labels = digits.target[order]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def main() -> None:
    comm = multiring.init()  # 2
    images, labels, test_images, test_labels = load()
    network = Network()
    optimizer = multiring.jax.distribute(optax.adam(3e-3))  # 3: its update averages gradients over ranks
    params = network.init(jax.random.key(0), images[:1])
    state = TrainState.create(apply_fn=network.apply, params=params, tx=optimizer)
    state = multiring.jax.broadcast_parameters(state)  # 4

    @jax.jit
    def step(state: Any, images: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            scores = state.apply_fn(params, images)
            return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(len(images))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH][comm.rank :: comm.size]  # 5: this rank's share
            state = step(state, images[batch], labels[batch])
    share = slice(comm.rank, None, comm.size)
    right = network.apply(state.params, test_images[share]).argmax(1) == test_labels[share]
    # Each rank has looked at its share of the test images: weight by how many these were.
    metrics = multiring.jax.average_metrics({"accuracy": right.mean()}, len(right))
    if comm.rank == 0:
        print(f"{comm.size} ranks, test accuracy {metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
