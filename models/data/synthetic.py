"""Fixed random images: for measuring speed without reading files."""

from __future__ import annotations

import numpy as np

from multiring.errors import UsageError
from multiring.models.data.base import Images, Labels, Split
from multiring.models.data.sharding import Indices

__all__ = ["Synthetic"]

POOL_SEED = 20170807


class Synthetic:
    """Random images drawn once and used again and again, so that loading costs a copy and no more.

    Args:
        image_size: Height and width in pixels.
        classes: Number of classes.
        train_count: Samples of the training part.
        test_count: Samples of the test part.
        channels: Channels of an image.
        pool: Number of different images; sample `i` is image `i % pool`.

    Raises:
        UsageError: A number is below 1.
    """

    description = "synthetic"
    slow = False

    def __init__(
        self,
        image_size: int,
        classes: int,
        *,
        train_count: int = 4096,
        test_count: int = 256,
        channels: int = 3,
        pool: int = 64,
    ) -> None:
        if min(image_size, classes, train_count, test_count, channels, pool) < 1:
            raise UsageError("sizes and counts of synthetic data must be at least 1")
        self.image_size = image_size
        self.classes = classes
        self.channels = channels
        self._counts: dict[Split, int] = {"train": train_count, "test": test_count}
        generator = np.random.default_rng(POOL_SEED)
        shape = (pool, channels, image_size, image_size)
        self._images: Images = generator.standard_normal(shape, dtype=np.float32)
        self._labels: Labels = generator.integers(0, classes, size=pool, dtype=np.int64)

    def count(self, split: Split) -> int:
        """Number of samples of a part."""
        return self._counts[split]

    def load(self, split: Split, indices: Indices, *, seed: int, epoch: int) -> tuple[Images, Labels]:
        """Load samples by number; see `Dataset.load`. Nothing is augmented."""
        del split, seed, epoch
        numbers = indices % len(self._labels)
        return self._images[numbers], self._labels[numbers]
