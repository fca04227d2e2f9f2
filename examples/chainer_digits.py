"""Train a small network on digits: an ordinary Chainer script, with five lines for many processes.

    multiring run -np 2 python examples/chainer_digits.py

The lines that multiring needs are numbered; without a launcher the same script trains in one process.
"""

from __future__ import annotations

import multiring.chainer  # 1: before Chainer, which it makes work with a current NumPy

# isort: split
import chainer
import chainermn
import numpy as np
from chainer import functions, links, training
from sklearn.datasets import load_digits

BATCH = 64  # images per step over all ranks, so that any number of ranks trains the same
EPOCHS = 15


class Network(chainer.Chain):  # type: ignore[misc]
    """Two convolutions and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = links.Convolution2D(1, 16, 3, pad=1, nobias=True)
            self.norm1 = links.BatchNormalization(16)
            self.conv2 = links.Convolution2D(16, 32, 3, stride=2, pad=1, nobias=True)
            self.norm2 = links.BatchNormalization(32)
            self.dense = links.Linear(512, 10)

    def forward(self, x: chainer.Variable) -> chainer.Variable:
        hidden = functions.relu(self.norm1(self.conv1(x)))
        hidden = functions.relu(self.norm2(self.conv2(hidden)))
        return self.dense(hidden)


def load() -> tuple[chainer.datasets.TupleDataset, chainer.datasets.TupleDataset]:
    """Images of shape (1, 8, 8) with their labels, for training and for the test."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = digits.images[order].astype(np.float32)[:, np.newaxis] / 16 - 0.5
    pairs = chainer.datasets.TupleDataset(images, digits.target[order].astype(np.int32))
    return chainer.datasets.split_dataset(pairs, 1500)


def main() -> None:
    comm = multiring.chainer.create_communicator()  # 2
    train, test = load()
    train = chainermn.scatter_dataset(train, comm, shuffle=True, seed=0)  # 3: this rank's share
    test = chainermn.scatter_dataset(test, comm, force_equal_length=False)
    np.random.seed(0)
    model = links.Classifier(Network())
    multiring.chainer.convert_sync_batch_normalization(model, comm)  # wanted only with batch normalisation
    optimizer = multiring.chainer.create_multi_node_optimizer(  # 4
        chainer.optimizers.MomentumSGD(lr=0.1), comm
    )
    optimizer.setup(model)
    batches = chainer.iterators.SerialIterator(train, BATCH // comm.size)
    updater = training.StandardUpdater(batches, optimizer)
    while updater.epoch < EPOCHS:
        updater.update()
        if updater.is_new_epoch:
            optimizer.lr *= 0.8
    images, labels = chainer.dataset.concat_examples(test)
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        accuracy = functions.accuracy(model.predictor(images), labels).array
    # 5: each rank has looked at its share of the test images, so weight by how many these were.
    metrics = multiring.chainer.average_metrics({"accuracy": accuracy}, len(test), comm)
    if comm.rank == 0:
        print(f"{comm.size} ranks, test accuracy {metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
