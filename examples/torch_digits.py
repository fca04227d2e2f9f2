"""Train a small network on digits: an ordinary PyTorch script, with five lines for many processes.

    multiring run -np 2 python examples/torch_digits.py

The lines that multiring needs are numbered; without a launcher the same script trains in one process.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import multiring  # 1
import multiring.torch

BATCH = 64  # images per step over all ranks, so that any number of ranks trains the same
EPOCHS = 20


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images of shape (n, 1, 8, 8) and labels, for training and for the test; the same on every rank."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = torch.from_numpy(digits.images[order]).float().unsqueeze(1) / 16 - 0.5
    labels = torch.from_numpy(digits.target[order])
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def main() -> None:
    comm = multiring.init()  # 2
    images, labels, test_images, test_labels = load()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    model = multiring.torch.convert_sync_batchnorm(model)  # wanted only with batch normalisation
    multiring.torch.broadcast_parameters(model)  # 3
    multiring.torch.register_gradient_hooks(model)  # 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH][comm.rank :: comm.size]  # 5: this rank's share
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]  # gradients are averaged over ranks when this returns
            optimizer.step()
        scheduler.step()
    model.eval()
    share = slice(comm.rank, None, comm.size)
    with torch.no_grad():
        right = model(test_images[share]).argmax(1) == test_labels[share]
    # Each rank has looked at its share of the test images: weight by how many these were.
    metrics = multiring.torch.average_metrics({"accuracy": right.float().mean()}, len(right))
    if comm.rank == 0:
        print(f"{comm.size} ranks, test accuracy {metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
