"""Train a small network on digits: an ordinary PyTensor script, with five lines for many processes.

    multiring run -np 2 python examples/pytensor_digits.py

The lines that multiring needs are numbered; without a launcher the same script trains in one process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import multiring  # 1
import multiring.pytensor

BATCH = 64  # images per step over all ranks, so that any number of ranks trains the same
EPOCHS = 40
# Compiles in a second. "CVM" (a C compiler) and "NUMBA", PyTensor's default, take longer to compile and run
# large networks faster.
MODE = "FAST_COMPILE"

Array = NDArray[Any]


def load() -> tuple[Array, Array, Array, Array]:
    """Images of shape (n, 64) and labels, for training and for the test; the same on every rank."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = digits.data[order] / 16 - 0.5, digits.target[order].astype(np.int64)
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def weight(rows: int, columns: int, name: str, draw: np.random.Generator) -> Any:
    """A matrix to be trained."""
    return pytensor.shared(draw.standard_normal((rows, columns)) * np.sqrt(2 / rows), name=name)


def momentum(params: list[Any], grads: list[Any], rate: Any) -> list[tuple[Any, Any]]:
    """Updates of stochastic gradient descent with momentum."""
    updates = []
    for param, grad in zip(params, grads, strict=True):
        velocity = pytensor.shared(np.zeros_like(param.get_value()), name=f"{param.name}.velocity")
        step = 0.9 * velocity + grad
        updates += [(velocity, step), (param, param - rate * step)]
    return updates


def main() -> None:
    comm = multiring.init()  # 2
    images, labels, test_images, test_labels = load()
    draw = np.random.default_rng(0)
    w1, w2 = weight(64, 256, "w1", draw), weight(256, 10, "w2", draw)
    b1, b2 = pytensor.shared(np.zeros(256), name="b1"), pytensor.shared(np.zeros(10), name="b2")
    params = [w1, b1, w2, b2]
    multiring.pytensor.broadcast_parameters(params)  # 3

    x, y, rate = pt.matrix("x"), pt.lvector("y"), pt.scalar("rate")
    scores = pt.maximum(x @ w1 + b1, 0) @ w2 + b2
    loss = -pt.special.log_softmax(scores, axis=1)[pt.arange(y.shape[0]), y].mean()
    grads = multiring.pytensor.grad(loss, params)  # 4: instead of pytensor.grad
    train = pytensor.function([x, y, rate], loss, updates=momentum(params, grads, rate), mode=MODE)
    right = pytensor.function([x, y], pt.eq(scores.argmax(axis=1), y).mean(), mode=MODE)

    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(len(images))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH][comm.rank :: comm.size]  # 5: this rank's share
            train(images[batch], labels[batch], 0.05 * (1 - epoch / EPOCHS))
    share = slice(comm.rank, None, comm.size)
    accuracy = right(test_images[share], test_labels[share])
    # Each rank has looked at its share of the test images: weight by how many these were.
    metrics = multiring.pytensor.average_metrics({"accuracy": accuracy}, len(test_labels[share]))
    if comm.rank == 0:
        print(f"{comm.size} ranks, test accuracy {metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
