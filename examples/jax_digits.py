"""Train a small network on digits: an ordinary JAX script, with five lines for many processes.

    multiring run -np 2 python examples/jax_digits.py

The lines that multiring needs are numbered; without a launcher the same script trains in one process.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import multiring  # 1
import multiring.jax

BATCH = 64  # images per step over all ranks, so that any number of ranks trains the same
EPOCHS = 20


def load() -> tuple[Any, Any, Any, Any]:
    """Images of shape (n, 64) and labels, for training and for the test; the same on every rank."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = digits.images[order].reshape(-1, 64).astype(np.float32) / 16 - 0.5
    labels = digits.target[order]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def make_parameters(key: jax.Array) -> dict[str, Any]:
    first, second = jax.random.split(key)
    return {
        "hidden": {"weight": jax.random.normal(first, (64, 128)) * 0.2, "bias": jnp.zeros(128)},
        "scores": {"weight": jax.random.normal(second, (128, 10)) * 0.1, "bias": jnp.zeros(10)},
    }


def scores(params: dict[str, Any], images: Any) -> jax.Array:
    hidden = jax.nn.relu(images @ params["hidden"]["weight"] + params["hidden"]["bias"])
    return hidden @ params["scores"]["weight"] + params["scores"]["bias"]


def loss(params: dict[str, Any], images: Any, labels: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(scores(params, images), labels).mean()


def main() -> None:
    comm = multiring.init()  # 2
    images, labels, test_images, test_labels = load()
    params = make_parameters(jax.random.key(0))
    params = multiring.jax.broadcast_parameters(params)  # 3
    steps = EPOCHS * (len(images) // BATCH)
    optimizer = optax.sgd(optax.cosine_decay_schedule(0.2, steps), momentum=0.9)
    optimizer = multiring.jax.distribute(optimizer)  # 4: its update averages gradients over ranks
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        gradients = jax.grad(loss)(params, images, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(len(images))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH][comm.rank :: comm.size]  # 5: this rank's share
            params, state = step(params, state, images[batch], labels[batch])
    share = slice(comm.rank, None, comm.size)
    right = scores(params, test_images[share]).argmax(1) == test_labels[share]
    # Each rank has looked at its share of the test images: weight by how many these were.
    metrics = multiring.jax.average_metrics({"accuracy": right.mean()}, len(right))
    if comm.rank == 0:
        print(f"{comm.size} ranks, test accuracy {metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
