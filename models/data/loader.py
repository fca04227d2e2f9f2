"""Turns the order of an epoch into one rank's batches, loading ahead where loading is slow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from multiring.models.data import Dataset, Images, Labels
from multiring.models.data.sharding import (
    Indices,
    epoch_order,
    global_batch_indices,
    local_slice,
    steps_per_epoch,
)

__all__ = ["Batch", "evaluation_batches", "training_batches"]

# Batches that are loaded or loading while the network works on another one.
AHEAD = 2


@dataclass(frozen=True)
class Batch:
    """What one rank computes on in one step.

    Attributes:
        images: `(n, channels, height, width)` float32; `n` may be 0 in the last step of an epoch.
        labels: `(n,)` int64.
        global_count: Samples of this step over all ranks, at least 1; in an evaluation those of this rank.
    """

    images: Images
    labels: Labels
    global_count: int


def training_batches(
    dataset: Dataset, *, seed: int, epoch: int, global_batch: int, rank: int, size: int, first_step: int = 0
) -> Generator[Batch]:
    """One rank's batches of one epoch.

    Args:
        dataset: The images.
        seed: Seed of the job.
        epoch: Number of the epoch, from 0.
        global_batch: Samples per step over all ranks.
        rank: This rank.
        size: Number of ranks.
        first_step: Steps of the epoch to leave out, because they were done before a resumption.
    """
    order = epoch_order(dataset.count("train"), seed, epoch)

    def load(step: int) -> Batch:
        indices = global_batch_indices(order, step, global_batch)
        own = indices[local_slice(len(indices), rank, size)]
        images, labels = dataset.load("train", own, seed=seed, epoch=epoch)
        return Batch(images, labels, len(indices))

    yield from _loaded(load, range(first_step, steps_per_epoch(len(order), global_batch)), ahead=dataset.slow)


def evaluation_batches(dataset: Dataset, *, batch: int, rank: int, size: int) -> Generator[Batch]:
    """One rank's part of the test images, none dropped and none repeated.

    Args:
        dataset: The images.
        batch: Most samples per batch.
        rank: This rank.
        size: Number of ranks.
    """
    part = local_slice(dataset.count("test"), rank, size)

    def load(start: int) -> Batch:
        indices: Indices = np.arange(start, min(start + batch, part.stop), dtype=np.int64)
        images, labels = dataset.load("test", indices, seed=0, epoch=0)
        return Batch(images, labels, len(labels))

    yield from _loaded(load, range(part.start, part.stop, batch), ahead=dataset.slow)


def _loaded(load: Callable[[int], Batch], keys: Sequence[int], *, ahead: bool) -> Generator[Batch]:
    if not ahead:
        yield from map(load, keys)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="loader") as executor:
        pending: deque[Future[Batch]] = deque()
        try:
            for key in keys:
                pending.append(executor.submit(load, key))
                if len(pending) > AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
