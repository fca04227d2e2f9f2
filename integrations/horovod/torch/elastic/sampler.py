"""A sampler that goes on where it was."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch

from multiring.horovod.basics import rank, size

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Gives each rank a share of the samples of an epoch that no rank has processed.

    Attributes:
        epoch: The epoch.
        processed_indices: What was processed in it.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """Of a dataset; `seed` has to be the same on all ranks."""
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.indices: list[int] = []
        self.reset()

    @property
    def processed_num(self) -> int:
        """Number of samples that were processed in this epoch."""
        return len(self.processed_indices)

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, of which nothing is processed. Call it at the end of the one before."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """The batch of this number has been processed by this rank."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Sequence[int]) -> None:
        """These samples have been processed."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of the batch of this number on this rank."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and what was processed in it."""
        return {"epoch": self.epoch, "processed_indices": self.processed_indices}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Deals out what is left to the ranks that there are."""
        self.num_replicas, self.rank = size(), rank()
        self.remaining_indices = [k for k in range(len(self.dataset)) if k not in self.processed_indices]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        order = list(self.remaining_indices)
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        order += (order * self.num_replicas)[: self.total_size - len(order)]
        self.indices = order[self.rank : self.total_size : self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
