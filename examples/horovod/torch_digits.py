"""Train a small network on digits: a script written for Horovod, without a word of multiring.

multiring run --horovod -np 2 python examples/horovod/torch_digits.py
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def load() -> tuple[TensorDataset, TensorDataset]:
    """Images of shape (n, 1, 8, 8) and labels, for training and for the test; the same on every rank."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = torch.from_numpy(digits.images[order]).float().unsqueeze(1) / 16 - 0.5
    labels = torch.from_numpy(digits.target[order])
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.05, help="for one rank")
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--use-adasum", action="store_true")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    return parser.parse_args()


def average(value: Tensor, name: str) -> float:
    return float(hvd.allreduce(value, name=name).item())


def main() -> None:
    args = parse()
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    training, test = load()
    sampler: DistributedSampler[Tensor] = DistributedSampler(
        training, num_replicas=hvd.size(), rank=hvd.rank()
    )
    loader = DataLoader(training, batch_size=args.batch_size, sampler=sampler)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    scale = 1 if args.use_adasum else hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scale, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        if hvd.rank() == 0 and epoch % 4 == 3:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    model.eval()
    test_sampler: DistributedSampler[Tensor] = DistributedSampler(
        test, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    right = torch.tensor(0.0)
    with torch.no_grad():
        for images, labels in DataLoader(test, batch_size=256, sampler=test_sampler):
            right += (model(images).argmax(1) == labels).sum()
    accuracy = average(right / len(test_sampler), "test accuracy")
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
