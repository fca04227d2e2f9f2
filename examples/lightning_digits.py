"""Train a small network on digits by Lightning: the strategy names the backend, and nothing else changes.

    multiring run -np 2 python examples/lightning_digits.py

Lightning gives each rank its share of the data and averages gradients by `DistributedDataParallel`, whose
bytes multiring moves. Without a launcher the same script trains in one process.
"""

from __future__ import annotations

import os
import warnings

import lightning
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import Tensor, nn
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
    # A number that every count of ranks up to 4 divides: Lightning would test some images twice otherwise.
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:1788], labels[1500:1788])


class Classifier(lightning.LightningModule):
    """Digits from pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, sync_dist=True)  # the mean over ranks
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        self.log("accuracy", (self.layers(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    size = int(os.environ.get("WORLD_SIZE", "1"))  # `multiring run` and torchrun set it
    lightning.seed_everything(0, verbose=False)
    train, test = load()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=size // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=DDPStrategy(process_group_backend="multiring") if size > 1 else "auto",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    trainer.fit(model, DataLoader(train, BATCH // size, shuffle=True, drop_last=True))
    [metrics] = trainer.test(model, DataLoader(test, len(test) // size), verbose=False)
    if trainer.is_global_zero:
        print(f"{size} ranks, test accuracy {metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
