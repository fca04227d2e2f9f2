"""What every data set offers."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from multiring.models.data.sharding import Indices

__all__ = ["Dataset", "Images", "Labels", "Split"]

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Split = Literal["train", "test"]


class Dataset(Protocol):
    """Numbered images with labels, in a training and a test part."""

    @property
    def description(self) -> str:
        """What it is, for the summary: "digits (scikit-learn)"."""

    @property
    def classes(self) -> int:
        """Number of classes; labels are `0 .. classes - 1`."""

    @property
    def channels(self) -> int:
        """Channels of an image."""

    @property
    def image_size(self) -> int:
        """Height and width of an image in pixels."""

    @property
    def slow(self) -> bool:
        """Whether loading takes long enough that it should run ahead of the training in a thread."""

    def count(self, split: Split) -> int:
        """Number of samples of a part."""

    def load(self, split: Split, indices: Indices, *, seed: int, epoch: int) -> tuple[Images, Labels]:
        """Load samples by number; those of the training part are augmented.

        Args:
            split: Which part.
            indices: Numbers of the samples, each in `range(count(split))`; may be empty.
            seed: Seed of the job.
            epoch: Number of the epoch; augmentation depends on `(seed, epoch, index)` alone.

        Returns:
            Normalised images `(n, channels, image_size, image_size)` and labels `(n,)`.

        Raises:
            DataError: A file is missing or damaged.
        """
