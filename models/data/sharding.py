"""Which rank sees which sample: pure functions of numbers.

The order of an epoch depends on the seed and the epoch alone, and a step takes the next `global_batch`
samples of it. Ranks take contiguous slices of that global batch, so N ranks of batch B see, step by step,
exactly what one rank of batch N*B sees. Nothing is dropped or repeated: the last global batch of an epoch
may be partial, and is then split as evenly as possible.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from multiring.errors import UsageError

__all__ = [
    "Indices",
    "epoch_order",
    "global_batch_indices",
    "local_slice",
    "sample_generator",
    "steps_per_epoch",
]

Indices = npt.NDArray[np.int64]

# Keep the streams apart: the same seed must not give the order and the augmentation the same numbers.
ORDER_STREAM = 1
SAMPLE_STREAM = 2


def epoch_order(count: int, seed: int, epoch: int) -> Indices:
    """Order in which an epoch visits `count` samples: a permutation of `range(count)`.

    Args:
        count: Number of samples.
        seed: Seed of the job, 0 or more.
        epoch: Number of the epoch, from 0.
    """
    generator = np.random.default_rng((ORDER_STREAM, seed, epoch))
    return generator.permutation(count).astype(np.int64, copy=False)


def sample_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Random numbers for one sample in one epoch, wherever and by whichever rank it is loaded."""
    return np.random.default_rng((SAMPLE_STREAM, seed, epoch, index))


def steps_per_epoch(count: int, global_batch: int) -> int:
    """Steps that one epoch takes, a partial last global batch included.

    Raises:
        UsageError: There are no samples or the batch is empty.
    """
    if count < 1 or global_batch < 1:
        raise UsageError(
            f"an epoch needs samples and a batch, not {count} samples in batches of {global_batch}"
        )
    return -(-count // global_batch)


def global_batch_indices(order: Indices, step: int, global_batch: int) -> Indices:
    """Samples of one step over all ranks.

    Args:
        order: Result of `epoch_order`.
        step: Step within the epoch, from 0.
        global_batch: Samples per step over all ranks.

    Raises:
        UsageError: The epoch has no such step.
    """
    if not 0 <= step < steps_per_epoch(len(order), global_batch):
        raise UsageError(
            f"step {step} is outside an epoch of {len(order)} samples in batches of {global_batch}"
        )
    return order[step * global_batch : (step + 1) * global_batch]


def local_slice(count: int, rank: int, size: int) -> slice:
    """The contiguous part of `count` samples that belongs to `rank`.

    Parts differ by at most one sample and the longer ones come first, as `numpy.array_split` does it; with
    fewer samples than ranks some parts are empty.

    Raises:
        UsageError: `rank` is not one of `size` ranks.
    """
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} is not one of {size} ranks")
    base, extra = divmod(count, size)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (rank < extra))
