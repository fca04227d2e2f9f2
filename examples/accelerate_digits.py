"""Train a small network on digits by Accelerate, which takes the process group that it finds.

    multiring run -np 2 python examples/accelerate_digits.py

Accelerate would choose Gloo for tensors of the CPU. Without a launcher the same script trains in one process.
"""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

BATCH = 64  # images per step over all ranks
EPOCHS = 8


def load() -> tuple[TensorDataset, TensorDataset]:
    """Images of shape (n, 64) and labels, for training and for the test; the same on every rank."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = torch.from_numpy(digits.images[order]).float().flatten(1) / 16 - 0.5
    labels = torch.from_numpy(digits.target[order])
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def main() -> None:
    if "WORLD_SIZE" in os.environ:  # `multiring run` and torchrun set it
        dist.init_process_group("multiring")  # before the Accelerator, which then makes none
    accelerator = Accelerator(cpu=True)
    size = accelerator.num_processes
    set_seed(0)
    train, test = load()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer, batches, test_batches = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        DataLoader(train, BATCH // size, shuffle=True, drop_last=True),
        DataLoader(test, BATCH // size),
    )
    for _ in range(EPOCHS):
        for images, labels in batches:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
    model.eval()
    right = []
    with torch.no_grad():
        for images, labels in test_batches:
            # Of all ranks; without those images that some ranks got to have as many as the others.
            right.append(accelerator.gather_for_metrics(model(images).argmax(1) == labels))
    accelerator.print(f"{size} ranks, test accuracy {torch.cat(right).float().mean().item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
